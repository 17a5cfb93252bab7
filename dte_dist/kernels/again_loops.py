# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops of the index codec `again`, over CPU memory; `kernels.cpu_codecs` is their face.

Two ascending lists of int32 positions are walked together. What comes next cannot be predicted, so nothing branches on it: every step
moves either place or both by what a comparison says, and writes where the next step writes again if it was for nothing.
"""

from __future__ import annotations

import numpy as np

from dte_dist.kernels.compiled import loop
from dte_dist.kernels.memory import at as _at
from dte_dist.kernels.memory import lowest as _lowest
from dte_dist.kernels.memory import ones as _ones

_I32, _U64 = np.int32(0), np.uint64(0)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@loop
def split_again(previous, size, positions, count, plane, fresh):
    """Set the bit of each of `size` previous positions that is among `count` positions, in a plane of zeros; return how many are not.

    These are written to `fresh`, which has room for `count`.
    """
    before, now, word, out = _at(previous, _I32), _at(positions, _I32), _at(plane, _U64), _at(fresh, _I32)
    i = j = found = np.int64(0)
    filled = _ZERO
    while i < size and j < count:
        old, new = before[i], now[j]
        filled |= np.uint64(old == new) << np.uint64(i & 63)
        word[i >> 6] = filled
        out[found] = new
        found += np.int64(new < old)
        step = np.int64(old <= new)
        j += np.int64(new <= old)
        filled *= np.uint64((i & 63) + step < 64)
        i += step
    for k in range(j, count):
        out[found + k - j] = now[k]
    return found + count - j


@loop
def count_again(plane, size):
    """Return how many bits of a plane are set; -1 if one is beyond the first `size`."""
    word, total = _at(plane, _U64), np.int64(0)
    for i in range((size + 63) >> 6):
        total += _ones(word[i])
    return np.int64(-1) if size & 63 and word[size >> 6] >> np.uint64(size & 63) else total


@loop
def join_again(previous, size, plane, fresh, extra, positions, count):
    """Write the previous positions whose bit is set, which are `count - extra`, and `extra` fresh ones, together in order.

    The first are gathered at the end of their room, so that what has been read is all that is written over.
    """
    before, new, word, out = _at(previous, _I32), _at(fresh, _I32), _at(plane, _U64), _at(positions, _I32)
    i = np.int64(extra)
    for block in range((size + 63) >> 6):
        left = word[block]
        while left != _ZERO:
            out[i] = before[64 * block + _lowest(left)]
            left &= left - _ONE
            i += 1
    i, j = np.int64(extra), np.int64(0)
    while i < count and j < extra:
        old, other = out[i], new[j]
        step = np.int64(old <= other)
        out[i + j - extra] = old if step else other
        i += step
        j += 1 - step
    for k in range(j, extra):
        out[count + k - extra] = new[k]
