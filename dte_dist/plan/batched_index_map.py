"""Positions in many tensors, translated at once: what `remap_delta_indices` does for one, without a call for
each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import build_index_maps
from dte_dist.tensors.flat import starts_of

__all__ = ["BatchedIndexMap", "repeat_per_part"]

_WINDOW: Final = 1 << 30


class BatchedIndexMap:
    """Translate positions in blocks on one side into positions in the flat space of the blocks on the other.

    Args:
        width: bytes of an element.
        source: the blocks of one side; block number n is of slot n.
        target: (slot, block) of the other side, in order of slots; an element may be in several blocks.

    Attributes:
        starts: int64[len(target) + 1], where each block of the target begins in its flat space.

    Example:
        >>> crossing = BatchedIndexMap(2, [Block.whole((4,)), Block.whole((3,))], [(0,
        ...     Block.rectangle((2,), (2,))), (1, Block.whole((3,)))])
        >>> positions = [torch.tensor([1, 3]), torch.tensor([2])]
        >>> [found.tolist() for found, _ in crossing.translate([0, 1], positions, torch.zeros(3,
        ...     dtype=torch.int16))]
        [[1, 4]]
    """

    def __init__(self, width: int, source: Sequence[Block], target: Iterable[tuple[int, Block]]) -> None:
        sides = list(enumerate(source)), list(target)
        begin, self.starts = (starts_of([block.numel for _, block in blocks]) for blocks in sides)
        self._begin, self._total = torch.from_numpy(begin[:-1].copy()), int(begin[-1])
        self._index_maps = build_index_maps(*(_space(width, blocks) for blocks in sides))

    def translate(
        self, numbers: Sequence[int], positions: Sequence[Tensor], bits: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield int64 positions in the target's flat space, and their bits; what no block of the target holds
        is dropped.

        Args:
            numbers: of the blocks that the positions are in, ascending.
            positions: of each: int32 or int64, strictly ascending, on one device.
            bits: an integer of any width for each position.
        """
        flat = torch.cat(list(positions)).to(torch.int64) + repeat_per_part(
            self._begin[torch.tensor(numbers)], positions
        )
        translate = kernels.remaps_on(flat.device).translate
        for first, here in _windows(flat, self._total):
            relative = (flat[here] - first).to(torch.int32)
            for index_map in self._index_maps:
                if index_map.meets(first, min(first + _WINDOW, self._total)):
                    yield translate(index_map, first, relative, bits[here])


def repeat_per_part(values: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return values[n] for each element of part n, on the device of the parts.

    Example:
        >>> repeat_per_part(torch.tensor([7, 9]), [torch.zeros(2), torch.zeros(1)]).tolist()
        [7, 7, 9]
    """
    counts = [len(part) for part in parts]
    total, device = sum(counts), parts[0].device
    return torch.repeat_interleave(values.to(device), torch.tensor(counts, device=device), output_size=total)


def _space(width: int, blocks: Iterable[tuple[int, Block]]) -> FlatSpace:
    return FlatSpace.of(
        width, Pieces.of(Piece(slot, number, block) for number, (slot, block) in enumerate(blocks))
    )


def _windows(flat: Tensor, total: int) -> Iterator[tuple[int, slice]]:
    """Yield (first position, places) of parts whose positions, counted from the first, fit int32; waits if
    there are several.
    """
    if total <= _WINDOW:
        yield 0, slice(0, len(flat))
        return
    firsts = torch.arange(0, total + _WINDOW, _WINDOW, device=flat.device)
    bounds = torch.searchsorted(flat, firsts).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            yield number * _WINDOW, slice(begin, end)
