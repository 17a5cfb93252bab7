"""Kernels of the value codecs for CPU tensors; the loops are in `value_codec_loops.py`.

Encoders return new uint8; decoders take any bytes of the right size, and say whether they are sound: as in
`index_codecs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.cpu import arguments as arrays
from dte_dist.kernels.cpu import index_codec_loops, value_codec_loops
from dte_dist.kernels.cpu.arguments import SAMPLES, address
from dte_dist.kernels.cpu.index_codecs import read_ef, room_for, write_ef
from dte_dist.kernels.cpu.threads import parallel_for
from dte_dist.kernels.interface import Flat
from dte_dist.kernels.sizes import (
    CLASSES,
    Classes,
    Planes,
    bitmap_nbytes,
    choose_planes,
    ef_size,
    low_size,
)
from dte_dist.kernels.torch.value_codecs import add, narrow, subtract, widen

__all__ = [
    "add",
    "add_ulps",
    "decode_planes",
    "encode_planes",
    "measure",
    "narrow",
    "precompile",
    "scatter_add",
    "subtract",
    "ulp_deltas",
    "widen",
]


def ulp_deltas(old: Tensor, new: Tensor) -> Tensor:
    """Return how far bits have moved, in the order of docs/protocol.md.

    Args:
        old, new: bits of 1, 2 or 4 bytes, of one length.

    Returns:
        int32 differences modulo the range of their dtype.

    Example:
        >>> ulp_deltas(torch.tensor([0x3F80], dtype=torch.int16), torch.tensor([0x3F7F],
        ...     dtype=torch.int16)).tolist()
        [-1]
    """
    count, sample, width = new.numel(), SAMPLES[new.dtype], new.element_size()
    out = torch.empty(count, dtype=torch.int32, device="cpu")
    before, after, into = address(old, count, new.dtype), address(new), out.data_ptr()

    def part(low: int, high: int) -> None:
        value_codec_loops.ulp_deltas(
            sample, before + width * low, after + width * low, high - low, into + 4 * low
        )

    parallel_for(part, count, least=arrays.STREAM // 4)
    return out


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


def add_ulps(flat: Flat, positions: Tensor, distances: Tensor) -> Tensor:
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
        return low + value_codec_loops.scatter_values(sample, width, table.address, *where) - high

    return touched, parallel_for(part, count, least=arrays.RANDOM)


def measure(distances: Tensor) -> Classes:
    """Count int32 distances by size."""
    numbers = np.empty(5 * CLASSES, np.int64)
    value_codec_loops.measure(address(distances, dtype=torch.int32), distances.numel(), numbers.ctypes.data)
    return Classes(distances, distances.numel(), numbers[:CLASSES])


def encode_planes(classes: Classes, width: int, plan: Planes) -> Tensor:
    """Write distances as `plan` says; `classes.wide` is overwritten."""
    count, values = classes.count, classes.wide.data_ptr()
    room = torch.empty(plan.size + 16, dtype=torch.uint8, device="cpu")
    signs = room.data_ptr()
    lows = signs + bitmap_nbytes(count)
    places = lows + low_size(count, plan.shift)
    value_codec_loops.to_magnitudes(values, count, width, signs)
    if plan.shift:
        index_codec_loops.split_low(values, count, plan.shift, lows)
    far = room_for(plan.far)
    if not plan.spread:
        unary = places + bitmap_nbytes(count)
        value_codec_loops.find_far(values, count, 1 << plan.shift, places, far.data_ptr())
    else:
        unary = places + ef_size(plan.far, count, plan.spread - 1)
        plane = torch.empty(bitmap_nbytes(count), dtype=torch.uint8, device="cpu")
        value_codec_loops.find_far(values, count, 1 << plan.shift, plane.data_ptr(), far.data_ptr())
        write_ef(far[: plan.far], count, plan.spread - 1, places, unary - places)
    bits = unary + bitmap_nbytes(plan.unary)
    room[bits - signs :].zero_()
    value_codec_loops.encode_far(values, far.data_ptr(), plan.far, plan.shift, unary, bits - unary, bits)
    return room[: plan.size]


def decode_planes(stream: Tensor, count: int, dtype: torch.dtype, plan: Planes) -> tuple[Tensor, bool]:
    """Read distances of the dtype of bits, and say whether the stream agrees with `plan`."""
    wide, far = room_for(count, zero=True), room_for(plan.far)
    values, signs = wide.data_ptr(), address(stream, plan.size, torch.uint8)
    lows = signs + bitmap_nbytes(count)
    places = lows + low_size(count, plan.shift)
    if plan.shift:
        index_codec_loops.join_low(lows, count, plan.shift, values)
    value_codec_loops.to_distances(values, count, signs)
    if not plan.spread:
        unary = places + bitmap_nbytes(count)
        sound = index_codec_loops.get_bits(places, unary - places, plan.far, 0, 0, count - 1, far.data_ptr())
    else:
        unary = places + ef_size(plan.far, count, plan.spread - 1)
        sound = read_ef(places, plan.far, count, plan.spread - 1, far.data_ptr())
    sizes = (
        plan.far,
        plan.shift,
        8 * dtype.itemsize - plan.shift,
        unary,
        plan.unary,
        unary + bitmap_nbytes(plan.unary),
    )
    sound = sound and value_codec_loops.decode_far(values, signs, far.data_ptr(), *sizes)
    return narrow(wide[:count], dtype), sound


def precompile(widths: Iterable[int]) -> None:
    """Compile every loop of the streams by running it on a few elements; those for single elements for these
    widths.
    """
    away = torch.tensor([1, 700, -3], dtype=torch.int32, device="cpu")
    classes = measure(away)
    chosen = choose_planes(classes, 2)
    decode_planes(encode_planes(classes, 2, chosen), 3, torch.int16, chosen)
    for bits in arrays.zeros(set(widths) - {8}):
        ulp_deltas(bits, bits)
