"""The kernels that need an index map with plain torch ops, for tensors of any device.

`translate` waits for the device once, for a count; `gather_dense` once, `scatter_dense` and `patch` twice
(three times if relative, and once more if positions do not ascend), `digest` and `gather_dense_flat` twice.

Entries differ in their number of axes: the axes are gone through from the innermost outwards, and an entry
that has none left sits out. The tables of an index map are copied to a device once.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.interface import Flat, Tables
from dte_dist.kernels.torch.index_codecs import decode_u16
from dte_dist.kernels.torch.scan import mixed, scatter
from dte_dist.kernels.torch.value_codecs import add_ulps, scatter_add

__all__ = ["digest", "gather_dense", "gather_dense_flat", "patch", "scatter_dense", "translate"]


def translate(index_map: Tables, first: int, positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Translate positions of a source's flat space into a receiver's."""
    tables = _tables(index_map, positions.device)
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


def scatter_dense(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy dense bits to where a receiver's space holds them."""
    positions = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    scatter(flat, *translate(index_map, first, positions, bits))


def gather_dense(index_map: Tables, first: int, bits: Tensor, array: Tensor) -> None:
    """Copy to `bits` what an array holds of a source's positions."""
    positions = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    there, here = translate(index_map, first, positions, positions)
    bits[here.to(torch.int64)] = array[there]


def gather_dense_flat(index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
    """Copy to `bits` what `flat`, a receiver's space, holds of a source's positions from `first` on."""
    here = torch.arange(len(bits), dtype=torch.int32, device=bits.device)
    there, which = translate(index_map, first, here, here)
    bits[which.to(torch.int64)] = add_ulps(
        flat, there, torch.zeros(len(there), dtype=bits.dtype, device=bits.device)
    )


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
        decode_u16(stream, len(values), length, positions)
    where = translate(index_map, first, positions, values)
    (scatter_add if relative else scatter)(flat, *where)


def digest(index_map: Tables, first: int, bits: Tensor, starts: np.ndarray, sums: np.ndarray) -> None:
    """Add the hashes of dense bits to the digests of a receiver's pieces.
    Waits once more for the sums.
    """
    positions, kept = translate(
        index_map, first, torch.arange(len(bits), dtype=torch.int32, device=bits.device), bits
    )
    bounds = torch.from_numpy(starts).to(bits.device, non_blocking=True)
    piece = torch.searchsorted(bounds, positions, right=True) - 1
    wide = kept.to(torch.int64)  # without the sign of narrower bits
    wide = wide if kept.element_size() == 8 else wide & ((1 << 8 * kept.element_size()) - 1)
    hashes = mixed(positions - bounds[piece], wide)
    sums += (
        torch.zeros(len(sums), dtype=torch.int64, device=bits.device)
        .index_add_(0, piece, hashes)
        .cpu()
        .numpy()
    )


class _DeviceTables:
    """The tables of an index map on one device, with one more axis of length one that entries without axes
    can point to.

    Attributes:
        inner: [entries] innermost axis of each.
        depth: most axes of an entry.
        none: the additional axis.
    """

    def __init__(self, index_map: Tables, device: torch.device) -> None:
        def column(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        self.begin, self.end, self.shift, self.origin = map(
            column, (index_map.begin, index_map.end, index_map.shift, index_map.origin)
        )
        self.axes, self.inner = column(index_map.axes), column(index_map.axis + index_map.axes - 1)
        self.extent, self.stride = (
            column(np.append(index_map.extent, 1)),
            column(np.append(index_map.stride, 0)),
        )
        self.low, self.high, self.target = map(column, (index_map.low, index_map.high, index_map.target))
        self.depth, self.none = int(index_map.axes.max(initial=0)), len(index_map.extent)
        owner = np.repeat(np.arange(len(index_map.extent)), np.diff(index_map.segment))
        self._span = int(index_map.extent.max(initial=0)) + 1
        self._owner, self._keys = column(owner), column(owner * self._span + index_map.low)

    def look_up(self, axis: Tensor, coordinate: Tensor) -> tuple[Tensor, Tensor]:
        """Find coordinates in the segments of their axes: whether there, and the coordinate in the
        receiver.
        """
        segment = (torch.searchsorted(self._keys, axis * self._span + coordinate, right=True) - 1).clamp_(
            min=0
        )
        low, high = self.low[segment], self.high[segment]
        found = (self._owner[segment] == axis) & (coordinate >= low) & (coordinate < high)
        return found, coordinate - low + self.target[segment]


_known: Final[WeakKeyDictionary[Tables, dict[torch.device, _DeviceTables]]] = WeakKeyDictionary()


def _tables(index_map: Tables, device: torch.device) -> _DeviceTables:
    on_devices = _known.setdefault(index_map, {})
    if device not in on_devices:
        on_devices[device] = _DeviceTables(index_map, device)
    return on_devices[device]
