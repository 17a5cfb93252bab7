"""Kernels for CPU tensors that need an index map; the loops are in `index_map_loops.py` and
`dense_loops.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.cpu import arguments as arrays
from dte_dist.kernels.cpu import dense_loops, index_map_loops
from dte_dist.kernels.cpu.arguments import SAMPLES, address
from dte_dist.kernels.cpu.threads import parallel_for
from dte_dist.kernels.cpu.value_codecs import scatter_add
from dte_dist.kernels.identity import Identity
from dte_dist.kernels.interface import Flat, Tables
from dte_dist.kernels.table import Table, addresses_of

__all__ = [
    "digest",
    "gather_dense",
    "gather_dense_flat",
    "patch",
    "precompile",
    "precompile_patch",
    "scatter_dense",
    "tables_at",
    "translate",
]

_known: Final[WeakKeyDictionary[Tables, np.ndarray]] = WeakKeyDictionary()


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
        return low, index_map_loops.translate(sample, width, table, entry, first, *where)

    found = arrays.compact(parallel_for(part, count, least=arrays.RANDOM), (to, 8), (new, width))
    if 2 * found < count:  # what is returned is kept until the vote: let it be no larger than it needs
        return out[:found].clone(), kept[:found].clone()
    return out[:found], kept[:found]


def scatter_dense(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy the dense bits of source positions [first, first + len(bits)) to where `flat`, a receiver's space,
    holds them.
    """
    arrays.bump(flat, _copy(index_map, first, bits, arrays.bits_table(flat), True))


def gather_dense(index_map: Tables, first: int, bits: Tensor, array: Tensor) -> None:
    """Copy to `bits` what `array`, a receiver's space in one piece, holds of source positions [first, first +
    len(bits)).
    """
    _copy(index_map, first, bits, arrays.OneTensor(array).table, False)


def gather_dense_flat(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy to `bits` what `flat`, a receiver's space, holds of a source's positions from `first` on: the
    reverse of `scatter_dense`.
    """
    _copy(index_map, first, bits, arrays.bits_table(flat), False)


def _copy(index_map: Tables, first: int, bits: Tensor, table: Table, inward: bool) -> np.ndarray:
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
        dense_loops.copy_dense(sample, width, at, entry, *where, marks, inward)

    parallel_for(part, len(bits), least=arrays.STREAM // width)
    return np.flatnonzero(touched)


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
    tables, there = tables_at(index_map), arrays.bits_table(flat).address

    def part(low: int, high: int) -> bool:
        entry = int(np.searchsorted(index_map.end, first, side="right"))
        return index_map_loops.patch(
            sample, width, tables, entry, first, at, blocks, by, low, high, there, marks, relative
        )

    sound = all(parallel_for(part, count, least=arrays.RANDOM))
    arrays.bump(flat, np.flatnonzero(touched))
    if not sound:
        raise IndexError(f"a table leads out of the {len(flat)} elements of a flat array")


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
    dense_loops.digest(SAMPLES[bits.dtype], bits.element_size(), tables_at(index_map), entry, *where)


def tables_at(index_map: Tables) -> int:
    """Return where the loops find the arrays of an index map: always the same place, whichever thread asks
    first.
    """
    found = _known.get(index_map)
    if found is None:  # of two threads that come here at once, one keeps its table, and both return that
        found = _known.setdefault(index_map, np.append(addresses_of(*index_map.tables()), len(index_map.end)))
    return int(found.ctypes.data)


def precompile(widths: Iterable[int]) -> None:
    """Compile every loop of translation for these widths by running it on one element."""
    wanted = set(widths)
    identity = Identity(1)
    for dtype in (dtype for dtype in SAMPLES if dtype.itemsize in wanted):
        bits = torch.zeros(1, dtype=dtype, device="cpu")
        translate(identity, 0, torch.zeros(1, dtype=torch.int32, device="cpu"), bits)
        scatter_dense(identity, 0, bits, arrays.OneTensor(bits.clone()))
        digest(identity, 0, bits, np.array([0, 1]), np.zeros(1, np.int64))


def precompile_patch(widths: Iterable[int]) -> None:
    """Compile every loop that goes to where elements are, for these widths."""
    for bits in arrays.zeros(widths):
        scatter_add(arrays.OneTensor(bits), torch.arange(3, device="cpu"), bits.clone())
        patch(
            Identity(1),
            0,
            torch.zeros(1, dtype=torch.int32, device="cpu"),
            bits[:1],
            arrays.OneTensor(bits),
            relative=False,
        )
