"""Changes that have arrived and been checked, waiting for the vote; and the tensors they will be written to.

Staging costs memory in proportion to the changes, never to the model. Nothing live is touched before `apply`, which
writes bits in place: addresses stay, version counters of autograd move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dte_dist import kernels
from dte_dist.change.flat import FlatTensors
from dte_dist.codec import Segment
from dte_dist.plan.remap import Remap

__all__ = ["StagedPatch", "Target"]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A receiver's flat space of one width as it lies in memory now.

    Attributes:
        flat: its local tensors.
        remaps: by source, the tables from that source's space to this one.
    """

    flat: FlatTensors
    remaps: Mapping[int, Sequence[Remap]]

    def place(self, source: int, first: int, bits: Tensor) -> None:
        """Write dense bits of positions from `first` on of a source's space."""
        for remap in self.remaps.get(source, ()):
            kernels.remaps_on(self.flat.device).place(remap, first, bits.to(self.flat.device), self.flat)

    def holds(self, source: int, first: int, length: int) -> bool:
        """Return whether something of positions [first, first + length) of a source's space may be held here."""
        return any(remap.meets(first, first + length) for remap in self.remaps.get(source, ()))

    def translate(self, source: int, first: int, positions: Tensor, bits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield positions of this space and bits, once for every table of the source that has some."""
        for remap in self.remaps.get(source, ()):
            held = kernels.remaps_on(positions.device).translate(remap, first, positions, bits)
            if len(held[0]):
                yield held


@dataclass(slots=True)
class StagedPatch:
    """Checked changes of one sync, in positions of the receiver.

    Attributes:
        sparse: (width, int64 positions, bits).
        dense: (width, source, first position in the source's space, bits).
    """

    sparse: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    dense: list[tuple[int, int, int, Tensor]] = field(default_factory=list)

    def add(self, target: Target, source: int, segment: Segment) -> None:
        """Stage one segment of a source's space. Its tensors may be views: they are copied."""
        if not target.holds(source, segment.first, segment.length):
            return
        width = target.flat.width
        if segment.positions is None:
            self.dense.append((width, source, segment.first, segment.bits.clone()))
        else:
            self.sparse.extend((width, *held) for held in target.translate(source, segment.first, segment.positions, segment.bits))

    def apply(self, targets: Mapping[int, Target]) -> None:
        """Write everything into the live tensors."""
        for width, positions, bits in self.sparse:
            flat = targets[width].flat
            kernels.on(flat.device).scatter(flat, positions.to(flat.device), bits.to(flat.device))
        for width, source, first, bits in self.dense:
            targets[width].place(source, first, bits)

    def clear(self) -> None:
        """Forget everything."""
        self.sparse.clear()
        self.dense.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held by what is staged."""
        tensors: list[Tensor] = [t for _, positions, bits in self.sparse for t in (positions, bits)]
        tensors += [bits for *_, bits in self.dense]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

