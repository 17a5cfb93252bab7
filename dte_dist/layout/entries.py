"""From tensors to entries: what a local tensor is part of, and whether it can be synchronised at all.

Three things may say where a tensor lies: its own DTensor spec, a `ShardSpec`, or a `Region` that the user
stated; a plain tensor without either is whole. The derived shape is compared with that of the local tensor,
so that a placement that does not describe its tensor is refused instead of sending the wrong elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dte_dist._torch_compat import AsyncCollectiveTensor, local_tensor, spec_of
from dte_dist.errors import LayoutMismatch
from dte_dist.layout.blocks import Block, cut_block
from dte_dist.layout.flattened import FlatView
from dte_dist.layout.placements import WHOLE, Entry, MeshSpec, Placement
from dte_dist.layout.sharding import ShardSpec, chunking_of, order_of
from dte_dist.layout.tensor_refs import Region
from dte_dist.tensors.dtypes import dtype_name
from dte_dist.tensors.overlaps import overlaps_itself

__all__ = ["EntryBuilder", "wait_collective"]


@dataclass(frozen=True, slots=True)
class _Place:
    """The meaning of a DTensor placement: how it travels, and the shape that this rank must then have."""

    placement: Placement
    local_shape: tuple[int, ...]


def wait_collective(tensor: Tensor) -> Tensor:
    """Return the tensor behind a collective that is still on its way, waiting for it; others as they are."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class EntryBuilder:
    """Make entries from tensors; numbers the meshes it meets and decodes each placement once.

    Attributes:
        meshes: the meshes met so far, in the order of their numbers.
        coordinates: this rank's coordinate on each of them, or None.
    """

    def __init__(self) -> None:
        self.meshes: list[MeshSpec] = []
        self.coordinates: list[tuple[int, ...] | None] = []
        self._numbers: dict[
            int, tuple[int, DeviceMesh]
        ] = {}  # by id: the mesh is held so that its id stays its own
        self._places: dict[Any, _Place] = {}

    def entry(self, name: str, tensor: Any, given: ShardSpec | Region | None = None) -> Entry:
        """Describe a tensor.

        Args:
            name: name of the slot.
            tensor: a plain tensor, a DTensor or a `FlatView`.
            given: where a plain tensor lies; None for what the tensor itself says.

        Raises:
            LayoutMismatch: the tensor cannot be synchronised, or its shape does not follow from its
                placement; names the slot.
            ValueError: it is no tensor.
        """
        shape, place, local = self._located(name, tensor, given)
        _refuse_unusable(name, local)
        if local.shape != place.local_shape and (local.numel() or 0 not in place.local_shape):
            raise LayoutMismatch(
                "the local tensor has another shape than its placement gives it",
                tensor=name,
                expected=place.local_shape,
                got=tuple(local.shape),
                hint="build the DTensor with distribute_tensor, or state its region with Layout.from_views",
            )
        if local.dtype is torch.complex128:
            return _as_pairs(name, shape, place.placement)
        return Entry(name, shape, dtype_name(name, local.dtype), place.placement)

    def _located(
        self, name: str, tensor: Any, given: ShardSpec | Region | None
    ) -> tuple[tuple[int, ...], _Place, Tensor]:
        """Return the full shape, the place and the local tensor."""
        if isinstance(tensor, FlatView):
            tensor = tensor.now()
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if is_lazy(tensor):
            raise LayoutMismatch(
                "the parameter has no shape yet", tensor=name, hint="run one forward of the lazy module first"
            )
        if isinstance(given, Region):
            number = None if given.mesh is None else self.number_of(given.mesh)
            place = _Place(Placement(number, block=given.block), given.block.shape)
            return given.full_shape, place, wait_collective(tensor)
        if isinstance(given, ShardSpec):
            return (
                given.full_shape,
                self._place(name, given.full_shape, given.mesh, given.placements),
                wait_collective(tensor),
            )
        if isinstance(tensor, DTensor):
            spec, shape = spec_of(tensor), tuple(tensor.shape)
            order, decode = order_of(spec)
            return (
                shape,
                self._place(name, shape, spec.mesh, spec.placements, order=order, decode=decode),
                wait_collective(local_tensor(tensor)),
            )
        shape = tuple(tensor.shape)
        return shape, self._place(name, shape, None, ()), wait_collective(tensor)

    def _place(
        self,
        name: str,
        shape: tuple[int, ...],
        mesh: DeviceMesh | None,
        placements: Sequence[Any],
        *,
        order: Any = None,
        decode: bool = True,
    ) -> _Place:
        key = (id(mesh), shape, placements, order, decode)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = (
                _Place(WHOLE, shape)
                if mesh is None
                else self._cut(name, shape, mesh, placements, order, decode)
            )
        return place

    def _cut(
        self, name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any], *rules: Any
    ) -> _Place:
        """Decode a placement on a mesh; `rules` are order and decode of `cuts_of`."""
        number = self.number_of(mesh)
        spec, coordinate = self.meshes[number], self.coordinates[number]
        order, decode = rules
        cuts = chunking_of(name, shape, spec.shape, placements, shard_order=order, decode=decode)
        local_shape = (0,) if coordinate is None else cut_block(shape, spec.shape, coordinate, cuts).shape
        return _Place(Placement(number, cuts), local_shape)

    def number_of(self, mesh: DeviceMesh | MeshSpec) -> int:
        """Return the number of a mesh; equal meshes share one. A `MeshSpec` has one dimension."""
        if isinstance(mesh, MeshSpec):
            rank = dist.get_rank()
            return self._add(mesh, (mesh.ranks.index(rank),) if rank in mesh.ranks else None)
        if id(mesh) not in self._numbers:
            spec = MeshSpec(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
            coordinate = mesh.get_coordinate()
            self._numbers[id(mesh)] = self._add(spec, None if coordinate is None else tuple(coordinate)), mesh
        return self._numbers[id(mesh)][0]

    def _add(self, spec: MeshSpec, coordinate: tuple[int, ...] | None) -> int:
        if spec not in self.meshes:
            self.meshes.append(spec)
            self.coordinates.append(coordinate)
        return self.meshes.index(spec)


def _refuse_unusable(name: str, local: Tensor) -> None:
    """Refuse a local tensor whose bits are not there, or not its own."""
    if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__ or local.layout is not torch.strided:
        kind = f"{type(local).__name__} of layout {local.layout}"
        raise LayoutMismatch(
            f"a {kind} is not one array of elements",
            tensor=name,
            hint="give the tensors inside it under names of their own",
        )
    if local.device.type == "meta":
        raise LayoutMismatch(
            "a tensor on the meta device has no data",
            tensor=name,
            hint="materialise the module first with to_empty(...)",
        )
    if local.is_conj() or local.is_neg():
        hint = "call resolve_conj() and resolve_neg()"
        raise LayoutMismatch(
            "the bits of a lazy conjugate or negative are not its values", tensor=name, hint=hint
        )
    if not local.numel():
        return
    if not local.data_ptr():
        raise LayoutMismatch(
            "the storage of the tensor has been freed",
            tensor=name,
            hint="take it from its module after reshard()",
        )
    if not local.is_contiguous() and overlaps_itself(local):
        raise LayoutMismatch(
            "elements of the tensor share memory with each other",
            tensor=name,
            got=f"strides {local.stride()} of shape {tuple(local.shape)}",
            hint="make it an array of its own with contiguous()",
        )


def _as_pairs(name: str, shape: tuple[int, ...], placement: Placement) -> Entry:
    """Describe a complex128 tensor as what `view_as_real` makes of it."""
    if placement.block is not None:
        placement = replace(placement, block=Block((*placement.block.runs, ((0, 2),))))
    return Entry(name, (*shape, 2), "float64", placement)
