"""Bounds of the columns of a control row.

A row that came as it was sent may still say what cannot be. All ranks see the same, and refuse alike, before
anything is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from dte_dist.errors import FrameError
from dte_dist.plan.transfer_plan import ROUTES
from dte_dist.sync.control import CALLS, REASONS, SEED_REASONS, ControlRow
from dte_dist.sync.version import NONE

__all__ = ["check_rows"]

_FLAG = (0, 1)
_VERSION = (NONE, (1 << 62) - 1)
_NUMBER = (0, 1 << 62)
_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "failed": _FLAG,
    "is_source": _FLAG,
    "is_receiver": _FLAG,
    "aborted": _FLAG,
    "full": _FLAG,
    "source_version": _VERSION,
    "receiver_version": _VERSION,
    "newest": _VERSION,
    "requested_version": _VERSION,
    "source_lineage": _NUMBER,
    "receiver_lineage": _NUMBER,
    "proposed_lineage": _NUMBER,
    "changed": _NUMBER,
    "reason": (0, len(REASONS) - 1),
    "seed_reason": (0, len(SEED_REASONS) - 1),
    "route": (0, len(ROUTES) - 1),
    "call": (0, len(CALLS) - 1),
}
"""The least and the largest that a column may say."""

_ANY: Final = (-(1 << 63), (1 << 63) - 1)


def check_rows(table: np.ndarray, sources: Sequence[int], receivers: Sequence[int]) -> None:
    """Refuse rows that say what cannot be.

    Args:
        table: int64, the packed rows of all ranks, perhaps with sizes behind; none of a rank that has failed.
        sources, receivers: ranks that are one, as agreed when the channel opened.

    Raises:
        FrameError: names the rank, the column and the number.

    Example:
        >>> rows = [ControlRow(is_source=1), ControlRow(is_receiver=1)]
        >>> check_rows(np.stack([row.pack([], 0) for row in rows]), [0], [1])
    """
    low, high = _bounds(len(table), tuple(sources), tuple(receivers))
    said = table[:, : ControlRow.columns()]
    wrong = np.argwhere((said < low) | (said > high))
    if len(wrong):
        rank, column = wrong[0].tolist()
        least = int(low[rank, column])
        most = int(high[rank, column])
        raise FrameError(
            f"the {ControlRow.__slots__[column]} of a control row cannot be",
            ranks=[rank],
            expected=least if least == most else f"{least} to {most}",
            got=int(said[rank, column]),
            hint="call again; if it stays, the ranks run different versions of dte_dist",
        )


@lru_cache(16)
def _bounds(
    ranks: int, sources: tuple[int, ...], receivers: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest that each column of each rank may say."""
    columns = np.array([_BOUNDS.get(name, _ANY) for name in ControlRow.__slots__], np.int64)
    low, high = (np.tile(bound, (ranks, 1)) for bound in columns.T)
    for name, members in (("is_source", sources), ("is_receiver", receivers)):
        column = ControlRow.__slots__.index(name)
        low[:, column] = high[:, column] = [rank in members for rank in range(ranks)]
    return low, high
