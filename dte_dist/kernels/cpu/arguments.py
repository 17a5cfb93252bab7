"""CPU memory as the numba loops want it: what `scan.py`, `index_map.py` and the codecs share.

Arguments become addresses once they have been checked, dtypes become samples, and parts of work that threads
have done are put together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.cpu import scan_loops
from dte_dist.kernels.interface import Flat
from dte_dist.kernels.table import PLAIN, Table
from dte_dist.kernels.torch.scan import gathered

__all__ = [
    "COUNTERS",
    "RANDOM",
    "SAMPLES",
    "STREAM",
    "OneTensor",
    "address",
    "bits_table",
    "bump",
    "check_all",
    "check_range",
    "compact",
    "is_wide",
    "readable",
    "rounds_as_torch",
    "zeros",
]

SAMPLES: Final = {
    torch.uint8: np.uint8(0),
    torch.int16: np.uint16(0),
    torch.int32: np.uint32(0),
    torch.int64: np.uint64(0),
}
"""For each dtype of bits, the sample that tells a numba loop its type."""

STREAM: Final = 1 << 18
"""Bytes to go through in order that are worth a thread."""

RANDOM: Final = 1 << 12
"""Positions to go to that are worth a thread."""

COUNTERS: Final = {torch.int32: np.int32(0), torch.int64: np.int64(0)}
"""For each dtype of positions, its sample."""


def address(
    tensor: Tensor, least: int = 0, dtype: torch.dtype | None = None, *, width: int | None = None
) -> int:
    """Return where a tensor lies, having checked that a loop may treat it as `least` contiguous elements of
    this dtype or width.
    """
    fits = tensor.dtype == dtype if dtype is not None else width is None or tensor.element_size() == width
    if not (
        fits and tensor.is_cpu and tensor.dim() == 1 and tensor.is_contiguous() and tensor.numel() >= least
    ):
        wanted = dtype or (f"{width}-byte elements" if width else tensor.dtype)
        raise ValueError(
            f"expected >= {least} contiguous {wanted} on the CPU in one dimension, got "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
    return tensor.data_ptr()


def is_wide(positions: Tensor) -> bool:
    """Return whether positions are int64; they must else be int32."""
    if positions.dtype not in COUNTERS:
        raise ValueError(f"positions are int32 or int64, not {positions.dtype}")
    return positions.dtype == torch.int64


def check_range(flat: Flat, begin: int, end: int) -> None:
    """Raise IndexError unless [begin, end) are elements of `flat`."""
    if not 0 <= begin <= end <= len(flat):
        raise IndexError(f"elements [{begin}, {end}) are not within the {len(flat)} of the flat array")


def check_all(missing: list[int], positions: Tensor, length: int) -> None:
    """Raise IndexError if a part of the positions was not gone through to its end: it stopped that many
    before it.
    """
    if any(missing):
        raise IndexError(f"a position of {positions.numel()} is not within [0, {length})")


def bits_table(flat: Flat) -> Table:
    """Return the table of tensors whose own bits are read or written; what is cast as it is read has none."""
    if flat.dtypes is not None:
        raise ValueError("tensors that are read as another dtype can only be read")
    return flat.table


def readable(flat: Flat, begin: int, end: int) -> tuple[Table, Tensor | None]:
    """Return the table with copies of what cannot be read in place in [begin, end), and their memory, to be
    kept alive.

    These are tensors that torch must cast first, and strided ones: torch copies them faster than a loop could
    look at them.
    """
    table = flat.table
    if flat.dtypes is None and not len(table.shapes):
        return table, None
    indices, low, high = flat.spans(begin, end)
    mine = flat.cast[indices] | (table.kinds[indices] > PLAIN)
    if not mine.any():
        return table, None
    indices, low, high = indices[mine], low[mine], high[mine]
    bits = gathered(flat, indices, low, high)
    return table.relocated(indices, bits.data_ptr() + flat.width * (np.cumsum(high - low) - high)), bits


def compact(parts: list[tuple[int, int]], *arrays: tuple[int, int]) -> int:
    """Move what several parts of a loop have written together, and return how many elements there are.

    Args:
        parts: (first, count) of each: it has written `count` elements of every array, from element `first`
            on.
        arrays: (address, bytes of an element) of each.
    """
    if len(parts) > 1:
        first, count = np.array(parts, np.int64).T.copy()
        for address, width in arrays:
            scan_loops.compact(width, first.ctypes.data, count.ctypes.data, len(parts), address)
    return sum(count for _, count in parts)


def bump(flat: Flat, indices: np.ndarray) -> None:
    """Move the version counters of tensors whose memory was written directly (inference tensors have none,
    and are passed over).
    """
    torch.autograd.graph.increment_version([flat.tensors[index] for index in indices.tolist()])
    flat.writes[indices] += 1


@cache
def rounds_as_torch() -> bool:
    """Return whether the loops cast fp32 to bf16 as torch does on this processor, bit for bit (they differ in
    what becomes of a NaN).
    """
    high, low = (
        torch.arange(1 << 16, dtype=torch.int32, device="cpu") << 16,
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF],
    )
    bits = (high[:, None] | torch.tensor(low, dtype=torch.int32, device="cpu")).view(-1)
    mine = torch.empty(len(bits), dtype=torch.int16, device="cpu")
    scan_loops.to_bf16(bits.data_ptr(), len(bits), mine.data_ptr())
    return torch.equal(mine, bits.view(torch.float32).to(torch.bfloat16).view(torch.int16))


class OneTensor:
    """One contiguous tensor as a `Flat`, with as little as the CPU kernels need."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensors = (tensor,)
        self.starts = np.array([0, tensor.numel()])
        self.table = Table(self.tensors, self.starts, np.array([tensor.data_ptr()]), np.ones(1, np.bool_))
        self.dtypes: tuple[torch.dtype, ...] | None = None
        self.cast = np.zeros(1, np.bool_)
        self.writes = np.zeros(1, np.int64)
        self.device = tensor.device
        self.width = tensor.element_size()

    def __len__(self) -> int:
        return len(self.tensors[0])

    def view(self, index: int) -> Tensor:
        return self.tensors[index]

    def spans(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.zeros(1, np.int64), np.array([begin]), np.array([end])


def zeros(widths: Iterable[int]) -> list[Tensor]:
    wanted = set(widths)
    return [torch.zeros(3, dtype=dtype, device="cpu") for dtype in SAMPLES if dtype.itemsize in wanted]
