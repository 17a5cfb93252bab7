"""Kernels for CPU tensors that go over live tensors: arguments are checked here, the work is done by the
numba loops of `scan_loops.py`.

The loops know memory only by address. A tensor that torch must cast first (`flat.cast`) stands in the table
as a copy, made window by window. Large work is split over threads, each with a part of the range or of the
positions; what is written does not depend on how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.cpu import arguments as arrays
from dte_dist.kernels.cpu import index_codec_loops, scan_loops
from dte_dist.kernels.cpu.arguments import SAMPLES, address
from dte_dist.kernels.cpu.threads import parallel_for
from dte_dist.kernels.interface import BITS, Flat
from dte_dist.kernels.table import Table

__all__ = [
    "advance",
    "checksum",
    "gather_1d",
    "precompile",
    "read",
    "scatter",
    "scatter_1d",
    "searchsorted",
    "strictly_increasing",
    "write",
]


def advance(  # noqa: PLR0917
    flat: Flat, begin: int, end: int, known: Tensor, positions: Tensor, old: Tensor, new: Tensor
) -> int:
    """Compare elements [begin, end) of `flat` with `known`, bring `known` up to date, and return how many
    differed.

    Args:
        flat: the live tensors.
        begin, end: range of the flat array, of fewer than 2^31 elements.
        known: bits[end - begin] to compare with, and to write what differs to.
        positions: int32[>= end - begin], receives the sorted positions that differed, counted from `begin`;
            if that is all of them, what is in it is undefined, as is what follows them.
        old, new: [>= end - begin], receive the known and the live bits at these positions.

    Example:
        >>> from dte_dist.tensors.flat import FlatTensors
        >>> flat, known = FlatTensors([torch.tensor([1, 2, 3], dtype=torch.int32)], 4), torch.tensor([1, 0,
        ...     3], dtype=torch.int32)
        >>> positions, old, new = torch.empty((3, 3), dtype=torch.int32)
        >>> count = advance(flat, 0, len(flat), known, positions, old, new)
        >>> positions[:count].tolist(), old[:count].tolist(), new[:count].tolist(), known.tolist()
        ([1], [0], [2], [1, 2, 3])
    """
    arrays.check_range(flat, begin, end)
    length, width, sample = end - begin, flat.width, SAMPLES[known.dtype]
    then, to = address(known, length, width=width), address(positions, length, torch.int32)
    before, after = address(old, length, known.dtype), address(new, length, known.dtype)
    table, _alive = arrays.readable(flat, begin, end)

    def part(low: int, high: int) -> tuple[int, int]:
        where = (then + width * low, to + 4 * low, before + width * low, after + width * low)
        count = scan_loops.advance(sample, width, table.address, begin + low, begin + high, *where)
        if low and count < high - low:  # else no position was written
            positions[low : low + count] += low
        return low, count

    parts = parallel_for(part, length, least=arrays.STREAM // width)
    if len(parts) > 1 and sum(count for _, count in parts) < length:
        for (low, count), high in zip(parts, [*(low for low, _ in parts[1:]), length], strict=True):
            if count == high - low:
                torch.arange(low, high, out=positions[low:high])
    return arrays.compact(parts, (to, 4), (before, width), (after, width))


def read(flat: Flat, begin: int, out: Tensor) -> None:
    """Copy elements [begin, begin + len(out)) of `flat` to `out`, bits of the width of `flat`."""
    arrays.check_range(flat, begin, begin + out.numel())
    table, _alive = arrays.readable(flat, begin, begin + out.numel())
    _copy(flat, table, begin, out, False)


def write(flat: Flat, begin: int, bits: Tensor) -> None:
    """Copy `bits`, of the width of `flat`, to its elements [begin, begin + len(bits)); the tensors' version
    counters move.
    """
    arrays.check_range(flat, begin, begin + bits.numel())
    arrays.bump(flat, _copy(flat, arrays.bits_table(flat), begin, bits, True))


def _copy(flat: Flat, table: Table, begin: int, bits: Tensor, inward: bool) -> np.ndarray:
    """Copy between a table and an array; return which tensors were met."""
    width, touched = flat.width, np.zeros(len(flat.tensors), np.bool_)
    buffer, sample, marks = address(bits, width=width), SAMPLES[BITS[width]], touched.ctypes.data

    def part(low: int, high: int) -> None:
        scan_loops.copy(
            sample, width, table.address, begin + low, begin + high, buffer + width * low, inward, marks
        )

    parallel_for(part, bits.numel(), least=arrays.STREAM // width)
    return np.flatnonzero(touched)


def scatter(flat: Flat, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position in `flat`; the version counters of the tensors touched move.

    Args:
        flat: the live tensors.
        positions: int32 or int64, in any order (ascending is fastest), each at most once.
        bits: one bit pattern per position, of the width of `flat`.

    Raises:
        IndexError: a position is outside `flat`; some of the others have been written.
    """
    count, width, touched = positions.numel(), flat.width, np.zeros(len(flat.tensors), np.bool_)
    sample, wide, marks, table = (
        SAMPLES[bits.dtype],
        arrays.is_wide(positions),
        touched.ctypes.data,
        arrays.bits_table(flat),
    )
    at, new, size = address(positions), address(bits, count, width=width), positions.element_size()

    def part(low: int, high: int) -> int:
        where = (at + size * low, wide, new + width * low)
        return low + scan_loops.scatter(sample, width, table.address, *where, high - low, marks) - high

    missing = parallel_for(part, count, least=arrays.RANDOM)
    arrays.bump(flat, np.flatnonzero(touched))
    arrays.check_all(missing, positions, len(flat))


def scatter_1d(array: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position (int32 or int64) in one array of the same dtype.

    Raises:
        IndexError: a position is outside the array; some of the others have been written.
    """
    count = positions.numel()
    _visit(scan_loops.scatter_1d, array, positions, address(bits, count, array.dtype))


def gather_1d(array: Tensor, positions: Tensor) -> Tensor:
    """Return the elements of an array at these positions (int32 or int64).

    Raises:
        IndexError: a position is outside the array.
    """
    out = array.new_empty(positions.numel())
    _visit(scan_loops.gather_1d, array, positions, out.data_ptr())
    return out


def _visit(loop: Callable[..., int], array: Tensor, positions: Tensor, bits: int) -> None:
    """Run `scatter_1d` or `gather_1d` over positions of an array."""
    sample, wide, length, width = (
        SAMPLES[array.dtype],
        arrays.is_wide(positions),
        array.numel(),
        array.element_size(),
    )
    element, at, size = address(array), address(positions), positions.element_size()

    def part(low: int, high: int) -> int:
        return (
            low + loop(sample, element, length, at + size * low, wide, bits + width * low, high - low) - high
        )

    arrays.check_all(parallel_for(part, positions.numel(), least=arrays.RANDOM), positions, length)


def searchsorted(positions: Tensor, starts: Sequence[int]) -> list[int]:
    """Return how many of some ascending positions are below each of `starts`.

    Example:
        >>> searchsorted(torch.tensor([1, 4, 9], dtype=torch.int32), [0, 4, 10])
        [0, 1, 3]
    """
    array = positions.numpy()
    found: list[int] = np.searchsorted(array, np.array(starts, array.dtype)).tolist()
    return found


def strictly_increasing(positions: Tensor, length: int) -> bool:
    """Return whether positions (int32 or int64) strictly increase within [0, length)."""
    return index_codec_loops.strictly_increasing(
        arrays.COUNTERS[positions.dtype], address(positions), positions.numel(), length
    )


def checksum(frame: Tensor, skip: int = -1) -> int:
    """Return 64 bits, as a signed int, over the 8-byte words of a uint8 tensor; word number `skip` counts as
    zero.
    """
    words, rest = divmod(frame.numel(), 8)
    if rest:
        raise ValueError(f"a checksum needs whole words of 8 bytes, not {frame.numel()} bytes")
    at = address(frame, dtype=torch.uint8)
    total = (
        sum(
            parallel_for(
                lambda low, high: int(scan_loops.checksum(at, low, high, skip)),
                words,
                least=arrays.STREAM // 8,
            )
        )
        & (1 << 64) - 1
    )
    return total - (total >> 63 << 64)


def precompile(widths: Iterable[int]) -> None:
    """Compile every loop for these widths by running it on a few elements."""
    wanted = set(widths)
    for dtype in (dtype for dtype in SAMPLES if dtype.itemsize in wanted):
        flat, bits = (
            arrays.OneTensor(torch.zeros(4, dtype=dtype, device="cpu")),
            torch.zeros(4, dtype=dtype, device="cpu"),
        )
        for counter in arrays.COUNTERS:
            positions = torch.arange(4, dtype=counter, device="cpu")
            strictly_increasing(positions, 4)
            scatter(flat, positions, bits)
            scatter_1d(bits, positions, gather_1d(bits, positions))
        advance(flat, 0, 4, bits, torch.zeros(4, dtype=torch.int32, device="cpu"), bits.clone(), bits.clone())
        write(flat, 0, bits)
        read(flat, 0, bits)
    positions = torch.arange(4, dtype=torch.int32, device="cpu")
    checksum(torch.zeros(8, dtype=torch.uint8, device="cpu"))
    arrays.compact([(0, 1), (2, 1)], (positions.data_ptr(), 4))
    arrays.rounds_as_torch()
