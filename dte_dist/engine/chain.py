"""Where a rank stands in the chain of versions, and the step that a sync takes in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dte_dist.change.snapshot import Snapshot
from dte_dist.codec import FrameHead
from dte_dist.plan.schedule import Chunk

__all__ = ["NONE", "Chain", "Step"]

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
        marks: on a receiver, address and version counter of each tensor as the last commit left them.
        broken_off: a sync broke off, so that receivers may hold a version of this lineage that this source never came to.
    """

    version: int = NONE
    stream: int = 0
    deltas: int = 0
    newest: int = NONE
    broken_off: bool = False
    marks: tuple[Any, ...] | None = None

    def move(self, version: int, stream: int, *, full: bool) -> None:
        """Move to a version that has been committed."""
        self.version, self.stream = version, stream
        self.deltas = 0 if full else self.deltas + 1
        self.newest = max(self.newest, version)
        self.broken_off = False

    def put_back(self, snapshot: Snapshot | None) -> None:
        """Undo what a source's snapshot took over and did not settle; without a version if it cannot be what it was."""
        if snapshot is None:
            return
        try:
            snapshot.undo()
        finally:
            if snapshot.torn:
                self.version = NONE

    def forget(self) -> None:
        """Stand where a rank stands that never held anything."""
        self.version, self.stream, self.deltas, self.newest, self.broken_off = NONE, 0, 0, NONE, False


@dataclass(frozen=True, slots=True)
class Step:
    """What all frames that make one version have in common.

    Attributes:
        schema: hash of the model map.
        stream: lineage.
        base: version that they start from; NONE for a seed.
        version: version that they make.
    """

    schema: int
    stream: int
    base: int
    version: int

    @property
    def is_seed(self) -> bool:
        """Whether the frames hold everything."""
        return self.base == NONE

    def head(self, source: int, chunks: int, chunk: Chunk) -> FrameHead:
        """Return what the frame of one of the `chunks` chunks of a source says of itself."""
        return FrameHead(
            schema=self.schema, stream=self.stream, base=self.base, version=self.version, source=source, number=chunk.number,
            count=chunks, width=chunk.width, first=chunk.first, length=chunk.length, seed=self.is_seed,
        )  # fmt: skip
