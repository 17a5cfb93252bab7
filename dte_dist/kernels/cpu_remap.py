"""Kernels for CPU tensors that need a table of translation; the loops are in `kernels.remap_loops`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, Tables, remap_loops
from dte_dist.kernels import torch_remap as fallback
from dte_dist.kernels.cpu import SAMPLES, _One, bump

__all__ = ["fetch", "place", "translate", "warm"]


def translate(remap: Tables, first: int, positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Translate positions of a source's flat space into a receiver's, dropping those it does not hold.

    Args:
        remap: the tables.
        first: position that the given positions count from.
        positions: int32, ascending.
        bits: one bit pattern per position.

    Returns:
        int64 positions in the receiver's space, and their bits.
    """
    count = len(positions)
    out, kept = torch.empty(count, dtype=torch.int64, device="cpu"), torch.empty_like(bits)
    entry = int(np.searchsorted(remap.end, first, side="right"))
    found = remap_loops.translate(
        remap.tables(), entry, SAMPLES[bits.dtype], first, positions.data_ptr(), bits.data_ptr(), count, out.data_ptr(), kept.data_ptr()
    )
    if 2 * found < count:  # what is returned is kept until the vote: let it be no larger than it needs
        return out[:found].clone(), kept[:found].clone()
    return out[:found], kept[:found]


def place(remap: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy the dense bits of source positions [first, first + len(bits)) to where `flat`, a receiver's space, holds them."""
    if flat.strided:
        fallback.place(remap, first, bits, flat)
        return
    touched = np.zeros(len(flat.tensors), np.bool_)
    _copy(remap, first, bits, (flat.starts, flat.addresses, touched), True)
    bump(flat, np.flatnonzero(touched))


def fetch(remap: Tables, first: int, bits: Tensor, array: Tensor) -> None:
    """Copy to `bits` what `array`, a receiver's space in one piece, holds of source positions [first, first + len(bits))."""
    table = np.array([0, len(array)]), np.array([array.data_ptr()]), np.zeros(1, np.bool_)
    _copy(remap, first, bits, table, False)


def _copy(remap: Tables, first: int, bits: Tensor, table: tuple[np.ndarray, np.ndarray, np.ndarray], inward: bool) -> None:
    entry = int(np.searchsorted(remap.end, first, side="right"))
    remap_loops.place(remap.tables(), entry, bits.element_size(), first, len(bits), bits.data_ptr(), *table, inward)


def warm(widths: Iterable[int]) -> None:
    """Compile every loop of translation for these widths by running it on one element."""
    wanted = set(widths)
    for dtype in (dtype for dtype in SAMPLES if dtype.itemsize in wanted):
        bits = torch.zeros(1, dtype=dtype, device="cpu")
        translate(_Identity(), 0, torch.zeros(1, dtype=torch.int32, device="cpu"), bits)
        place(_Identity(), 0, bits, _One(bits.clone()))


class _Identity:
    """Tables that leave one position where it is, to warm the loops with."""

    def __init__(self) -> None:
        zero, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
        self.begin, self.end, self.shift, self.origin, self.axis, self.axes = zero, zero + 1, zero, zero, zero, zero
        self.extent, self.stride, self.segment, self.low, self.high, self.target = none, none, zero, none, none, none

    def tables(self) -> tuple[np.ndarray, ...]:
        return (
            self.begin, self.end, self.shift, self.origin, self.axis, self.axes, self.extent, self.stride, self.segment,
            self.low, self.high, self.target,
        )  # fmt: skip
