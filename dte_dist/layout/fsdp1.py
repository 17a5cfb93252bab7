"""The older FullyShardedDataParallel (FSDP1): all that dte_dist knows of how torch keeps it.

A unit of FSDP1 flattens its parameters into one FlatParameter and gives each rank of its group an equal
range of that. torch has no public way to ask which elements a rank holds, nor where they lie. Every private
name that is needed for it is used in this file and in no other. Where torch lacks one, a `LayoutMismatch`
says so.

Torch keeps up to four kinds of tensors over the same elements, each with a version counter of its own:

1. The FlatParameter, whose memory is now the range, now what was gathered. With use_orig_params=False the
   optimizer writes to it.
2. The local shard, which keeps the range from the first forward on. `load_state_dict` and
   `summon_full_params` write back to it.
3. With use_orig_params=True the original parameters, set to parts of the range. Then the optimizer writes
   to these.
4. Parameters that were gathered for a pass. They may outlive the pass (SHARD_GRAD_OP, the root, evaluation),
   and the next pass takes it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from dte_dist.errors import LayoutMismatch

__all__ = [
    "FLAT_PARAMETER",
    "Original",
    "device_mesh",
    "flat_parameter",
    "has_moved",
    "is_cloned",
    "is_flattened",
    "is_in_use",
    "is_placed",
    "is_unit",
    "is_wrapper",
    "mesh_ranks",
    "originals",
    "registered",
    "replica_ranks",
    "reshard",
    "twins",
]

FLAT_PARAMETER: Final = "_flat_param"
"""Key under which a wrapped module registers the FlatParameter of its unit (use_orig_params=False)."""

_GATHERED: Final = "_full_param_padded", "_full_prec_full_param_padded"
"""Attributes of a FlatParameter that hold what was gathered for a pass; the second in full precision."""


@dataclass(frozen=True, slots=True)
class Original:
    """One parameter as it was before it was flattened, and which of its elements this rank holds.

    Attributes:
        homes: (id of the module, key) of each place where it is registered; several if it is tied.
        shape, strides: of the parameter, whose elements were flattened in the order of memory.
        begin, end: positions in that order that this rank holds; equal if it holds none.
        offset: where they begin in the range of this rank.
        spec: of the DTensor that it is the local tensor of (tensor parallelism); None if it is plain.
    """

    homes: tuple[tuple[int, str], ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    end: int
    offset: int
    spec: Any


def is_wrapper(module: nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    """Return whether a module is wrapped by FSDP1."""
    return isinstance(module, FullyShardedDataParallel)


def is_unit(module: nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    """Return whether a module is wrapped by FSDP1 and flattens parameters of its own."""
    return is_wrapper(module) and _own(module, "_handle") is not None


def flat_parameter(unit: FullyShardedDataParallel) -> Tensor:
    """Return the FlatParameter of a unit."""
    return _of(_own(unit, "_handle"), "flat_param")


def originals(unit: FullyShardedDataParallel) -> list[Original]:
    """Return the parameters that a unit flattened, without padding."""
    flat = flat_parameter(unit)
    homes = [[(id(owner), key)] for key, owner, _ in _of(flat, "_param_infos")]
    first = {places[0]: places for places in homes}
    for key, owner, _, first_key, first_owner, _ in _of(flat, "_shared_param_infos"):
        first[id(first_owner), first_key].append((id(owner), key))
    columns = (_of(flat, name) for name in ("_shapes", "_strides", "_shard_param_infos", "_param_extensions"))
    return [
        Original(tuple(dict.fromkeys(places)), tuple(shape), tuple(strides), *_range_of(part), spec)
        for places, shape, strides, part, spec in zip(homes, *columns, strict=True)
    ]


def _range_of(part: Any) -> tuple[int, int, int]:
    """Return begin, end and offset of what a rank holds of a parameter."""
    if not _of(part, "in_shard"):
        return 0, 0, 0
    begin = _of(part, "intra_param_start_idx")
    return begin, begin + _of(part, "numel_in_shard"), _of(part, "offset_in_shard")


def mesh_ranks(unit: FullyShardedDataParallel) -> tuple[int, ...]:
    """Return the global ranks that hold the ranges of a FlatParameter, or train copies of it (NO_SHARD)."""
    return _ranks(_own(unit, "process_group"))


def replica_ranks(unit: FullyShardedDataParallel) -> tuple[int, ...]:
    """Return the global ranks that hold the same range and reduce gradients together, if they are several."""
    group = _own(unit, "_inter_node_pg") if _is_sharded(unit) else _own(unit, "process_group")
    ranks = () if group is None else _ranks(group)
    return ranks if len(ranks) > 1 else ()


def device_mesh(unit: FullyShardedDataParallel) -> DeviceMesh | None:
    """Return the mesh that the unit was wrapped with, if it was one."""
    return _own(unit, "_device_mesh")


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def is_in_use(wrapper: FullyShardedDataParallel) -> bool:
    """Return whether a pass is running or the parameters are summoned: what is registered then is a copy."""
    return _of(wrapper, "training_state").name != "IDLE"


def has_moved(unit: FullyShardedDataParallel) -> bool:
    """Return whether the FlatParameter of a unit that is not in use has other memory than the local shard.

    It was moved or cast after the first forward then, which torch undoes at the end of the next one.
    """
    flat = flat_parameter(unit)
    shard = vars(flat).get("_local_shard")
    return shard is not None and shard.data_ptr() != flat.data_ptr()


def reshard(unit: FullyShardedDataParallel) -> None:
    """Let a unit that is not in use have nothing but its range, as before a forward; purely local.

    What was gathered would hide writes to the range from the next pass, which gathers anew if it is gone. A
    parameter that somebody replaced, or set to other memory, is written back into the range, as torch does
    when the next pass begins.

    Raises:
        LayoutMismatch: torch cannot take over such a parameter.
    """
    handle = _own(unit, "_handle")
    if _gathered(unit) or _of(handle, "_skipped_use_sharded_views"):
        _reshard(unit, handle)
    writes_back = _of(handle, "_use_orig_params") and not _of(handle, "_skip_writeback_check")
    if writes_back and _is_displaced(flat_parameter(unit)):
        write_back = _of(handle, "_writeback_orig_params")
        try:
            write_back()
        except RuntimeError as error:
            what = f"a parameter was replaced by a tensor that torch cannot take over: {error}"
            hint = "write to parameters of FullyShardedDataParallel in place, or inside of summon_full_params"
            raise LayoutMismatch(what, hint=hint) from error
        _reshard(unit, handle)


def _reshard(unit: FullyShardedDataParallel, handle: Any) -> None:
    runtime = import_module("torch.distributed.fsdp._runtime_utils")
    _of(runtime, "_reshard")(unit, handle, _is_sharded(unit))
    for left in _gathered(unit):  # in the other precision
        if left.is_cuda:
            left.record_stream(torch.cuda.current_stream(left.device))
        left.untyped_storage().resize_(0)


def _gathered(unit: FullyShardedDataParallel) -> list[Tensor]:
    """Return the tensors that still hold what was gathered for a pass."""
    attributes = vars(flat_parameter(unit))
    held = (attributes.get(name) for name in _GATHERED)
    return [tensor for tensor in held if tensor is not None and tensor.untyped_storage().size()]


def _is_displaced(flat: Tensor) -> bool:
    """Return whether an original parameter is no longer the part of the range that it was set to."""
    begin, size = flat.data_ptr(), flat.element_size()
    columns = (_of(flat, name) for name in ("_params", "_shard_param_infos", "_param_infos"))
    for parameter, part, (key, owner, _) in zip(*columns, strict=True):
        if part.in_shard and part.numel_in_shard:
            there = parameter.data_ptr() == begin + part.offset_in_shard * size
            if not there or owner._parameters.get(key) is not parameter:
                return True
    return False


def twins(unit: FullyShardedDataParallel) -> Iterator[tuple[int, Tensor]]:
    """Yield the other tensors over the range: each original parameter by its index, the whole range by -1."""
    flat = flat_parameter(unit)
    yield from enumerate(_of(flat, "_params") or ())
    shard = vars(flat).get("_local_shard")
    if shard is not None:  # torch makes it in the first forward
        yield -1, shard


def is_placed(spec: Any) -> bool:
    """Return whether the `spec` of an `Original` is that of a DTensor, and no other extension of FSDP1."""
    return all(hasattr(spec, name) for name in ("mesh", "placements", "shape"))


def registered(unit: FullyShardedDataParallel) -> nn.Module:
    """Return the module that registers the FlatParameter."""
    return unit.module


def is_flattened(tensor: Any) -> bool:
    """Return whether FSDP1 flattened a parameter, which leaves it no shape; or it is a FlatParameter."""
    return getattr(tensor, "_fsdp_flattened", False) is True


def is_cloned(tensor: Any) -> bool:
    """Return whether FSDP1 says of a tensor that it was cloned for a full state dict."""
    return getattr(tensor, "_has_been_cloned", False) is True


def _is_sharded(unit: FullyShardedDataParallel) -> bool:
    return bool(_of(_own(unit, "_handle"), "uses_sharded_strategy"))


def _own(wrapper: FullyShardedDataParallel, name: str) -> Any:
    """Return an attribute of the wrapper itself or None; getattr would go on to the wrapped module."""
    return vars(wrapper).get(name)


def _of(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        keeper = getattr(owner, "__name__", type(owner).__name__)
        raise LayoutMismatch(
            f"this torch keeps FullyShardedDataParallel in another way: {keeper} has no {name}",
            got=f"torch {torch.__version__}",
            hint="use a version of torch that dte_dist was tested with, or shard the module with fully_shard",
        ) from error
