"""Pair spaces: what one source and one receiver have in common, as a flat space of its own.

On the p2p route a source sends each receiver only what that receiver holds. The elements of that overlap,
laid end to end, are the pair space; positions on the wire count in it, so that indices are as dense as the
overlap and whole parts need none. Both ends know it from the layouts: the source translates from its own
space into the pair space, the receiver from there into its own. Both translations are ordinary `IndexMap`s,
since a pair space is a `FlatSpace` whose pieces are intersections of blocks.

Receivers that hold the same blocks share a "lane": what a source sends to one it sends to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dte_dist.plan.flat_space import BlockTable, FlatSpace, Pieces
from dte_dist.plan.index_map import matching_blocks
from dte_dist.plan.overlap import intersect

__all__ = ["lanes_of", "pair_space", "pair_spaces"]


def lanes_of(
    receiver_spaces: Mapping[int, Mapping[int, FlatSpace]],
) -> dict[int, int]:
    """Number the lanes of receivers: those whose spaces are one object (`ModelMap` makes them so) are in one
    lane.

    Example:
        >>> spaces = {2: FlatSpace.of(2, Pieces.of([]))}
        >>> lanes_of({1: spaces, 2: spaces, 3: {}})
        {1: 0, 2: 0, 3: 1}
    """
    numbers: dict[int, int] = {}
    return {rank: numbers.setdefault(id(spaces), len(numbers)) for rank, spaces in receiver_spaces.items()}


def pair_spaces(source: Mapping[int, FlatSpace], receiver: Mapping[int, FlatSpace]) -> dict[int, FlatSpace]:
    """Return the pair space of each width that both ranks hold something of."""
    spaces = {
        width: pair_space(space, receiver[width]) for width, space in source.items() if width in receiver
    }
    return {width: space for width, space in spaces.items() if space.numel}


def pair_space(source: FlatSpace, receiver: FlatSpace) -> FlatSpace:
    """Return the space of the elements that a source contributes and a receiver holds, in the order of the
    source's space.

    Example:
        >>> from dte_dist.layout import Block
        >>> from dte_dist.plan.flat_space import Piece
        >>> spaces = [FlatSpace.of(2, Pieces.of([Piece(0, 0, Block((((first, 4),),)))])) for first in (4, 2)]
        >>> [piece.block.runs for piece in pair_space(*spaces).pieces]
        [(((4, 2),),)]
    """
    at, home = matching_blocks(source.pieces.slot, receiver.pieces.slot)
    table = BlockTable()
    number = _intersections(
        source.pieces.block[at],
        receiver.pieces.block[home],
        source.pieces.table,
        receiver.pieces.table,
        table,
    )
    kept = number >= 0
    slot = source.pieces.slot[at[kept]]
    number = number[kept]
    # A receiver that holds a tied tensor under two names meets the source twice; the elements travel once.
    first = np.sort(np.unique(slot * (len(table) + 1) + number, return_index=True)[1])
    pieces = Pieces(table, slot[first], np.full(len(first), -1, np.int64), number[first])
    return FlatSpace.of(source.width, pieces)


def _intersections(
    a: np.ndarray,
    b: np.ndarray,
    of_a: BlockTable,
    of_b: BlockTable,
    table: BlockTable,
) -> np.ndarray:
    """Number the intersection of each pair of blocks in `table`; -1 for nothing. There are few different
    pairs.
    """
    pairs, which = np.unique(a * len(of_b) + b, return_inverse=True)
    numbers = [
        table.number(
            intersect(
                of_a.blocks[pair // len(of_b)],
                of_b.blocks[pair % len(of_b)],
            )
        )
        for pair in pairs.tolist()
    ]
    return np.array(numbers, np.int64)[which]
