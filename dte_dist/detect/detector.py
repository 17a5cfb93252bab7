"""Which elements changed: the form in which it is told, and what tells it.

A `ChangeDetector` is asked once for each version, and goes through the flat ranges of a rank.
`detect.snapshot` compares with the bits that receivers are known to hold, and so knows the old bits. A
detector that keeps no bits may stand beside it: its changes have no old ones, and travel as bits, not as
distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dte_dist.tensors.flat import FlatTensors

__all__ = ["ChangeDetector", "Changed", "Detector"]

Detector = Callable[[Tensor, Tensor], Tensor]
"""A caller's own search for changes: (live bits, known bits) of one range, 1-D integer views in wire dtype,
to the ascending int32 or int64 positions of all elements that may differ. It may name too many elements; one
it forgets stays stale. It gets copies.

Example:
    >>> def compare(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:  # a dte_dist.Detector
    ...     return (live != known).nonzero().view(-1)
    >>> report = dte_dist.delta_broadcast(model)
    >>> train()
    >>> dte_dist.delta_broadcast(model, detector=compare).kind
    'delta'
"""


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """The changes in elements [first, first + length) of a space.

    Attributes:
        first, length: the range.
        positions: int32, ascending, counted from `first`; None if all elements changed.
        old, new: the bits before and now, one for each position; `old` is None where nobody knows them.
    """

    first: int
    length: int
    positions: Tensor | None
    old: Tensor | None
    new: Tensor

    def __len__(self) -> int:
        return len(self.new)

    def bounds(self) -> tuple[int, int]:
        """Return where the range begins, and where it ends."""
        return self.first, self.first + self.length

    def listed(self) -> Tensor:
        """Return the positions, also if all elements changed."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.length, dtype=torch.int32, device=self.new.device)


class ChangeDetector(Protocol):
    """Finds the elements of a rank that differ from what was committed last."""

    def changes(
        self, live: FlatTensors, width: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[list[Changed]]:
        """Yield all changes, in order, in batches; the tensors are good until the next batch.

        Args:
            live: the live tensors of a width, as they would be sent.
            width: bytes of an element.
            ranges: (first, length) of ranges to go through; what is found in different ones is told apart.
        """
