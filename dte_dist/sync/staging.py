"""Changes that have arrived and been checked, waiting for the vote; and the tensors they will be written to.

Staging costs memory in proportion to the changes, never to the model: what is staged are the segments as they
were read, most of them views of the frame that they came in. Nothing live is touched before `apply`, which
translates and writes in one pass, in place: addresses stay, version counters of autograd move.

Changes that came as distances are added to the live bits when they are written: what is written then lies in
the cache because it was read, while reading it before would cost as much again. Whole segments are turned
into bits at once, for there reading is cheap; and so is what may come to one element twice, since bits may be
written twice but distances not added twice: a tensor that the sources tie and the receiver does not, and
tensors of the receiver that are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import Segment
from dte_dist.plan.index_map import IndexMap
from dte_dist.tensors.flat import FlatTensors

__all__ = ["StagedPatch", "Target"]


@dataclass(frozen=True, eq=False)
class Target:
    """A receiver's flat space of one width as it lies in memory now.

    Attributes:
        flat: its local tensors.
        index_maps: by source, the tables from that source's space to this one.
    """

    flat: FlatTensors
    index_maps: Mapping[int, Sequence[IndexMap]]

    @cached_property
    def _is_aliased(self) -> bool:
        return self.flat.is_aliased()

    def may_repeat(self, source: int, first: int, length: int) -> bool:
        """Return whether something of positions [first, first + length) of a source's space may come to one
        element here twice.

        Where a source position has two homes, and on the p2p route an element two positions, that takes two
        tables.
        """
        return (
            self._is_aliased
            or sum(index_map.meets(first, first + length) for index_map in self.index_maps.get(source, ()))
            > 1
        )

    def place(self, source: int, first: int, bits: Tensor) -> None:
        """Write dense bits of positions from `first` on of a source's space."""
        for index_map in self.index_maps.get(source, ()):
            kernels.on(self.flat.device).scatter_dense(index_map, first, bits.to(self.flat.device), self.flat)

    def holds(self, source: int, first: int, length: int) -> bool:
        """Return whether something of positions [first, first + length) of a source's space may be held
        here.
        """
        return any(index_map.meets(first, first + length) for index_map in self.index_maps.get(source, ()))

    def resolve(self, source: int, first: int, distances: Tensor) -> Tensor:
        """Turn dense distances of positions from `first` on of a source's space into bits; what is not held
        here is of any value.
        """
        codecs = kernels.on(self.flat.device)
        distances = distances.to(self.flat.device)
        bits = torch.zeros_like(distances)
        for index_map in self.index_maps.get(source, ()):
            codecs.gather_dense_flat(index_map, first, bits, self.flat)
        return codecs.add(bits, distances)

    def patch(self, source: int, segment: Segment) -> None:
        """Write the changes of a segment of a source's space, not all of its elements, into the tensors."""
        if segment.positions is None:
            raise ValueError("a whole segment is placed, not patched")
        device = self.flat.device
        length = segment.length if segment.packed else None
        positions = segment.positions.to(device)
        values = segment.values.to(device)
        for index_map in self.index_maps.get(source, ()):
            if index_map.meets(segment.first, segment.first + segment.length):
                patch = kernels.on(device).patch
                patch(
                    index_map,
                    segment.first,
                    positions,
                    values,
                    self.flat,
                    relative=segment.relative,
                    length=length,
                )

    def as_bits(self, source: int, segment: Segment) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield positions of this space and bits for the distances of a segment, once for every table of the
        source that has some.
        """
        device = self.flat.device
        positions = segment.unpacked().to(device)
        distances = segment.values.to(device)
        for index_map in self.index_maps.get(source, ()):
            where = kernels.on(device).translate(index_map, segment.first, positions, distances)
            if len(where[0]):
                yield where[0], kernels.on(device).add_ulps(self.flat, *where)


@dataclass(slots=True)
class StagedPatch:
    """Checked changes of one sync.

    Attributes:
        sparse: (target, source, segment) of a source's space, not all of whose elements changed.
        dense: (target, source, first position in the source's space, bits).
        absolute: (target, positions in the receiver's space, bits) of what may come to one element twice.
    """

    sparse: list[tuple[Target, int, Segment]] = field(default_factory=list)
    dense: list[tuple[Target, int, int, Tensor]] = field(default_factory=list)
    absolute: list[tuple[Target, Tensor, Tensor]] = field(default_factory=list)

    def add(self, target: Target, source: int, segment: Segment) -> None:
        """Stage one segment of a source's space, whose tensors must stay as they are until `clear`."""
        if not target.holds(source, segment.first, segment.length):
            return
        values = segment.values
        if segment.positions is None:
            values = target.resolve(source, segment.first, values) if segment.relative else values
            self.dense.append((target, source, segment.first, values))
        elif segment.relative and target.may_repeat(source, segment.first, segment.length):
            self.absolute += [(target, *changes) for changes in target.as_bits(source, segment)]
        else:
            self.sparse.append((target, source, segment))

    def apply(self) -> None:
        """Write everything into the live tensors."""
        for target, source, segment in self.sparse:
            target.patch(source, segment)
        for target, positions, bits in self.absolute:
            kernels.on(target.flat.device).scatter(target.flat, positions, bits)
        for target, source, first, bits in self.dense:
            target.place(source, first, bits)

    def clear(self) -> None:
        """Forget everything."""
        self.sparse.clear()
        self.dense.clear()
        self.absolute.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of what is staged; frames, of which most of it is views, count once."""
        tensors = [bits for *_, bits in self.dense] + [
            tensor for _, *changes in self.absolute for tensor in changes
        ]
        tensors += [
            part
            for *_, segment in self.sparse
            for part in (segment.positions, segment.values)
            if part is not None
        ]
        memory = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
        }
        return sum(memory.values())
