"""The flat spaces of a rank: its pieces of one element width, laid end to end in slot order.

Positions on the wire are positions in the *sender's* flat space. A receiver knows that space, because it follows
from the sender's manifest, and translates (see `remap`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dte_dist.layout import Block

__all__ = ["FlatSpace", "Piece", "spaces_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of one slot on one rank.

    Attributes:
        slot: index into `ModelMap.slots`.
        entry: index into the entries of that rank's manifest: where the local tensor is found.
        block: the part of the slot that is held.
    """

    slot: int
    entry: int
    block: Block


@dataclass(frozen=True, slots=True, eq=False)
class FlatSpace:
    """All pieces of one rank with elements of `width` bytes, laid end to end.

    Attributes:
        width: bytes of one element.
        pieces: in slot order.
        starts: int64[len(pieces) + 1], position of the first element of each piece; the last is the total.
    """

    width: int
    pieces: tuple[Piece, ...]
    starts: np.ndarray

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.starts[-1])


def spaces_of(pieces: Iterable[Piece], widths: dict[int, int]) -> dict[int, FlatSpace]:
    """Sort the pieces of one rank into one flat space per width.

    Args:
        pieces: pieces in slot order; empty ones are dropped.
        widths: bytes of an element of each slot, by slot index.

    Example:
        >>> spaces_of([Piece(0, 0, Block((((0, 4),),)))], {0: 2})[2].numel
        4
    """
    sorted_by_width: dict[int, list[Piece]] = {}
    numels: dict[int, list[int]] = {}
    for piece in pieces:
        numel = piece.block.numel
        if numel:
            sorted_by_width.setdefault(widths[piece.slot], []).append(piece)
            numels.setdefault(widths[piece.slot], []).append(numel)
    return {
        width: FlatSpace(width, tuple(group), np.concatenate(([0], np.cumsum(numels[width], dtype=np.int64))))
        for width, group in sorted(sorted_by_width.items())
    }
