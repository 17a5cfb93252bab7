"""The kernels of translation with plain torch ops, for tensors of any device; no host synchronisation but for a count.

Entries differ in their number of axes: the axes are gone through from the innermost outwards, and an entry that has none left sits out.
The tables of a remap are copied to a device once.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels import Flat, Tables, torch_ops

__all__ = ["digest", "fetch", "place", "translate"]


def translate(remap: Tables, first: int, positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Translate positions of a source's flat space into a receiver's; see `kernels.cpu_remap.translate`."""
    tables = _tables(remap, positions.device)
    at = positions.to(torch.int64) + first
    entry = torch.searchsorted(tables.end, at, right=True).clamp_(max=len(tables.end) - 1)
    held = (at >= tables.begin[entry]) & (at < tables.end[entry])
    axes, inner = tables.axes[entry], tables.inner[entry]
    target = tables.shift[entry] + torch.where(axes == 0, at, 0)
    rest = at - tables.origin[entry]
    for back in range(tables.depth):
        has = axes > back
        axis = torch.where(has, inner - back, tables.none)
        extent = tables.extent[axis]
        coordinate, rest = rest % extent, rest // extent
        found, moved = tables.look_up(axis, coordinate)
        target = target + torch.where(has, moved * tables.stride[axis], 0)
        held &= found | ~has
    kept = held.nonzero().view(-1)
    return target[kept], bits[kept]


def place(remap: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy dense bits to where a receiver's space holds them; see `kernels.cpu_remap.place`."""
    positions = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    torch_ops.scatter(flat, *translate(remap, first, positions, bits))


def fetch(remap: Tables, first: int, bits: Tensor, array: Tensor) -> None:
    """Copy to `bits` what an array holds of a source's positions; see `kernels.cpu_remap.fetch`."""
    positions = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    there, here = translate(remap, first, positions, positions)
    bits[here.to(torch.int64)] = array[there]


def digest(remap: Tables, first: int, bits: Tensor, starts: np.ndarray, sums: np.ndarray) -> None:
    """Add the hashes of dense bits to the digests of a receiver's pieces; see `kernels.cpu_remap.digest`. Waits once more for the sums."""
    positions, kept = translate(remap, first, torch.arange(len(bits), dtype=torch.int32, device=bits.device), bits)
    bounds = torch.from_numpy(starts).to(bits.device, non_blocking=True)
    piece = torch.searchsorted(bounds, positions, right=True) - 1
    wide = kept.to(torch.int64)  # without the sign of narrower bits
    wide = wide if kept.element_size() == 8 else wide & ((1 << 8 * kept.element_size()) - 1)
    hashes = torch_ops.mixed(positions - bounds[piece], wide)
    sums += torch.zeros(len(sums), dtype=torch.int64, device=bits.device).index_add_(0, piece, hashes).cpu().numpy()


class _DeviceTables:
    """The tables of a remap on one device, with one more axis of length one that entries without axes can point to.

    Attributes:
        inner: [entries] innermost axis of each.
        depth: most axes of an entry.
        none: the additional axis.
    """

    def __init__(self, remap: Tables, device: torch.device) -> None:
        def column(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        self.begin, self.end, self.shift, self.origin = map(column, (remap.begin, remap.end, remap.shift, remap.origin))
        self.axes, self.inner = column(remap.axes), column(remap.axis + remap.axes - 1)
        self.extent, self.stride = column(np.append(remap.extent, 1)), column(np.append(remap.stride, 0))
        self.low, self.high, self.target = map(column, (remap.low, remap.high, remap.target))
        self.depth, self.none = int(remap.axes.max(initial=0)), len(remap.extent)
        owner = np.repeat(np.arange(len(remap.extent)), np.diff(remap.segment))
        self._span = int(remap.extent.max(initial=0)) + 1
        self._owner, self._keys = column(owner), column(owner * self._span + remap.low)

    def look_up(self, axis: Tensor, coordinate: Tensor) -> tuple[Tensor, Tensor]:
        """Find coordinates in the segments of their axes: whether there, and the coordinate in the receiver."""
        segment = (torch.searchsorted(self._keys, axis * self._span + coordinate, right=True) - 1).clamp_(min=0)
        low, high = self.low[segment], self.high[segment]
        found = (self._owner[segment] == axis) & (coordinate >= low) & (coordinate < high)
        return found, coordinate - low + self.target[segment]


_known: Final[WeakKeyDictionary[Tables, dict[torch.device, _DeviceTables]]] = WeakKeyDictionary()


def _tables(remap: Tables, device: torch.device) -> _DeviceTables:
    on_devices = _known.setdefault(remap, {})
    if device not in on_devices:
        on_devices[device] = _DeviceTables(remap, device)
    return on_devices[device]
