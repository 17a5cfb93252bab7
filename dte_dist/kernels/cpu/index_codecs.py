"""Kernels of the index codecs for CPU tensors; the loops are in `index_codec_loops.py` and `reuse_loops.py`.

Encoders return new uint8; what they are given may be used again at once. Decoders take any bytes of the right
size, and return what they read together with whether it is sound; where it is not, they have read and written
only what is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.cpu import index_codec_loops, reuse_loops
from dte_dist.kernels.cpu.arguments import address
from dte_dist.kernels.sizes import best_low, bitmap_nbytes, ef_size, low_size

__all__ = [
    "check_u16",
    "count_again",
    "decode_bitmap",
    "decode_ef",
    "decode_u16",
    "encode_bitmap",
    "encode_ef",
    "encode_u16",
    "join_again",
    "precompile",
    "read_ef",
    "room_for",
    "split_again",
    "write_ef",
]

_BLOCK: Final = 1 << 16


def encode_u16(positions: Tensor, length: int) -> Tensor:
    """Write sorted positions below `length` as uint8: a uint32 count per block of 65536, then a uint16 offset
    each.

    Example:
        >>> encode_u16(torch.tensor([1, 65536], dtype=torch.int32), 70000).tolist()
        [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    """
    count, blocks = positions.numel(), -(-length // _BLOCK)
    stream = torch.empty(4 * blocks + 2 * count, dtype=torch.uint8, device="cpu")
    index_codec_loops.encode_u16(address(positions, dtype=torch.int32), count, blocks, stream.data_ptr())
    return stream


def check_u16(stream: Tensor, count: int, length: int) -> bool:
    """Return whether the size of a stream, its counts and the order of its positions are such as `encode_u16`
    writes; for any bytes.
    """
    blocks = -(-length // _BLOCK)
    if stream.numel() != 4 * blocks + 2 * count:
        return False
    return index_codec_loops.check_u16(address(stream, dtype=torch.uint8), count, blocks, length)


def decode_u16(stream: Tensor, count: int, length: int, positions: Tensor) -> bool:
    """Read what `encode_u16` wrote into `positions` (int32[count]).

    Returns:
        What `check_u16` does; if that is False, nothing is read.
    """
    if not check_u16(stream, count, length):
        return False
    index_codec_loops.decode_u16(
        stream.data_ptr(), count, -(-length // _BLOCK), address(positions, count, torch.int32)
    )
    return True


def encode_bitmap(positions: Tensor, length: int) -> Tensor:
    """Write a bit for each of `length` elements, in whole words.

    Raises:
        ValueError: positions do not ascend below `length`; not all such are noticed.
    """
    stream = torch.empty(bitmap_nbytes(length), dtype=torch.uint8, device="cpu")
    _set_bits(positions, length, (0, 0), stream.data_ptr(), len(stream))
    return stream


def _set_bits(positions: Tensor, length: int, shape: tuple[int, int], at: int, size: int) -> None:
    if not index_codec_loops.set_bits(
        address(positions, dtype=torch.int32), len(positions), *shape, size, at
    ):
        raise ValueError(f"positions do not ascend within [0, {length})")


def decode_bitmap(stream: Tensor, count: int, length: int) -> tuple[Tensor, bool]:
    """Read int32[count] positions, and say whether there are as many, all below `length`."""
    positions = room_for(count)
    sound = index_codec_loops.get_bits(
        address(stream, bitmap_nbytes(length), torch.uint8),
        bitmap_nbytes(length),
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
    write_ef(positions, length, low, stream.data_ptr(), len(stream))
    return stream


def write_ef(positions: Tensor, length: int, low: int, at: int, size: int) -> None:
    lows = low_size(len(positions), low)
    index_codec_loops.split_low(address(positions, dtype=torch.int32), len(positions), low, at)
    _set_bits(positions, length, (low, 1), at + lows, size - lows)


def decode_ef(stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor, bool]:
    """Read int32[count] positions, and say whether they strictly increase below `length`."""
    positions = room_for(count)
    sound = read_ef(
        address(stream, ef_size(count, length, low), torch.uint8), count, length, low, positions.data_ptr()
    )
    return positions[:count], sound


def read_ef(at: int, count: int, length: int, low: int, positions: int) -> bool:
    """Read positions into memory that has room for a multiple of 64."""
    size, lows = ef_size(count, length, low), low_size(count, low)
    if not index_codec_loops.get_bits(at + lows, size - lows, count, low, 1, (length - 1) >> low, positions):
        return False
    if low:
        index_codec_loops.join_low(at, count, low, positions)
    return index_codec_loops.strictly_increasing(np.int32(0), positions, count, length)


def split_again(previous: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bit for each previous position, set if it is one of `positions`, and those of `positions` that
    are new.

    Args:
        previous, positions: int32, ascending.
    """
    size, count = len(previous), len(positions)
    plane = torch.zeros(bitmap_nbytes(size), dtype=torch.uint8, device="cpu")
    fresh = torch.empty(count, dtype=torch.int32, device="cpu")
    where = address(previous, dtype=torch.int32), size, address(positions, dtype=torch.int32), count
    return plane, fresh[: reuse_loops.split_again(*where, plane.data_ptr(), fresh.data_ptr())]


def count_again(plane: Tensor, size: int) -> int:
    """Return how many bits of `size` are set; -1 if one beyond them is."""
    return reuse_loops.count_again(address(plane, bitmap_nbytes(size), torch.uint8), size)


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
        address(plane, bitmap_nbytes(len(previous)), torch.uint8),
    )
    reuse_loops.join_again(
        *bits, address(fresh, dtype=torch.int32), len(fresh), positions.data_ptr(), count, room.data_ptr()
    )
    return positions


def room_for(count: int, *, zero: bool = False) -> Tensor:
    """Return int32 for a multiple of 64 elements: loops may write to all of it."""
    make = torch.zeros if zero else torch.empty
    return make((count + 63) & -64, dtype=torch.int32, device="cpu")


def precompile(_widths: Iterable[int]) -> None:
    """Compile every loop of the streams by running it on a few positions."""
    few = torch.tensor([0, 1, 2], dtype=torch.int32, device="cpu")
    decode_u16(encode_u16(few, 3), 3, 3, few.clone())
    best_low(3, 99)
    decode_ef(encode_ef(few, 99, 1), 3, 99, 1)
    join_again(few, split_again(few, few)[0], few[:0], count_again(split_again(few, few)[0], 3))
