"""DTensor placements read as ordered plain chunks.

`fully_shard` over tensor parallelism chunks what tensor parallelism left, so the mesh dimension that stands
first was applied last. DTensor writes this as `_StridedShard(dim, split_factor)`: the split factor is the
number of chunks that were there before and stand further right. Read from left to right that gives the same
rows only while every chunk is full; 7 rows over 3 x 2 ranks go wrong, and so do the 50257 of GPT-2. Hence the
order of application is recovered from the split factors, and each step is then a plain `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.blocks import Block, Cut, cut_block

__all__ = ["ShardSpec", "chunking_of", "local_block", "order_of"]

_REDISTRIBUTE = "turn it into Shard or Replicate placements first with redistribute(...)"


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Say how a full tensor is placed, for a local shard that is a plain tensor.

    Args:
        full_shape: shape of the full tensor.
        mesh: the DeviceMesh it is placed on; None for a tensor that this rank holds entirely.
        placements: one DTensor placement per mesh dimension.

    Raises:
        ValueError: the mesh is no DeviceMesh, or the number of placements is not that of its dimensions.

    Example:
        >>> ShardSpec((7, 3), None, ())
        ShardSpec(full_shape=(7, 3), mesh=None, placements=())
    """

    full_shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_shape", tuple(map(int, self.full_shape)))
        object.__setattr__(self, "placements", tuple(self.placements))
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise ValueError(f"mesh must be a DeviceMesh or None, not {type(self.mesh).__name__}")
        dimensions = 0 if self.mesh is None else self.mesh.ndim
        if len(self.placements) != dimensions:
            raise ValueError(
                f"a mesh of {dimensions} dimensions needs as many placements, not {self.placements}"
            )


def chunking_of(
    slot: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Any],
    *,
    shard_order: Any = None,
    decode: bool = True,
) -> tuple[Cut, ...]:
    """Return the cuts that DTensor placements mean, in order of application.

    Args:
        slot: name for messages.
        shape: shape of the full tensor.
        mesh_shape: shape of the mesh.
        placements: one placement per mesh dimension.
        shard_order: `DTensorSpec.shard_order` where it is set: pairs of a tensor dimension and its mesh
            dimensions in order.
        decode: whether split factors say in which order the mesh dimensions were applied; otherwise they are
            taken literally.

    Raises:
        LayoutMismatch: a placement is Partial or unknown, or a `_StridedShard` has no single meaning; names
            the slot.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> chunking_of("w", (7, 3), (2, 4), (Replicate(), Shard(-1)))
        (Cut(dim=1, mesh_dim=1, split_factor=1),)
    """
    given = [_cut(slot, len(shape), mesh_dim, placement) for mesh_dim, placement in enumerate(placements)]
    # One coordinate keeps everything: such a cut says nothing, and would make the decoding ambiguous.
    real = [cut for cut in given if cut is not None and mesh_shape[cut.mesh_dim] > 1]
    orders = {dim: tuple(mesh_dims) for dim, mesh_dims in shard_order or ()}
    cuts: list[Cut] = []
    for dim in sorted({cut.dim for cut in real}):
        mine = [cut for cut in real if cut.dim == dim]
        if any(cut.split_factor > 1 for cut in mine):
            ordered = _decoded(mine, mesh_shape) if decode else None
            cuts += ordered or _literal(slot, mine, shape[dim], mesh_shape, placements)
        else:
            cuts += (
                sorted(mine, key=lambda cut: orders[cut.dim].index(cut.mesh_dim)) if dim in orders else mine
            )
    return tuple(cuts)


def order_of(spec: Any) -> tuple[Any, bool]:
    """Return `shard_order` and `decode` of a DTensorSpec, for `cuts_of`.

    Both fields are new in recent versions of torch; without them, placements mean what they mean by default.
    """
    return getattr(spec, "shard_order", None), getattr(spec, "use_strided_shard_as_shard_order", True)


def local_block(slot: str, spec: Any) -> Block:
    """Return the block that this rank holds of a DTensor, by its DTensorSpec.

    Raises:
        LayoutMismatch: as `cuts_of`, or this rank is not in the mesh; names the slot.
    """
    shape, coordinate = tuple(spec.shape), spec.mesh.get_coordinate()
    if coordinate is None:
        what = "this rank is not in the mesh of a tensor that it holds"
        hint = "shard the module on a mesh that this rank is in"
        raise LayoutMismatch(what, tensor=slot, got=spec.mesh, hint=hint)
    order, decode = order_of(spec)
    cuts = chunking_of(slot, shape, spec.mesh.shape, spec.placements, shard_order=order, decode=decode)
    return cut_block(shape, spec.mesh.shape, coordinate, cuts)


def _cut(slot: str, dimensions: int, mesh_dim: int, placement: Any) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    # Up to torch 2.10 a _StridedShard is a Shard and since then it is not: only its attribute tells them
    # apart on both.
    if type(placement) is not Shard and not hasattr(placement, "split_factor"):
        what = "holds a sum that is not reduced yet" if placement.is_partial() else "is not known"
        raise LayoutMismatch(f"placement {placement} {what}", tensor=slot, hint=_REDISTRIBUTE)
    dim = placement.dim + dimensions if placement.dim < 0 else placement.dim
    if not 0 <= dim < dimensions:
        raise LayoutMismatch(
            f"placement {placement} shards a dimension that is not there",
            tensor=slot,
            got=f"{dimensions} dimensions",
        )
    return Cut(dim, mesh_dim, int(getattr(placement, "split_factor", 1)))


def _decoded(cuts: Sequence[Cut], mesh_shape: Sequence[int]) -> list[Cut] | None:
    """Order the cuts of one dimension so that each split factor is the number of chunks made before; None if
    none fits.

    From right to left, each cut goes behind as many of those on its right as have that many chunks together.
    """
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        chunks_before = list(accumulate((mesh_shape[done.mesh_dim] for done in ordered), mul, initial=1))
        if cut.split_factor not in chunks_before:
            return None
        ordered.insert(chunks_before.index(cut.split_factor), Cut(cut.dim, cut.mesh_dim))
    return ordered


def _literal(
    slot: str, cuts: Sequence[Cut], size: int, mesh_shape: Sequence[int], placements: Sequence[Any]
) -> list[Cut]:
    """Take split factors that decode to no order literally, which is safe only where everything divides
    evenly.
    """
    if cuts[-1].split_factor > 1:
        raise LayoutMismatch(
            "a _StridedShard without a Shard of the same dimension to its right does "
            "not say where its pieces lie",
            tensor=slot,
            got=tuple(placements),
            hint=_REDISTRIBUTE,
        )
    for cut in cuts:
        parts = mesh_shape[cut.mesh_dim]
        if size % (parts * cut.split_factor):
            raise LayoutMismatch(
                "split factors that belong to no order of the mesh dimensions need a "
                "size that divides evenly",
                tensor=slot,
                got=f"{tuple(placements)} on a mesh {tuple(mesh_shape)}",
                hint=_REDISTRIBUTE,
            )
        size //= parts
    return list(cuts)
