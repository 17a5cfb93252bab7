"""Changes that have arrived and been checked, waiting for the vote; and the tensors they will be written to.

Staging costs memory in proportion to the changes, never to the model. Nothing live is touched before `apply`, which
writes in place: addresses stay, version counters of autograd move.

Changes that came as distances are staged as distances, and added to the live bits when they are written: what is written then
lies in the cache because it was read, while reading it now would cost as much again. Whole segments are turned into bits at
once, for there reading is cheap; and so is what may come to one element twice, since bits may be written twice but distances not
added twice: a tensor that the sources tie and the receiver does not, and tensors of the receiver that are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.change.flat import FlatTensors
from dte_dist.codec import Segment
from dte_dist.plan.remap import Remap

__all__ = ["StagedPatch", "Target"]


@dataclass(frozen=True, eq=False)
class Target:
    """A receiver's flat space of one width as it lies in memory now.

    Attributes:
        flat: its local tensors.
        remaps: by source, the tables from that source's space to this one.
    """

    flat: FlatTensors
    remaps: Mapping[int, Sequence[Remap]]

    @cached_property
    def _is_aliased(self) -> bool:
        """Whether two tensors are the same memory: a tied name with several regions."""
        addresses = [tensor.data_ptr() for tensor in self.flat.tensors if tensor.numel()]
        return len(set(addresses)) < len(addresses)

    def may_repeat(self, source: int, first: int, length: int) -> bool:
        """Return whether something of positions [first, first + length) of a source's space may come to one element here twice.

        Where a source position has two homes, and on the p2p route an element two positions, that takes two tables.
        """
        return self._is_aliased or sum(remap.meets(first, first + length) for remap in self.remaps.get(source, ())) > 1

    def place(self, source: int, first: int, bits: Tensor) -> None:
        """Write dense bits of positions from `first` on of a source's space."""
        for remap in self.remaps.get(source, ()):
            kernels.remaps_on(self.flat.device).place(remap, first, bits.to(self.flat.device), self.flat)

    def holds(self, source: int, first: int, length: int) -> bool:
        """Return whether something of positions [first, first + length) of a source's space may be held here."""
        return any(remap.meets(first, first + length) for remap in self.remaps.get(source, ()))

    def resolve(self, source: int, first: int, distances: Tensor) -> Tensor:
        """Turn dense distances of positions from `first` on of a source's space into bits; what is not held here is of any value."""
        codecs, distances = kernels.codecs_on(self.flat.device), distances.to(self.flat.device)
        bits = torch.zeros_like(distances)
        for remap in self.remaps.get(source, ()):
            codecs.collect(remap, first, bits, self.flat)
        return codecs.add(bits, distances)

    def translate(self, source: int, first: int, positions: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield positions of this space and values, once for every table of the source that has some."""
        for remap in self.remaps.get(source, ()):
            held = kernels.remaps_on(positions.device).translate(remap, first, positions, values)
            if len(held[0]):
                yield held

    def write(self, changes: Changes) -> None:
        """Write changes into the tensors."""
        device = self.flat.device
        scatter = kernels.codecs_on(device).scatter_add if changes.relative else kernels.on(device).scatter
        scatter(self.flat, changes.positions.to(device), changes.values.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Changes of a receiver's flat space.

    Attributes:
        width: bytes of an element.
        positions: int64.
        values: one per position: bits, or distances if `relative`.
        relative: whether these are distances.
    """

    width: int
    positions: Tensor
    values: Tensor
    relative: bool


@dataclass(slots=True)
class StagedPatch:
    """Checked changes of one sync, in positions of the receiver.

    Attributes:
        sparse: changes of single elements.
        dense: (width, source, first position in the source's space, bits).
    """

    sparse: list[Changes] = field(default_factory=list)
    dense: list[tuple[int, int, int, Tensor]] = field(default_factory=list)

    def add(self, target: Target, source: int, segment: Segment) -> None:
        """Stage one segment of a source's space. Its tensors may be views: they are copied."""
        if not target.holds(source, segment.first, segment.length):
            return
        width, values = target.flat.width, segment.values
        if segment.positions is None:
            values = target.resolve(source, segment.first, values) if segment.relative else values.clone()
            self.dense.append((width, source, segment.first, values))
            return
        at_once = segment.relative and target.may_repeat(source, segment.first, segment.length)
        for positions, held in target.translate(source, segment.first, segment.positions, values):
            changes = Changes(width, positions, held, segment.relative)
            self.sparse.append(_as_bits(changes, target.flat) if at_once else changes)

    def apply(self, targets: Mapping[int, Target]) -> None:
        """Write everything into the live tensors."""
        for changes in self.sparse:
            targets[changes.width].write(changes)
        for width, source, first, bits in self.dense:
            targets[width].place(source, first, bits)

    def clear(self) -> None:
        """Forget everything."""
        self.sparse.clear()
        self.dense.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held by what is staged."""
        tensors: list[Tensor] = [tensor for changes in self.sparse for tensor in (changes.positions, changes.values)]
        tensors += [bits for *_, bits in self.dense]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _as_bits(changes: Changes, flat: FlatTensors) -> Changes:
    positions, distances = changes.positions.to(flat.device), changes.values.to(flat.device)
    return Changes(changes.width, positions, kernels.codecs_on(flat.device).moved(flat, positions, distances), False)
