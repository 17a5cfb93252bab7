"""The kernels of the codecs with plain torch ops, for tensors of any device; the functions are those of
`kernels.cpu_codecs`.

They write the same bytes. Decoders know all sizes beforehand, so they never wait for the device: the places
of the bits that are set are found by their ranks, and whether a stream was sound stays on the device; only of
`again`, `count_again` has to wait once. Of the others, `measure`, `count_ulp8`, `split_again`,
`encode_planes` and `moved` wait once; `collect` twice, and `scatter_add` twice, or three times if positions
do not ascend, to learn which tensors they meet.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, Tables, torch_ops, torch_remap
from dte_dist.kernels.planes import CLASSES, Classes, Planes, bitmap_bytes, ef_size

__all__ = [
    "add",
    "collect",
    "count_again",
    "count_ulp8",
    "decode_bitmap",
    "decode_ef",
    "decode_planes",
    "decode_ulp8",
    "distances",
    "encode_bitmap",
    "encode_ef",
    "encode_planes",
    "encode_ulp8",
    "join_again",
    "measure",
    "moved",
    "narrow",
    "patch",
    "scatter_add",
    "split_again",
    "subtract",
    "widen",
]

_GATHER: Final = 0x0102040810204080
_REPEAT: Final = 0x0101010101010101
_SELECT: Final = 0x8040201008040201 - (1 << 64)
_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def subtract(bits: Tensor, known: Tensor) -> Tensor:
    """Return how far each bit pattern is from the known one, in the order, modulo the range of the dtype.

    Example:
        >>> subtract(torch.tensor([-0x8000], dtype=torch.int16), torch.tensor([0],
        ...     dtype=torch.int16)).tolist()
        [-1]
    """
    return (_ordered(bits) - _ordered(known)).view(bits.dtype)


def add(bits: Tensor, distances: Tensor) -> Tensor:
    """Return the bit pattern that is so far from each one: the reverse of `subtract`."""
    return _ordered(_ordered(bits) + _signed(distances)).view(bits.dtype)


def distances(old: Tensor, new: Tensor) -> Tensor:
    """Return how far bits have moved, as int32."""
    return _signed(subtract(new, old)).to(torch.int32)


def narrow(distances: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int32 distances in the dtype of bits of 1, 2 or 4 bytes."""
    return distances.to(_SIGNED[dtype.itemsize]).view(dtype)


def widen(distances: Tensor) -> Tensor:
    """Return distances, in the dtype of bits, as int32: the reverse of `narrow`."""
    return _signed(distances).to(torch.int32)


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
    """Write values to where `flat`, a receiver's space, holds them, or move what is there by them.

    Waits as what it calls.
    """
    if length is not None:
        stream, positions = positions, torch.empty(len(values), dtype=torch.int32, device=positions.device)
        torch_ops.decode_u16(stream, len(values), length, positions)
    where = torch_remap.translate(index_map, first, positions, values)
    (scatter_add if relative else torch_ops.scatter)(flat, *where)


def scatter_add(flat: Flat, positions: Tensor, distances: Tensor) -> None:
    """Move the bits at positions of `flat`."""
    torch_ops.scatter(flat, positions, moved(flat, positions, distances))


def moved(flat: Flat, positions: Tensor, distances: Tensor) -> Tensor:
    """Return what `scatter_add` would write."""
    starts = torch.from_numpy(flat.starts).to(positions.device, non_blocking=True)
    order = positions.argsort()
    positions = positions[order]
    bounds = torch.searchsorted(positions, starts).tolist()
    if bounds[0] != 0 or bounds[-1] != len(positions):
        raise IndexError(f"positions are not all within [0, {len(flat)})")
    bits = torch.empty_like(distances)
    for index in np.flatnonzero(np.diff(bounds)).tolist():
        here = slice(bounds[index], bounds[index + 1])
        bits[order[here]] = take(flat.view(index), positions[here] - int(flat.starts[index]))
    return add(bits, distances)


def take(view: Tensor, positions: Tensor) -> Tensor:
    """Return the elements at positions (int64, in row-major order) of a tensor of any strides."""
    return (
        view.view(-1)[positions]
        if view.is_contiguous()
        else view[torch_ops.coordinates(positions, view.shape)]
    )


def collect(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy to `bits` what `flat`, a receiver's space, holds of a source's positions from `first` on."""
    here = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    there, which = torch_remap.translate(index_map, first, here, here)
    bits[which.to(torch.int64)] = moved(
        flat, there, torch.zeros(len(there), dtype=bits.dtype, device=bits.device)
    )


def encode_bitmap(positions: Tensor, length: int) -> Tensor:
    """Write a bit for each of `length` elements, in whole words."""
    return _plane(positions, length)


def decode_bitmap(stream: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Read int32[count] positions, and say whether there are as many, all below `length`; safe for any
    bytes.
    """
    positions, sound = _ranks(_unpacked(stream), count)
    return positions.to(torch.int32), sound & torch_ops.sorted_below(positions, length)


def encode_ef(positions: Tensor, length: int, low: int) -> Tensor:
    """Write the `low` lowest bits of each position, then the rest as differences in unary."""
    count = len(positions)
    places = (positions >> low).to(torch.int64) + torch.arange(count, device=positions.device)
    return torch.cat([*_split(positions, low), _plane(places, count + ((length - 1) >> low))])


def decode_ef(stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor, Tensor]:
    """Read int32[count] positions, and say whether they strictly increase below `length`; safe for any
    bytes.
    """
    lows, at = _joined(stream, count, low)
    places, sound = _ranks(_unpacked(stream[at:]), count)
    high = places - torch.arange(count, device=stream.device)
    positions = high << low | lows
    return positions.to(torch.int32), sound & torch_ops.sorted_below(positions, length)


def split_again(previous: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bit for each previous position, set if it is one of `positions`, and those of `positions` that
    are new. Waits once.
    """
    return _packed(_padded(_among(previous, positions).to(torch.uint8), 64)), positions[
        ~_among(positions, previous)
    ]


def _among(values: Tensor, others: Tensor) -> Tensor:
    """Return which values are among others, which ascend."""
    if not len(others):
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return others[torch.searchsorted(others, values).clamp_(max=len(others) - 1)] == values


def count_again(plane: Tensor, size: int) -> int:
    """Return how many bits of `size` are set; -1 if one beyond them is. Waits once."""
    flags = _unpacked(plane)
    return int(torch.where(flags[size:].any(), -1, flags.sum()))


def join_again(previous: Tensor, plane: Tensor, fresh: Tensor, count: int) -> Tensor:
    """Return the previous positions whose bit is set and the fresh ones, together in order; they are `count`
    in number.
    """
    again, _ = _ranks(_unpacked(plane)[: len(previous)], count - len(fresh))
    return torch.cat([previous[again], fresh]).sort()[0]


def measure(distances: Tensor) -> Classes:
    """Count int32 distances by size. Waits once."""
    count = len(distances)
    magnitude = (distances.to(torch.int64).abs() - 1) & 0xFFFFFFFF
    at_least = (magnitude >= 1 << torch.arange(CLASSES - 1, device=distances.device).view(-1, 1)).sum(
        1
    )  # torch.bincount would wait
    return Classes(distances, count, -np.diff([count, *at_least.tolist(), 0]))


def count_ulp8(distances: Tensor) -> int:
    """Return how many int32 distances are not within +-127. Waits once."""
    return int(((distances < -127) | (distances > 127)).sum())


def encode_planes(classes: Classes, width: int, plan: Planes) -> Tensor:
    """Write distances as `plan` says. Waits once."""
    wide = classes.wide
    magnitude = (wide.to(torch.int64).abs() - 1) & ((1 << 8 * width) - 1)
    high = magnitude >> plan.shift
    far = (high > 0).nonzero().view(-1)
    high = high[far]
    more = _bit_length(high) - 1
    last = (more + 1).cumsum(0) - 1
    which, bit = _runs(more.cumsum(0), plan.unary - plan.far)
    signs = _packed(_padded(wide < 0, 64))
    places = (
        encode_ef(far.to(torch.int32), len(wide), plan.spread - 1) if plan.spread else _plane(far, len(wide))
    )
    bits = _packed(_padded(((high[which] >> bit) & 1).to(torch.uint8), 64))
    return torch.cat([signs, *_split(magnitude, plan.shift), places, _plane(last, plan.unary), bits])


def decode_planes(stream: Tensor, count: int, dtype: torch.dtype, plan: Planes) -> tuple[Tensor, Tensor]:
    """Read distances of the dtype of bits, and say whether the stream agrees with `plan`; safe for any
    bytes.
    """
    at = bitmap_bytes(count)
    negative = _unpacked(stream[:at])[:count]
    lows, used = _joined(stream[at:], count, plan.shift)
    at += used
    if not plan.spread:
        end = at + bitmap_bytes(count)
        far, sound = decode_bitmap(stream[at:end], plan.far, count)
    else:
        end = at + ef_size(plan.far, count, plan.spread - 1)
        far, sound = decode_ef(stream[at:end], plan.far, count, plan.spread - 1)
    far = far.to(torch.int64).clamp_(0, count - 1)
    at, end = end, end + bitmap_bytes(plan.unary)
    parts, agrees = _high_parts(stream[at:end], stream[end:], plan, 8 * dtype.itemsize - plan.shift)
    high = torch.zeros(count, dtype=torch.int64, device=stream.device)
    high[far] = parts
    magnitude = (high << plan.shift) + lows + 1
    values = torch.where(negative, -magnitude, magnitude).to(_SIGNED[dtype.itemsize])
    return values.view(dtype), sound & agrees


def _high_parts(unary: Tensor, bits: Tensor, plan: Planes, most: int) -> tuple[Tensor, Tensor]:
    """Return int64[far] high parts of up to `most` bits, and whether they are so many, in as many bits as the
    plan says.
    """
    last, sound = _ranks(_unpacked(unary), plan.far)
    if not plan.far:
        return last, sound
    more = last.diff(prepend=last.new_full((1,), -1)) - 1
    sound &= (last[-1] == plan.unary - 1) & (more < most).all()
    more = more.clamp_(0, 31)
    which, bit = _runs(more.cumsum(0), plan.unary - plan.far)
    part = _unpacked(bits)[: plan.unary - plan.far].to(torch.int64) << bit
    return (1 << more).index_add_(0, which, part), sound


def _runs(ends: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return int64[total]: of each place, in which of the runs with these ends it is, and where in that, up
    to 31; safe for any ends.
    """
    place = torch.arange(total, device=ends.device)
    which = torch.searchsorted(ends, place, right=True).clamp_(max=max(len(ends) - 1, 0))
    starts = torch.nn.functional.pad(ends, (1, 0))
    return which, (place - starts[which]).clamp_(0, 31)


def _bit_length(values: Tensor) -> Tensor:
    """Return how many bits integers in [0, 2^32) have."""
    bits = torch.zeros_like(values)
    for half in (16, 8, 4, 2, 1):
        bits += (values >> bits >= 1 << half) * half
    return bits + (values > 0)


def encode_ulp8(distances: Tensor, width: int, others: int) -> Tensor:
    """Write an int8 for each int32 distance, -128 for those that do not fit, which follow; they are `others`
    in number.
    """
    escaped = (distances < -127) | (distances > 127)
    near = torch.where(escaped, -128, distances).to(torch.int8).view(torch.uint8)
    return torch.cat([_padded(near), _bytes_of(distances[_ranks(escaped, others)[0]], width)])


def decode_ulp8(stream: Tensor, count: int, dtype: torch.dtype, escapes: int) -> tuple[Tensor, Tensor]:
    """Read distances of the dtype of bits, and say whether there are so many escapes; safe for any bytes."""
    signed = _SIGNED[dtype.itemsize]
    near = stream[:count].view(torch.int8)
    values = near.to(signed)
    escaped, sound = _ranks(near == -128, escapes)
    if escapes:
        values[escaped] = stream[count + -count % 8 :].view(signed)
    return values.view(dtype), sound


def _signed(bits: Tensor) -> Tensor:
    return bits.view(_SIGNED[bits.element_size()])


def _ordered(bits: Tensor) -> Tensor:
    """Return where bit patterns are in the order, as signed integers, or the reverse: the map is its own
    inverse.
    """
    bits = _signed(bits)
    return bits ^ ((bits >> (8 * bits.element_size() - 1)) & torch.iinfo(bits.dtype).max)


def _bytes_of(distances: Tensor, width: int) -> Tensor:
    """Return int32 distances as bytes, `width` for each."""
    return distances.to(_SIGNED[width]).view(torch.uint8)


def _padded(stream: Tensor, multiple: int = 8) -> Tensor:
    """Fill a stream with zeros up to a multiple of some bytes."""
    return torch.nn.functional.pad(stream, (0, -len(stream) % multiple))


def _plane(places: Tensor, count: int) -> Tensor:
    """Return words of bits, those at `places` set."""
    flags = torch.zeros(8 * bitmap_bytes(count), dtype=torch.uint8, device=places.device)
    flags[places.to(torch.int64)] = 1
    return _packed(flags)


def _packed(flags: Tensor) -> Tensor:
    """Put 8 bytes of 0 or 1 into one, the first into the lowest bit."""
    return ((flags.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def _unpacked(stream: Tensor) -> Tensor:
    """Return the bits of a stream as truth values."""
    return ((stream.to(torch.int64) * _REPEAT) & _SELECT).view(torch.uint8).ne(0)


def _ranks(flags: Tensor, count: int) -> tuple[Tensor, Tensor]:
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


def _split(values: Tensor, low: int) -> list[Tensor]:
    """Return the `low` lowest bits of integers: whole bytes as streams of bytes, then a plane of words for
    each further bit.
    """
    streams = [_padded(((values >> shift) & 0xFF).to(torch.uint8)) for shift in range(0, low & -8, 8)]
    room = torch.zeros(8 * bitmap_bytes(len(values)), dtype=torch.uint8, device=values.device)
    for bit in range(low & -8, low):
        room[: len(values)] = (values >> bit) & 1
        streams.append(_packed(room))
    return streams


def _joined(stream: Tensor, count: int, low: int) -> tuple[Tensor, int]:
    """Return int64[count] of what `_split` wrote, and how many bytes that was."""
    values, at = torch.zeros(count, dtype=torch.int64, device=stream.device), 0
    for bit in range(low):
        if bit >= low & -8:
            values |= _unpacked(stream[at : at + bitmap_bytes(count)])[:count].to(torch.int64) << bit
            at += bitmap_bytes(count)
        elif bit % 8 == 0:
            values |= stream[at : at + count].to(torch.int64) << bit
            at += count + -count % 8
    return values, at
