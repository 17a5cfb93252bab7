"""Inline frames: small deltas that travel with the control rows instead of after them.

A sync of a few kilobytes costs nothing but round trips. So a source's control row carries its frames too, in
a place that every rank has agreed on: as large as the largest delta of the last sync, and a half, if all of
that sync would have been small. Then a sync is three round trips: rows with frames, vote, acknowledgement.
Where frames do not fit after all, they travel on their route.

All ranks know the sizes of all frames of each sync, so all come to the same room for the next without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["INLINE_BYTES", "InlineFrames"]

INLINE_BYTES: Final = 64 << 10
"""Bytes that all sources together send each rank in inline frames, at most."""


class InlineFrames:
    """The room for inline frames in the control rows of the next sync, the same on all ranks.

    Args:
        sources: how many there are.

    Attributes:
        capacity: bytes that each source's row has; 0 before the first delta.

    Example:
        >>> inline = InlineFrames(2)
        >>> inline.adapt({0: [96, 0], 1: [800]})
        >>> inline.capacity, inline.holds({0: [1000, 0], 1: [8]}), inline.holds({0: [2000], 1: [8]})
        (1200, True, False)
    """

    def __init__(self, sources: int) -> None:
        self._most = INLINE_BYTES // sources // 8 * 8
        self.capacity = 0

    def adapt(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Adapt to the sizes of the frames of a delta, by source."""
        largest = max(map(sum, sizes.values()), default=0)
        self.capacity = min(self._most, largest * 3 // 16 * 8) if largest <= self._most else 0

    def holds(self, sizes: Mapping[int, Sequence[int]]) -> bool:
        """Return whether all frames of these sizes, by source, are in inline frames."""
        return all(sum(row) <= self.capacity for row in sizes.values())

    def write(self, frames: Sequence[Tensor], place: Tensor) -> None:
        """Write this source's frames, one after the other, into its inline payload, if they fit."""
        if frames and sum(map(len, frames)) <= self.capacity:
            joined = torch.cat(list(frames))
            place[: len(joined)].copy_(joined)

    @staticmethod
    def read(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the frames in an inline payload."""
        return list(payload[: sum(sizes)].split(list(sizes)))
