"""Bits of many elements with plain torch ops: planes of them, their ranks, low bits of integers.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from dte_dist.kernels.sizes import bitmap_nbytes

__all__ = ["join_low", "pack", "pad", "plane", "ranks", "split_low", "unpack"]

_GATHER: Final = 0x0102040810204080
_REPEAT: Final = 0x0101010101010101
_SELECT: Final = 0x8040201008040201 - (1 << 64)


def pad(stream: Tensor, multiple: int = 8) -> Tensor:
    """Fill a stream with zeros up to a multiple of some bytes."""
    return torch.nn.functional.pad(stream, (0, -len(stream) % multiple))


def plane(places: Tensor, count: int) -> Tensor:
    """Return words of bits, those at `places` set."""
    flags = torch.zeros(8 * bitmap_nbytes(count), dtype=torch.uint8, device=places.device)
    flags[places.to(torch.int64)] = 1
    return pack(flags)


def pack(flags: Tensor) -> Tensor:
    """Put 8 bytes of 0 or 1 into one, the first into the lowest bit."""
    return ((flags.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack(stream: Tensor) -> Tensor:
    """Return the bits of a stream as truth values."""
    return ((stream.to(torch.int64) * _REPEAT) & _SELECT).view(torch.uint8).ne(0)


def ranks(flags: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return int64[count] places where a flag is set, in order, and whether there are so many.

    Does not wait.
    """
    if not len(flags):
        return torch.zeros(count, dtype=torch.int64, device=flags.device), torch.full(
            (), count == 0, device=flags.device
        )
    rank = flags.cumsum(0)
    found = torch.zeros(count + 1, dtype=torch.int64, device=flags.device)
    slot = torch.where(flags & (rank <= count), rank - 1, count)
    found[slot] = torch.arange(len(flags), device=flags.device)
    return found[:count], rank[-1] == count


def split_low(values: Tensor, low: int) -> list[Tensor]:
    """Return the `low` lowest bits of integers: whole bytes as streams of bytes, then a plane of words for
    each further bit.
    """
    streams = [pad(((values >> shift) & 0xFF).to(torch.uint8)) for shift in range(0, low & -8, 8)]
    room = torch.zeros(8 * bitmap_nbytes(len(values)), dtype=torch.uint8, device=values.device)
    for bit in range(low & -8, low):
        room[: len(values)] = (values >> bit) & 1
        streams.append(pack(room))
    return streams


def join_low(stream: Tensor, count: int, low: int) -> tuple[Tensor, int]:
    """Return int64[count] of what `split_low` wrote, and how many bytes that was."""
    values, at = torch.zeros(count, dtype=torch.int64, device=stream.device), 0
    for bit in range(low):
        if bit >= low & -8:
            values |= unpack(stream[at : at + bitmap_nbytes(count)])[:count].to(torch.int64) << bit
            at += bitmap_nbytes(count)
        elif bit % 8 == 0:
            values |= stream[at : at + count].to(torch.int64) << bit
            at += count + -count % 8
    return values, at
