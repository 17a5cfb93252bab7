"""Changes found by comparing live tensors with the bits that receivers are known to hold.

Known bits (`detect.known_bits`) are compared, range by range, with the live tensors. Elements that differ are
taken over in the same pass, while they lie in the cache; the bits that were there are noted. Changes are
given out in batches: after reading much memory the code that works on changes is no longer in the cache, so
it is not called for each range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect.detector import Changed, Detector
from dte_dist.detect.known_bits import KnownBits, UndoRecord, is_few
from dte_dist.tensors.flat import BITS, FlatTensors

__all__ = ["Snapshot"]

_RANGE_SEGMENTS: Final = 8
"""Segments that are compared at once where little changes: each call costs what a few thousand changes do."""

_SPARSE_RATIO: Final = 16
"""Little is one change in so many elements."""

_BATCH_CHANGES: Final = 1 << 21
"""Changes that end a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class _ScratchBuffers:
    """Memory for changes, most of which is never touched."""

    positions: Tensor
    old: Tensor
    new: Tensor

    @classmethod
    def of(cls, count: int, width: int, device: torch.device) -> _ScratchBuffers:
        return cls(
            *(kernels.empty(count, dtype, device) for dtype in (torch.int32, BITS[width], BITS[width]))
        )

    def after(self, count: int) -> _ScratchBuffers:
        """Return what is left of it."""
        return _ScratchBuffers(self.positions[count:], self.old[count:], self.new[count:])

    def changed(self, first: int, length: int, count: int) -> Changed:
        """Return the first `count` changes in it as those of a range."""
        return Changed(
            first,
            length,
            None if count == length else self.positions[:count],
            self.old[:count],
            self.new[:count],
        )

    def undo_columns(self, count: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first `count` positions and old bits, each in one piece: many small ones would
        leave holes in memory.
        """
        kept = tuple(
            kernels.empty(count, part.dtype, part.device).copy_(part[:count])
            for part in (self.positions, self.old)
        )
        return kept[0], kept[1]


class Snapshot(KnownBits):
    """Known bits of one rank's flat spaces, and what differs from them; a `ChangeDetector`.

    Args:
        totals: elements of each width.
        device: of the live tensors, where the snapshot lies too.
        segment: elements of the smallest ranges to compare.
    """

    def __init__(self, totals: Mapping[int, int], device: torch.device, segment: int) -> None:
        self._scratch: dict[int, _ScratchBuffers] = {}
        self._segment = segment
        self._range_segments = _RANGE_SEGMENTS
        super().__init__(totals, device)

    def move(self, device: torch.device) -> None:
        """Move to another device, as the live tensors did; nothing may wait to be committed."""
        self._scratch = {}
        super().move(device)

    def changes(
        self,
        live: FlatTensors,
        width: int,
        ranges: Iterable[tuple[int, int]],
        detector: Detector | None = None,
    ) -> Iterator[list[Changed]]:
        """Take over what differs in some ranges, and yield it in batches.

        Args:
            live: the live tensors of a width.
            width: of elements.
            ranges: (first, length) of ranges to go through, one after the other; what is found in different
                ones is told apart.
            detector: the caller's own search; None compares all.

        Yields:
            What was found, in order; the tensors are views of memory that the next batch uses again.

        Raises:
            ValueError: the caller's detector returned something else than ascending positions of a range.
        """
        if width not in self._scratch:
            most = min(len(self.bits[width]), _RANGE_SEGMENTS * self._segment)
            self._scratch[width] = _ScratchBuffers.of(
                min(len(self.bits[width]), _BATCH_CHANGES + most),
                width,
                self.device,
            )
        # `inconsistent` is True from before the first bit of a batch is taken over until all of the batch is
        # noted, so that whatever breaks off in between (an interrupt at any line, too) leaves a snapshot that
        # is known to be of no version.
        batch = list[Changed]()
        filled = 0
        was_inconsistent = self.inconsistent
        try:
            for first, length in self._cut(ranges):
                named = (
                    self._detected(live, width, (first, length), detector) if detector is not None else None
                )
                batch.append(
                    self._update_range(
                        live,
                        width,
                        (first, length),
                        self._scratch[width].after(filled),
                        named,
                    )
                )
                self._halfway = False
                count = len(batch[-1].new)
                filled += count
                self._range_segments = _RANGE_SEGMENTS if _SPARSE_RATIO * count < length else 1
                if filled >= _BATCH_CHANGES:
                    done = self._record(width, batch)
                    batch = []
                    filled = 0
                    self.inconsistent = was_inconsistent
                    yield done
        finally:  # also of what was found before a detector failed
            last = self._record(width, batch)
            # Without a batch nothing became inconsistent here; it may have been elsewhere since the last one.
            if batch and not self._halfway:
                self.inconsistent = was_inconsistent
        if last:
            yield last

    def _cut(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Cut ranges into those that are compared at once, as long as it pays by what was found last."""
        for begin, length in ranges:
            first = begin
            while first < begin + length:
                size = min(self._range_segments * self._segment, begin + length - first)
                yield first, size
                first += size

    def _update_range(
        self,
        live: FlatTensors,
        width: int,
        where: tuple[int, int],
        room: _ScratchBuffers,
        named: Tensor | None,
    ) -> Changed:
        """Take over what differs in a range, or what stands at the positions that a detector named; it has to
        be noted.
        """
        first, length = where
        known = self.bits[width][first : first + length]
        if named is None:
            self.inconsistent = self._halfway = True
            count = self._kernels.advance(
                live,
                first,
                first + length,
                known,
                room.positions,
                room.old,
                room.new,
            )
            return room.changed(first, length, count)
        bits = torch.empty_like(known)
        self._kernels.read(live, first, bits)
        room.positions[: len(named)] = named
        count = len(named)
        room.old[:count] = self._kernels.gather_1d(known, named)
        room.new[:count] = self._kernels.gather_1d(bits, named)
        self.inconsistent = self._halfway = True
        self._kernels.scatter_1d(known, named, room.new[:count])
        return room.changed(first, length, count)

    def _detected(
        self,
        live: FlatTensors,
        width: int,
        where: tuple[int, int],
        detector: Detector,
    ) -> Tensor:
        """Return the positions that a caller's detector names in a range; it gets copies."""
        first, length = where
        known = self.bits[width][first : first + length].clone()
        bits = torch.empty_like(known)
        self._kernels.read(live, first, bits)
        positions = detector(bits, known)
        if positions.dim() != 1 or positions.dtype not in (
            torch.int32,
            torch.int64,
        ):
            raise ValueError(
                "a detector returns int32 or int64 positions in one dimension, got "
                f"{positions.dtype}{list(positions.shape)}"
            )
        positions = positions.to(known.device).contiguous()
        if not self._kernels.strictly_increasing(positions, length):
            raise ValueError(f"a detector returns ascending positions within [0, {length})")
        return positions

    def _record(self, width: int, batch: list[Changed]) -> list[Changed]:
        """Note what the ranges of a batch held before, once; return what changed in them."""
        batch = [changed for changed in batch if len(changed.new)]
        if all(is_few(changed, width) for changed in batch):
            self.undo_log += self._record_sparse(width, batch)
        else:
            at = 0
            old = self._scratch[width].old
            for changed in batch:
                self.undo_log.append(self.record(width, changed, old[at : at + len(changed)]))
                at += len(changed)
        return batch

    def _record_sparse(self, width: int, batch: list[Changed]) -> Iterator[UndoRecord]:
        """Copy what a batch held where it changed."""
        positions, old = self._scratch[width].undo_columns(sum(map(len, batch)))
        at = 0
        for changed in batch:
            here = slice(at, at + len(changed))
            yield UndoRecord(width, changed.first, positions[here], old[here])
            at = here.stop
