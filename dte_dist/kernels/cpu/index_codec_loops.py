# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops of the index codecs `u16`, `bitmap` and `ef`, over CPU memory; `index_codecs.py` is their
face, docs/protocol.md says what the streams mean.

A mispredicted branch costs more than the arithmetic, so no loop branches on the data of single elements:
    elements are looked at 64 at a time, and what they are is a word of 64 bits; the loops then walk the bits
    that are set. Positions are int32 for every width of element, so these loops are compiled once.

Encoders trust their arguments, except that no position makes `set_bits` write outside its words. Decoders
trust sizes and counts, which the caller has compared with what is there, and no byte of a stream.
"""

from __future__ import annotations

import numpy as np

from dte_dist.kernels.cpu.intrinsics import add_planes, count_trailing_zeros, plane_of, pointer, popcount
from dte_dist.kernels.cpu.jit import inline, loop
from dte_dist.kernels.sizes import MOST_LOW, bitmap_nbytes, ef_size, padded

__all__ = [
    "best_low",
    "check_u16",
    "decode_u16",
    "encode_u16",
    "get_bits",
    "join_low",
    "lower_bound",
    "seek_u16",
    "set_bits",
    "split_low",
    "strictly_increasing",
    "unpack_u16",
]

_U8, _U16, _U32, _U64, _I32, _I64 = (
    np.uint8(0),
    np.uint16(0),
    np.uint32(0),
    np.uint64(0),
    np.int32(0),
    np.int64(0),
)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@inline
def lower_bound(positions, i, count, limit):
    """Return the first of the places [i, count), which are some, whose position is at least `limit`; near `i`
    first.
    """
    position, reach = pointer(positions, _I32), 1
    if position[count - 1] < limit:
        return count
    while i + reach < count and position[i + reach] < limit:
        i += reach
        reach += reach
    end = min(i + reach, count)
    while i < end:
        middle = (i + end) >> 1
        if position[middle] < limit:
            i = middle + 1
        else:
            end = middle
    return i


@loop
def strictly_increasing(counter, positions, count, length):
    """Return whether positions (of the type of `counter`) strictly increase within [0, length)."""
    position = pointer(positions, counter)
    falls = 0
    for i in range(1, count):
        falls += position[i] <= position[i - 1]
    return falls == 0 and (count == 0 or (position[0] >= 0 and position[count - 1] < length))


@loop
def encode_u16(positions, count, blocks, stream):
    """Write uint32[blocks] counts and uint16[count] offsets for sorted int32 positions."""
    position, number = pointer(positions, _I32), pointer(stream, _U32)
    offset = pointer(stream + 4 * blocks, _U16)
    for i in range(count):
        offset[i] = np.uint16(position[i] & 0xFFFF)
    first = 0
    for block in range(blocks):
        low, high = first, count
        while low < high:
            middle = (low + high) >> 1
            if position[middle] >> 16 <= block:
                low = middle + 1
            else:
                high = middle
        number[block] = np.uint32(low - first)
        first = low


@loop
def check_u16(stream, count, blocks, length):
    """Return whether a stream has counts and offsets such as `encode_u16` writes."""
    number, offset = pointer(stream, _U32), pointer(stream + 4 * blocks, _U16)
    first, last, falls = np.int64(0), np.int64(-1), 0
    for block in range(blocks):
        stop = first + np.int64(number[block])
        if stop > count:
            return False
        for i in range(first + 1, stop):
            falls += offset[i] <= offset[i - 1]
        if stop > first:
            last = (np.int64(block) << 16) + np.int64(offset[stop - 1])
        first = stop
    return first == count and falls == 0 and last < length


@loop
def decode_u16(stream, count, blocks, positions):
    """Write the positions that `encode_u16` was given; the stream has been checked."""
    position, number, offset = (
        pointer(positions, _I32),
        pointer(stream, _U32),
        pointer(stream + 4 * blocks, _U16),
    )
    first = np.int64(0)
    for block in range(blocks):
        stop, base = first + np.int64(number[block]), np.int32(block << 16)
        for i in range(first, stop):
            position[i] = base | np.int32(offset[i])
        first = stop


@inline
def seek_u16(stream, blocks, place):
    """Return in which block of a stream of codec u16 its position number `place` is, and how many there are
    from it to the block's end.
    """
    number, block, ahead = pointer(stream, _U32), _I64, place
    while block < blocks and ahead >= number[block]:
        ahead -= np.int64(number[block])
        block += 1
    return block, np.int64(number[block]) - ahead if block < blocks else _I64


@inline
def unpack_u16(stream, blocks, block, left, count, positions):
    """Write `count` positions of a stream of codec u16 as int32, the next being `left` before the end of
    block `block`.

    Return the same of what follows.
    """
    number, position, done = pointer(stream, _U32), pointer(positions, _I32), _I64
    for i in range(block + 1):
        done += number[i]
    offset = pointer(stream + 4 * blocks + 2 * (done - left), _U16)
    done = _I64
    while done < count:
        while left == 0:
            block += 1
            left = np.int64(number[block])
        stop, base = min(count, done + left), np.int32(block << 16)
        for i in range(done, stop):
            position[i] = base | np.int32(offset[i])
        left -= stop - done
        done = stop
    return block, left


@loop
def best_low(count, length):
    """Return the number of low bits that makes `ef_size` smallest, the least of several; and that size."""
    best, least = 0, np.int64(1) << 62
    for low in range(MOST_LOW + 1):
        size = ef_size(count, length, low)
        if size < least:
            best, least = low, size
    return best, least


@loop
def set_bits(positions, count, low, step, size, stream):
    """Set bit (position >> low) + step * i for each position i.

    Return False if they leave the words or go back by more than one.
    """
    position, word = pointer(positions, _I32), pointer(stream, _U64)
    for at in range(size >> 3):
        word[at] = _ZERO
    here, filled = 0, _ZERO
    for i in range(count):
        bit = np.int64(position[i] >> low) + step * i
        if bit >> 6 != here:
            if not here <= bit >> 6 < size >> 3:
                return False
            word[here] = filled
            here, filled = bit >> 6, _ZERO
        filled |= _ONE << np.uint64(bit & 63)
    if count:
        word[here] = filled
    return True


@loop
def get_bits(stream, size, count, low, step, most, positions):
    """Write b << low with b = bit - step * i for each bit i that is set.

    Return False if there are not `count`, or a b is above `most`.
    """
    position, word = pointer(positions, _I32), pointer(stream, _U64)
    total = 0
    for at in range(size >> 3):
        total += popcount(word[at])
    if total != count:
        return False
    i, last = np.int64(0), np.int64(0)
    for at in range(size >> 3):
        left = word[at]
        base = at << 6
        while left != _ZERO:
            last = base + count_trailing_zeros(left) - step * i
            position[i] = np.int32(last << low)
            left &= left - _ONE
            i += 1
    return last <= most


@loop
def split_low(values, count, low, stream):
    """Write the `low` lowest bits of int32 values: whole bytes as streams of bytes, then a plane of words for
    each further bit.
    """
    value, whole = pointer(values, _I32), count & -64
    for byte in range(low >> 3):
        out = pointer(stream + byte * padded(count), _U8)
        for i in range(count):
            out[i] = np.uint8((value[i] >> (8 * byte)) & 0xFF)
        for i in range(count, padded(count)):
            out[i] = _U8
    planes, size = stream + (low >> 3) * padded(count), bitmap_nbytes(count)
    for plane in range(low & 7):
        word, bit = pointer(planes + plane * size, _U64), (low & -8) + plane
        for block in range(whole >> 6):
            word[block] = plane_of(values + 256 * block, bit)
        if whole < count:
            last = _ZERO
            for i in range(whole, count):
                last |= np.uint64((value[i] >> bit) & 1) << np.uint64(i & 63)
            word[whole >> 6] = last


@loop
def join_low(stream, count, low, values):
    """OR what `split_low` wrote into int32 values, which have room for a multiple of 64."""
    value = pointer(values, _I32)
    for byte in range(low >> 3):
        part = pointer(stream + byte * padded(count), _U8)
        for i in range(count):
            value[i] |= np.int32(part[i]) << np.int32(8 * byte)
    planes, size, most = stream + (low >> 3) * padded(count), bitmap_nbytes(count), low & 7
    if most:
        for block in range((count + 63) >> 6):
            at = planes + 8 * block
            word = (
                pointer(at, _U64)[0],
                pointer(at + size, _U64)[0] if most > 1 else _ZERO,
                pointer(at + 2 * size, _U64)[0] if most > 2 else _ZERO,
                pointer(at + 3 * size, _U64)[0] if most > 3 else _ZERO,
                pointer(at + 4 * size, _U64)[0] if most > 4 else _ZERO,
                pointer(at + 5 * size, _U64)[0] if most > 5 else _ZERO,
                pointer(at + 6 * size, _U64)[0] if most > 6 else _ZERO,
            )
            add_planes(values + 256 * block, np.int64(low & -8), word)
