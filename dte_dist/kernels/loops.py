# mypy: allow-untyped-defs
# ruff: noqa: PLR0917
"""The numba loops over CPU memory. `kernels.cpu` is their face: it checks arguments and turns tensors into addresses.

Every loop takes memory as int64 addresses: thousands of tensors then need one table of numbers, and a call costs
a microsecond whatever it touches. Types come in as `sample`, any scalar of the element's unsigned type, so that one source
serves all widths: numba compiles it anew for each type of sample. Nothing is compiled at import.

All loops run on one core, without the GIL, and trust their arguments unless they say otherwise.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_BLOCK: Final = 64  # bytes compared at once: two AVX2 registers or one of AVX-512, and at most 64 elements, one bit each

_FIRST = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xFF51AFD7ED558CCD)
_THIRD = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_U16, _U32, _I32 = np.uint16(0), np.uint32(0), np.int32(0)


@intrinsic
def _at(_typing: Any, address: Any, sample: Any) -> Any:
    """Return a pointer to elements of the type of `sample`, which are read and written with `pointer[index]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(sample)(types.int64, sample), generate


@intrinsic
def _differing(_typing: Any, left: Any, right: Any, sample: Any) -> Any:
    """Return a mask of which elements of two blocks of 64 bytes differ, the first in the lowest bit; no alignment is needed."""
    lanes = _BLOCK * 8 // sample.bitwidth

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        block = ir.VectorType(ir.IntType(sample.bitwidth), lanes).as_pointer()
        loaded = [builder.load(builder.inttoptr(address, block), align=1) for address in args[:2]]
        mask = builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(lanes))
        return mask if lanes == 64 else builder.zext(mask, ir.IntType(64))

    return types.uint64(types.int64, types.int64, sample), generate


@intrinsic
def _lowest(_typing: Any, mask: Any) -> Any:
    """Return the number of the lowest bit that is set in a mask that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def _word(_typing: Any, address: Any) -> Any:
    """Read a little-endian uint64 from any address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.int64), generate


@intrinsic
def _move(_typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes between addresses; they must not overlap."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        into, out_of = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, into, out_of, args[2], 1)

    return types.void(types.int64, types.int64, types.int64), generate


@njit(nogil=True, cache=True)
def find(starts, position):
    """Return the index of the tensor that holds a position: the last that starts at or before it, hence never an empty one."""
    low, high = 0, starts.size
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _diff_run(sample, width, lanes, live, known, length, base, positions, bits):
    """Compare one contiguous run, `lanes` elements to a block; positions count from `base`. Return how many differ."""
    a, b = _at(live, sample), _at(known, sample)
    position, bit = _at(positions, _I32), _at(bits, sample)
    found, low, whole = 0, 0, length & -lanes
    while low < whole:
        mask = _differing(live + low * width, known + low * width, sample)
        while mask != _ZERO:
            i = low + _lowest(mask)
            position[found] = np.int32(base + i)
            bit[found] = a[i]
            found += 1
            mask &= mask - _ONE
        low += lanes
    for i in range(whole, length):
        if a[i] != b[i]:
            position[found] = np.int32(base + i)
            bit[found] = a[i]
            found += 1
    return found


@njit(nogil=True, cache=True)
def diff(sample, width, starts, addresses, begin, end, known, positions, bits):
    """Compare elements [begin, end) of the tensors of a table with `known`. Return how many differ."""
    found, at, index, lanes = 0, begin, find(starts, begin), _BLOCK // width
    while at < end:
        stop = min(end, starts[index + 1])
        if stop > at:
            live = addresses[index] + (at - starts[index]) * width
            then = known + (at - begin) * width
            found += _diff_run(sample, width, lanes, live, then, stop - at, at - begin, positions + 4 * found, bits + width * found)
            at = stop
        index += 1
    return found


@njit(nogil=True, cache=True)
def copy(width, starts, addresses, begin, end, buffer, inward):
    """Copy elements [begin, end) of the tensors of a table from `buffer` (inward) or to it; tensors at address 0 are left out."""
    at, index = begin, find(starts, begin)
    while at < end:
        stop = min(end, starts[index + 1])
        if stop > at and addresses[index]:
            live = addresses[index] + (at - starts[index]) * width
            there = buffer + (at - begin) * width
            if inward:
                _move(live, there, (stop - at) * width)
            else:
                _move(there, live, (stop - at) * width)
        at = max(at, stop)
        index += 1


@njit(nogil=True, cache=True)
def scatter(sample, counter, width, starts, addresses, positions, bits, count, touched):
    """Write bits to positions (of the type of `counter`) of the tensors of a table, in any order, and mark the tensors touched.

    Tensors at address 0 are marked but not written. Return how many were written: fewer than `count` if a position is out of range.
    """
    position, bit = _at(positions, counter), _at(bits, sample)
    low = high = here = np.int64(0)
    for i in range(count):
        at = np.int64(position[i])
        if at < low or at >= high:
            if at < 0 or at >= starts[-1]:
                return i
            index = find(starts, at)
            low, high, here = starts[index], starts[index + 1], addresses[index]
            touched[index] = True
        if here:
            _at(here + (at - low) * width, sample)[0] = bit[i]
    return count


@njit(nogil=True, cache=True)
def put(sample, counter, array, length, positions, bits, count):
    """Write bits to positions of one array. Return how many were written: fewer than `count` if a position is out of range."""
    element, position, bit = _at(array, sample), _at(positions, counter), _at(bits, sample)
    for i in range(count):
        at = np.int64(position[i])
        if at < 0 or at >= length:
            return i
        element[at] = bit[i]
    return count


@njit(nogil=True, cache=True)
def gather(sample, counter, array, length, positions, bits, count):
    """Read bits from positions of one array. Return how many were read: fewer than `count` if a position is out of range."""
    element, position, bit = _at(array, sample), _at(positions, counter), _at(bits, sample)
    for i in range(count):
        at = np.int64(position[i])
        if at < 0 or at >= length:
            return i
        bit[i] = element[at]
    return count


@njit(nogil=True, cache=True)
def encode_u16(positions, count, blocks, stream):
    """Write uint32[blocks] counts and uint16[count] offsets for sorted int32 positions."""
    position, number = _at(positions, _I32), _at(stream, _U32)
    offset = _at(stream + 4 * blocks, _U16)
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


@njit(nogil=True, cache=True)
def decode_u16(stream, count, blocks, length, positions):
    """Write the positions that `encode_u16` was given. Return False, having read only what is there, if they are not sound."""
    position, number = _at(positions, _I32), _at(stream, _U32)
    offset = _at(stream + 4 * blocks, _U16)
    first, falls = np.int64(0), 0
    for block in range(blocks):
        stop = first + np.int64(number[block])
        if stop > count:
            return False
        base = np.int32(block << 16)
        for i in range(first, stop):
            position[i] = base | np.int32(offset[i])
        for i in range(first + 1, stop):
            falls += offset[i] <= offset[i - 1]
        first = stop
    return first == count and falls == 0 and (count == 0 or position[count - 1] < length)


@njit(nogil=True, cache=True)
def sorted_below(counter, positions, count, length):
    """Return whether positions (of the type of `counter`) strictly increase within [0, length)."""
    position = _at(positions, counter)
    falls = 0
    for i in range(1, count):
        falls += position[i] <= position[i - 1]
    return falls == 0 and (count == 0 or (position[0] >= 0 and position[count - 1] < length))


@njit(nogil=True, cache=True)
def _mix(word):
    word = (word ^ (word >> _SHIFT)) * _SECOND
    word = (word ^ (word >> _SHIFT)) * _THIRD
    return word ^ (word >> _SHIFT)


@njit(nogil=True, cache=True)
def checksum(frame, words, skip):
    """Return the sum of all words, each mixed with its place, modulo 2^64 (docs/protocol.md, "The checksum")."""
    total, place = _ZERO, _ZERO
    for i in range(words):
        place += _FIRST
        total += _mix(place + _word(frame + 8 * i))
    if 0 <= skip < words:  # exchanged afterwards: a condition within the loop would keep it from using vectors
        place = np.uint64(skip + 1) * _FIRST
        total += _mix(place) - _mix(place + _word(frame + 8 * skip))
    return total
