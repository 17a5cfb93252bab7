"""The kernels of translation with plain torch ops, for tensors of any device; no host synchronisation but for a count.

Entries differ in their number of axes, so all are padded to the most with axes of length one: the arithmetic of a
position is then the same everywhere, and one gather per axis fetches its numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, Tables, torch_ops

__all__ = ["place", "translate"]


def translate(remap: Tables, first: int, positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Translate positions of a source's flat space into a receiver's; see `kernels.cpu_remap.translate`."""
    device = positions.device

    def column(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    begin, end = column(remap.begin), column(remap.end)
    at = positions.to(torch.int64) + first
    entry = torch.searchsorted(end, at, right=True)
    held = entry < len(end)
    entry = entry.clamp_(max=len(end) - 1)
    held &= at >= begin[entry]
    target = column(remap.shift)[entry]
    first_axis, axes = column(remap.axis)[entry], column(remap.axes)[entry]
    rest = at - column(remap.origin)[entry]
    extent, stride = column(np.append(remap.extent, 1)), column(np.append(remap.stride, 0))
    target = target + torch.where(axes == 0, at, 0)
    for back in range(1, int(remap.axes.max(initial=0)) + 1):
        has = axes >= back
        axis = torch.where(has, first_axis + axes - back, len(extent) - 1)
        coordinate = torch.where(axes > back, rest % extent[axis], rest)
        rest = torch.where(axes > back, rest // extent[axis], rest)
        found, moved = _look_up(remap, axis, coordinate, device)
        target = target + torch.where(has, moved * stride[axis], 0)
        held &= found | ~has
    return target[held], bits[held]


def _look_up(remap: Tables, axis: Tensor, coordinate: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Find coordinates in the segments of their axes: whether there, and the coordinate in the receiver."""
    span = int(max(remap.extent.max(initial=0), 1)) + 1
    owner = np.repeat(np.arange(len(remap.extent)), np.diff(remap.segment))
    keys = torch.from_numpy(owner * span + remap.low).to(device)
    segment = (torch.searchsorted(keys, axis * span + coordinate, right=True) - 1).clamp_(min=0)
    low, high, target, owners = (torch.from_numpy(a).to(device)[segment] for a in (remap.low, remap.high, remap.target, owner))
    return (owners == axis) & (coordinate >= low) & (coordinate < high), coordinate - low + target


def place(remap: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy dense bits to where a receiver's space holds them; see `kernels.cpu_remap.place`."""
    positions = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    torch_ops.scatter(flat, *translate(remap, first, positions, bits))
