# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops that translate positions between flat spaces (see `plan.remap` for the tables).

Positions come sorted, so the entries are walked once; the outer coordinates of an entry with axes are worked out once
per row, not once per position. Nothing is compiled at import.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dte_dist.kernels.loops import _at, _move, find

__all__ = ["place", "translate"]


@njit(nogil=True, cache=True)
def _lookup(low, high, begin, end, coordinate):
    """Return the segment among [begin, end) that contains a coordinate, or -1."""
    while begin < end:
        middle = (begin + end) >> 1
        if coordinate < low[middle]:
            end = middle
        elif coordinate >= high[middle]:
            begin = middle + 1
        else:
            return middle
    return -1


@njit(nogil=True, cache=True)
def _row(tables, entry, row):
    """Return the receiver's position of the start of a row of an entry with axes, or -1 if the receiver has no such row."""
    _, _, shift, _, axis, axes, extent, stride, segment, low, high, target = tables
    base = shift[entry]
    for a in range(axis[entry] + axes[entry] - 2, axis[entry] - 1, -1):
        coordinate = row
        if a > axis[entry]:
            row = coordinate // extent[a]
            coordinate -= row * extent[a]
        k = _lookup(low, high, segment[a], segment[a + 1], coordinate)
        if k < 0:
            return np.int64(-1)
        base += (coordinate - low[k] + target[k]) * stride[a]
    return base


@njit(nogil=True, cache=True)
def translate(tables, entry, sample, first, positions, bits, count, out, kept):
    """Translate sorted int32 positions, counted from `first`, from entry `entry` on; keep the bits of those that have a home.

    `tables` are the arrays of a Remap in order; all other arrays are addresses. Return how many were kept.
    """
    begin, end, shift, origin, axis, axes, extent, _, segment, low, high, target = tables
    position, bit = _at(positions, np.int32(0)), _at(bits, sample)
    into, keep = _at(out, np.int64(0)), _at(kept, sample)
    found = i = 0
    while i < count:
        at = first + position[i]
        while entry < len(end) and end[entry] <= at:
            entry += 1
        if entry == len(end):
            break
        if at < begin[entry]:
            i += 1
            continue
        stop = end[entry]
        if axes[entry] == 0:
            while i < count and first + position[i] < stop:
                into[found] = first + position[i] + shift[entry]
                keep[found] = bit[i]
                found += 1
                i += 1
            continue
        inner = axis[entry] + axes[entry] - 1
        length, k0, k1 = extent[inner], segment[inner], segment[inner + 1]
        row_start = row_stop = base = np.int64(-1)
        while i < count and first + position[i] < stop:
            at = first + position[i] - origin[entry]
            if at >= row_stop:
                row = at // length
                row_start, row_stop = row * length, (row + 1) * length
                base = _row(tables, entry, row)
            if base >= 0:
                k = _lookup(low, high, k0, k1, at - row_start)
                if k >= 0:
                    into[found] = base + at - row_start - low[k] + target[k]
                    keep[found] = bit[i]
                    found += 1
            i += 1
    return found


@njit(nogil=True, cache=True)
def _copy_run(width, starts, addresses, touched, to, source, length, inward):
    """Copy `length` elements from an address to position `to` of a table of tensors (inward), or the other way."""
    index = find(starts, to)
    while length > 0:
        here = min(length, starts[index + 1] - to)
        if here > 0:
            touched[index] = True
            there = addresses[index] + (to - starts[index]) * width
            if inward:
                _move(there, source, here * width)
            else:
                _move(source, there, here * width)
            to, source, length = to + here, source + here * width, length - here
        index += 1


@njit(nogil=True, cache=True)
def place(tables, entry, width, first, length, bits, starts, addresses, touched, inward):
    """Copy dense bits of source positions [first, first + length) to where a table of tensors holds them (inward), or back.

    Tensors that are met are marked as touched.
    """
    begin, end, shift, origin, axis, axes, extent, _, segment, low, high, target = tables
    stop = first + length
    while entry < len(begin) and begin[entry] < stop:
        at, until = max(first, begin[entry]), min(stop, end[entry])
        if axes[entry] == 0:
            if until > at:
                _copy_run(width, starts, addresses, touched, at + shift[entry], bits + (at - first) * width, until - at, inward)
            entry += 1
            continue
        inner = axis[entry] + axes[entry] - 1
        size = extent[inner]
        row = (at - origin[entry]) // size
        while origin[entry] + row * size < until:
            row_start = origin[entry] + row * size
            base = _row(tables, entry, row)
            if base >= 0:
                for k in range(segment[inner], segment[inner + 1]):
                    x, y = max(at, row_start + low[k]), min(until, row_start + high[k])
                    if y > x:
                        to = base + x - row_start - low[k] + target[k]
                        _copy_run(width, starts, addresses, touched, to, bits + (x - first) * width, y - x, inward)
            row += 1
        entry += 1
