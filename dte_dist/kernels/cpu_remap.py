"""Kernels for CPU tensors that need a table of translation; the loops are in `kernels.remap_loops`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, Tables, digest_loops, remap_loops
from dte_dist.kernels import cpu_arrays as arrays
from dte_dist.kernels.cpu_arrays import SAMPLES
from dte_dist.kernels.identity import Identity
from dte_dist.kernels.table import Table, addresses_of
from dte_dist.kernels.threads import split

__all__ = ["copy", "digest", "fetch", "place", "tables_at", "translate", "warm"]


def translate(index_map: Tables, first: int, positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Translate positions of a source's flat space into a receiver's, dropping those it does not hold.

    Args:
        index_map: the tables.
        first: position that the given positions count from.
        positions: int32, ascending.
        bits: one bit pattern per position.

    Returns:
        int64 positions in the receiver's space, and their bits.
    """
    count, width, sample = len(positions), bits.element_size(), SAMPLES[bits.dtype]
    out, kept = torch.empty(count, dtype=torch.int64, device="cpu"), torch.empty_like(bits)
    at, old = arrays.address(positions, dtype=torch.int32), arrays.address(bits, count)
    to, new = out.data_ptr(), kept.data_ptr()
    table = tables_at(index_map)

    def part(low: int, high: int) -> tuple[int, int]:
        entry = int(
            np.searchsorted(index_map.end, first + int(positions[low]) if high > low else first, side="right")
        )
        where = (at + 4 * low, old + width * low, high - low, to + 8 * low, new + width * low)
        return low, remap_loops.translate(sample, width, table, entry, first, *where)

    found = arrays.join(split(part, count, least=arrays.RANDOM), (to, 8), (new, width))
    if 2 * found < count:  # what is returned is kept until the vote: let it be no larger than it needs
        return out[:found].clone(), kept[:found].clone()
    return out[:found], kept[:found]


def place(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy the dense bits of source positions [first, first + len(bits)) to where `flat`, a receiver's space,
    holds them.
    """
    arrays.bump(flat, copy(index_map, first, bits, arrays.bits_table(flat), True))


def fetch(index_map: Tables, first: int, bits: Tensor, array: Tensor) -> None:
    """Copy to `bits` what `array`, a receiver's space in one piece, holds of source positions [first, first +
    len(bits)).
    """
    copy(index_map, first, bits, arrays.OneTensor(array).table, False)


def copy(index_map: Tables, first: int, bits: Tensor, table: Table, inward: bool) -> np.ndarray:
    """Copy between dense bits and a table; return which tensors were met."""
    width, sample, touched = (
        bits.element_size(),
        SAMPLES[bits.dtype],
        np.zeros(len(table.addresses), np.bool_),
    )
    at, there, marks = tables_at(index_map), bits.data_ptr(), touched.ctypes.data

    def part(low: int, high: int) -> None:
        entry = int(np.searchsorted(index_map.end, first + low, side="right"))
        where = (first + low, high - low, there + width * low, table.address)
        remap_loops.place(sample, width, at, entry, *where, marks, inward)

    split(part, len(bits), least=arrays.STREAM // width)
    return np.flatnonzero(touched)


def digest(index_map: Tables, first: int, bits: Tensor, starts: np.ndarray, sums: np.ndarray) -> None:
    """Add the hashes of dense bits, those of source positions from `first` on, to the digests of a receiver's
    pieces.

    Args:
        index_map: the tables; positions that they drop are left out.
        first: position of the first.
        bits: one bit pattern for each.
        starts: int64[pieces + 1], ascending: where the receiver's pieces begin.
        sums: int64[pieces], to be added to, modulo 2^64.
    """
    if not (starts.dtype == sums.dtype == np.int64 and len(starts) == len(sums) + 1):
        raise ValueError(
            f"expected int64 starts and sums of {len(sums)} pieces, got "
            f"{starts.dtype}[{len(starts)}] and {sums.dtype}"
        )
    if not len(bits) or not len(sums):
        return
    entry = int(np.searchsorted(index_map.end, first, side="right"))
    where = (first, len(bits), arrays.address(bits), starts.ctypes.data, len(sums), sums.ctypes.data)
    digest_loops.digest(SAMPLES[bits.dtype], bits.element_size(), tables_at(index_map), entry, *where)


_known: Final[WeakKeyDictionary[Tables, np.ndarray]] = WeakKeyDictionary()


def tables_at(index_map: Tables) -> int:
    """Return where the loops find the arrays of an index map: always the same place, whichever thread asks
    first.
    """
    found = _known.get(index_map)
    if found is None:  # of two threads that come here at once, one keeps its table, and both return that
        found = _known.setdefault(index_map, np.append(addresses_of(*index_map.tables()), len(index_map.end)))
    return int(found.ctypes.data)


def warm(widths: Iterable[int]) -> None:
    """Compile every loop of translation for these widths by running it on one element."""
    wanted = set(widths)
    identity = Identity(1)
    for dtype in (dtype for dtype in SAMPLES if dtype.itemsize in wanted):
        bits = torch.zeros(1, dtype=dtype, device="cpu")
        translate(identity, 0, torch.zeros(1, dtype=torch.int32, device="cpu"), bits)
        place(identity, 0, bits, arrays.OneTensor(bits.clone()))
        digest(identity, 0, bits, np.array([0, 1]), np.zeros(1, np.int64))
