# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops of the value codecs, over CPU memory; `value_codecs.py` is their face, docs/protocol.md
says what the streams mean.

As in `index_codec_loops.py`, no loop branches on the data of single elements, and decoders trust no byte of a
stream. Distances are int32 for every width of element, so these loops are compiled once; only those that
touch elements come in one form per width.
"""

from __future__ import annotations

import numpy as np

from dte_dist.kernels.cpu.index_codec_loops import best_low
from dte_dist.kernels.cpu.intrinsics import (
    SOME,
    at_distance,
    at_least,
    bit_length,
    count_trailing_zeros,
    distance_between,
    plane_of,
    pointer,
    popcount,
    scratch,
    signed_magnitudes,
    table_column,
)
from dte_dist.kernels.cpu.jit import loop
from dte_dist.kernels.cpu.scan_loops import element, find_tensor
from dte_dist.kernels.sizes import CLASSES, bitmap_nbytes, low_size
from dte_dist.kernels.table import ADDRESSES, COUNT, KINDS, PLAIN, STARTS

__all__ = [
    "choose_planes",
    "decode_far",
    "encode_far",
    "find_far",
    "measure",
    "scatter_values",
    "to_distances",
    "to_magnitudes",
    "ulp_deltas",
]

_U8, _I32, _I64, _U64 = np.uint8(0), np.int32(0), np.int64(0), np.uint64(0)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@loop
def _bits_of(distance):
    """Return the bits of |distance| - 1 modulo 2^32."""
    return bit_length(np.uint32(abs(np.int64(distance)) - 1))


@loop
def measure(distances, count, classes):
    """Count int32 distances by the bits of m = |distance| - 1 modulo 2^32, in int64[CLASSES].

    There is room for four times as many more, since an increment has to wait for the last one of the same
    number.
    """
    distance, number, whole = pointer(distances, _I32), pointer(classes, _I64), count & -4
    for i in range(5 * CLASSES):
        number[i] = 0
    for i in range(0, whole, 4):
        number[CLASSES + _bits_of(distance[i])] += 1
        number[2 * CLASSES + _bits_of(distance[i + 1])] += 1
        number[3 * CLASSES + _bits_of(distance[i + 2])] += 1
        number[4 * CLASSES + _bits_of(distance[i + 3])] += 1
    for i in range(whole, count):
        number[CLASSES + _bits_of(distance[i])] += 1
    for i in range(4 * CLASSES):
        number[i % CLASSES] += number[CLASSES + i]


@loop
def choose_planes(classes, count, width, plan):
    """Choose how `count` distances of these classes are written in the fewest bytes.

    Write into int64[5] the fields of `Planes`. The least shift of several that are equally good is taken.
    """
    number, chosen, most = pointer(classes, _I64), pointer(plan, _I64), 8 * width
    chosen[4] = np.int64(1) << 62
    for shift in range(most):
        far = unary = np.int64(0)
        for bits in range(shift + 1, CLASSES):
            far += number[bits]
            unary += number[bits] * (min(bits, most) - shift)
        rest = (
            bitmap_nbytes(count) + low_size(count, shift) + bitmap_nbytes(unary) + bitmap_nbytes(unary - far)
        )
        if rest >= chosen[4] or unary >> 32:
            continue
        low, places = best_low(far, count)
        spread = low + 1
        if places >= bitmap_nbytes(count):
            spread, places = 0, bitmap_nbytes(count)
        if rest + places < chosen[4]:
            chosen[0], chosen[1], chosen[2], chosen[3], chosen[4] = shift, spread, far, unary, rest + places


@loop
def to_magnitudes(distances, count, width, signs):
    """Write a plane of the signs of int32 distances, and turn them into m = |distance| - 1 modulo the range
    of elements of a width.
    """
    distance, word, whole = pointer(distances, _I32), pointer(signs, _U64), count & -64
    for block in range(whole >> 6):
        word[block] = plane_of(distances + 256 * block, np.int64(31))
    if whole < count:
        last = _ZERO
        for i in range(whole, count):
            last |= np.uint64(distance[i] < 0) << np.uint64(i & 63)
        word[whole >> 6] = last
    mask = np.int32((np.int64(1) << (8 * width)) - 1)
    for i in range(count):
        distance[i] = np.int32(abs(distance[i]) - 1) & mask


@loop
def find_far(magnitudes, count, bound, plane, far):
    """Write a plane of which magnitudes are at least `bound`, and the positions of these."""
    magnitude, word, place, whole = (
        pointer(magnitudes, _I32),
        pointer(plane, _U64),
        pointer(far, _I32),
        count & -64,
    )
    found = np.int64(0)
    for block in range((count + 63) >> 6):
        left = _ZERO
        if 64 * block < whole:
            left = at_least(magnitudes + 256 * block, bound)
        else:
            for i in range(whole, count):
                left |= np.uint64(np.uint32(magnitude[i]) >= np.uint32(bound)) << np.uint64(i & 63)
        word[block] = left
        while left != _ZERO:
            place[found] = np.int32(64 * block + count_trailing_zeros(left))
            left &= left - _ONE
            found += 1


@loop
def encode_far(magnitudes, far, count, shift, unary, size, bits):
    """Write the high parts h of the magnitudes that are far: how many bits each has, in unary, and all of
    them but the highest.

    `unary` are `size` bytes of whole words; `bits` are zeros, and two words more than are wanted: each part
    is also written to the word behind that in which it begins, and a last part of no bits may begin behind
    them.
    """
    magnitude, place, word, low = (
        pointer(magnitudes, _I32),
        pointer(far, _I32),
        pointer(unary, _U64),
        pointer(bits, _U64),
    )
    for at in range(size >> 3):
        word[at] = _ZERO
    last, done = np.int64(-1), np.int64(0)
    for i in range(count):
        high = np.uint32(magnitude[place[i]]) >> np.uint32(shift)
        more = bit_length(high) - 1
        last += more + 1
        word[last >> 6] |= _ONE << np.uint64(last & 63)
        rest, within = np.uint64(high) ^ (_ONE << np.uint64(more)), np.uint64(done & 63)
        low[done >> 6] |= rest << within
        low[(done >> 6) + 1] |= (rest >> _ONE) >> (np.uint64(63) - within)
        done += more


@loop
def to_distances(magnitudes, count, signs):
    """Turn int32 magnitudes, which have room for a multiple of 64, into distances."""
    word = pointer(signs, _U64)
    for block in range((count + 63) >> 6):
        signed_magnitudes(magnitudes + 256 * block, word[block])


@loop
def decode_far(distances, signs, far, count, shift, most, unary, size, bits):
    """Move the distances that are far by their high parts, as `encode_far` wrote them; `size` is the number
    of bits in unary.

    Return False if there are not `count` parts in exactly so many bits, or one has more than `most`;
    distances are of no use then.
    """
    distance, sign, place = pointer(distances, _I32), pointer(signs, _U64), pointer(far, _I32)
    word, end, total = pointer(unary, _U64), bitmap_nbytes(size) >> 3, 0
    for at in range(end):
        total += popcount(word[at])
    if total != count or (size and word[end - 1] >> np.uint64((size - 1) & 63) != _ONE):
        return False
    low = pointer(bits if size > count else unary, _U64)
    last_word, i, last, longest = (
        max((bitmap_nbytes(size - count) >> 3) - 1, 0),
        np.int64(0),
        np.int64(-1),
        np.int64(0),
    )
    for block in range(end):
        left = word[block]
        while left != _ZERO:
            bit = (block << 6) + count_trailing_zeros(left)
            left &= left - _ONE
            done, more, at = last + 1 - i, bit - last - 1, place[i]
            longest, last, i = max(longest, more), bit, i + 1
            top, within = _ONE << np.uint64(more & 31), np.uint64(done & 63)
            here, ahead = (
                low[min(done >> 6, last_word)],
                low[min((done >> 6) + 1, last_word)],
            )  # of a part of no bits, there may be neither
            part = here >> within | (ahead << _ONE) << (np.uint64(63) - within)
            high = np.int64(part & (top - _ONE) | top) << shift
            negative = np.int64((sign[at >> 6] >> np.uint64(at & 63)) & _ONE)
            distance[at] = np.int32(distance[at] + ((high ^ -negative) + negative))
    return longest < most


@loop
def ulp_deltas(sample, old, new, count, out):
    """Write how far each bit pattern is from an old one, in the order, as int32."""
    before, after, distance = pointer(old, sample), pointer(new, sample), pointer(out, _I32)
    for i in range(count):
        distance[i] = distance_between(after[i], before[i])


@loop
def scatter_values(sample, width, table, positions, values, count, relative, touched, out):
    """Write values to int64 positions of the tensors of a table, or move the bits there by them, and mark the
    tensors.

    If `out` is not 0, what comes of it is written there and not into the tensors. Positions come in any
    order. Return how many positions were seen to: if one is out of range fewer than `count`, a multiple of
    SOME that ends before it.
    """
    position, value, mark = pointer(positions, _I64), pointer(values, sample), pointer(touched, _U8)
    starts, addresses, kinds = (
        table_column(table, STARTS),
        table_column(table, ADDRESSES),
        table_column(table, KINDS),
    )
    there, some = pointer(scratch(), _I64), pointer(scratch() + 8 * SOME, sample)
    index = low = high = live = np.int64(0)
    for begin in range(0, count, SOME):
        end = min(begin + SOME, count)
        for i in range(begin, end):
            at = position[i]
            if at < low or at >= high:
                if at < 0 or at >= starts[pointer(table, _I64)[COUNT]]:
                    return begin
                index = find_tensor(table, index, at)
                low, high, live = starts[index], starts[index + 1], addresses[index]
                mark[index] = 1
            there[i - begin] = (
                live + (at - low) * width if kinds[index] == PLAIN else element(table, index, at - low)
            )
        if relative:
            for i in range(end - begin):  # nothing else here: then many loads are on their way at once
                some[i] = pointer(there[i], sample)[0]
        for i in range(end - begin):
            some[i] = at_distance(some[i], value[begin + i]) if relative else value[begin + i]
        for i in range(end - begin):
            pointer(out + (begin + i) * width if out else there[i], sample)[0] = some[i]
    return count
