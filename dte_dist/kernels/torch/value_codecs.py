"""The kernels of the value codecs with plain torch ops, for tensors of any device.

They write the same bytes as those of the CPU. Decoders never wait for the device, as in `index_codecs.py`. Of
the others, `measure`, `encode_planes` and `add_ulps` wait once; `scatter_add` twice, or three
times if positions do not ascend, to learn which tensors they meet.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.interface import Flat
from dte_dist.kernels.sizes import CLASSES, Classes, Planes, bitmap_nbytes, ef_size
from dte_dist.kernels.torch.bits import join_low, pack, pad, plane, ranks, split_low, unpack
from dte_dist.kernels.torch.index_codecs import decode_bitmap, decode_ef, encode_ef
from dte_dist.kernels.torch.scan import coordinates, scatter

__all__ = [
    "add",
    "add_ulps",
    "decode_planes",
    "encode_planes",
    "measure",
    "narrow",
    "scatter_add",
    "subtract",
    "ulp_deltas",
    "widen",
]

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


def ulp_deltas(old: Tensor, new: Tensor) -> Tensor:
    """Return how far bits have moved, as int32."""
    return _signed(subtract(new, old)).to(torch.int32)


def narrow(distances: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int32 distances in the dtype of bits of 1, 2 or 4 bytes."""
    return distances.to(_SIGNED[dtype.itemsize]).view(dtype)


def widen(distances: Tensor) -> Tensor:
    """Return distances, in the dtype of bits, as int32: the reverse of `narrow`."""
    return _signed(distances).to(torch.int32)


def scatter_add(flat: Flat, positions: Tensor, distances: Tensor) -> None:
    """Move the bits at positions of `flat`."""
    scatter(flat, positions, add_ulps(flat, positions, distances))


def add_ulps(flat: Flat, positions: Tensor, distances: Tensor) -> Tensor:
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
        bits[order[here]] = _take(flat.view(index), positions[here] - int(flat.starts[index]))
    return add(bits, distances)


def _take(view: Tensor, positions: Tensor) -> Tensor:
    """Return the elements at positions (int64, in row-major order) of a tensor of any strides."""
    return view.view(-1)[positions] if view.is_contiguous() else view[coordinates(positions, view.shape)]


def measure(distances: Tensor) -> Classes:
    """Count int32 distances by size. Waits once."""
    count = len(distances)
    magnitude = (distances.to(torch.int64).abs() - 1) & 0xFFFFFFFF
    at_least = (magnitude >= 1 << torch.arange(CLASSES - 1, device=distances.device).view(-1, 1)).sum(
        1
    )  # torch.bincount would wait
    return Classes(distances, count, -np.diff([count, *at_least.tolist(), 0]))


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
    signs = pack(pad(wide < 0, 64))
    places = (
        encode_ef(far.to(torch.int32), len(wide), plan.spread - 1) if plan.spread else plane(far, len(wide))
    )
    bits = pack(pad(((high[which] >> bit) & 1).to(torch.uint8), 64))
    return torch.cat([signs, *split_low(magnitude, plan.shift), places, plane(last, plan.unary), bits])


def decode_planes(stream: Tensor, count: int, dtype: torch.dtype, plan: Planes) -> tuple[Tensor, Tensor]:
    """Read distances of the dtype of bits, and say whether the stream agrees with `plan`; safe for any
    bytes.
    """
    at = bitmap_nbytes(count)
    negative = unpack(stream[:at])[:count]
    lows, used = join_low(stream[at:], count, plan.shift)
    at += used
    if not plan.spread:
        end = at + bitmap_nbytes(count)
        far, sound = decode_bitmap(stream[at:end], plan.far, count)
    else:
        end = at + ef_size(plan.far, count, plan.spread - 1)
        far, sound = decode_ef(stream[at:end], plan.far, count, plan.spread - 1)
    far = far.to(torch.int64).clamp_(0, count - 1)
    at, end = end, end + bitmap_nbytes(plan.unary)
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
    last, sound = ranks(unpack(unary), plan.far)
    if not plan.far:
        return last, sound
    more = last.diff(prepend=last.new_full((1,), -1)) - 1
    sound &= (last[-1] == plan.unary - 1) & (more < most).all()
    more = more.clamp_(0, 31)
    which, bit = _runs(more.cumsum(0), plan.unary - plan.far)
    part = unpack(bits)[: plan.unary - plan.far].to(torch.int64) << bit
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


def _signed(bits: Tensor) -> Tensor:
    return bits.view(_SIGNED[bits.element_size()])


def _ordered(bits: Tensor) -> Tensor:
    """Return where bit patterns are in the order, as signed integers, or the reverse: the map is its own
    inverse.
    """
    bits = _signed(bits)
    return bits ^ ((bits >> (8 * bits.element_size() - 1)) & torch.iinfo(bits.dtype).max)
