"""Kernels for CPU tensors: arguments are checked here, the work is done by the numba loops of `kernels.loops`.

The loops know memory only by address. Tensors that are not contiguous have none (`flat.strided`): to be read they are
first copied, in parts, into contiguous memory that stands in for them in the table; to be written they go through torch ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, loops, torch_ops

__all__ = [
    "SAMPLES", "bump", "checksum", "decode_u16", "diff", "encode_u16", "gather", "put", "read", "scatter", "sorted_below", "warm",
    "write",
]  # fmt: skip

SAMPLES: Final = {
    torch.uint8: np.uint8(0), torch.int16: np.uint16(0), torch.int32: np.uint32(0), torch.int64: np.uint64(0),
}  # fmt: skip
"""For each dtype of bits, the sample that tells a numba loop its type."""

_COUNTERS: Final = {torch.int32: np.int32(0), torch.int64: np.int64(0)}
_BLOCK: Final = 1 << 16


def diff(flat: Flat, begin: int, end: int, known: Tensor, positions: Tensor, bits: Tensor) -> int:  # noqa: PLR0917
    """Compare elements [begin, end) of `flat` with `known` and return how many differ.

    Args:
        flat: the live tensors.
        begin, end: range of the flat array, of fewer than 2^31 elements.
        known: bits[end - begin] to compare with.
        positions: int32[>= end - begin], receives the sorted positions that differ, counted from `begin`.
        bits: [>= end - begin], receives the live bits at these positions.

    Example:
        >>> count = diff(flat, 0, len(flat), known, positions, bits)
        >>> changes = positions[:count], bits[:count]
    """
    _check_range(flat, begin, end)
    length = end - begin
    addresses, _alive = _readable(flat, begin, end)
    return loops.diff(
        SAMPLES[known.dtype], flat.width, flat.starts, addresses, begin, end,
        _address(known, length, width=flat.width), _address(positions, length, torch.int32), _address(bits, length, known.dtype),
    )  # fmt: skip


def read(flat: Flat, begin: int, out: Tensor) -> None:
    """Copy elements [begin, begin + len(out)) of `flat` to `out`, bits of the width of `flat`."""
    end = begin + out.numel()
    _check_range(flat, begin, end)
    addresses, _alive = _readable(flat, begin, end)
    loops.copy(flat.width, flat.starts, addresses, begin, end, _address(out, width=flat.width), False)


def write(flat: Flat, begin: int, bits: Tensor) -> None:
    """Copy `bits`, of the width of `flat`, to its elements [begin, begin + len(bits)); the tensors' version counters move."""
    end = begin + bits.numel()
    _check_range(flat, begin, end)
    loops.copy(flat.width, flat.starts, flat.addresses, begin, end, _address(bits, width=flat.width), True)
    if begin == end:
        return
    first, last = loops.find(flat.starts, begin), loops.find(flat.starts, end - 1)
    bump(flat, first + np.flatnonzero(np.diff(flat.starts[first : last + 2])))
    for index in flat.strided:
        low, high = max(begin, int(flat.starts[index])), min(end, int(flat.starts[index + 1]))
        if low < high:
            torch_ops.write_part(flat, index, low - int(flat.starts[index]), bits[low - begin : high - begin])


def scatter(flat: Flat, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position in `flat`; the version counters of the tensors touched move.

    Args:
        flat: the live tensors.
        positions: int32 or int64, in any order (ascending is fastest), each at most once.
        bits: one bit pattern per position, of the width of `flat`.

    Raises:
        IndexError: a position is outside `flat`; those before it have been written.
    """
    count = positions.numel()
    touched = np.zeros(len(flat.tensors), np.bool_)
    done = loops.scatter(
        SAMPLES[bits.dtype], _COUNTERS[positions.dtype], flat.width, flat.starts, flat.addresses,
        _address(positions), _address(bits, count, width=flat.width), count, touched,
    )  # fmt: skip
    indices = np.flatnonzero(touched)
    bump(flat, indices)
    for index in flat.strided:
        if touched[index]:
            low, high = int(flat.starts[index]), int(flat.starts[index + 1])
            here = (positions[:done] >= low) & (positions[:done] < high)
            torch_ops.put_into(flat, index, positions[:done][here] - low, bits[:done][here])
    _check_done(done, positions, len(flat))


def put(array: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position (int32 or int64) in one array of the same dtype.

    Raises:
        IndexError: a position is outside the array; those before it have been written.
    """
    count = positions.numel()
    done = loops.put(
        SAMPLES[array.dtype], _COUNTERS[positions.dtype], _address(array), array.numel(),
        _address(positions), _address(bits, count, array.dtype), count,
    )  # fmt: skip
    _check_done(done, positions, array.numel())


def gather(array: Tensor, positions: Tensor) -> Tensor:
    """Return the elements of an array at these positions (int32 or int64).

    Raises:
        IndexError: a position is outside the array.
    """
    out = array.new_empty(positions.numel())
    done = loops.gather(
        SAMPLES[array.dtype], _COUNTERS[positions.dtype], _address(array), array.numel(), _address(positions), out.data_ptr(), out.numel()
    )
    _check_done(done, positions, array.numel())
    return out


def encode_u16(positions: Tensor, length: int) -> Tensor:
    """Write sorted positions below `length` as uint8: a uint32 count per block of 65536, then a uint16 offset each.

    Example:
        >>> encode_u16(torch.tensor([1, 65536], dtype=torch.int32), 70000).tolist()
        [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    """
    count, blocks = positions.numel(), -(-length // _BLOCK)
    stream = torch.empty(4 * blocks + 2 * count, dtype=torch.uint8, device="cpu")
    loops.encode_u16(_address(positions, dtype=torch.int32), count, blocks, stream.data_ptr())
    return stream


def decode_u16(stream: Tensor, count: int, length: int, positions: Tensor) -> bool:
    """Read what `encode_u16` wrote into `positions` (int32[count]).

    Returns:
        False if the size of the stream, its counts or the order of its positions are not sound; safe for any bytes.
    """
    blocks = -(-length // _BLOCK)
    if stream.numel() != 4 * blocks + 2 * count:
        return False
    return loops.decode_u16(_address(stream, dtype=torch.uint8), count, blocks, length, _address(positions, count, torch.int32))


def sorted_below(positions: Tensor, length: int) -> bool:
    """Return whether positions (int32 or int64) strictly increase within [0, length)."""
    return loops.sorted_below(_COUNTERS[positions.dtype], _address(positions), positions.numel(), length)


def checksum(frame: Tensor, skip: int = -1) -> int:
    """Return 64 bits, as a signed int, over the 8-byte words of a uint8 tensor; word number `skip` counts as zero."""
    words, rest = divmod(frame.numel(), 8)
    if rest:
        raise ValueError(f"a checksum needs whole words of 8 bytes, not {frame.numel()} bytes")
    return int(np.uint64(loops.checksum(_address(frame, dtype=torch.uint8), words, skip)).astype(np.int64))


def warm(widths: Iterable[int]) -> None:
    """Compile every loop for these widths by running it on a few elements."""
    wanted = set(widths)
    for dtype in (dtype for dtype in SAMPLES if dtype.itemsize in wanted):
        flat, bits = _One(torch.zeros(4, dtype=dtype, device="cpu")), torch.zeros(4, dtype=dtype, device="cpu")
        for counter in _COUNTERS:
            positions = torch.arange(4, dtype=counter, device="cpu")
            sorted_below(positions, 4)
            scatter(flat, positions, bits)
            put(bits, positions, gather(bits, positions))
        diff(flat, 0, 4, bits, torch.zeros(4, dtype=torch.int32, device="cpu"), bits.clone())
        write(flat, 0, bits)
        read(flat, 0, bits)
    positions = torch.arange(4, dtype=torch.int32, device="cpu")
    decode_u16(encode_u16(positions, 4), 4, 4, positions)
    checksum(torch.zeros(8, dtype=torch.uint8, device="cpu"))


class _One:
    """One contiguous tensor as a `Flat`, to warm the loops with."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensors = (tensor,)
        self.starts = np.array([0, tensor.numel()])
        self.addresses = np.array([tensor.data_ptr()])
        self.strided: tuple[int, ...] = ()
        self.width = tensor.element_size()

    def __len__(self) -> int:
        return len(self.tensors[0])

    def view(self, index: int) -> Tensor:
        return self.tensors[index]

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        yield 0, begin, end


def _address(tensor: Tensor, least: int = 0, dtype: torch.dtype | None = None, *, width: int | None = None) -> int:
    """Return where a tensor lies, having checked that a loop may treat it as `least` contiguous elements of this dtype or width."""
    fits = tensor.dtype == dtype if dtype is not None else width is None or tensor.element_size() == width
    if not (fits and tensor.is_cpu and tensor.dim() == 1 and tensor.is_contiguous() and tensor.numel() >= least):
        wanted = dtype or (f"{width}-byte elements" if width else tensor.dtype)
        raise ValueError(f"expected >= {least} contiguous {wanted} on the CPU in one dimension, got {tensor.dtype}{list(tensor.shape)}")
    return tensor.data_ptr()


def _check_range(flat: Flat, begin: int, end: int) -> None:
    if not 0 <= begin <= end <= len(flat):
        raise IndexError(f"elements [{begin}, {end}) are not within the {len(flat)} of the flat array")


def _check_done(done: int, positions: Tensor, length: int) -> None:
    if done < positions.numel():
        raise IndexError(f"position {int(positions[done])} is not within [0, {length})")


def _readable(flat: Flat, begin: int, end: int) -> tuple[np.ndarray, list[Tensor]]:
    """Return the table's addresses with copies in place of strided tensors in [begin, end), and the copies, to be kept alive."""
    if not flat.strided:
        return flat.addresses, []
    addresses, copies = flat.addresses.copy(), []
    for index in flat.strided:
        start = int(flat.starts[index])
        low, high = max(begin, start) - start, min(end, int(flat.starts[index + 1])) - start
        if low < high:
            copies.append(torch_ops.read_part(flat.view(index), low, high))
            addresses[index] = copies[-1].data_ptr() - low * flat.width
    return addresses, copies


def bump(flat: Flat, indices: np.ndarray) -> None:
    """Move the version counters of tensors whose memory was written directly (inference tensors have none, and are passed over)."""
    written = indices[flat.addresses[indices] != 0].tolist()
    torch.autograd.graph.increment_version([flat.tensors[index] for index in written])
