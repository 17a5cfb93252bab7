"""Parameters that the older FullyShardedDataParallel (FSDP1) flattened, as regions of what they were before.

A rank holds a range of the flat positions of each parameter, often all of it or nothing, somewhere in the
range that it holds of one FlatParameter. A range of positions is a few rectangles (`range_blocks`), and each
of them is a view of what the rank holds. A view is made when it is read and is not kept: torch moves the
memory (offloading, `module.to`), and a view that stayed would keep the old memory alive. This costs a steady
sync about 2 microseconds a rectangle, and 5 for each FlatParameter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import fsdp1
from dte_dist.layout.blocks import Block, range_blocks, row_major
from dte_dist.layout.placements import MeshSpec
from dte_dist.layout.sharding import local_block
from dte_dist.layout.tensor_refs import Region

__all__ = ["FlatUnit", "FlatView", "beside"]


@dataclass(frozen=True, slots=True, eq=False)
class FlatView:
    """A rectangle of a flattened parameter; stands for the view of it until that is read.

    Attributes:
        unit: where it is found.
        member: index of the parameter in the unit.
        region: what it is of the parameter.
        offset, strides: where its elements lie in the range of this rank.
    """

    unit: FlatUnit
    member: int
    region: Region
    offset: int
    strides: tuple[int, ...]

    @property
    def home(self) -> tuple[int, tuple[int, int]]:
        """Where in the module it is found, the same for every layout of the module."""
        return id(self.unit.unit()), (self.member, self.offset)

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of the unit's range."""
        return flat.as_strided(self.region.block.shape, self.strides, flat.storage_offset() + self.offset)

    def now(self) -> Tensor:
        """Return the view as it is now."""
        return self.of(self.unit.flat())


@dataclass(frozen=True, eq=False)
class FlatUnit:
    """One unit of FSDP1, with one FlatParameter, and what this rank holds of it; keeps no module alive.

    Attributes:
        unit: the module, weakly.
        meshes: whose ranks hold the parameters together: ranges, replicas, tensor parallelism.
        views: by id of the module and key under which a parameter is registered, its rectangles; tied ones
            have the same. A key without any is no tensor of the model: the FlatParameter.
    """

    unit: weakref.ref[FullyShardedDataParallel]
    meshes: list[MeshSpec | DeviceMesh]
    views: dict[int, dict[str, list[FlatView]]] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def of(cls, module: FullyShardedDataParallel, prefix_of: Callable[[int], str]) -> FlatUnit:
        """Describe a unit.

        Args:
            module: the unit.
            prefix_of: returns the prefix of the canonical names of a module, by its id; for messages.

        Raises:
            LayoutMismatch: a parameter cannot be described; names it.
        """
        ranks, replicas = fsdp1.mesh_ranks(module), fsdp1.replica_ranks(module)
        mirror = _row(replicas) if replicas else None
        meshes = _row(ranks), mirror, fsdp1.device_mesh(module)
        unit = cls(weakref.ref(module), [mesh for mesh in meshes if mesh is not None])
        unit.views[id(fsdp1.registered(module))][fsdp1.FLAT_PARAMETER] = []
        for member, original in enumerate(fsdp1.originals(module)):
            first, key = original.homes[0]
            views = list(unit._views(member, original, _whole(prefix_of(first) + key, original, mirror)))
            for owner, key in original.homes:
                unit.views[owner][key] = views
            if original.spec is not None and original.spec.mesh not in unit.meshes:
                unit.meshes.append(original.spec.mesh)
        return unit

    def flat(self) -> Tensor:
        """Return the range of this rank, which shares its version counter with the FlatParameter."""
        unit = self.unit()
        if unit is None:
            hint = "keep a reference to it, or build a new layout"
            raise LayoutMismatch("the module of this layout no longer exists", hint=hint)
        return fsdp1.flat_parameter(unit).detach()

    def twins(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the other tensors over the range, which count writes on their own; see `fsdp1.twins`."""
        unit = self.unit()
        return iter(()) if unit is None else fsdp1.twins(unit)

    def _views(self, member: int, original: fsdp1.Original, whole: Region) -> Iterator[FlatView]:
        """Yield the rectangles that this rank holds of a parameter, the part `whole` of the full tensor."""
        dims, offset = range(len(original.shape)), original.offset
        order = _order(original)
        for stored in range_blocks([original.shape[dim] for dim in order], original.begin, original.end):
            runs = dict(zip(order, stored.runs, strict=True))
            strides = dict(zip(order, row_major(stored.shape), strict=True))
            block = whole.block.part(Block(tuple(runs[dim] for dim in dims)))
            region = Region(whole.full_shape, block, whole.mesh)
            yield FlatView(self, member, region, offset, tuple(strides[dim] for dim in dims))
            offset += stored.numel
        if original.begin == original.end:  # the slot must be known here as on ranks that hold some of it
            nothing = Block(((),) * len(dims))  # torch flattens no tensor without dimensions
            yield FlatView(self, member, Region(whole.full_shape, nothing), 0, (1,) * len(dims))


def beside(objects: Sequence[Any]) -> dict[tuple[FlatUnit, int], int]:
    """Return the index of an entry of every flattened parameter, and by -1 of every unit, if there is one."""
    found: dict[tuple[FlatUnit, int], int] = {}
    for index, view in enumerate(objects):
        if isinstance(view, FlatView):
            found.setdefault((view.unit, view.member), index)
            found.setdefault((view.unit, -1), index)
    return found


def _row(ranks: tuple[int, ...]) -> MeshSpec:
    return MeshSpec((len(ranks),), ranks)


def _whole(name: str, original: fsdp1.Original, mirror: MeshSpec | None) -> Region:
    """Return what a parameter was of the full tensor: all of it, or what tensor parallelism had left."""
    spec = original.spec
    _refuse_gaps(name, original)
    if spec is None:
        return Region(original.shape, Block.whole(original.shape), mirror)
    block = local_block(name, spec) if fsdp1.is_placed(spec) else None
    if block is None or block.shape != original.shape:
        what = "FullyShardedDataParallel flattened an unknown part of a tensor"
        raise LayoutMismatch(what, tensor=name, got=spec, hint="shard the module with fully_shard")
    replicated = all(isinstance(placement, Replicate) for placement in spec.placements)
    return Region(tuple(spec.shape), block, spec.mesh if mirror is None and replicated else mirror)


def _order(original: fsdp1.Original) -> list[int]:
    """Return the dimensions in the order in which they lay in memory: row-major unless they were permuted."""
    return sorted(range(len(original.shape)), key=lambda dim: -original.strides[dim])


def _refuse_gaps(name: str, original: fsdp1.Original) -> None:
    """Refuse a parameter whose elements did not fill the memory that was flattened, one after the other."""
    order = _order(original)
    for dim, stride in zip(order, row_major([original.shape[dim] for dim in order]), strict=True):
        if original.shape[dim] > 1 and original.strides[dim] != stride and 0 not in original.shape:
            raise LayoutMismatch(
                "the parameter was no array without gaps when FullyShardedDataParallel flattened it",
                tensor=name,
                got=f"shape {original.shape}, strides {original.strides}",
                hint="make it contiguous() before the module is wrapped",
            )
