# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops that go over live tensors: compare, copy, scatter, gather, checksum. `scan.py` checks their
arguments, turns tensors into addresses and splits the work.

Every loop takes memory as int64 addresses, many tensors as that of a `Table`. So calls cost little, and one
compiled form serves all; only what touches elements is compiled anew for each type of `sample`, any scalar of
the element's unsigned type. Nothing is compiled at import.

A loop runs on one core, without the GIL, and trusts its arguments unless it says otherwise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dte_dist.kernels.cpu.intrinsics import (
    BLOCK,
    count_trailing_zeros,
    differing,
    move,
    move_down,
    pointer,
    scratch,
    table_column,
    word,
)
from dte_dist.kernels.cpu.jit import inline, loop
from dte_dist.kernels.table import ADDRESSES, COUNT, KINDS, PLAIN, ROUNDED, SHAPES, STARTS

__all__ = [
    "advance",
    "checksum",
    "compact",
    "copy",
    "element",
    "find_tensor",
    "gather_1d",
    "mix",
    "scatter",
    "scatter_1d",
    "to_bf16",
]

_ROWS: Final = 32  # of a transposed matrix that are copied at once
_ROOM: Final = 2048  # elements of at most 8 bytes that `scratch` holds
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xFF51AFD7ED558CCD)
_THIRD = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_ZERO, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)
_U8, _U16, _U32, _I32, _I64 = np.uint8(0), np.uint16(0), np.uint32(0), np.int32(0), np.int64(0)
_HALF, _LAST, _SIXTEEN = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
_SIGNLESS, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint16(0xFFFF)


@inline
def find_tensor(table, index, position):
    """Return which tensor holds a position, never an empty one: the last that starts at or before it, sought
    near `index` first.
    """
    starts, high, reach = table_column(table, STARTS), pointer(table, _I64)[COUNT], 1
    if starts[index] > position:
        index = 0
    while index + reach < high and starts[index + reach] <= position:
        index += reach
        reach += reach
    high = min(index + reach, high)
    while high - index > 1:
        middle = (index + high) >> 1
        if starts[middle] <= position:
            index = middle
        else:
            high = middle
    return index


@inline
def _shape(table, index):
    """Return how a strided tensor is described (`Table.shapes`)."""
    return pointer(pointer(table, _I64)[SHAPES] + 8 * (table_column(table, KINDS)[index] - 1), _I64)


@inline
def element(table, index, place):
    """Return the address of element `place`, in row-major order, of a tensor that is not contiguous."""
    address, shape = table_column(table, ADDRESSES)[index], _shape(table, index)
    for dim in range(2 * shape[0] - 1, 1, -2):
        outer = place // shape[dim]
        address += (place - outer * shape[dim]) * shape[dim + 1]
        place = outer
    return address + place * shape[2]


@inline
def _copy_strided(sample, width, table, index, place, count, buffer, inward):
    """Copy `count` elements from `place` on of a tensor that is not contiguous, from `buffer` (inward) or to
    it.

    Where rows lie side by side, as in a transposed matrix, several are copied at once: else each element
    would cost a line of the cache.
    """
    shape = _shape(table, index)
    size, step, outer = shape[2 * shape[0] - 1], shape[2 * shape[0]], 2 * shape[0] - 3
    beside = (
        step != width and shape[0] > 1 and shape[outer + 1] == width
    )  # a last dimension of one element may have any step
    while count > 0:
        row, column = place // size, place % size
        here, rows, live = min(count, size - column), 1, element(table, index, place)
        if beside and here == size:
            rows = min(count // size, _ROWS, shape[outer] - row % shape[outer])
        if step == width:
            move(live if inward else buffer, buffer if inward else live, here * width)
        else:
            for i in range(here):
                for j in range(rows):
                    one, other = (
                        pointer(live + i * step + j * width, sample),
                        pointer(buffer + (i + j * size) * width, sample),
                    )
                    if inward:
                        one[0] = other[0]
                    else:
                        other[0] = one[0]
        place, count, buffer = place + here * rows, count - here * rows, buffer + here * rows * width


@loop
def to_bf16(live, count, buffer):
    """Write fp32 as bf16: to the nearest, ties to even; every NaN becomes 0xffff, as torch casts in one
    dimension.
    """
    single, half = pointer(live, _U32), pointer(buffer, _U16)
    for i in range(count):
        bits = single[i]
        rounded = (bits + (_HALF + (bits >> _SIXTEEN & _LAST))) >> _SIXTEEN
        half[i] = _NAN if bits & _SIGNLESS > _INFINITY else np.uint16(rounded)


@inline
def _take_run(width, live, known, low, end, first, old, new):
    """Take over elements [low, end) of a run that all differ; write what they were and are from element
    `first` of the arrays on.
    """
    size, to = (end - low) * width, first * width
    move(old + to, known + low * width, size)
    move(new + to, live + low * width, size)
    move(known + low * width, live + low * width, size)


@inline
def _count_up(positions, first, count, start):
    """Write start, start + 1, ... to int32 places [first, first + count)."""
    position = pointer(positions, _I32)
    for i in range(count):
        position[first + i] = np.int32(start + i)


@inline
def _advance_run(sample, width, live, known, length, base, begun, out):
    """Compare one contiguous run and take it over; positions count from `base`. Return how many differ, with
    the `begun` before.

    `out` are the addresses of positions and bits, for changes from the very first on. Positions are not
    written for as long as everything
    has changed: while `begun` is `base`.
    """
    positions, old, new = out
    a, b = pointer(live, sample), pointer(known, sample)
    position, before, after = pointer(positions, _I32), pointer(old, sample), pointer(new, sample)
    lanes = BLOCK // width
    found, low, whole, full = begun, np.int64(0), length & -lanes, begun == base
    every = _ALL >> np.uint64(64 - lanes)
    while low < whole:
        if full:
            start, stop = low, min(low + _ROOM, whole)
            while low < stop and differing(live + low * width, known + low * width, sample) == every:
                low += lanes
            _take_run(width, live, known, start, low, found, old, new)
            if found != base + start:
                _count_up(positions, found, low - start, base + start)
            found += low - start
            if low == stop:
                continue
            if found == base + low:
                _count_up(positions, np.int64(0), found, np.int64(0))
        count, start, stop = found, low, min(low + _ROOM, whole)
        while low < stop:
            mask = differing(live + low * width, known + low * width, sample)
            while mask != _ZERO:
                i = low + count_trailing_zeros(mask)
                position[found], before[found], after[found] = np.int32(base + i), b[i], a[i]
                b[i] = a[i]
                found += 1
                mask &= mask - _ONE
            low += lanes
        full = found - count == low - start
    for i in range(whole, length):
        if a[i] != b[i]:
            position[found], before[found], after[found] = np.int32(base + i), b[i], a[i]
            b[i] = a[i]
            found += 1
        elif found == base + i:
            _count_up(positions, np.int64(0), found, np.int64(0))
    return found


@loop
def advance(sample, width, table, begin, end, known, positions, old, new):
    """Compare elements [begin, end) of a table, none of them strided, with `known`, and take over what
    differs.

    Write positions, counted from `begin`, and the bits before and after. Return how many; if that is all, no
    position is written.
    """
    starts, addresses, kinds = (
        table_column(table, STARTS),
        table_column(table, ADDRESSES),
        table_column(table, KINDS),
    )
    found, now, index, room = np.int64(0), begin, find_tensor(table, _I64, begin), scratch()
    while now < end:
        stop = min(end, starts[index + 1])
        while now < stop:
            place, here = now - starts[index], stop - now
            live = addresses[index] + place * width
            if kinds[index] == ROUNDED:
                here, live = min(here, _ROOM), room
                to_bf16(addresses[index] + 4 * place, here, live)
            then = known + (now - begin) * width
            found = _advance_run(sample, width, live, then, here, now - begin, found, (positions, old, new))
            now += here
        index += 1
    return found


@loop
def compact(width, parts, counts, number, array):
    """Move counts[i] elements from place parts[i] on together, for i below `number`, in ascending order."""
    first, count, done = pointer(parts, _I64), pointer(counts, _I64), 0
    for i in range(number):
        if first[i] != done:
            move_down(array + width * done, array + width * first[i], width * count[i])
        done += count[i]


@loop
def copy(sample, width, table, begin, end, buffer, inward, touched):
    """Copy elements [begin, end) of a table from `buffer` (inward) or to it, and mark the tensors that are
    met.
    """
    starts, addresses, kinds, mark = (
        table_column(table, STARTS),
        table_column(table, ADDRESSES),
        table_column(table, KINDS),
        pointer(touched, _U8),
    )
    now, index = begin, find_tensor(table, _I64, begin)
    while now < end:
        stop = min(end, starts[index + 1])
        if stop > now:
            place, size = now - starts[index], (stop - now) * width
            live = addresses[index] + place * width
            mark[index] = 1
            if kinds[index] == PLAIN:
                move(live if inward else buffer, buffer if inward else live, size)
            elif kinds[index] == ROUNDED:
                to_bf16(addresses[index] + 4 * place, stop - now, buffer)
            else:
                _copy_strided(sample, width, table, index, place, stop - now, buffer, inward)
            buffer += size
            now = stop
        index += 1


@loop
def scatter(sample, width, table, positions, wide, bits, count, touched):
    """Write bits to positions (int64 if `wide`, else int32) of the tensors of a table, in any order, and mark
    the tensors touched.

    Return how many were written: fewer than `count` if a position is out of range.
    """
    starts, addresses, kinds, mark = (
        table_column(table, STARTS),
        table_column(table, ADDRESSES),
        table_column(table, KINDS),
        pointer(touched, _U8),
    )
    narrow_position, wide_position, bit, total = (
        pointer(positions, _I32),
        pointer(positions, _I64),
        pointer(bits, sample),
        starts[pointer(table, _I64)[COUNT]],
    )
    index = i = np.int64(0)
    while i < count:
        now = wide_position[i] if wide else np.int64(narrow_position[i])
        if now < 0 or now >= total:
            break
        index = find_tensor(table, index, now)
        low, high, live = starts[index], starts[index + 1], addresses[index]
        mark[index] = 1
        if kinds[index] == PLAIN:
            while low <= now < high:
                pointer(live + (now - low) * width, sample)[0] = bit[i]
                i += 1
                if i == count:
                    break
                now = wide_position[i] if wide else np.int64(narrow_position[i])
        else:
            pointer(element(table, index, now - low), sample)[0] = bit[i]
            i += 1
    return i


@loop
def scatter_1d(sample, array, length, positions, wide, bits, count):
    """Write bits to positions (int64 if `wide`, else int32) of one array.

    Return how many were written: fewer than `count` if a position is out of range.
    """
    element, bit, narrow_position, wide_position = (
        pointer(array, sample),
        pointer(bits, sample),
        pointer(positions, _I32),
        pointer(positions, _I64),
    )
    for i in range(count):
        place = wide_position[i] if wide else np.int64(narrow_position[i])
        if place < 0 or place >= length:
            return i
        element[place] = bit[i]
    return count


@loop
def gather_1d(sample, array, length, positions, wide, bits, count):
    """Read bits from positions (int64 if `wide`, else int32) of one array.

    Return how many: as `scatter_1d`.
    """
    element, bit, narrow_position, wide_position = (
        pointer(array, sample),
        pointer(bits, sample),
        pointer(positions, _I32),
        pointer(positions, _I64),
    )
    for i in range(count):
        place = wide_position[i] if wide else np.int64(narrow_position[i])
        if place < 0 or place >= length:
            return i
        bit[i] = element[place]
    return count


@inline
def mix(bits):
    """Return a hash of 64 bits, as murmur3 ends."""
    bits = (bits ^ (bits >> _SHIFT)) * _SECOND
    bits = (bits ^ (bits >> _SHIFT)) * _THIRD
    return bits ^ (bits >> _SHIFT)


@loop
def checksum(frame, low, high, skip):
    """Return the sum of words [low, high), each mixed with its place, modulo 2^64 (docs/protocol.md, "The
    checksum").
    """
    total, place = _ZERO, np.uint64(low) * _FIRST
    for i in range(low, high):
        place += _FIRST
        total += mix(place + word(frame + 8 * i))
    # Exchanged afterwards: a condition within the loop would keep it from using vectors.
    if low <= skip < high:
        place = np.uint64(skip + 1) * _FIRST
        total += mix(place) - mix(place + word(frame + 8 * skip))
    return total
