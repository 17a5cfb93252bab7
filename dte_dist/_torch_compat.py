"""Every private name of torch that dte_dist needs, behind one function each.

torch has no public way to what is read here. Each function says what it returns, with which torch its private
names were checked, and what happens where they are gone: either something public takes their place, or a
DeltaError names what is missing. Nothing else in the package may use a private name of torch
(tests/unit/test_house.py).

The loops of a steady sync are no slower for it: `versions`, `local_tensors` and `structure_of` do a whole
loop in one call, and `foreach_copy_` is torch's own function.

1. Tensors: version counters, views, what counts the holders of memory.
2. DTensors, and tensors that collectives or sharding wrap.
3. Modules: what they register.
4. Process groups.

Those of FSDP2 and FSDP1 are in `_torch_fsdp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dte_dist.errors import DeltaError, LayoutMismatch

__all__ = [
    "HINT",
    "WRAPPERS",
    "AsyncCollectiveTensor",
    "Registered",
    "ShardedTensor",
    "backends_of",
    "base_of",
    "coalesced",
    "flatten",
    "foreach_copy_",
    "local_tensor",
    "local_tensors",
    "missing",
    "nccl_options",
    "preferred_device",
    "read",
    "registered_by",
    "spec_of",
    "structure_of",
    "unflatten",
    "use_count",
    "use_counts",
    "version",
    "versions",
]

WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that torch.compile, activation checkpointing and FSDP1 insert into names. Checked with torch
2.13. A new one would stay in the names, and a side without the wrapper would be refused by name."""

HINT: Final = "use a version of torch that dte_dist was tested with"


def missing(owner: object, error: AttributeError) -> NoReturn:
    keeper = getattr(owner, "__name__", type(owner).__name__)
    raise LayoutMismatch(
        f"this torch keeps what dte_dist needs in another way: {keeper} has no {error.name}",
        got=f"torch {torch.__version__}",
        hint=HINT,
    ) from error


def read(owner: Any, name: str) -> Any:
    """Return an attribute of an object of torch whose names are no interface; for handles of FSDP1.

    Raises:
        LayoutMismatch: it has none.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        missing(owner, error)


# ---- tensors


def version(tensor: Tensor) -> int:
    """Return the version counter of a tensor that is no inference tensor: writes through torch add to it.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        return tensor._version
    except AttributeError as error:
        missing(tensor, error)


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each tensor; -1 for an inference tensor, which has none.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [-1 if tensor.is_inference() else version(tensor) for tensor in tensors]
    except AttributeError as error:
        missing(Tensor, error)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, if it is a view.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        return tensor._base
    except AttributeError as error:
        missing(tensor, error)


def use_count(tensor: Tensor) -> int | None:
    """Return how many hold a tensor below Python.

    Checked with torch 2.13. Where it is gone: None.
    """
    count = getattr(tensor, "_use_count", None)
    return None if count is None else int(count())


def use_counts(tensor: Tensor, storage: Any) -> tuple[int, int] | None:
    """Return how many hold the storage of a tensor, and how many the tensor, below Python.

    Checked with torch 2.13. Where one is gone: None, which says that it cannot be counted.
    """
    uses, data = getattr(torch._C, "_storage_Use_Count", None), getattr(storage, "_cdata", None)
    mine = use_count(tensor)
    return None if uses is None or data is None or mine is None else (int(uses(data)), mine)


def _copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(into, values, strict=True):
        target.copy_(value)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


foreach_copy_: Final[Callable[[Sequence[Tensor], Sequence[Tensor]], object]] = getattr(
    torch, "_foreach_copy_", _copy_each
)
"""Copies tensors into tensors, many in one launch. Checked with torch 2.13. Where it is gone: one by one."""

_UTILS: Final = import_module("torch._utils")

flatten: Final[Callable[[Sequence[Tensor]], Tensor]] = getattr(_UTILS, "_flatten_dense_tensors", _flatten)
"""Returns tensors of one dtype end to end, in one dimension. Checked with torch 2.13. Where it is gone:
`torch.cat`."""

unflatten: Final[Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]] = getattr(
    _UTILS, "_unflatten_dense_tensors", _unflatten
)
"""Returns the parts of a flat tensor with the shapes of other tensors. Checked with torch 2.13. Where it is
gone: `Tensor.split`."""


# ---- DTensors, and tensors that collectives or sharding wrap


class _Nothing:
    """Stands for a class that this torch does not have: nothing is an instance of it."""


def _class(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, _Nothing)
    except ImportError:
        return _Nothing


AsyncCollectiveTensor: Final = _class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
"""The class of a tensor that a collective is still writing. Checked with torch 2.13. Where it is gone:
nothing is an instance; such a tensor is refused as a subclass that is not known."""

ShardedTensor: Final = _class("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
"""The class of what FSDP1 gives in a sharded state dict. Checked with torch 2.13. Where it is gone:
nothing is an instance; such a tensor is refused as a subclass that is not known."""


def preferred_device(tensor: Any) -> torch.device:
    """Return the device on which a ShardedTensor of which this rank holds nothing would keep its shards.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    device: torch.device = read(tensor, "_get_preferred_device")()
    return device


def spec_of(tensor: DTensor) -> Any:
    """Return the DTensorSpec of a DTensor: mesh, placements and order of the shards.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        return tensor._spec
    except AttributeError as error:
        missing(tensor, error)


def local_tensor(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor itself; `to_local` would return a view, 50 times slower.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        return tensor._local_tensor
    except AttributeError as error:
        missing(tensor, error)


def local_tensors(tensors: Sequence[Any]) -> list[Any]:
    """Return the local tensor of each DTensor, and everything else as it is.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        return [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
    except AttributeError as error:
        missing(DTensor, error)


# ---- modules


class Registered(NamedTuple):
    """What a module registers, by key: the dicts themselves, which follow it. Only `modules` keeps modules
    alive.
    """

    modules: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    non_persistent: set[str]


def registered_by(module: nn.Module) -> Registered:
    """Return what a module registers.

    Checked with torch 2.13. Where one is gone: LayoutMismatch.
    """
    try:
        persistent = module._non_persistent_buffers_set
        return Registered(module._modules, module._parameters, module._buffers, persistent)
    except AttributeError as error:
        missing(module, error)


def structure_of(module: nn.Module) -> tuple[tuple[str, ...], list[Any]]:
    """Return the keys of the children, and the dict of the parameters of each; None where there is no child.

    Checked with torch 2.13. Where one is gone: LayoutMismatch.
    """
    try:
        children = module._modules
        owners = [None if child is None else child._parameters for child in children.values()]
    except AttributeError as error:
        missing(module, error)
    return tuple(children), owners


# ---- process groups


def backends_of(group: dist.ProcessGroup) -> str:
    """Return the backends of a process group by device, such as "cpu:gloo,cuda:nccl", whether or not torch's
    registry knows the group.

    Checked with torch 2.13. Where a group that is in no registry does not say: "cpu:gloo".
    """
    with suppress(KeyError, RuntimeError, TypeError, ValueError):  # it is in no registry
        return str(dist.get_backend_config(group))
    try:
        backends = {device.type: group._get_backend(device).name() for device in group._device_types}
    except AttributeError:
        return "cpu:gloo"
    return ",".join(f"{device}:{backend}" for device, backend in backends.items())


def nccl_options(timeout: timedelta) -> Any:
    """Return options of a ProcessGroupNCCL with a timeout.

    Checked with torch 2.13. Where torch takes no such option: DeltaError.
    """
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "_timeout"):
        raise DeltaError("NCCL of this torch takes no timeout", got=f"torch {torch.__version__}", hint=HINT)
    options._timeout = timeout
    return options


def coalesced(backend: Any, begin: Callable[[], object]) -> Any:
    """Start the operations that `begin` starts on a backend as one; returns their Work.

    Checked with torch 2.13. Where it is gone: DeltaError, before anything has started.
    """
    if not hasattr(backend, "_start_coalescing") or not hasattr(backend, "_end_coalescing"):
        raise DeltaError("NCCL of this torch joins no sends", got=f"torch {torch.__version__}", hint=HINT)
    backend._start_coalescing()
    try:
        begin()
    finally:
        work = backend._end_coalescing()
    return work
