"""What several ranks hold, slot by slot, and the copies between two sides of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from dte_dist.layout import Block
from dte_dist.plan.flat_space import BlockTable, FlatSpace, Pieces
from dte_dist.plan.model_map import Slot
from dte_dist.plan.overlap import axis_of
from dte_dist.plan.transfer_ops import Box, Boxes, Ends, Group, TransferOps

__all__ = ["BlockOverlap", "Held"]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The pieces of several ranks as columns, in order of slot, rank and entry.

    Attributes:
        table: the numbered blocks.
        slot, rank, entry, block: of each piece.
        borders: int64[slots + 1]: where the pieces of each slot begin.
    """

    table: BlockTable
    slot: np.ndarray
    rank: np.ndarray
    entry: np.ndarray
    block: np.ndarray
    borders: np.ndarray

    @classmethod
    def of(cls, spaces: Mapping[int, Mapping[int, FlatSpace]], slots: int) -> Held:
        """Collect the pieces of the flat spaces of ranks."""
        pieces = [
            (rank, space.pieces) for rank, widths in sorted(spaces.items()) for space in widths.values()
        ]
        table = pieces[0][1].table if pieces else BlockTable()
        columns = [
            np.stack(
                [
                    each.slot,
                    np.full(len(each), rank),
                    each.entry,
                    each.block,
                ]
            )
            for rank, each in pieces
        ]
        joined = np.concatenate([np.zeros((4, 0), np.int64), *columns], axis=1)
        joined = joined[:, np.argsort(joined[0], kind="stable")]
        slot, rank, entry, block = joined
        borders = np.searchsorted(slot, np.arange(slots + 1))
        return cls(table, slot, rank, entry, block, borders)

    def of_rank(self, rank: int) -> Pieces:
        """Return the pieces of one rank."""
        mine = self.rank == rank
        return Pieces(self.table, self.slot[mine], self.entry[mine], self.block[mine])

    def blocks_of(self, rank: int) -> dict[tuple[int, int], Block]:
        """Return what a rank holds, by number of the slot and entry."""
        return {(piece.slot, piece.entry): piece.block for piece in self.of_rank(rank)}

    def at(self, slot: int) -> slice:
        """Return where the pieces of a slot are."""
        begin, end = self.borders[slot : slot + 2].tolist()
        return slice(begin, end)

    def key(self, slot: int) -> bytes:
        """Return what tells apart slots that are held by other ranks or in other blocks."""
        here = self.at(slot)
        return self.rank[here].tobytes() + self.block[here].tobytes()

    def entries(self, slots: np.ndarray) -> np.ndarray:
        """Return int64[slots, pieces]: the entries of slots that are held alike."""
        first = self.at(int(slots[0]))
        begins = self.borders[slots][:, None]
        return self.entry[begins + np.arange(first.stop - first.start)]


class BlockOverlap:
    """The ops between what sources contribute and receivers hold: each pair of blocks is looked at once, if
    its bounds meet.
    """

    def __init__(self, sent: Held, held: Held) -> None:
        self._sent = sent
        self._held = held
        self._boxes = Boxes()
        self._known: dict[tuple[int, int], range] = {}
        tables = [side.table.blocks for side in (sent, held)]  # a side that holds nothing has an empty one
        most = max((len(block.runs) for block in chain(*tables)), default=0)
        self._bounds = [_bounds(blocks, most) for blocks in tables]

    def ops(self, slots: tuple[Slot, ...]) -> TransferOps:
        alike: dict[tuple[bytes, bytes], list[int]] = {}
        for slot in range(len(slots)):
            key = self._sent.key(slot), self._held.key(slot)
            alike.setdefault(key, []).append(slot)
        groups = [self._group(np.array(same, np.int64)) for same in alike.values()]
        return TransferOps(slots, groups, self._boxes)

    def _group(self, slots: np.ndarray) -> Group:
        example = int(slots[0])
        here = self._sent.at(example)
        there = self._held.at(example)
        a = self._sent.block[here]
        b = self._held.block[there]
        i, j = self._meeting(a, b)
        pairs = zip(a[i].tolist(), b[j].tolist(), strict=True)
        found = [self._between(*pair) for pair in pairs]
        counts = np.array([len(each) for each in found], np.int64)
        send = Ends(
            self._sent.rank[here],
            self._sent.entries(slots),
            np.repeat(i, counts),
        )
        recv = Ends(
            self._held.rank[there],
            self._held.entries(slots),
            np.repeat(j, counts),
        )
        box = np.array(list(chain.from_iterable(found)), np.int64)
        return Group(slots, send, recv, box)

    def _meeting(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which blocks of two lists have bounds that meet, as indices of both, pair by pair."""
        low_a, high_a = self._bounds[0][:, a, None]
        low_b, high_b = self._bounds[1][:, None, b]
        meets = (low_a < high_b) & (low_b < high_a)
        i, j = np.nonzero(np.all(meets, axis=-1))
        return i, j

    def _between(self, a: int, b: int) -> range:
        """Return the numbers of the pairs of slices by which block `a` of a source becomes block `b` of a
        receiver.
        """
        if (a, b) not in self._known:
            sent = self._sent.table.blocks[a]
            held = self._held.table.blocks[b]
            self._known[a, b] = self._boxes.add(_boxes(sent, held))
        return self._known[a, b]


def _boxes(a: Block, b: Block) -> list[Box]:
    """Return the slices of two local tensors that are equal elements, in the order of the first."""
    axes = [axis_of(x, y) for x, y in zip(a.runs, b.runs, strict=True)]
    boxes = []
    for parts in product(*(axis.segments for axis in axes)):
        read = tuple(slice(at, at + length) for at, length, _ in parts)
        written = tuple(slice(other, other + length) for _, length, other in parts)
        boxes.append((read, written))
    return boxes


def _bounds(blocks: Sequence[Block], dimensions: int) -> np.ndarray:
    """Return int64[2, blocks, dimensions]: where the runs of each block begin and end; [0, 1) for dimensions
    it has not.
    """
    bounds = np.zeros((2, len(blocks), dimensions), np.int64)
    low, high = bounds
    high[:] = 1
    for number, block in enumerate(blocks):
        mine = len(block.runs)
        low[number, :mine] = [runs[0][0] for runs in block.runs]
        high[number, :mine] = [sum(runs[-1]) for runs in block.runs]
    return bounds
