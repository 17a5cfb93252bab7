"""The older FullyShardedDataParallel (FSDP1): how torch keeps it.

A unit of FSDP1 flattens its parameters into one FlatParameter and gives each rank of its group an equal
range of that. torch has no public way to ask which elements a rank holds, nor where they lie: `_torch_fsdp`
reads the private names that are needed for it. Where torch lacks one, a `LayoutMismatch` says so.

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
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from dte_dist._torch_compat import read, registered_by
from dte_dist._torch_fsdp import (
    FLAT_PARAMETER,
    flat_columns,
    flat_gathered,
    flat_local_shard,
    fsdp1_handle,
    fsdp1_mesh,
    fsdp1_replica_group,
    fsdp1_reshard,
    fsdp1_shows_gathered,
    fsdp1_write_back,
    is_cloned_by_fsdp1,
    is_flattened_by_fsdp1,
)
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
    return is_wrapper(module) and fsdp1_handle(module) is not None


def flat_parameter(unit: FullyShardedDataParallel) -> Tensor:
    """Return the FlatParameter of a unit."""
    return read(fsdp1_handle(unit), "flat_param")


def originals(unit: FullyShardedDataParallel) -> list[Original]:
    """Return the parameters that a unit flattened, without padding."""
    columns = flat_columns(flat_parameter(unit))
    homes = [[(id(owner), key)] for key, owner, _ in columns.infos]
    first = {places[0]: places for places in homes}
    for key, owner, _, first_key, first_owner, _ in columns.tied:
        first[id(first_owner), first_key].append((id(owner), key))
    known = zip(homes, columns.shapes, columns.strides, columns.shards, columns.extensions, strict=True)
    return [
        Original(tuple(dict.fromkeys(places)), tuple(shape), tuple(strides), *_rangeread(part), spec)
        for places, shape, strides, part, spec in known
    ]


def _rangeread(part: Any) -> tuple[int, int, int]:
    """Return begin, end and offset of what a rank holds of a parameter."""
    if not read(part, "in_shard"):
        return 0, 0, 0
    begin = read(part, "intra_param_start_idx")
    return begin, begin + read(part, "numel_in_shard"), read(part, "offset_in_shard")


def mesh_ranks(unit: FullyShardedDataParallel) -> tuple[int, ...]:
    """Return the global ranks that hold the ranges of a FlatParameter, or train copies of it (NO_SHARD)."""
    return _ranks(_own(unit, "process_group"))


def replica_ranks(unit: FullyShardedDataParallel) -> tuple[int, ...]:
    """Return the global ranks that hold the same range and reduce gradients together, if they are several."""
    group = fsdp1_replica_group(unit) if _is_sharded(unit) else _own(unit, "process_group")
    ranks = () if group is None else _ranks(group)
    return ranks if len(ranks) > 1 else ()


def device_mesh(unit: FullyShardedDataParallel) -> DeviceMesh | None:
    """Return the mesh that the unit was wrapped with, if it was one."""
    return fsdp1_mesh(unit)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def is_in_use(wrapper: FullyShardedDataParallel) -> bool:
    """Return whether a pass is running or the parameters are summoned: what is registered then is a copy."""
    return read(wrapper, "training_state").name != "IDLE"


def has_moved(unit: FullyShardedDataParallel) -> bool:
    """Return whether the FlatParameter of a unit that is not in use has other memory than the local shard.

    It was moved or cast after the first forward then, which torch undoes at the end of the next one.
    """
    flat = flat_parameter(unit)
    shard = flat_local_shard(flat)
    return shard is not None and shard.data_ptr() != flat.data_ptr()


def reshard(unit: FullyShardedDataParallel) -> None:
    """Let a unit that is not in use have nothing but its range, as before a forward; purely local.

    What was gathered would hide writes to the range from the next pass, which gathers anew if it is gone. A
    parameter that somebody replaced, or set to other memory, is written back into the range, as torch does
    when the next pass begins.

    Raises:
        LayoutMismatch: torch cannot take over such a parameter.
    """
    handle = fsdp1_handle(unit)
    if _gathered(unit) or fsdp1_shows_gathered(handle):
        _reshard(unit, handle)
    write_back = fsdp1_write_back(handle)
    if write_back is not None and _is_displaced(flat_parameter(unit)):
        try:
            write_back()
        except RuntimeError as error:
            what = f"a parameter was replaced by a tensor that torch cannot take over: {error}"
            hint = "write to parameters of FullyShardedDataParallel in place, or inside of summon_full_params"
            raise LayoutMismatch(what, hint=hint) from error
        _reshard(unit, handle)


def _reshard(unit: FullyShardedDataParallel, handle: Any) -> None:
    fsdp1_reshard(unit, handle, free=_is_sharded(unit))
    for left in _gathered(unit):  # in the other precision
        if left.is_cuda:
            left.record_stream(torch.cuda.current_stream(left.device))
        left.untyped_storage().resize_(0)


def _gathered(unit: FullyShardedDataParallel) -> list[Tensor]:
    """Return the tensors that still hold what was gathered for a pass."""
    return flat_gathered(flat_parameter(unit))


def _is_displaced(flat: Tensor) -> bool:
    """Return whether an original parameter is no longer the part of the range that it was set to."""
    begin, size = flat.data_ptr(), flat.element_size()
    columns = flat_columns(flat)
    known = zip(columns.originals, columns.shards, columns.infos, strict=True)
    for parameter, part, (key, owner, _) in known:
        if part.in_shard and part.numel_in_shard:
            there = parameter.data_ptr() == begin + part.offset_in_shard * size
            if not there or registered_by(owner).parameters.get(key) is not parameter:
                return True
    return False


def twins(unit: FullyShardedDataParallel) -> Iterator[tuple[int, Tensor]]:
    """Yield the other tensors over the range: each original parameter by its index, the whole range by -1."""
    flat = flat_parameter(unit)
    yield from enumerate(flat_columns(flat).originals)
    shard = flat_local_shard(flat)
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
    return is_flattened_by_fsdp1(tensor)


def is_cloned(tensor: Any) -> bool:
    """Return whether FSDP1 says of a tensor that it was cloned for a full state dict."""
    return is_cloned_by_fsdp1(tensor)


def _is_sharded(unit: FullyShardedDataParallel) -> bool:
    return bool(read(fsdp1_handle(unit), "uses_sharded_strategy"))


def _own(wrapper: FullyShardedDataParallel, name: str) -> Any:
    """Return an attribute of the wrapper itself or None; getattr would go on to the wrapped module."""
    return vars(wrapper).get(name)
