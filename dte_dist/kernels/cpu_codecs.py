"""Kernels of the codecs for CPU tensors; the loops are in `kernels.codec_loops` and `kernels.again_loops`.

Encoders return new uint8; what they are given may be used again at once. Decoders take any bytes of the right
size, and return what they read together with whether it is sound; where it is not, they have read and written
only what is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, Tables, again_loops, codec_loops, cpu_remap, loops, remap_loops
from dte_dist.kernels import cpu_arrays as arrays
from dte_dist.kernels.cpu_arrays import SAMPLES, address
from dte_dist.kernels.identity import Identity
from dte_dist.kernels.planes import CLASSES, Classes, Planes, bitmap_bytes, ef_size, low_size, padded
from dte_dist.kernels.threads import split
from dte_dist.kernels.torch_codecs import add, narrow, subtract, widen

__all__ = [
    "add",
    "best_low",
    "choose_planes",
    "collect",
    "count_again",
    "count_ulp8",
    "decode_bitmap",
    "decode_ef",
    "decode_planes",
    "decode_ulp8",
    "distances",
    "encode_bitmap",
    "encode_ef",
    "encode_planes",
    "encode_ulp8",
    "join_again",
    "measure",
    "moved",
    "narrow",
    "patch",
    "scatter_add",
    "split_again",
    "subtract",
    "warm",
    "warm_patch",
    "widen",
]


def best_low(count: int, length: int) -> tuple[int, int]:
    """Return the number of low bits that makes the stream of `count` positions below `length` smallest, and
    its bytes.

    Example:
        >>> best_low(10_000, 1 << 20)
        (6, 10840)
    """
    return codec_loops.best_low(count, length)


def choose_planes(classes: Classes, width: int, zeros: int = 0) -> Planes:
    """Choose how distances are written in the fewest bytes; `zeros` more distances are 0."""
    numbers, chosen = classes.numbers.copy(), np.empty(5, np.int64)
    numbers[-1] += zeros
    codec_loops.choose_planes(numbers.ctypes.data, classes.count + zeros, width, chosen.ctypes.data)
    return Planes(*chosen.tolist())


def distances(old: Tensor, new: Tensor) -> Tensor:
    """Return how far bits have moved, in the order of docs/protocol.md.

    Args:
        old, new: bits of 1, 2 or 4 bytes, of one length.

    Returns:
        int32 differences modulo the range of their dtype.

    Example:
        >>> distances(torch.tensor([0x3F80], dtype=torch.int16), torch.tensor([0x3F7F],
        ...     dtype=torch.int16)).tolist()
        [-1]
    """
    count, sample, width = new.numel(), SAMPLES[new.dtype], new.element_size()
    out = torch.empty(count, dtype=torch.int32, device="cpu")
    before, after, into = address(old, count, new.dtype), address(new), out.data_ptr()

    def part(low: int, high: int) -> None:
        codec_loops.distances(sample, before + width * low, after + width * low, high - low, into + 4 * low)

    split(part, count, least=arrays.STREAM // 4)
    return out


def patch(
    index_map: Tables,
    first: int,
    positions: Tensor,
    values: Tensor,
    flat: Flat,
    *,
    relative: bool,
    length: int | None = None,
) -> None:
    """Write values to where `flat`, a receiver's space, holds them; those that it does not hold are passed
    over.

    Args:
        index_map: tables from the space that the positions count in.
        first: position that they count from.
        positions: int32, ascending; or, with `length`, uint8 that `check_u16` accepts.
        values: one for each: bits of the width of `flat`; distances to move what is there by if `relative`.
        relative: they are distances.
        length: of the segment that the positions are in.

    Raises:
        ValueError: there are not as many positions as values.
        IndexError: the tables lead out of `flat`; some of the others have been written.
    """
    count, width, sample, touched = (
        len(values),
        values.element_size(),
        SAMPLES[values.dtype],
        np.zeros(len(flat.tensors), np.bool_),
    )
    blocks = 0 if length is None else -(-length >> 16)
    if len(positions) != (count if length is None else 4 * blocks + 2 * count):
        raise ValueError(f"positions of {len(positions)} elements do not fit {count} values")
    at = address(positions, dtype=torch.int32 if length is None else torch.uint8)
    by, marks = address(values, width=flat.width), touched.ctypes.data
    tables, there = cpu_remap.tables_at(index_map), arrays.bits_table(flat).address

    def part(low: int, high: int) -> bool:
        entry = int(np.searchsorted(index_map.end, first, side="right"))
        return remap_loops.patch(
            sample, width, tables, entry, first, at, blocks, by, low, high, there, marks, relative
        )

    sound = all(split(part, count, least=arrays.RANDOM))
    arrays.bump(flat, np.flatnonzero(touched))
    if not sound:
        raise IndexError(f"a table leads out of the {len(flat)} elements of a flat array")


def scatter_add(flat: Flat, positions: Tensor, distances: Tensor) -> None:
    """Move the bits at positions of `flat` by distances; the version counters of the tensors touched move.

    Args:
        flat: the live tensors.
        positions: int64, in any order (ascending is fastest), each at most once.
        distances: one per position, of the width of `flat`.

    Raises:
        IndexError: a position is outside `flat`; some of the others have been moved.
    """
    touched, missing = _scatter_add(flat, positions, distances, None)
    arrays.bump(flat, np.flatnonzero(touched))
    arrays.check_all(missing, positions, len(flat))


def moved(flat: Flat, positions: Tensor, distances: Tensor) -> Tensor:
    """Return what `scatter_add` would write.

    Raises:
        IndexError: a position is outside `flat`.
    """
    out = torch.empty_like(distances)
    _, missing = _scatter_add(flat, positions, distances, out)
    arrays.check_all(missing, positions, len(flat))
    return out


def _scatter_add(
    flat: Flat, positions: Tensor, distances: Tensor, out: Tensor | None
) -> tuple[np.ndarray, list[int]]:
    """Move the bits, into `out` if there is one.

    Return which tensors were met, and what `check_all` wants to know.
    """
    count, width, touched = len(positions), flat.width, np.zeros(len(flat.tensors), np.bool_)
    sample, table, marks = SAMPLES[distances.dtype], arrays.bits_table(flat), touched.ctypes.data
    at, by, into = (
        address(positions, dtype=torch.int64),
        address(distances, count, width=width),
        0 if out is None else out.data_ptr(),
    )

    def part(low: int, high: int) -> int:
        where = (at + 8 * low, by + width * low, high - low, True, marks, into and into + width * low)
        return low + codec_loops.scatter_values(sample, width, table.address, *where) - high

    return touched, split(part, count, least=arrays.RANDOM)


def collect(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy to `bits` what `flat`, a receiver's space, holds of a source's positions from `first` on: the
    reverse of `place`.
    """
    cpu_remap.copy(index_map, first, bits, arrays.bits_table(flat), False)


def encode_bitmap(positions: Tensor, length: int) -> Tensor:
    """Write a bit for each of `length` elements, in whole words.

    Raises:
        ValueError: positions do not ascend below `length`; not all such are noticed.
    """
    stream = torch.empty(bitmap_bytes(length), dtype=torch.uint8, device="cpu")
    _set_bits(positions, length, (0, 0), stream.data_ptr(), len(stream))
    return stream


def _set_bits(positions: Tensor, length: int, shape: tuple[int, int], at: int, size: int) -> None:
    if not codec_loops.set_bits(address(positions, dtype=torch.int32), len(positions), *shape, size, at):
        raise ValueError(f"positions do not ascend within [0, {length})")


def decode_bitmap(stream: Tensor, count: int, length: int) -> tuple[Tensor, bool]:
    """Read int32[count] positions, and say whether there are as many, all below `length`."""
    positions = _room(count)
    sound = codec_loops.get_bits(
        address(stream, bitmap_bytes(length), torch.uint8),
        bitmap_bytes(length),
        count,
        0,
        0,
        length - 1,
        positions.data_ptr(),
    )
    return positions[:count], sound


def encode_ef(positions: Tensor, length: int, low: int) -> Tensor:
    """Write the `low` lowest bits of each position, then the rest as differences in unary (Elias and Fano).

    Raises:
        ValueError: positions do not ascend below `length`; not all such are noticed.
    """
    count = len(positions)
    stream = torch.empty(ef_size(count, length, low), dtype=torch.uint8, device="cpu")
    _write_ef(positions, length, low, stream.data_ptr(), len(stream))
    return stream


def _write_ef(positions: Tensor, length: int, low: int, at: int, size: int) -> None:
    lows = low_size(len(positions), low)
    codec_loops.split_low(address(positions, dtype=torch.int32), len(positions), low, at)
    _set_bits(positions, length, (low, 1), at + lows, size - lows)


def decode_ef(stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor, bool]:
    """Read int32[count] positions, and say whether they strictly increase below `length`."""
    positions = _room(count)
    sound = _read_ef(
        address(stream, ef_size(count, length, low), torch.uint8), count, length, low, positions.data_ptr()
    )
    return positions[:count], sound


def _read_ef(at: int, count: int, length: int, low: int, positions: int) -> bool:
    """Read positions into memory that has room for a multiple of 64."""
    size, lows = ef_size(count, length, low), low_size(count, low)
    if not codec_loops.get_bits(at + lows, size - lows, count, low, 1, (length - 1) >> low, positions):
        return False
    if low:
        codec_loops.join_low(at, count, low, positions)
    return loops.sorted_below(np.int32(0), positions, count, length)


def split_again(previous: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bit for each previous position, set if it is one of `positions`, and those of `positions` that
    are new.

    Args:
        previous, positions: int32, ascending.
    """
    size, count = len(previous), len(positions)
    plane = torch.zeros(bitmap_bytes(size), dtype=torch.uint8, device="cpu")
    fresh = torch.empty(count, dtype=torch.int32, device="cpu")
    where = address(previous, dtype=torch.int32), size, address(positions, dtype=torch.int32), count
    return plane, fresh[: again_loops.split_again(*where, plane.data_ptr(), fresh.data_ptr())]


def count_again(plane: Tensor, size: int) -> int:
    """Return how many bits of `size` are set; -1 if one beyond them is."""
    return again_loops.count_again(address(plane, bitmap_bytes(size), torch.uint8), size)


def join_again(previous: Tensor, plane: Tensor, fresh: Tensor, count: int) -> Tensor:
    """Return the previous positions whose bit is set and the fresh ones, together in order; they are `count`
    in number.

    Args:
        previous: int32, ascending; as many as `split_again` was given.
        plane: what it returned, or any bits of which `count_again` finds `count - len(fresh)` set.
        fresh: int32; the result is in order if these are, and if none of the others is among them.
    """
    positions, room = (torch.empty(count + more, dtype=torch.int32, device="cpu") for more in (0, 5))
    bits = (
        address(previous, dtype=torch.int32),
        len(previous),
        address(plane, bitmap_bytes(len(previous)), torch.uint8),
    )
    again_loops.join_again(
        *bits, address(fresh, dtype=torch.int32), len(fresh), positions.data_ptr(), count, room.data_ptr()
    )
    return positions


def measure(distances: Tensor) -> Classes:
    """Count int32 distances by size."""
    numbers = np.empty(5 * CLASSES, np.int64)
    codec_loops.measure(address(distances, dtype=torch.int32), distances.numel(), numbers.ctypes.data)
    return Classes(distances, distances.numel(), numbers[:CLASSES])


def count_ulp8(distances: Tensor) -> int:
    """Return how many int32 distances are not within +-127."""
    return codec_loops.count_ulp8(address(distances, dtype=torch.int32), distances.numel())


def encode_planes(classes: Classes, width: int, plan: Planes) -> Tensor:
    """Write distances as `plan` says; `classes.wide` is overwritten."""
    count, values = classes.count, classes.wide.data_ptr()
    room = torch.empty(plan.size + 16, dtype=torch.uint8, device="cpu")
    signs = room.data_ptr()
    lows = signs + bitmap_bytes(count)
    places = lows + low_size(count, plan.shift)
    codec_loops.to_magnitudes(values, count, width, signs)
    if plan.shift:
        codec_loops.split_low(values, count, plan.shift, lows)
    far = _room(plan.far)
    if not plan.spread:
        unary = places + bitmap_bytes(count)
        codec_loops.find_far(values, count, 1 << plan.shift, places, far.data_ptr())
    else:
        unary = places + ef_size(plan.far, count, plan.spread - 1)
        plane = torch.empty(bitmap_bytes(count), dtype=torch.uint8, device="cpu")
        codec_loops.find_far(values, count, 1 << plan.shift, plane.data_ptr(), far.data_ptr())
        _write_ef(far[: plan.far], count, plan.spread - 1, places, unary - places)
    bits = unary + bitmap_bytes(plan.unary)
    room[bits - signs :].zero_()
    codec_loops.encode_far(values, far.data_ptr(), plan.far, plan.shift, unary, bits - unary, bits)
    return room[: plan.size]


def decode_planes(stream: Tensor, count: int, dtype: torch.dtype, plan: Planes) -> tuple[Tensor, bool]:
    """Read distances of the dtype of bits, and say whether the stream agrees with `plan`."""
    wide, far = _room(count, zero=True), _room(plan.far)
    values, signs = wide.data_ptr(), address(stream, plan.size, torch.uint8)
    lows = signs + bitmap_bytes(count)
    places = lows + low_size(count, plan.shift)
    if plan.shift:
        codec_loops.join_low(lows, count, plan.shift, values)
    codec_loops.to_distances(values, count, signs)
    if not plan.spread:
        unary = places + bitmap_bytes(count)
        sound = codec_loops.get_bits(places, unary - places, plan.far, 0, 0, count - 1, far.data_ptr())
    else:
        unary = places + ef_size(plan.far, count, plan.spread - 1)
        sound = _read_ef(places, plan.far, count, plan.spread - 1, far.data_ptr())
    sizes = (
        plan.far,
        plan.shift,
        8 * dtype.itemsize - plan.shift,
        unary,
        plan.unary,
        unary + bitmap_bytes(plan.unary),
    )
    sound = sound and codec_loops.decode_far(values, signs, far.data_ptr(), *sizes)
    return narrow(wide[:count], dtype), sound


def encode_ulp8(distances: Tensor, width: int, others: int) -> Tensor:
    """Write an int8 for each int32 distance, -128 for those that do not fit, which follow; they are `others`
    in number.
    """
    count = distances.numel()
    stream = torch.empty(padded(count) + width * others, dtype=torch.uint8, device="cpu")
    codec_loops.encode_ulp8(address(distances, dtype=torch.int32), count, width, stream.data_ptr())
    return stream


def decode_ulp8(stream: Tensor, count: int, dtype: torch.dtype, escapes: int) -> tuple[Tensor, bool]:
    """Read distances of the dtype of bits, and say whether there are so many escapes."""
    wide = _room(count)
    at = address(stream, padded(count) + dtype.itemsize * escapes, torch.uint8)
    sound = codec_loops.decode_ulp8(at, count, dtype.itemsize, escapes, wide.data_ptr())
    return narrow(wide[:count], dtype), sound


def _room(count: int, *, zero: bool = False) -> Tensor:
    """Return int32 for a multiple of 64 elements: loops may write to all of it."""
    make = torch.zeros if zero else torch.empty
    return make((count + 63) & -64, dtype=torch.int32, device="cpu")


def warm(widths: Iterable[int]) -> None:
    """Compile every loop of the streams by running it on a few elements; those for single elements for these
    widths.
    """
    few, away = (
        torch.tensor(values, dtype=torch.int32, device="cpu") for values in ([0, 1, 2], [1, 700, -3])
    )
    best_low(3, 99)
    decode_ef(encode_ef(few, 99, 1), 3, 99, 1)
    join_again(few, split_again(few, few)[0], few[:0], count_again(split_again(few, few)[0], 3))
    decode_ulp8(encode_ulp8(away, 2, count_ulp8(away)), 3, torch.int16, 1)
    classes = measure(away)
    chosen = choose_planes(classes, 2)
    decode_planes(encode_planes(classes, 2, chosen), 3, torch.int16, chosen)
    for bits in _zeros(set(widths) - {8}):
        distances(bits, bits)


def warm_patch(widths: Iterable[int]) -> None:
    """Compile every loop that goes to where elements are, for these widths."""
    for bits in _zeros(widths):
        scatter_add(arrays.OneTensor(bits), torch.arange(3, device="cpu"), bits.clone())
        patch(
            Identity(1),
            0,
            torch.zeros(1, dtype=torch.int32, device="cpu"),
            bits[:1],
            arrays.OneTensor(bits),
            relative=False,
        )


def _zeros(widths: Iterable[int]) -> list[Tensor]:
    wanted = set(widths)
    return [torch.zeros(3, dtype=dtype, device="cpu") for dtype in SAMPLES if dtype.itemsize in wanted]
