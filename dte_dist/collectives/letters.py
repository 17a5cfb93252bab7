"""Letters: small deltas that travel with the control rows instead of after them.

A sync of a few kilobytes costs nothing but round trips. So a source's control row carries its frames too, in a place that every
rank has agreed on: as large as the largest delta of the last sync, and a half, if all of that sync would have been small. Then a
sync is three round trips: rows with frames, vote, acknowledgement. Where frames do not fit after all, they travel on their route.

All ranks know the sizes of all frames of each sync, so all come to the same room for the next without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["LETTERS", "Letters"]

LETTERS: Final = 64 << 10
"""Bytes that all sources together send each rank in letters, at most."""


class Letters:
    """The room for letters in the control rows of the next sync, the same on all ranks.

    Args:
        sources: how many there are.

    Attributes:
        room: bytes that each source's row has; 0 before the first delta.

    Example:
        >>> letters = Letters(2)
        >>> letters.learn({0: [96, 0], 1: [800]})
        >>> letters.room, letters.hold({0: [1000, 0], 1: [8]}), letters.hold({0: [2000], 1: [8]})
        (1200, True, False)
    """

    def __init__(self, sources: int) -> None:
        self._most = LETTERS // sources // 8 * 8
        self.room = 0

    def learn(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Adapt to the sizes of the frames of a delta, by source."""
        largest = max(map(sum, sizes.values()), default=0)
        self.room = min(self._most, largest * 3 // 16 * 8) if largest <= self._most else 0

    def hold(self, sizes: Mapping[int, Sequence[int]]) -> bool:
        """Return whether all frames of these sizes, by source, are in letters."""
        return all(sum(row) <= self.room for row in sizes.values())

    def write(self, frames: Sequence[Tensor], place: Tensor) -> None:
        """Write this source's frames, one after the other, into its letter, if they fit."""
        if frames and sum(map(len, frames)) <= self.room:
            joined = torch.cat(list(frames))
            place[: len(joined)].copy_(joined)

    @staticmethod
    def read(letter: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the frames in a letter."""
        return list(letter[: sum(sizes)].split(list(sizes)))
