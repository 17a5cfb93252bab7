"""Translate positions of a source's flat space into a receiver's.

An `IndexMap` is a table of entries, each a range of the source's space together with how it lies in the
receiver's space:

* shifted: receiver position = source position + shift. Neighbours with the same shift are one entry, so two
  ranks with the same layout need a single entry for the whole model.
* with axes: the position is taken apart into coordinates along the axes of the overlap, outermost first, each
  looked up in a table of segments. Entries of like geometry share their axes.

Positions outside every entry, or in a coordinate that no segment covers, belong to other receivers and are
dropped. Entries of one table do not overlap in the source's space. Where a source position has several homes
in one receiver (a tensor that the source ties and the receiver does not), the further homes are in further
tables, "layers".

All of it is array work: there are far fewer different pairs of blocks than pairs of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.overlap import Axis, Overlap, overlap_of

__all__ = ["IndexMap", "build_index_maps", "is_identity", "matching_blocks"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class IndexMap:
    """One table of entries, as int64 arrays for the kernels.

    Attributes:
        begin, end: [entries] range of the source's space, ascending and disjoint.
        shift: [entries] receiver position minus source position; for an entry with axes, where the receiver's
            piece starts.
        origin: [entries] source position that the coordinates of an entry with axes count from.
        axis, axes: [entries] first axis of each entry, and how many; none for a shifted one.
        extent, stride: [axes] length of the axis in the source's block; elements per step in the receiver's
            block.
        segment: [axes + 1] first segment of each axis.
        low, high, target: [segments] coordinates [low, high) of the axis, and the coordinate in the receiver
            of the first.
    """

    begin: np.ndarray
    end: np.ndarray
    shift: np.ndarray
    origin: np.ndarray
    axis: np.ndarray
    axes: np.ndarray
    extent: np.ndarray
    stride: np.ndarray
    segment: np.ndarray
    low: np.ndarray
    high: np.ndarray
    target: np.ndarray

    def meets(self, low: int, high: int) -> bool:
        """Return whether an entry overlaps positions [low, high) of the source's space."""
        return bool(
            np.searchsorted(self.end, low, side="right") < np.searchsorted(self.begin, high, side="left")
        )

    def tables(self) -> tuple[np.ndarray, ...]:
        """Return all arrays, in the order of the attributes."""
        return (
            self.begin,
            self.end,
            self.shift,
            self.origin,
            self.axis,
            self.axes,
            self.extent,
            self.stride,
            self.segment,
            self.low,
            self.high,
            self.target,
        )


def build_index_maps(source: FlatSpace, receiver: FlatSpace) -> tuple[IndexMap, ...]:
    """Build the tables from one rank's flat space to another's of the same width; one per layer, none if
    nothing overlaps.

    Example:
        >>> from dte_dist.layout import Block
        >>> from dte_dist.plan.flat_space import Piece, Pieces
        >>> spaces = [FlatSpace.of(2, Pieces.of([Piece(0, 0, Block((((first, 4),),)))])) for first in (4, 2)]
        >>> [(index_map.begin.tolist(), index_map.end.tolist(), index_map.shift.tolist())
        ...     for index_map in build_index_maps(*spaces)]
        [([0], [2], [2])]
    """
    at, home = matching_blocks(source.pieces.slot, receiver.pieces.slot)
    first = source.pieces.table.blocks
    second = receiver.pieces.table.blocks
    pairs, which = np.unique(
        source.pieces.block[at] * len(second) + receiver.pieces.block[home],
        return_inverse=True,
    )
    overlaps = [overlap_of(first[pair // len(second)], second[pair % len(second)]) for pair in pairs.tolist()]
    shared = np.array([overlap is not None for overlap in overlaps], np.bool_)[which]
    if not shared.any():
        return ()
    patterns = _Patterns(overlaps)
    which = which[shared]
    start = source.starts[at[shared]]
    target = receiver.starts[home[shared]]
    begin = start + patterns.begin[which]
    end = start + patterns.end[which]
    order = np.argsort(begin, kind="stable")
    layer = _layers(begin[order], end[order])
    chosen = [order[layer == number] for number in range(int(layer.max()) + 1)]
    return tuple(patterns.index_map(which[pick], start[pick], target[pick]) for pick in chosen)


def is_identity(index_maps: Sequence[IndexMap], numel: int) -> bool:
    """Return whether each of the `numel` positions of a space becomes the same position of the other, and no
    other.
    """
    if len(index_maps) != 1 or len(index_maps[0].begin) != 1:
        return False
    index_map = index_maps[0]
    return bool(
        index_map.begin[0] == 0
        and index_map.end[0] == numel
        and index_map.shift[0] == 0
        and index_map.axes[0] == 0
    )


def matching_blocks(source: np.ndarray, receiver: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of pieces of one slot, as indices of both; the slots of each side are ascending."""
    low = np.searchsorted(receiver, source, side="left")
    counts = np.searchsorted(receiver, source, side="right") - low
    return np.repeat(np.arange(len(source)), counts), _ranges(low, counts)


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return first[0], first[0] + 1, ... (counts[0] of them), then the same for every other."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)


def _layers(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Number the layer of each range, in order of `begin`: the first one whose ranges all end before it."""
    if (begin[1:] >= end[:-1]).all():
        return np.zeros(len(begin), np.int64)
    layers: list[int] = []
    ends: list[int] = []
    for low, high in zip(begin.tolist(), end.tolist(), strict=True):
        layer = next(
            (number for number, last in enumerate(ends) if last <= low),
            len(ends),
        )
        ends[layer : layer + 1] = [high]
        layers.append(layer)
    return np.array(layers, np.int64)


class _Patterns:
    """The entries of each of several overlaps, as they would be if both blocks started at position 0.

    Attributes:
        begin, end: [overlaps] range of source positions; nothing for None.
    """

    def __init__(self, overlaps: Sequence[Overlap | None]) -> None:
        rows: list[tuple[int, int, int, int, int]] = []
        counts: list[int] = []
        axes: list[tuple[int, int]] = []
        self._segments: list[tuple[int, int, int]] = []
        self._segment = [0]
        for overlap in overlaps:
            before = len(rows)
            if overlap is not None and overlap.axes:
                rows.append(
                    (
                        overlap.begin,
                        overlap.end,
                        0,
                        len(axes),
                        len(overlap.axes),
                    )
                )
                axes += self._add(overlap.axes)
            elif overlap is not None:
                rows += [(at, at + length, other - at, 0, 0) for at, length, other in overlap.runs]
            counts.append(len(rows) - before)
        self.begin = np.array(
            [0 if overlap is None else overlap.begin for overlap in overlaps],
            np.int64,
        )
        self.end = np.array(
            [0 if overlap is None else overlap.end for overlap in overlaps],
            np.int64,
        )
        self._rows = _columns(rows, 5)
        self._counts = np.array(counts, np.int64)
        self._axes = (
            *_columns(axes, 2),
            np.array(self._segment, np.int64),
            *_columns(self._segments, 3),
        )

    def _add(self, axes: tuple[Axis, ...]) -> list[tuple[int, int]]:
        """Add the segments of an overlap's axes; return extent and stride of each."""
        stride = 1
        added = []
        for axis in reversed(axes):
            added.append((axis.extent, stride))
            stride *= axis.other
        for axis in axes:
            self._segments += [(low, low + length, target) for low, length, target in axis.segments]
            self._segment.append(len(self._segments))
        return added[::-1]

    def index_map(self, which: np.ndarray, start: np.ndarray, target: np.ndarray) -> IndexMap:
        """Put overlaps `which` at where their blocks start in the source's and the receiver's space;
        ascending and disjoint.
        """
        counts = self._counts[which]
        before = np.cumsum(self._counts) - self._counts
        rows = self._rows[:, _ranges(before[which], counts)]
        start = np.repeat(start, counts)
        target = np.repeat(target, counts)
        begin, end, shift, axis, axes = rows
        shifted = axes == 0
        begin = begin + start
        end = end + start
        shift = shift + target - np.where(shifted, start, 0)
        joined = (begin[1:] == end[:-1]) & (shift[1:] == shift[:-1]) & shifted[1:] & shifted[:-1]
        first = np.append(True, ~joined)
        last = np.append(~joined, True)
        return IndexMap(
            begin[first],
            end[last],
            shift[first],
            start[first],
            axis[first],
            axes[first],
            *self._axes,
        )


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    """Return rows of numbers as contiguous int64 columns."""
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, width).T)
