"""Kernels in plain torch ops, for tensors of any device; the functions are those of `kernels.cpu`, which documents them.

On an accelerator the host must not wait for the device more than it has to. So truth values and checksums stay on the device as
tensors of no dimension, and nothing here depends on what is in the data, except how many changes `diff` found and
which tensors a `scatter` touches: each of these waits once a call.

`read_part`, `write_part` and `put_into` work on one tensor of any strides; `kernels.cpu` uses them for those without an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat

__all__ = [
    "checksum", "decode_u16", "diff", "encode_u16", "gather", "put", "put_into", "read", "read_part", "scatter", "sorted_below",
    "write", "write_part",
]  # fmt: skip

_BLOCK_BITS: Final = 16
_FIRST: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_SECOND: Final = 0xFF51AFD7ED558CCD - (1 << 64)
_THIRD: Final = 0xC4CEB9FE1A85EC53 - (1 << 64)


def diff(flat: Flat, begin: int, end: int, known: Tensor, positions: Tensor, bits: Tensor) -> int:  # noqa: PLR0917
    """Compare elements [begin, end) of `flat` with `known`; write positions and bits and return how many differ. Waits once."""
    live = _live(flat, begin, end)
    changed = torch.nonzero(live != known).view(-1)
    count = changed.numel()
    positions[:count] = changed
    bits[:count] = live[changed]
    return count


def read(flat: Flat, begin: int, out: Tensor) -> None:
    """Copy elements [begin, begin + len(out)) of `flat` to `out`."""
    out.copy_(_live(flat, begin, begin + out.numel()))


def write(flat: Flat, begin: int, bits: Tensor) -> None:
    """Copy `bits` to elements [begin, begin + len(bits)) of `flat`."""
    done = 0
    for index, low, high in flat.spans(begin, begin + bits.numel()):
        write_part(flat, index, low, bits[done : done + high - low])
        done += high - low


def scatter(flat: Flat, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position in `flat`. Waits once, or twice if the positions are not sorted.

    Raises:
        IndexError: a position is outside `flat`; nothing has been written.
    """
    starts = torch.from_numpy(flat.starts).to(positions.device, non_blocking=True)
    positions = positions.to(torch.int64)
    ascending, *bounds = torch.cat([sorted_below(positions, len(flat)).view(1), torch.searchsorted(positions, starts)]).tolist()
    if not ascending:
        positions, order = positions.sort()
        bits = bits[order]
        bounds = torch.searchsorted(positions, starts).tolist()
    if bounds[0] != 0 or bounds[-1] != positions.numel():
        raise IndexError(f"positions are not all within [0, {len(flat)})")
    for index in np.flatnonzero(np.diff(bounds)).tolist():
        here = slice(bounds[index], bounds[index + 1])
        put_into(flat, index, positions[here] - int(flat.starts[index]), bits[here])


def put(array: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position in one contiguous array; a position outside it is an error of the device."""
    with torch.inference_mode(array.is_inference()):
        array.index_copy_(0, positions.to(torch.int64), bits)


def gather(array: Tensor, positions: Tensor) -> Tensor:
    """Return the elements of an array at these positions; a position outside it is an error of the device."""
    return array.index_select(0, positions)


def encode_u16(positions: Tensor, length: int) -> Tensor:
    """Write sorted positions below `length` as uint8: a uint32 count per block of 65536, then a uint16 offset each."""
    blocks = _blocks(length)
    # The end of the last block may be 2^31, which int32 cannot hold; `length` serves as well.
    borders = (torch.arange(1, blocks + 1, device=positions.device) << _BLOCK_BITS).clamp_(max=length).to(torch.int32)
    ends = torch.searchsorted(positions, borders, out_int32=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    offsets = (positions & 0xFFFF).to(torch.int16)  # few ops know uint16 on an accelerator
    return torch.cat([counts.view(torch.uint8), offsets.view(torch.uint8)])


def decode_u16(stream: Tensor, count: int, length: int, positions: Tensor) -> bool | Tensor:
    """Read what `encode_u16` wrote into `positions`. Return whether the stream is sound; safe for any bytes."""
    blocks = _blocks(length)
    if stream.numel() != 4 * blocks + 2 * count:
        return False
    counts, offsets = stream[: 4 * blocks].view(torch.int32), stream[4 * blocks :].view(torch.int16)
    ends = counts.cumsum(0, dtype=torch.int64)
    sound = (counts >= 0).all() & (counts.sum() == count)
    if not count:
        return sound
    # Unsound counts give block numbers that are wrong but in range.
    block = torch.searchsorted(ends, torch.arange(count, device=stream.device), right=True).clamp_(0, blocks - 1)
    positions.copy_((block << _BLOCK_BITS) | (offsets.to(torch.int64) & 0xFFFF))
    return sound & sorted_below(positions, length)


def sorted_below(positions: Tensor, length: int) -> Tensor:
    """Return whether positions strictly increase within [0, length)."""
    if not positions.numel():
        return torch.ones((), dtype=torch.bool, device=positions.device)
    first, last = positions[0].to(torch.int64), positions[-1].to(torch.int64)
    return (positions[1:] > positions[:-1]).all() & (first >= 0) & (last < length)


def checksum(frame: Tensor, skip: int = -1) -> Tensor:
    """Return 64 bits over the 8-byte words of a uint8 tensor, as an int64 tensor of no dimension; word `skip` counts as zero."""
    if frame.numel() % 8:
        raise ValueError(f"a checksum needs whole words of 8 bytes, not {frame.numel()} bytes")
    words = (frame if frame.data_ptr() % 8 == 0 and frame.storage_offset() % 8 == 0 else frame.clone()).view(torch.int64)
    mixed = torch.arange(1, words.numel() + 1, device=frame.device).mul_(_FIRST)
    if skip < 0:
        mixed += words
    else:
        mixed[:skip] += words[:skip]
        mixed[skip + 1 :] += words[skip + 1 :]
    mixed = _fold(mixed).mul_(_SECOND)
    mixed = _fold(mixed).mul_(_THIRD)
    return _fold(mixed).sum()


def read_part(view: Tensor, low: int, high: int) -> Tensor:
    """Return elements [low, high), in row-major order, of one tensor of any strides, contiguous: a view if the tensor is."""
    rows, at = _around(view, low, high)
    return rows.contiguous().view(-1)[at : at + high - low]


def write_part(flat: Flat, index: int, low: int, bits: Tensor) -> None:
    """Copy `bits` to elements [low, low + len(bits)), in row-major order, of tensor `index`, of any strides."""
    view = _writable(flat, index)
    rows, at = _around(view, low, low + bits.numel())
    if rows.numel() != bits.numel():
        merged = rows.flatten().clone()
        merged[at : at + bits.numel()] = bits
        bits = merged
    with torch.inference_mode(view.is_inference()):
        rows.copy_(bits.view(rows.shape))


def put_into(flat: Flat, index: int, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position (int64, in row-major order) of tensor `index`, of any strides."""
    view = _writable(flat, index)
    with torch.inference_mode(view.is_inference()):
        if view.is_contiguous():
            view.view(-1).index_copy_(0, positions, bits)
        else:
            view.index_put_(_coordinates(positions, view.shape), bits)


def _writable(flat: Flat, index: int) -> Tensor:
    """Return a view that moves the version counter of its tensor when written: one made in inference mode has its own."""
    with torch.inference_mode(False):
        return flat.view(index)


def _around(view: Tensor, low: int, high: int) -> tuple[Tensor, int]:
    """Narrow a tensor to rows that hold elements [low, high); return them and where `low` is among them."""
    if view.is_contiguous():
        return view.view(-1)[low:high], 0
    row = view[0].numel()
    first, last = low // row, -(-high // row)
    low, high = low - first * row, high - first * row
    if last - first == 1 and view.dim() > 1:
        return _around(view[first], low, high)
    return view[first:last], low


def _coordinates(positions: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return what `torch.unravel_index` returns, which waits for the device."""
    coordinates = []
    for size in reversed(shape):
        coordinates.append(positions % size)
        positions = positions // size
    return tuple(reversed(coordinates))


def _live(flat: Flat, begin: int, end: int) -> Tensor:
    """Return elements [begin, end) as one contiguous tensor: a view if they lie in one contiguous tensor."""
    parts = [read_part(flat.view(index), low, high) for index, low, high in flat.spans(begin, end)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else flat.view(0).new_empty(0)


def _blocks(length: int) -> int:
    return -(-length >> _BLOCK_BITS)


def _fold(words: Tensor) -> Tensor:
    """Return x ^ (x >> 33), the shift being logical: torch shifts int64 with its sign, which the mask removes."""
    return words ^ ((words >> 33) & 0x7FFFFFFF)
