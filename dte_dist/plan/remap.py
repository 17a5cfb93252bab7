"""Translate positions of a source's flat space into a receiver's.

A `Remap` is a table of entries, each a range of the source's space together with how it lies in the receiver's space:

* shifted: receiver position = source position + shift. Neighbours with the same shift are one entry, so two
  ranks with the same layout need a single entry for the whole model.
* axes: the position is taken apart into coordinates along the axes of the overlap, outermost first, each looked up in
  a table of segments.

Positions outside every entry, or in a coordinate that no segment covers, belong to other receivers and are dropped.
Entries of one table do not overlap in the source's space. Where a source position has several homes in one receiver (a
tensor that the source ties and the receiver does not), the further homes are in further tables, "layers".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dte_dist.plan.overlap import Axis, Overlap, overlap_of
from dte_dist.plan.space import FlatSpace

__all__ = ["Remap", "build_remaps"]

_NO_AXES = -1


@dataclass(frozen=True, slots=True, eq=False)
class Remap:
    """One table of entries, as int64 arrays for the kernels.

    Attributes:
        begin, end: [entries] range of the source's space, ascending and disjoint.
        shift: [entries] receiver position minus source position; for an entry with axes, where the receiver's piece starts.
        axis: [entries + 1] first axis of each entry; an entry without axes is a shifted one.
        extent, stride: [axes] length of the axis in the source's block; elements per step in the receiver's block.
        segment: [axes + 1] first segment of each axis.
        low, high, target: [segments] coordinates [low, high) of the axis, and the coordinate in the receiver of the first.
        origin: [entries] source position that coordinates count from.
    """

    begin: np.ndarray
    end: np.ndarray
    shift: np.ndarray
    axis: np.ndarray
    extent: np.ndarray
    stride: np.ndarray
    segment: np.ndarray
    low: np.ndarray
    high: np.ndarray
    target: np.ndarray
    origin: np.ndarray

    @property
    def is_shift(self) -> bool:
        """True if no entry has axes."""
        return not len(self.extent)

    def tables(self) -> tuple[np.ndarray, ...]:
        """Return all arrays, in the order of the attributes."""
        return (
            self.begin, self.end, self.shift, self.axis, self.extent, self.stride, self.segment,
            self.low, self.high, self.target, self.origin,
        )  # fmt: skip


@dataclass(slots=True)
class _Entry:
    begin: int
    end: int
    shift: int
    axes: tuple[Axis, ...]
    origin: int


def build_remaps(source: FlatSpace, receiver: FlatSpace) -> tuple[Remap, ...]:
    """Build the tables from one rank's flat space to another's of the same width; one per layer, none if nothing overlaps."""
    homes: dict[int, list[tuple[int, int]]] = {}
    for index, piece in enumerate(receiver.pieces):
        homes.setdefault(piece.slot, []).append((index, int(receiver.starts[index])))
    layers: list[list[_Entry]] = []
    for index, piece in enumerate(source.pieces):
        start = int(source.starts[index])
        for home, target in homes.get(piece.slot, ()):
            overlap = overlap_of(piece.block, receiver.pieces[home].block)
            if overlap is not None:
                _place(layers, list(_entries(overlap, start, target)))
    return tuple(_pack(layer) for layer in layers)


def _entries(overlap: Overlap, start: int, target: int) -> Iterator[_Entry]:
    for low, length, other in overlap.runs:
        yield _Entry(start + low, start + low + length, target + other - start - low, (), 0)
    if overlap.axes:
        yield _Entry(start + overlap.begin, start + overlap.end, target, overlap.axes, start)


def _place(layers: list[list[_Entry]], entries: list[_Entry]) -> None:
    """Add entries to the first layer that ends before them, joining a shifted entry to the one it continues."""
    layer = next((layer for layer in layers if layer[-1].end <= entries[0].begin), None)
    if layer is None:
        layer = []
        layers.append(layer)
    for entry in entries:
        last = layer[-1] if layer else None
        if last and last.end == entry.begin and last.shift == entry.shift and not last.axes and not entry.axes:
            last.end = entry.end
        else:
            layer.append(entry)


def _pack(layer: list[_Entry]) -> Remap:
    axes: list[tuple[int, int]] = []
    segments: list[tuple[int, int, int]] = []
    first_axis, first_segment = [0], [0]
    for entry in layer:
        stride = 1
        packed: list[tuple[Axis, int]] = []
        for axis in reversed(entry.axes):
            packed.append((axis, stride))
            stride *= axis.other
        for axis, step in reversed(packed):
            axes.append((axis.extent, step))
            segments.extend((low, low + length, target) for low, length, target in axis.segments)
            first_segment.append(len(segments))
        first_axis.append(len(axes))
    column = np.array(axes, np.int64).reshape(-1, 2).T.copy()
    table = np.array(segments, np.int64).reshape(-1, 3).T.copy()
    return Remap(
        *(np.array([getattr(entry, name) for entry in layer], np.int64) for name in ("begin", "end", "shift")),
        np.array(first_axis, np.int64), column[0], column[1], np.array(first_segment, np.int64), table[0], table[1], table[2],
        np.array([entry.origin for entry in layer], np.int64),
    )  # fmt: skip
