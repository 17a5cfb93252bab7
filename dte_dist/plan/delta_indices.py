"""Positions of a delta, translated from one block of a slot into another: the public form of
`plan.index_map`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import IndexMap, build_index_maps

__all__ = ["remap_delta_indices"]

_WINDOW = 1 << 30


def remap_delta_indices(indices: Tensor, source: Block, receiver: Block) -> tuple[Tensor, Tensor]:
    """Translate positions in one rank's block of a slot into positions in another rank's block of it.

    Swap the blocks for the other direction. Where the two have one contiguous part in common, as with plain
    chunks along the first dimension, it costs a subtraction and two binary searches.

    Args:
        indices: [count] int32 or int64, strictly increasing flat positions (row-major) in `source`, on any
            device.
        source, receiver: the blocks, of one slot.

    Returns:
        int64 [kept] positions in `receiver`, and int64 [kept] places in `indices` of those elements that it
        holds, ascending: the values of a delta follow with `values[kept]`. Both on the device of `indices`.

    Raises:
        ValueError: the indices are not one-dimensional, of another dtype, not strictly increasing or outside
            of `source`; or the blocks differ in their number of dimensions.

    Example:
        >>> sender = dte_dist.Layout.from_views([("w", torch.zeros(2, 4), (6, 4), (2, 0))])  # rows 2 and 3
        >>> # rows 3 to 5, columns 1 to 3
        >>> receiver = dte_dist.Layout.from_views([("w", torch.zeros(3, 3), (6, 4), (3, 1))])
        >>> blocks = [layout.manifest.block(0, layout.coordinates) for layout in (sender, receiver)]
        >>> positions, kept = dte_dist.remap_delta_indices(torch.tensor([0, 3, 4, 5, 7]), *blocks)
        >>> positions.tolist(), kept.tolist()
        ([0, 2], [3, 4])
    """
    _check(indices, source, receiver)
    indices = indices.detach().contiguous()
    index_map = _remap(source, receiver)
    if index_map is None:
        nothing = torch.empty(0, dtype=torch.int64, device=indices.device)
        return nothing, nothing.clone()
    if len(index_map.begin) == 1 and not index_map.axes[0]:
        first, last = (_below(indices, int(border)) for border in (index_map.begin[0], index_map.end[0]))
        positions = indices[first:last].to(torch.int64) + int(index_map.shift[0])
        return positions, torch.arange(first, last, dtype=torch.int64, device=indices.device)
    parts = [_translated(index_map, *window) for window in _windows(indices, source.numel)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([positions for positions, _ in parts]), torch.cat([kept for _, kept in parts])


@lru_cache(maxsize=1024)
def _remap(source: Block, receiver: Block) -> IndexMap | None:
    spaces = (FlatSpace.of(8, Pieces.of([Piece(0, 0, block)])) for block in (source, receiver))
    return next(iter(build_index_maps(*spaces)), None)


def _check(indices: Tensor, source: Block, receiver: Block) -> None:
    if indices.dim() != 1 or indices.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ValueError(
            "indices must be a 1-D tensor of int32 or int64, not of shape "
            f"{tuple(indices.shape)} and {indices.dtype}"
        )
    if len(source.runs) != len(receiver.runs):
        raise ValueError(
            f"blocks of one slot have as many dimensions, not {len(source.runs)} and {len(receiver.runs)}"
        )
    if not bool(kernels.on(indices.device).strictly_increasing(indices.detach().contiguous(), source.numel)):
        raise ValueError(
            f"indices must strictly increase within [0, {source.numel}), the positions of {source}"
        )


def _below(indices: Tensor, border: int) -> int:
    """Return how many of the sorted indices are less than `border`, which may be more than their dtype
    holds.
    """
    last = min(border - 1, torch.iinfo(indices.dtype).max)
    return int(torch.searchsorted(indices, last, right=True))


def _windows(indices: Tensor, numel: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first position, first place, indices) of parts whose positions, counted from the first, fit
    int32.
    """
    place = 0
    for first in range(0, numel, _WINDOW):
        end = len(indices) if first + _WINDOW >= numel else _below(indices, first + _WINDOW)
        if end > place or first + _WINDOW >= numel:
            yield first, place, indices[place:end]
        place = end


def _translated(index_map: IndexMap, first: int, place: int, indices: Tensor) -> tuple[Tensor, Tensor]:
    relative = (indices - first if first else indices).to(torch.int32)
    places = torch.arange(
        place,
        place + len(indices),
        dtype=torch.int64,
        device=indices.device,
    )
    return kernels.on(indices.device).translate(index_map, first, relative, places)
