# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops that translate positions between flat spaces (see `plan.index_map` for the tables).

Positions come sorted, so the entries are walked once. Which positions a receiver holds is as good as random,
and a wrong guess costs more than the work: so every one is written, and the next is written over it if it was
not to be kept.

`index_map` is the address of the addresses of an IndexMap's arrays, in their order, and of the number of
entries. Nothing is compiled at import.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dte_dist.kernels.cpu.index_codec_loops import lower_bound, seek_u16, unpack_u16
from dte_dist.kernels.cpu.intrinsics import (
    SOME,
    at_distance,
    high_product,
    move,
    pointer,
    scratch,
    table_column,
)
from dte_dist.kernels.cpu.jit import inline, loop
from dte_dist.kernels.cpu.scan_loops import find_tensor
from dte_dist.kernels.cpu.value_codec_loops import scatter_values
from dte_dist.kernels.table import ADDRESSES, COUNT, KINDS, PLAIN, STARTS

__all__ = [
    "AXES",
    "AXIS",
    "BEGIN",
    "END",
    "ENTRIES",
    "EXTENT",
    "HIGH",
    "LOW",
    "ORIGIN",
    "SEGMENT",
    "SHIFT",
    "STRIDE",
    "TARGET",
    "patch",
    "row_start",
    "translate",
]

BEGIN, END, SHIFT, ORIGIN, AXIS, AXES, EXTENT, STRIDE, SEGMENT, LOW, HIGH, TARGET, ENTRIES = range(13)
"""Places of an index map's arrays among their addresses, and of the number of entries."""

_MOST_AXES: Final = 16
_U8, _U64, _I32, _I64 = np.uint8(0), np.uint64(0), np.int32(0), np.int64(0)
_ZERO, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


@inline
def _lookup(index_map, begin, end, coordinate):
    """Return the segment among [begin, end) that contains a coordinate, or -1."""
    low, high = table_column(index_map, LOW), table_column(index_map, HIGH)
    while begin < end:
        middle = (begin + end) >> 1
        if coordinate < low[middle]:
            end = middle
        elif coordinate >= high[middle]:
            begin = middle + 1
        else:
            return middle
    return np.int64(-1)


@inline
def row_start(index_map, entry, row):
    """Return the receiver's position of the start of a row of an entry with axes, or -1 if the receiver has
    no such row.
    """
    extent, stride, segment = (
        table_column(index_map, EXTENT),
        table_column(index_map, STRIDE),
        table_column(index_map, SEGMENT),
    )
    low, target = table_column(index_map, LOW), table_column(index_map, TARGET)
    outer, base = table_column(index_map, AXIS)[entry], table_column(index_map, SHIFT)[entry]
    for a in range(outer + table_column(index_map, AXES)[entry] - 2, outer - 1, -1):
        coordinate = row
        if a > outer:
            row = coordinate // extent[a]
            coordinate -= row * extent[a]
        k = _lookup(index_map, segment[a], segment[a + 1], coordinate)
        if k < 0:
            return k
        base += (coordinate - low[k] + target[k]) * stride[a]
    return base


@inline
def _measure(index_map, entry, parts):
    """Write down the axes of an entry for `_in_rectangle`. Return False if they are not of its kind.

    Its kind: the receiver holds one run along each, and all positions are below 2^32. Five uint64 for each,
    innermost first: 2^64 / extent rounded up, or 0 for the outermost; extent; first coordinate held, and how
    many; elements per step in the receiver's block. Before them, the position in the receiver of coordinates
    that are all 0, which may be below 0.
    """
    extent, stride, segment = (
        table_column(index_map, EXTENT),
        table_column(index_map, STRIDE),
        table_column(index_map, SEGMENT),
    )
    low, high, target, number = (
        table_column(index_map, LOW),
        table_column(index_map, HIGH),
        table_column(index_map, TARGET),
        pointer(parts, _U64),
    )
    first, axes, home = (
        table_column(index_map, AXIS)[entry],
        table_column(index_map, AXES)[entry],
        table_column(index_map, SHIFT)[entry],
    )
    if (
        axes > _MOST_AXES
        or table_column(index_map, END)[entry] - table_column(index_map, ORIGIN)[entry] >= 1 << 32
    ):
        return False
    for a in range(axes):
        this, here = first + axes - 1 - a, 5 * a + 1
        k, inner = segment[this], a < axes - 1
        if segment[this + 1] - k != 1 or (inner and extent[this] == 1):
            return False
        home += (target[k] - low[k]) * stride[this]
        number[here] = _ALL // np.uint64(extent[this]) + _ONE if inner else _ZERO
        number[here + 1], number[here + 2] = np.uint64(extent[this]), np.uint64(low[k])
        number[here + 3], number[here + 4] = np.uint64(high[k] - low[k]), np.uint64(stride[this])
    number[0] = np.uint64(home)
    return True


@inline
def _in_plane(sample, parts, offset, positions, bits, count, out, kept):
    """Do what `_in_rectangle` does where there are two axes, as in most entries, with everything in
    registers.
    """
    position, bit, into, keep = (
        pointer(positions, _I32),
        pointer(bits, sample),
        pointer(out, _I64),
        pointer(kept, sample),
    )
    number, found = pointer(parts, _U64), _I64
    home, scale, size, low, held = number[0], number[1], number[2], number[3], number[4]
    low_row, held_rows, step = number[8], number[9], number[10]
    for i in range(count):
        place = np.uint64(position[i] + offset)
        row = high_product(place, scale)
        column = place - row * size
        into[found] = np.int64(home + column + row * step)
        keep[found] = bit[i]
        found += np.int64((column - low < held) & (row - low_row < held_rows))
    return found


@inline
def _in_rectangle(sample, parts, axes, offset, positions, bits, count, out, kept):
    """Translate positions of an entry that `_measure` accepted; they count from its origin less `offset`.
    Return how many are kept.

    Products with 2^64 / extent stand for divisions. A position outside a run wraps to a large number when its
    start is taken off.
    """
    position, bit, into, keep = (
        pointer(positions, _I32),
        pointer(bits, sample),
        pointer(out, _I64),
        pointer(kept, sample),
    )
    number, found = pointer(parts, _U64), _I64
    for i in range(count):
        rest, to, held = np.uint64(position[i] + offset), number[0], True
        for a in range(1, 5 * axes, 5):
            above = high_product(rest, number[a])
            coordinate = rest - above * number[a + 1]
            held &= coordinate - number[a + 2] < number[a + 3]
            to += coordinate * number[a + 4]
            rest = above
        into[found] = np.int64(to)
        keep[found] = bit[i]
        found += np.int64(held)
    return found


@inline
def _in_rows(sample, index_map, entry, offset, positions, bits, count, out, kept):
    """Translate positions of an entry with any runs along its axes, row by row. Return how many are kept."""
    extent, segment = table_column(index_map, EXTENT), table_column(index_map, SEGMENT)
    low, high, target = (
        table_column(index_map, LOW),
        table_column(index_map, HIGH),
        table_column(index_map, TARGET),
    )
    position, bit, into, keep = (
        pointer(positions, _I32),
        pointer(bits, sample),
        pointer(out, _I64),
        pointer(kept, sample),
    )
    inner = table_column(index_map, AXIS)[entry] + table_column(index_map, AXES)[entry] - 1
    length, last = extent[inner], segment[inner + 1] - 1
    found = i = _I64
    while i < count:
        row = (position[i] + offset) // length
        start = row * length - offset
        stop, base, k = (
            lower_bound(positions, i, count, start + length),
            row_start(index_map, entry, row),
            segment[inner],
        )
        i = stop if base < 0 else i
        while i < stop:
            coordinate = position[i] - start
            while k < last and coordinate >= high[k]:
                k += 1
            into[found] = base + coordinate - low[k] + target[k]
            keep[found] = bit[i]
            found += np.int64((coordinate >= low[k]) & (coordinate < high[k]))
            i += 1
    return found


@inline
def _shift(sample, width, distance, positions, bits, count, out, kept):
    """Translate positions of an entry without axes, all of which are kept."""
    position, into = pointer(positions, _I32), pointer(out, _I64)
    for i in range(count):
        into[i] = position[i] + distance
    move(kept, bits, count * width)
    return count


@inline
def _translate(sample, width, index_map, entry, first, positions, bits, count, out, kept):
    """Translate sorted int32 positions, counted from `first`, from entry `entry` on; keep the bits of those
    that have a home.

    Return how many were kept, and an entry from which later positions may go on.
    """
    begin, end, shift = (
        table_column(index_map, BEGIN),
        table_column(index_map, END),
        table_column(index_map, SHIFT),
    )
    origin, axes = table_column(index_map, ORIGIN), table_column(index_map, AXES)
    found, i, entries, parts = _I64, _I64, pointer(index_map, _I64)[ENTRIES], scratch()
    while i < count and entry < entries:
        i = lower_bound(positions, i, count, begin[entry] - first)
        if i == count:
            break
        stop = lower_bound(positions, i, count, end[entry] - first)
        here, old, to, new, offset = (
            positions + 4 * i,
            bits + width * i,
            out + 8 * found,
            kept + width * found,
            first - origin[entry],
        )
        if axes[entry] == 0:
            found += _shift(sample, width, first + shift[entry], here, old, stop - i, to, new)
        elif stop > i:
            if not _measure(index_map, entry, parts):
                found += _in_rows(sample, index_map, entry, offset, here, old, stop - i, to, new)
            elif axes[entry] == 2:
                found += _in_plane(sample, parts, offset, here, old, stop - i, to, new)
            else:
                found += _in_rectangle(sample, parts, axes[entry], offset, here, old, stop - i, to, new)
        i = stop
        if i < count:
            entry += 1
    return found, entry


@loop
def translate(sample, width, index_map, entry, first, positions, bits, count, out, kept):
    """Do what `_translate` does. Return how many were kept."""
    return _translate(sample, width, index_map, entry, first, positions, bits, count, out, kept)[0]


@inline
def _write_here(sample, width, live, positions, values, count, relative):
    """Write values to positions of one array, or move what is there by them."""
    position, value, some = pointer(positions, _I32), pointer(values, sample), pointer(scratch(), sample)
    if relative:
        for i in range(count):  # nothing else here: then many loads are on their way at once
            some[i] = pointer(live + width * position[i], sample)[0]
        for i in range(count):
            some[i] = at_distance(some[i], value[i])
        value = some
    for i in range(count):
        pointer(live + width * position[i], sample)[0] = value[i]


@loop
def patch(
    sample, width, index_map, entry, first, positions, blocks, values, low, high, table, touched, relative
):
    """Translate positions [low, high) and write their values, or move what is there by them, in the tensors
    of a table.

    Positions are int32, or a stream of codec u16 of some `blocks`; they are taken in parts that stay in the
    first cache. Most such parts become neighbours in one tensor, and are written straight there. Return
    whether all positions were within the table.
    """
    starts, addresses, kinds, mark = (
        table_column(table, STARTS),
        table_column(table, ADDRESSES),
        table_column(table, KINDS),
        pointer(touched, _U8),
    )
    begin, end, shift, axes = (
        table_column(index_map, BEGIN),
        table_column(index_map, END),
        table_column(index_map, SHIFT),
        table_column(index_map, AXES),
    )
    homes, kept, unpacked, some = scratch(), scratch() + 8 * SOME, scratch() + 16 * SOME, positions
    entries, total, index, missing = (
        pointer(index_map, _I64)[ENTRIES],
        starts[pointer(table, _I64)[COUNT]],
        _I64,
        _I64,
    )
    block, left = seek_u16(positions, blocks, low)
    for done in range(low, high, SOME):
        size, theirs = min(SOME, high - done), values + width * done
        if blocks:
            block, left = unpack_u16(positions, blocks, block, left, size, unpacked)
            some = unpacked
        else:
            some = positions + 4 * done
        least, most = first + pointer(some, _I32)[0], first + pointer(some, _I32)[size - 1]
        while entry < entries and end[entry] <= least:
            entry += 1
        if entry == entries:
            break
        moves = shift[entry]
        if (
            axes[entry] == 0
            and begin[entry] <= least
            and most < end[entry]
            and least + moves >= 0
            and most + moves < total
        ):
            index = find_tensor(table, index, least + moves)
            if kinds[index] == PLAIN and most + moves < starts[index + 1]:
                mark[index] = 1
                live = addresses[index] + (first + moves - starts[index]) * width
                _write_here(sample, width, live, some, theirs, size, relative)
                continue
        found, entry = _translate(sample, width, index_map, entry, first, some, theirs, size, homes, kept)
        missing += found - scatter_values(
            sample, width, table, homes, kept, found, relative, touched, np.int64(0)
        )
    return missing == 0
