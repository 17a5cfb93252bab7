"""The positions that the previous delta changed, at both ends: those that the index codec `again` counts on.

1. While frames are written or read, `before` gives the places of the same chunk in the delta that made the
   frame's base, and `note` takes those of this one. A source notes what it writes, a receiver what it has
   read and proven.
2. `commit` lets what was noted be what is known: the sync made a version. `forget` drops what was noted: it
   did not.
3. `drop` drops all: what was known need not be what the other end knows.

The known positions belong to one (version, lineage). Each of these is made by exactly one sync, so a frame
whose base and stream are those of the history speaks of the same delta at both ends. That a receiver which
follows
has that history is for the source to see to: see `Source.commit`. Chunks are told apart by source, number and
schema, which differs between routes and lanes (`sync.frame_builder`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.header import FrameHead

__all__ = ["DeltaPositions", "PreviousDelta"]

_SLACK: Final = 1024
"""Bytes of memory beside positions that are not worth a copy."""


class DeltaPositions:
    """Which elements of a chunk changed, segment by segment; segments that were sent whole are not among
    them.

    Example:
        >>> places = DeltaPositions()
        >>> places.add(0, 100, torch.tensor([3, 90], dtype=torch.int32))
        >>> places.add(100, 50, torch.tensor([7], dtype=torch.int32))
        >>> places.within(50, 100).tolist()
        [40, 57]
    """

    __slots__ = ("_firsts", "_parts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._parts: list[tuple[int, Tensor]] = []

    def add(self, first: int, length: int, positions: Tensor) -> None:
        """Add the int32 positions of segment [first, first + length), counted from `first`; segments come in
        ascending order.

        They must stay as they are. A small part of larger memory is copied, so that this is not kept
        with it.
        """
        if positions.untyped_storage().nbytes() > 2 * positions.nbytes + _SLACK:
            positions = positions.clone()
        self._firsts.append(first)
        self._parts.append((length, positions))

    def within(self, first: int, length: int) -> Tensor | None:
        """Return the int32 positions in [first, first + length), counted from `first`; None if there are
        none.

        Waits for the device at a segment that is cut by the range: twice at most.
        """
        found: list[Tensor] = []
        for number in range(max(bisect_right(self._firsts, first) - 1, 0), len(self._firsts)):
            begin, (size, positions) = self._firsts[number], self._parts[number]
            low, high = max(first - begin, 0), min(first + length - begin, size)
            if begin >= first + length:
                break
            if low >= high:
                continue
            if high - low < size:
                positions = _cut(positions, low, high)
            if len(positions):
                found.append(positions if begin == first else positions + (begin - first))
        if not found:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return sum(positions.nbytes for _, positions in self._parts)


class PreviousDelta:
    """The places of one delta by chunk, and those of the one in the making.

    Example:
        >>> from dataclasses import replace
        >>> head = FrameHead(schema=7, lineage=9, base=1, version=2, source=0, number=0, count=1, width=4,
        ...     first=0, length=100)
        >>> history, places = PreviousDelta(), DeltaPositions()
        >>> places.add(0, 100, torch.tensor([3, 8], dtype=torch.int32))
        >>> history.record(head, places)
        >>> history.commit(head.version, head.lineage)
        >>> history.before(replace(head, base=2, version=3)).within(5, 10).tolist()
        [3]
    """

    __slots__ = ("_known", "_made", "_noted")

    def __init__(self) -> None:
        self._made: tuple[int, int] | None = None
        self._known: dict[tuple[int, int, int], DeltaPositions] = {}
        self._noted: dict[tuple[int, int, int], DeltaPositions] = {}

    def before(self, head: FrameHead) -> DeltaPositions | None:
        """Return the places of a frame's chunk in the delta that made its base; None if they are not known,
        or there are none.
        """
        return self._known.get(_key(head)) if self._made == (head.base, head.lineage) else None

    def record(self, head: FrameHead, places: DeltaPositions) -> None:
        """Note the places of a frame's chunk in the delta in the making."""
        self._noted[_key(head)] = places

    def commit(self, version: int, stream: int) -> None:
        """Let what was noted be what is known: it made this version."""
        self._made, self._known, self._noted = (version, stream), self._noted, {}

    def discard(self) -> None:
        """Forget what was noted."""
        self._noted = {}

    def reset(self) -> None:
        """Forget everything."""
        self._made, self._known, self._noted = None, {}, {}

    @property
    def nbytes(self) -> int:
        """Bytes of the positions that are held."""
        return sum(places.nbytes for held in (self._known, self._noted) for places in held.values())


def _key(head: FrameHead) -> tuple[int, int, int]:
    return head.schema, head.source, head.number


def _cut(positions: Tensor, low: int, high: int) -> Tensor:
    """Return the positions in [low, high)."""
    begin, end = kernels.on(positions.device).searchsorted(positions, [low, high])
    return positions[begin:end]
