"""The flat spaces of a rank: its pieces of one element width, laid end to end in slot order.

Positions on the wire are positions in the *sender's* flat space. A receiver knows that space, because it
follows from the sender's manifest, and translates (see `plan.index_map`).

A model has thousands of pieces but few different blocks, and every rank knows the spaces of all ranks. So
pieces are columns of numbers, and blocks are numbered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dte_dist.layout import Block

__all__ = ["BlockTable", "FlatSpace", "Piece", "Pieces", "spaces_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of one slot on one rank.

    Attributes:
        slot: index into `ModelMap.slots`.
        entry: index into the entries of that rank's manifest: where the local tensor is found.
        block: the part of the slot that is held; not empty.
    """

    slot: int
    entry: int
    block: Block


@dataclass(slots=True)
class BlockTable:
    """Different blocks, numbered in the order in which they were first seen.

    Example:
        >>> table = BlockTable()
        >>> table.number(Block.whole((3,))), table.number(Block.whole((3,))), table.number(Block.whole((0,)))
        (0, 0, -1)
    """

    blocks: list[Block] = field(default_factory=list)
    _numbers: dict[Block, int] = field(default_factory=dict)
    _numels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.blocks)

    def number(self, block: Block | None) -> int:
        """Return the number of a block; -1 for None and for a block without elements."""
        if block is None or not block.numel:
            return -1
        number = self._numbers.setdefault(block, len(self.blocks))
        if number == len(self.blocks):
            self.blocks.append(block)
        return number

    def numels(self) -> np.ndarray:
        """Return int64[len(self)]: the elements of each block."""
        if len(self._numels) < len(self.blocks):
            self._numels = np.array([block.numel for block in self.blocks], np.int64)
        return self._numels


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of one rank, in slot order, as columns.

    Attributes:
        table: the numbered blocks; ranks share one.
        slot, entry, block: one number per piece, as in `Piece`; a block by its number.
    """

    table: BlockTable
    slot: np.ndarray
    entry: np.ndarray
    block: np.ndarray

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Pieces:
        """Write a few pieces as columns, dropping empty ones.

        Example:
            >>> Pieces.of([Piece(3, 1, Block.whole((2,))), Piece(0, 0, Block.whole((2,)))]).slot.tolist()
            [0, 3]
        """
        table = BlockTable()
        rows = [
            (piece.slot, piece.entry, table.number(piece.block))
            for piece in sorted(pieces, key=lambda piece: piece.slot)
        ]
        columns = np.array([row for row in rows if row[2] >= 0], np.int64).reshape(-1, 3).T
        return cls(table, *columns)

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, wanted: np.ndarray) -> Pieces:
        """Return the pieces for which a truth value is True; the columns are shared if all are."""
        if wanted.all():
            return self
        return Pieces(
            self.table,
            self.slot[wanted],
            self.entry[wanted],
            self.block[wanted],
        )

    def __iter__(self) -> Iterator[Piece]:
        for slot, entry, block in zip(
            self.slot.tolist(),
            self.entry.tolist(),
            self.block.tolist(),
            strict=True,
        ):
            yield Piece(slot, entry, self.table.blocks[block])


@dataclass(frozen=True, slots=True, eq=False)
class FlatSpace:
    """All pieces of one rank with elements of `width` bytes, laid end to end.

    Attributes:
        width: bytes of one element.
        pieces: in slot order; iterate over them, or use their columns.
        starts: int64[len(pieces) + 1], position of the first element of each piece; the last is the total.
    """

    width: int
    pieces: Pieces
    starts: np.ndarray

    @classmethod
    def of(cls, width: int, pieces: Pieces) -> FlatSpace:
        """Lay pieces end to end.

        Example:
            >>> FlatSpace.of(2, Pieces.of([Piece(0, 0, Block.whole((4,))), Piece(1, 1, Block.whole((2,
            ...     3)))])).starts.tolist()
            [0, 4, 10]
        """
        numels = pieces.table.numels()[pieces.block]
        return cls(
            width,
            pieces,
            np.concatenate((np.zeros(1, np.int64), np.cumsum(numels))),
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.starts[-1])


def spaces_of(pieces: Pieces, widths: Sequence[int] | np.ndarray) -> dict[int, FlatSpace]:
    """Sort the pieces of one rank into one flat space per width.

    Args:
        pieces: the pieces.
        widths: bytes of an element of each slot, by slot index.

    Example:
        >>> spaces_of(Pieces.of([Piece(0, 0, Block.whole((4,)))]), [2])[2].numel
        4
    """
    width = np.asarray(widths, np.int64)[pieces.slot]
    return {each: FlatSpace.of(each, pieces.take(width == each)) for each in np.unique(width).tolist()}
