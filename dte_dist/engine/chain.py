"""Where a rank stands in the chain of versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["NONE", "Chain"]

NONE: Final = -1
"""A version that is not there, in memory and on the wire."""


@dataclass(slots=True)
class Chain:
    """Where a rank stands: which version of which lineage it holds.

    Attributes:
        version: NONE before the first seed, and while dirty.
        stream: random number of the lineage.
        deltas: how many deltas since the last full sync.
        newest: the highest version ever held; numbers never go back, even where a version was lost.
        broken_off: a sync broke off, so that receivers may hold a version of this lineage that this source never came to.
    """

    version: int = NONE
    stream: int = 0
    deltas: int = 0
    newest: int = NONE
    broken_off: bool = False

    def move(self, version: int, stream: int, *, full: bool) -> None:
        """Move to a version that has been committed."""
        self.version, self.stream = version, stream
        self.deltas = 0 if full else self.deltas + 1
        self.newest = max(self.newest, version)
        self.broken_off = False

    def forget(self) -> None:
        """Stand where a rank stands that never held anything."""
        self.version, self.stream, self.deltas, self.newest, self.broken_off = NONE, 0, 0, NONE, False
