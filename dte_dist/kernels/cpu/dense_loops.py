# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops that take dense bits through an index map (see `plan.index_map` for the tables): copying
them, and digesting them by where they belong.

`index_map` is the address of the addresses of an IndexMap's arrays, as in `index_map_loops.py`. Nothing is
compiled at import.
"""

from __future__ import annotations

import numpy as np

from dte_dist.kernels.cpu.index_map_loops import (
    AXES,
    AXIS,
    BEGIN,
    END,
    ENTRIES,
    EXTENT,
    HIGH,
    LOW,
    ORIGIN,
    SEGMENT,
    SHIFT,
    TARGET,
    row_start,
)
from dte_dist.kernels.cpu.intrinsics import pointer, table_column
from dte_dist.kernels.cpu.jit import inline, loop
from dte_dist.kernels.cpu.scan_loops import copy, mix

__all__ = ["copy_dense", "digest"]

_FIRST = np.uint64(0x9E3779B97F4A7C15)
_ZERO, _I64 = np.uint64(0), np.int64(0)


@loop
def copy_dense(sample, width, index_map, entry, first, length, bits, table, touched, inward):
    """Copy dense bits of source positions [first, first + length) to where a table of tensors holds them
    (inward), or back.

    Tensors that are met are marked as touched.
    """
    begin, end, shift, origin = (
        table_column(index_map, BEGIN),
        table_column(index_map, END),
        table_column(index_map, SHIFT),
        table_column(index_map, ORIGIN),
    )
    axis, axes, extent, segment = (
        table_column(index_map, AXIS),
        table_column(index_map, AXES),
        table_column(index_map, EXTENT),
        table_column(index_map, SEGMENT),
    )
    low, high, target = (
        table_column(index_map, LOW),
        table_column(index_map, HIGH),
        table_column(index_map, TARGET),
    )
    stop, entries = first + length, pointer(index_map, _I64)[ENTRIES]
    while entry < entries and begin[entry] < stop:
        now, until = max(first, begin[entry]), min(stop, end[entry])
        if axes[entry] == 0:
            to = now + shift[entry]
            copy(
                sample,
                width,
                table,
                to,
                to + max(until - now, 0),
                bits + (now - first) * width,
                inward,
                touched,
            )
            entry += 1
            continue
        inner = axis[entry] + axes[entry] - 1
        row = (now - origin[entry]) // extent[inner]
        start = origin[entry] + row * extent[inner]
        while start < until:
            base = row_start(index_map, entry, row)
            if base >= 0:
                for k in range(segment[inner], segment[inner + 1]):
                    x, y = max(now, start + low[k]), min(until, start + high[k])
                    if y > x:
                        to = base + x - start - low[k] + target[k]
                        copy(
                            sample, width, table, to, to + y - x, bits + (x - first) * width, inward, touched
                        )
            row, start = row + 1, start + extent[inner]
        entry += 1


@inline
def _piece(start, pieces, position):
    """Return the last piece that begins at or before a position: the one that holds it, never an empty
    one.
    """
    low, high = _I64, pieces
    while high - low > 1:
        middle = (low + high) >> 1
        if start[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@inline
def _add(sample, width, bits, length, position, starts, pieces, sums):
    """Add the hashes of `length` neighbours, the first of which belongs to `position`, to the sums of their
    pieces.
    """
    start, total = pointer(starts, _I64), pointer(sums, _I64)
    piece = _piece(start, pieces, position)
    while length > 0:
        while start[piece + 1] <= position:
            piece += 1
        count = min(length, start[piece + 1] - position)
        bit, place, added = pointer(bits, sample), np.uint64(position - start[piece]) * _FIRST, _ZERO
        for i in range(count):
            place += _FIRST
            added += mix(place + np.uint64(bit[i]))
        total[piece] += np.int64(added)
        position, bits, length = position + count, bits + width * count, length - count


@loop
def digest(sample, width, index_map, entry, first, length, bits, starts, pieces, sums):
    """Add the hashes of source positions [first, first + length), from entry `entry` on, to the sums of the
    pieces they belong to.
    """
    begin, end, shift, origin = (
        table_column(index_map, BEGIN),
        table_column(index_map, END),
        table_column(index_map, SHIFT),
        table_column(index_map, ORIGIN),
    )
    axis, axes, extent, segment = (
        table_column(index_map, AXIS),
        table_column(index_map, AXES),
        table_column(index_map, EXTENT),
        table_column(index_map, SEGMENT),
    )
    low, high, target = (
        table_column(index_map, LOW),
        table_column(index_map, HIGH),
        table_column(index_map, TARGET),
    )
    stop, entries = first + length, pointer(index_map, _I64)[ENTRIES]
    while entry < entries and begin[entry] < stop:
        now, until = max(first, begin[entry]), min(stop, end[entry])
        if axes[entry] == 0:
            here = bits + (now - first) * width
            _add(sample, width, here, max(until - now, 0), now + shift[entry], starts, pieces, sums)
            entry += 1
            continue
        inner = axis[entry] + axes[entry] - 1
        row = (now - origin[entry]) // extent[inner]
        start = origin[entry] + row * extent[inner]
        while start < until:
            base = row_start(index_map, entry, row)
            if base >= 0:
                for k in range(segment[inner], segment[inner + 1]):
                    x, y = max(now, start + low[k]), min(until, start + high[k])
                    if y > x:
                        to = base + x - start - low[k] + target[k]
                        _add(sample, width, bits + (x - first) * width, y - x, to, starts, pieces, sums)
            row, start = row + 1, start + extent[inner]
        entry += 1
