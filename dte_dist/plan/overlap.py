"""What two blocks of one slot have in common, and how positions in one become positions in the other.

A block is the product of one run list per dimension, so the overlap of two blocks is the product of the overlaps of their run lists. Per
dimension it is a short table of segments (coordinate in A, length, coordinate in B). Neighbouring dimensions of
which the inner one is whole in both blocks are merged, so that what remains is usually one dimension: then
positions in A and in B differ by a constant on each segment. Otherwise a position is taken apart into
coordinates (mixed radix), each is looked up in its table, and they are put together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dte_dist.layout import Block

__all__ = ["Axis", "Overlap", "overlap_of"]

Segments = tuple[tuple[int, int, int], ...]
_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class Axis:
    """One merged dimension of an overlap.

    Attributes:
        extent: its length in block A.
        other: its length in block B.
        segments: (coordinate in A, length, coordinate in B), ascending and disjoint.
    """

    extent: int
    other: int
    segments: Segments

    @property
    def is_whole(self) -> bool:
        """True if the dimension is whole in both blocks, and the same."""
        return self.extent == self.other and self.segments == ((0, self.extent, 0),)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part of block A that block B holds too, in positions of each.

    Attributes:
        runs: (position in A, length, position in B), ascending, if a few runs say it all; else empty.
        axes: otherwise, at least two axes, outermost first.
        begin, end: the range of positions in A that contains the overlap.
    """

    runs: Segments
    axes: tuple[Axis, ...]
    begin: int
    end: int


@lru_cache(maxsize=65536)
def overlap_of(a: Block, b: Block) -> Overlap | None:
    """Intersect two blocks of the same slot; None if they share no element.

    Example:
        >>> overlap_of(Block((((2, 4),),)), Block((((0, 3),),))).runs
        ((0, 1, 2),)
    """
    axes = _merge(tuple(_axis(x, y) for x, y in zip(a.runs, b.runs, strict=True)))
    if any(not axis.segments for axis in axes):
        return None
    if len(axes) == 2 and sum(length for _, length, _ in axes[0].segments) <= _FEW_ROWS:
        return _from_runs(_rows(*axes))
    if len(axes) == 1:
        return _from_runs(axes[0].segments)
    inner = 1
    low = high = 0
    for axis in reversed(axes):
        low += axis.segments[0][0] * inner
        high += (axis.segments[-1][0] + axis.segments[-1][1] - 1) * inner
        inner *= axis.extent
    return Overlap((), axes, low, high + 1)


def _from_runs(runs: Segments) -> Overlap:
    return Overlap(runs, (), runs[0][0], runs[-1][0] + runs[-1][1])


def _axis(x: tuple[tuple[int, int], ...], y: tuple[tuple[int, int], ...]) -> Axis:
    """Intersect two run lists of one dimension."""
    segments = []
    i = j = at_x = at_y = 0
    while i < len(x) and j < len(y):
        (x0, xn), (y0, yn) = x[i], y[j]
        low, high = max(x0, y0), min(x0 + xn, y0 + yn)
        if high > low:
            segments.append((at_x + low - x0, high - low, at_y + low - y0))
        if x0 + xn <= y0 + yn:
            i, at_x = i + 1, at_x + xn
        else:
            j, at_y = j + 1, at_y + yn
    return Axis(sum(n for _, n in x), sum(n for _, n in y), tuple(segments))


def _merge(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Merge each axis that is whole in both blocks into the axis left of it."""
    merged: list[Axis] = []
    for axis in axes:
        if merged and axis.is_whole:
            n, outer = axis.extent, merged.pop()
            axis = Axis(outer.extent * n, outer.other * n, tuple((s * n, k * n, d * n) for s, k, d in outer.segments))
        merged.append(axis)
    return tuple(merged) or (Axis(1, 1, ((0, 1, 0),)),)


def _rows(outer: Axis, inner: Axis) -> Segments:
    """Write a two-dimensional overlap of few rows as runs."""
    return tuple(
        ((row + k) * inner.extent + s, n, (other + k) * inner.other + d)
        for row, rows, other in outer.segments
        for k in range(rows)
        for s, n, d in inner.segments
    )
