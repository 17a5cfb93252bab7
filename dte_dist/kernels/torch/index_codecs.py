"""The kernels of the index codecs with plain torch ops, for tensors of any device.

They write the same bytes as those of the CPU. Decoders know all sizes beforehand, so they never wait for the
device: the places of the bits that are set are found by their ranks, and whether a stream was sound stays on
the device; only of `again`, `count_again` has to wait once. Of the encoders, `split_again` waits once.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from dte_dist.kernels.torch.bits import join_low, pack, pad, plane, ranks, split_low, unpack
from dte_dist.kernels.torch.scan import strictly_increasing

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
    "split_again",
]

_BLOCK_BITS: Final = 16


def encode_u16(positions: Tensor, length: int) -> Tensor:
    """Write sorted positions below `length` as uint8: a uint32 count per block of 65536, then a uint16 offset
    each.
    """
    blocks = _blocks(length)
    # The end of the last block may be 2^31, which int32 cannot hold; `length` serves as well.
    borders = (
        (torch.arange(1, blocks + 1, device=positions.device) << _BLOCK_BITS)
        .clamp_(max=length)
        .to(torch.int32)
    )
    ends = torch.searchsorted(positions, borders, out_int32=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    offsets = (positions & 0xFFFF).to(torch.int16)  # few ops know uint16 on an accelerator
    return torch.cat([counts.view(torch.uint8), offsets.view(torch.uint8)])


def decode_u16(stream: Tensor, count: int, length: int, positions: Tensor) -> bool | Tensor:
    """Read what `encode_u16` wrote into `positions`.

    Return whether the stream is sound; safe for any bytes.
    """
    blocks = _blocks(length)
    if stream.numel() != 4 * blocks + 2 * count:
        return False
    counts, offsets = stream[: 4 * blocks].view(torch.int32), stream[4 * blocks :].view(torch.int16)
    ends = counts.cumsum(0, dtype=torch.int64)
    sound = (counts >= 0).all() & (counts.sum() == count)
    if not count:
        return sound
    # Unsound counts give block numbers that are wrong but in range.
    block = torch.searchsorted(ends, torch.arange(count, device=stream.device), right=True).clamp_(
        0, blocks - 1
    )
    positions.copy_((block << _BLOCK_BITS) | (offsets.to(torch.int64) & 0xFFFF))
    return sound & strictly_increasing(positions, length)


def check_u16(stream: Tensor, count: int, length: int) -> bool | Tensor:
    """Return whether a stream is such as `encode_u16` writes; safe for any bytes."""
    return decode_u16(stream, count, length, torch.empty(count, dtype=torch.int32, device=stream.device))


def encode_bitmap(positions: Tensor, length: int) -> Tensor:
    """Write a bit for each of `length` elements, in whole words."""
    return plane(positions, length)


def decode_bitmap(stream: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Read int32[count] positions, and say whether there are as many, all below `length`; safe for any
    bytes.
    """
    positions, sound = ranks(unpack(stream), count)
    return positions.to(torch.int32), sound & strictly_increasing(positions, length)


def encode_ef(positions: Tensor, length: int, low: int) -> Tensor:
    """Write the `low` lowest bits of each position, then the rest as differences in unary."""
    count = len(positions)
    places = (positions >> low).to(torch.int64) + torch.arange(count, device=positions.device)
    return torch.cat([*split_low(positions, low), plane(places, count + ((length - 1) >> low))])


def decode_ef(stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor, Tensor]:
    """Read int32[count] positions, and say whether they strictly increase below `length`; safe for any
    bytes.
    """
    lows, at = join_low(stream, count, low)
    places, sound = ranks(unpack(stream[at:]), count)
    high = places - torch.arange(count, device=stream.device)
    positions = high << low | lows
    return positions.to(torch.int32), sound & strictly_increasing(positions, length)


def split_again(previous: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bit for each previous position, set if it is one of `positions`, and those of `positions` that
    are new. Waits once.
    """
    return pack(pad(_among(previous, positions).to(torch.uint8), 64)), positions[~_among(positions, previous)]


def _among(values: Tensor, others: Tensor) -> Tensor:
    """Return which values are among others, which ascend."""
    if not len(others):
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return others[torch.searchsorted(others, values).clamp_(max=len(others) - 1)] == values


def count_again(plane: Tensor, size: int) -> int:
    """Return how many bits of `size` are set; -1 if one beyond them is. Waits once."""
    flags = unpack(plane)
    return int(torch.where(flags[size:].any(), -1, flags.sum()))


def join_again(previous: Tensor, plane: Tensor, fresh: Tensor, count: int) -> Tensor:
    """Return the previous positions whose bit is set and the fresh ones, together in order; they are `count`
    in number.
    """
    again, _ = ranks(unpack(plane)[: len(previous)], count - len(fresh))
    return torch.cat([previous[again], fresh]).sort()[0]


def _blocks(length: int) -> int:
    return -(-length >> _BLOCK_BITS)
