# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops of the index codec `again`, over CPU memory; `index_codecs.py` is their face.

Two ascending lists of int32 positions are walked together. The next position cannot be predicted, so nothing
branches on it: every step moves either place or both by what a comparison says, and writes where the next
step writes again if it was for nothing. A step has to wait for the one before; so there are always two walks
at a time, which do not wait for each other.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dte_dist.kernels.cpu.index_codec_loops import lower_bound
from dte_dist.kernels.cpu.intrinsics import count_trailing_zeros, pointer, popcount
from dte_dist.kernels.cpu.jit import inline, loop

__all__ = ["count_again", "join_again", "split_again"]

_I32, _U64 = np.int32(0), np.uint64(0)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_ABOVE: Final = np.int32(0x7FFFFFFF)
_BELOW: Final = np.int32(-1)
_VALID: Final = np.int32(0x3FFFFFFF)


@inline
def _step(old, new, i, j, found, filled, plane, fresh):
    """Look at one previous and one present position; return where to go on, and the bits of the word that is
    being filled.
    """
    word, out = pointer(plane, _U64), pointer(fresh, _I32)
    filled |= np.uint64(old == new) << np.uint64(i & 63)
    word[i >> 6] = filled
    out[found] = new
    ahead = np.int64(old <= new)
    filled *= np.uint64((i & 63) + ahead < 64)
    return i + ahead, j + np.int64(new <= old), found + np.int64(new < old), filled


@loop
def split_again(previous, size, positions, count, plane, fresh):
    """Set the bit of each of `size` previous positions that is among `count` positions, in a plane of zeros;
    return how many are not.

    These are written to `fresh`, which has room for `count`. One walk begins in the middle, at the start of a
    word.
    """
    before, now, out = pointer(previous, _I32), pointer(positions, _I32), pointer(fresh, _I32)
    half = (np.int64(size) >> 1) & -64
    middle = lower_bound(positions, np.int64(0), count, before[half]) if half and count else np.int64(0)
    i = j = found = np.int64(0)
    i2, j2, found2 = half, middle, middle
    filled = filled2 = _ZERO
    while i < half and j < middle and i2 < size and j2 < count:
        i, j, found, filled = _step(before[i], now[j], i, j, found, filled, plane, fresh)
        i2, j2, found2, filled2 = _step(before[i2], now[j2], i2, j2, found2, filled2, plane, fresh)
    while i < half and j < middle:
        i, j, found, filled = _step(before[i], now[j], i, j, found, filled, plane, fresh)
    while i2 < size and j2 < count:
        i2, j2, found2, filled2 = _step(before[i2], now[j2], i2, j2, found2, filled2, plane, fresh)
    for k in range(j, middle):
        out[found + k - j] = now[k]
    found += middle - j
    for k in range(middle, found2):
        out[found + k - middle] = out[k]
    found += found2 - middle
    for k in range(j2, count):
        out[found + k - j2] = now[k]
    return found + count - j2


@loop
def count_again(plane, size):
    """Return how many bits of a plane are set; -1 if one is beyond the first `size`."""
    word, total = pointer(plane, _U64), np.int64(0)
    for i in range((size + 63) >> 6):
        total += popcount(word[i])
    return np.int64(-1) if size & 63 and word[size >> 6] >> np.uint64(size & 63) else total


@inline
def _gather(previous, size, plane, again):
    """Write the previous positions whose bit is set, and any one after them."""
    before, word, out = pointer(previous, _I32), pointer(plane, _U64), pointer(again, _I32)
    i, whole = np.int64(0), size >> 6
    for block in range(whole):
        bits = word[block]
        for bit in range(64):
            out[i] = before[64 * block + bit]
            i += np.int64((bits >> np.uint64(bit)) & _ONE)
    left = word[whole] if size & 63 else _ZERO
    while left != _ZERO:
        out[i] = before[64 * whole + count_trailing_zeros(left)]
        left &= left - _ONE
        i += 1


@loop
def join_again(previous, size, plane, fresh, extra, positions, count, room):
    """Write the previous positions whose bit is set, which are `count - extra`, and `extra` fresh ones,
    together in order.

    One walk begins at either end. Both lists are copied to `room`, which is for `count + 5`, between bounds
    that no walk passes as long as positions are from 0 to below 2^30. Fresh ones that are not are written as
    others.
    """
    again, other = room + 4, room + 4 * (count - extra + 3)
    first, second, new, out = (
        pointer(again, _I32),
        pointer(other, _I32),
        pointer(fresh, _I32),
        pointer(positions, _I32),
    )
    _gather(previous, size, plane, again)
    for k in range(extra):
        second[k] = new[k] & _VALID
    first[-1] = second[-1] = _BELOW
    first[count - extra] = second[extra] = _ABOVE
    i, j, i2, j2 = np.int64(0), np.int64(0), np.int64(count - extra - 1), np.int64(extra - 1)
    for k in range((count + 1) >> 1):
        one, two = first[i], second[j]
        ahead = np.int64(one <= two)
        out[k] = one if ahead else two
        i, j = i + ahead, j + 1 - ahead
        one, two = first[i2], second[j2]
        ahead = np.int64(one > two)
        out[count - 1 - k] = one if ahead else two
        i2, j2 = i2 - ahead, j2 - 1 + ahead
