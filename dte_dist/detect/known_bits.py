"""The bits that receivers are known to hold, and what is needed to put them back.

A source keeps one array per width for the blocks it contributes, in wire dtype. A seed fills it; each delta
takes changes over (`detect.snapshot`), and notes the bits that were there:

1. `commit` forgets what was there: the receivers have what was sent.
2. `roll_back` puts it back instead: they do not, and the next changes are found from where they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect.detector import Changed
from dte_dist.tensors.flat import BITS, FlatTensors

__all__ = ["KnownBits", "UndoRecord", "is_few"]


@dataclass(frozen=True, slots=True, eq=False)
class UndoRecord:
    """The bits of a range before it was taken over: at some positions, or everywhere (None)."""

    width: int
    first: int
    positions: Tensor | None
    bits: Tensor


class KnownBits:
    """Known bits of one rank's flat spaces.

    Args:
        totals: elements of each width.
        device: of the live tensors, where the bits lie too.

    Attributes:
        bits: by width, the known bits; undefined until the first `refresh`.
        inconsistent: True if something broke off while bits were taken over or put back: they are then of no
            version.
        undo_log: what `roll_back` puts back.
    """

    def __init__(self, totals: Mapping[int, int], device: torch.device) -> None:
        self.bits = {width: kernels.empty(total, BITS[width], device) for width, total in totals.items()}
        self.inconsistent = False
        self._halfway = False  # whether a range may have been taken over that is not noted yet
        self.undo_log: list[UndoRecord] = []
        self.move(device)

    def move(self, device: torch.device) -> None:
        """Move to another device, as the live tensors did; nothing may wait to be committed."""
        self._kernels = kernels.on(device)
        self.bits = {width: bits.to(device) for width, bits in self.bits.items()}
        self.device = device  # last: after an interrupt it moves again

    def refresh(
        self,
        live: Mapping[int, FlatTensors],
        ranges: Iterable[tuple[int, int, int]],
    ) -> None:
        """Take over all live bits, given as ranges (width, first, length) that cover them; this cannot be
        undone.
        """
        self.inconsistent = True
        self.commit()
        for width, first, length in ranges:
            self._kernels.read(live[width], first, self.bits[width][first : first + length])
        self.inconsistent = self._halfway = False

    def record(self, width: int, changed: Changed, old: Tensor) -> UndoRecord:
        """Return what a range held where it changed, or all that it held if that is less; copies."""
        if changed.positions is not None and is_few(changed, width):
            return UndoRecord(width, changed.first, changed.positions.clone(), old.clone())
        bits = kernels.empty(changed.length, old.dtype, self.device)
        if changed.positions is None:
            return UndoRecord(width, changed.first, None, bits.copy_(old))
        bits.copy_(self.bits[width][changed.first : changed.first + changed.length])
        self._kernels.scatter_1d(bits, changed.positions, old)
        return UndoRecord(width, changed.first, None, bits)

    def commit(self) -> None:
        """Let what was taken over be what is known from now on."""
        self.undo_log.clear()

    def roll_back(self) -> None:
        """Put back what was known before the last `commit`; if it breaks off, it can be done again."""
        was_inconsistent = self.inconsistent
        self.inconsistent = True
        for before in self.undo_log:
            known = self.bits[before.width][before.first :]
            if before.positions is None:
                known[: len(before.bits)].copy_(before.bits)
            else:
                self._kernels.scatter_1d(known, before.positions, before.bits)
        self.commit()
        self.inconsistent = was_inconsistent


def is_few(changed: Changed, width: int) -> bool:
    """Return whether positions and bits of what changed in a range are fewer bytes than all of its bits."""
    return changed.positions is not None and (4 + width) * len(changed) <= width * changed.length
