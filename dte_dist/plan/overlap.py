"""The overlap of two blocks of one slot, and how positions in one become positions in the other.

A block is the product of one run list per dimension, so the overlap of two blocks is the product of the
overlaps of their run lists. Per dimension it is a short table of segments (coordinate in A, length,
coordinate in B). Neighbouring dimensions are merged where the inner one is whole in both blocks or the outer
one is a single row, so that what remains is usually one dimension: then positions in A and in B differ by a
constant on each segment. Otherwise a position is taken apart into coordinates (mixed radix), each is looked
up in its table, and they are put together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dte_dist.layout import Block, Runs

__all__ = ["Axis", "Overlap", "axis_of", "intersect", "overlap_of"]

Segments = tuple[tuple[int, int, int], ...]


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
        runs: (position in A, length, position in B), ascending, if one axis is left; else empty.
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
    axes = _merge([axis_of(x, y) for x, y in zip(a.runs, b.runs, strict=True)])
    if not all(axis.segments for axis in axes):
        return None
    if len(axes) == 1:
        runs = axes[0].segments
        return Overlap(runs, (), runs[0][0], runs[-1][0] + runs[-1][1])
    low = 0
    high = 0
    for axis in axes:
        first, _, _ = axis.segments[0]
        last, length, _ = axis.segments[-1]
        low = low * axis.extent + first
        high = high * axis.extent + last + length - 1
    return Overlap((), axes, low, high + 1)


@lru_cache(maxsize=65536)
def intersect(a: Block, b: Block) -> Block | None:
    """Return the elements that two blocks of the same slot share, as a block; None if there are none.

    Example:
        >>> intersect(Block((((2, 4),),)), Block((((0, 3), (5, 9)),))).runs
        (((2, 1), (5, 1)),)
    """
    shared = [_shared(x, y) for x, y in zip(a.runs, b.runs, strict=True)]
    block = Block(tuple(tuple((low, length) for low, length, _, _ in parts) for parts in shared))
    return block if block.numel else None


def _shared(x: Runs, y: Runs) -> Iterator[tuple[int, int, int, int]]:
    """Yield what two run lists share: start and length, and the coordinates of the start within x and within
    y.
    """
    i = j = at_x = at_y = 0
    while i < len(x) and j < len(y):
        (x0, xn), (y0, yn) = x[i], y[j]
        low = max(x0, y0)
        high = min(x0 + xn, y0 + yn)
        if high > low:
            yield low, high - low, at_x + low - x0, at_y + low - y0
        if x0 + xn <= y0 + yn:
            i = i + 1
            at_x = at_x + xn
        else:
            j = j + 1
            at_y = at_y + yn


def axis_of(x: Runs, y: Runs) -> Axis:
    """Intersect two run lists of one dimension; segments that continue each other in both are one.

    Example:
        >>> axis_of(((2, 4),), ((0, 3), (5, 9))).segments
        ((0, 1, 2), (3, 1, 3))
    """
    segments: list[tuple[int, int, int]] = []
    for _, length, at, other in _shared(x, y):
        last_at, last_length, last_other = segments[-1] if segments else (0, 0, -1)
        if (last_at + last_length, last_other + last_length) == (at, other):
            segments[-1] = last_at, last_length + length, last_other
        else:
            segments.append((at, length, other))
    return Axis(sum(n for _, n in x), sum(n for _, n in y), tuple(segments))


def _merge(axes: list[Axis]) -> tuple[Axis, ...]:
    """Merge each axis into the axis left of it if it is whole in both blocks, or if that one has a single
    row.
    """
    merged = [Axis(1, 1, ((0, 1, 0),))]
    for axis in axes:
        outer = merged[-1]
        if axis.is_whole:
            n = axis.extent
            segments = tuple((at * n, length * n, other * n) for at, length, other in outer.segments)
            merged[-1] = Axis(outer.extent * n, outer.other * n, segments)
        elif len(outer.segments) == 1 and outer.segments[0][1] == 1:
            row, _, other = outer.segments[0]
            rest = tuple((row * axis.extent + s, k, other * axis.other + d) for s, k, d in axis.segments)
            merged[-1] = Axis(outer.extent * axis.extent, outer.other * axis.other, rest)
        else:
            merged.append(axis)
    return tuple(merged)
