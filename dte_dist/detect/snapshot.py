"""The bits that receivers are known to hold, and what differs from them now.

A source keeps one array per width for the blocks it contributes, in wire dtype. It is filled by a seed and
then compared, range by range, with the live tensors. Elements that differ are taken over in the same pass,
while it lies in the cache; the bits that were there are
noted, so that it can be undone until every receiver has what was sent:

1. `advance` finds changes and takes them over, range after range, and gives them out in waves: after reading
   much memory the code that works on changes is no longer in the cache, so it is not called for each range.
2. `commit` forgets what was there: the receivers have it.
3. `undo` puts it back instead: they do not, and the next changes are found from where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect.live_space import LiveSpace
from dte_dist.tensors.flat import BITS

__all__ = ["Changed", "Detector", "Snapshot"]

_RANGE_SEGMENTS: Final = 8
"""Segments that are compared at once where little changes: each call costs what a few thousand changes do."""

_SPARSE_RATIO: Final = 16
"""Little is one change in so many elements."""

_BATCH_CHANGES: Final = 1 << 21
"""Changes that end a wave."""

Detector = Callable[[Tensor, Tensor], Tensor]
"""A caller's own search for changes: (live bits, known bits) of one range, 1-D integer views in wire dtype,
to the ascending int32 or int64 positions of all elements that may differ. It may name too many elements; one
it forgets stays stale. It gets copies.

Example:
    >>> def compare(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:  # a dte_dist.Detector
    ...     return (live != known).nonzero().view(-1)
    >>> report = dte_dist.delta_broadcast(model)
    >>> train()
    >>> dte_dist.delta_broadcast(model, detector=compare).kind
    'delta'
"""


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """The changes in elements [first, first + length) of a space.

    Attributes:
        first, length: the range.
        positions: int32, ascending, counted from `first`; None if all elements changed.
        old, new: the bits before and now, one for each position.
    """

    first: int
    length: int
    positions: Tensor | None
    old: Tensor
    new: Tensor

    def __len__(self) -> int:
        return len(self.new)

    def bounds(self) -> tuple[int, int]:
        """Return where the range begins, and where it ends."""
        return self.first, self.first + self.length

    def listed(self) -> Tensor:
        """Return the positions, also if all elements changed."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.length, dtype=torch.int32, device=self.new.device)


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


@dataclass(frozen=True, slots=True, eq=False)
class _UndoRecord:
    """The bits of a range before it was taken over: at some positions, or everywhere (None)."""

    width: int
    first: int
    positions: Tensor | None
    bits: Tensor


class Snapshot:
    """Known bits of one rank's flat spaces.

    Args:
        totals: elements of each width.
        device: of the live tensors, where the snapshot lies too.
        segment: elements of the smallest ranges to compare.

    Attributes:
        bits: by width, the known bits; undefined until the first `refresh`.
        inconsistent: True if something broke off while bits were taken over or put back: they are then of no
            version.
    """

    def __init__(self, totals: Mapping[int, int], device: torch.device, segment: int) -> None:
        self.bits = {width: kernels.empty(total, BITS[width], device) for width, total in totals.items()}
        self.inconsistent = False
        self._halfway = False  # whether a range may have been taken over that is in no wave yet
        self._segment, self._range_segments, self._undo_log = segment, _RANGE_SEGMENTS, list[_UndoRecord]()
        self.move(device)

    def move(self, device: torch.device) -> None:
        """Move to another device, as the live tensors did; nothing may wait to be settled."""
        self._scratch: dict[int, _ScratchBuffers] = {}
        self._kernels = kernels.on(device)
        self.bits = {width: bits.to(device) for width, bits in self.bits.items()}
        self.device = device  # last: after an interrupt it moves again

    def diff_and_update(
        self, live: LiveSpace, width: int, spans: Iterable[tuple[int, int]], detector: Detector | None = None
    ) -> Iterator[list[Changed]]:
        """Find what differs in some spans, take it over, and yield it in waves.

        Args:
            live: the live tensors of a width.
            width: of elements.
            spans: (first, length) of ranges to go through, one after the other; what is found in different
                ones is told apart.
            detector: the caller's own search; None compares all.

        Yields:
            What was found, in order; the tensors are views of memory that the next wave uses again.

        Raises:
            ValueError: the caller's detector returned something else than ascending positions of a range.
        """
        if width not in self._scratch:
            most = min(len(self.bits[width]), _RANGE_SEGMENTS * self._segment)
            self._scratch[width] = _ScratchBuffers.of(
                min(len(self.bits[width]), _BATCH_CHANGES + most), width, self.device
            )
        # `inconsistent` is True from before the first bit of a wave is taken over until all of the wave is
        # noted, so that whatever breaks off in between (an interrupt at any line, too) leaves a snapshot that
        # is known to be of no version.
        wave, filled, was_inconsistent = list[Changed](), 0, self.inconsistent
        try:
            for first, length in self._ranges(spans):
                named = (
                    self._detected(live, width, (first, length), detector) if detector is not None else None
                )
                wave.append(
                    self._update_range(
                        live, width, (first, length), self._scratch[width].after(filled), named
                    )
                )
                self._halfway = False
                filled, self._range_segments = (
                    filled + len(wave[-1]),
                    _RANGE_SEGMENTS if _SPARSE_RATIO * len(wave[-1]) < length else 1,
                )
                if filled >= _BATCH_CHANGES:
                    done = self._record(width, wave)
                    wave, filled = [], 0
                    self.inconsistent = was_inconsistent
                    yield done
        finally:  # also of what was found before a detector failed
            last = self._record(width, wave)
            # Without a wave nothing became inconsistent here; it may have been elsewhere since the last one.
            if wave and not self._halfway:
                self.inconsistent = was_inconsistent
        if last:
            yield last

    def _ranges(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Cut spans into ranges, as long as it pays by what was found last."""
        for begin, length in spans:
            first = begin
            while first < begin + length:
                size = min(self._range_segments * self._segment, begin + length - first)
                yield first, size
                first += size

    def _update_range(
        self, live: LiveSpace, width: int, where: tuple[int, int], room: _ScratchBuffers, named: Tensor | None
    ) -> Changed:
        """Take over what differs in a range, or what stands at the positions that a detector named; it has to
        be noted.
        """
        first, length = where
        known = self.bits[width][first : first + length]
        if named is None:
            self.inconsistent = self._halfway = True
            count = self._kernels.advance(
                live.flat, first, first + length, known, room.positions, room.old, room.new
            )
            return room.changed(first, length, count)
        bits = torch.empty_like(known)
        self._kernels.read(live.flat, first, bits)
        room.positions[: len(named)] = named
        changed = room.changed(first, length, len(named))
        changed.old.copy_(self._kernels.gather_1d(known, named))
        changed.new.copy_(self._kernels.gather_1d(bits, named))
        self.inconsistent = self._halfway = True
        self._kernels.scatter_1d(known, named, changed.new)
        return changed

    def _detected(self, live: LiveSpace, width: int, where: tuple[int, int], detector: Detector) -> Tensor:
        """Return the positions that a caller's detector names in a range; it gets copies."""
        first, length = where
        known = self.bits[width][first : first + length].clone()
        bits = torch.empty_like(known)
        self._kernels.read(live.flat, first, bits)
        positions = detector(bits, known)
        if positions.dim() != 1 or positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "a detector returns int32 or int64 positions in one dimension, got "
                f"{positions.dtype}{list(positions.shape)}"
            )
        positions = positions.to(known.device).contiguous()
        if not self._kernels.strictly_increasing(positions, length):
            raise ValueError(f"a detector returns ascending positions within [0, {length})")
        return positions

    def _record(self, width: int, wave: list[Changed]) -> list[Changed]:
        """Note what the ranges of a wave held before; return what changed in them. To note it twice is to put
        it back twice.
        """
        wave = [changed for changed in wave if len(changed)]
        few = all(_is_few(changed, width) for changed in wave)
        self._undo_log += (
            self._record_sparse(width, wave)
            if few
            else [self._record_range(width, changed) for changed in wave]
        )
        return wave

    def _record_sparse(self, width: int, wave: list[Changed]) -> Iterator[_UndoRecord]:
        """Copy what a wave held where it changed."""
        positions, old = self._scratch[width].undo_columns(sum(map(len, wave)))
        at = 0
        for changed in wave:
            here = slice(at, at + len(changed))
            yield _UndoRecord(width, changed.first, positions[here], old[here])
            at = here.stop

    def _record_range(self, width: int, changed: Changed) -> _UndoRecord:
        """Copy what a range held where it changed, or all that it held if that is less."""
        if changed.positions is not None and _is_few(changed, width):
            return _UndoRecord(width, changed.first, changed.positions.clone(), changed.old.clone())
        bits = kernels.empty(changed.length, changed.old.dtype, self.device)
        if changed.positions is None:
            return _UndoRecord(width, changed.first, None, bits.copy_(changed.old))
        bits.copy_(self.bits[width][changed.first : changed.first + changed.length])
        self._kernels.scatter_1d(bits, changed.positions, changed.old)
        return _UndoRecord(width, changed.first, None, bits)

    def commit(self) -> None:
        """Let what was taken over be what is known from now on."""
        self._undo_log.clear()

    def roll_back(self) -> None:
        """Put back what was known before the last `commit`; if it breaks off, it can be done again."""
        was_inconsistent = self.inconsistent
        self.inconsistent = True
        for before in self._undo_log:
            known = self.bits[before.width][before.first :]
            if before.positions is None:
                known[: len(before.bits)].copy_(before.bits)
            else:
                self._kernels.scatter_1d(known, before.positions, before.bits)
        self.commit()
        self.inconsistent = was_inconsistent

    def refresh(self, live: Mapping[int, LiveSpace], ranges: Iterable[tuple[int, int, int]]) -> None:
        """Take over all live bits, given as ranges (width, first, length) that cover them; this cannot be
        undone.
        """
        self.inconsistent = True
        self.commit()
        for width, first, length in ranges:
            self._kernels.read(live[width].flat, first, self.bits[width][first : first + length])
        self.inconsistent = self._halfway = False


def _is_few(changed: Changed, width: int) -> bool:
    """Return whether positions and bits of what changed in a range are fewer bytes than all of its bits."""
    return changed.positions is not None and (4 + width) * len(changed) <= width * changed.length
