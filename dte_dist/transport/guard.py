"""The guard of a row, which tells whether it came as it was sent, or damaged, short or out of turn.

A row says sizes, and gloo ends the process that gets more than it has room for. TCP damages nothing without a
word, but bad memory, a bad network card or a fault of a program may.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np

from dte_dist.errors import FrameError

__all__ = ["DamagedRow", "guard_of", "refuse_damage"]

_FIX: Final = (
    "call again on every rank, which opens new connections; if it stays, look for bad memory or a bad "
    "network card"
)


class DamagedRow(FrameError):
    """A row or a description came damaged to this rank alone; the others are told by the `Board` of the
    channel.
    """


def guard_of(row: np.ndarray, sender: int, turn: int) -> int:
    """Return a word that goes with a row: of its bytes, their number, who sends it, and its turn.

    Args:
        row: int64, contiguous.
        sender: group rank.
        turn: how many exchanges there have been on the group, this one included; the same on all members.

    Example:
        >>> guard_of(np.array([1, 2]), 0, 1) == guard_of(np.array([1, 2]), 0, 2)
        False
    """
    begin = zlib.crc32(b"%d %d" % (sender, turn))
    return (row.nbytes & 0x7FFFFFFF) << 32 | zlib.crc32(row.data, begin)


def refuse_damage(what: str, rank: int, rows: Mapping[int, np.ndarray], turn: int) -> None:
    """Raise a `DamagedRow` if rows, whose last word is their guard, came damaged to a rank; by sender."""
    senders = [sender for sender, row in rows.items() if guard_of(row[:-1], sender, turn) != row[-1]]
    if senders:
        told = f"{what} came damaged, short or out of turn to rank {rank}"
        raise DamagedRow(told, ranks=senders, got=f"another checksum, in exchange {turn}", hint=_FIX)
