"""Which tensors of a rank a sync concerns, noted as it goes by and named only for who asks.

A source notes what it finds, range by range (`ChangedPieces`): one search per range, for all pieces in it,
and on an accelerator no wait for it. A receiver notes nothing: the kernels count which tensors they write to.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from dte_dist.detect.detector import Changed
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.report import Marks

__all__ = ["ChangedPieces"]


class ChangedPieces:
    """Which pieces of a source's flat spaces have changes.

    Args:
        spaces: by width.
        device: of the changes.

    Example:
        >>> from dte_dist.plan.flat_space import Piece, Pieces
        >>> pieces = Pieces.of([Piece(slot, slot, dte_dist.layout.Block.whole((4,))) for slot in range(3)])
        >>> found = ChangedPieces({2: FlatSpace.of(2, pieces)}, torch.device("cpu"))
        >>> bits = torch.zeros(2, dtype=torch.int16)
        >>> found.note(2, Changed(0, 12, torch.tensor([1, 8], dtype=torch.int32), bits, bits))
        >>> found.marks()[0][1].tolist()
        [True, False, True]
    """

    def __init__(self, spaces: Mapping[int, FlatSpace], device: torch.device) -> None:
        self._spaces = spaces
        self._masks = {
            width: torch.zeros(len(space.pieces), dtype=torch.bool, device=device)
            for width, space in spaces.items()
        }

    def note(self, width: int, changed: Changed) -> None:
        """Note what changed, at least one element, in a range of the space of one width."""
        starts = self._spaces[width].starts
        begin, end = changed.bounds()
        low = int(np.searchsorted(starts, begin, side="right")) - 1
        high = int(np.searchsorted(starts, end, side="left"))
        mask = self._masks[width]
        if high - low == 1 or changed.positions is None:
            mask[low:high] = True
            return
        bounds = (starts[low : high + 1] - begin).clip(0, changed.length).astype(np.int32)
        # No count comes back from here: it would have to be waited for.
        below = torch.searchsorted(
            changed.positions, torch.from_numpy(bounds).to(mask.device, non_blocking=True)
        )
        mask[low:high] |= below.diff() > 0

    def note_all(self) -> None:
        """Note that all is sent."""
        for mask in self._masks.values():
            mask.fill_(True)

    def marks(self) -> Marks:
        """Return the entries of each space, and whether each has changes."""
        return [(space.pieces.entry, self._masks[width]) for width, space in self._spaces.items()]
