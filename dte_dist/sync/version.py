"""Where a rank stands in the chain of versions, and the step that a sync takes in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from dte_dist.codec import FrameHead
from dte_dist.codec.header import NONE
from dte_dist.detect.fingerprint import Fingerprint
from dte_dist.detect.snapshot import Snapshot
from dte_dist.plan.chunks import Chunk

__all__ = ["NONE", "SyncStep", "VersionState"]

_LANE: Final = 0x9E3779B97F4A7C15
"""Mixed into the schema of a lane's frames, times its number."""


@dataclass(slots=True, eq=False)
class VersionState:
    """Where a rank stands: which version of which lineage it holds.

    Attributes:
        version: NONE before the first seed, and while dirty.
        lineage: random number of the lineage.
        deltas: how many deltas since the last full sync.
        newest: the highest version ever held; numbers never go back, even where a version was lost.
        fingerprint: on a receiver, of the live copy as the last commit left it.
        seed_reason: on a receiver without a version, why it has none, as a number of `control.SEED_REASONS`.
        overlapping: on a receiver, chains of other channels that write to some of the same tensors.
        aborted: a sync broke off, so that receivers may hold a version of this lineage that this source never
            came to.
    """

    version: int = NONE
    lineage: int = 0
    deltas: int = 0
    newest: int = NONE
    aborted: bool = False
    fingerprint: Fingerprint | None = None
    seed_reason: int = 0
    overlapping: list[VersionState] = field(default_factory=list, repr=False)

    def advance_to(self, version: int, lineage: int, *, full: bool) -> None:
        """Move to a version that has been committed.

        The version comes last: an interrupt before it leaves a rank that was without a version as it was.
        """
        self.version = NONE
        self.newest = max(self.newest, version)
        self.deltas = 0 if full else self.deltas + 1
        self.aborted = False
        self.seed_reason = 0
        self.lineage = lineage
        self.version = version

    def invalidate(self, seed_reason: int) -> None:
        """Give up a receiver's version, for a reason that the report will give; it is seeded by the next
        sync.
        """
        reason = seed_reason if self.version != NONE or not self.seed_reason else self.seed_reason
        self.version = NONE  # first: an interrupt may cost the reason, not the seed
        self.seed_reason = reason

    def roll_back(self, snapshot: Snapshot | None) -> None:
        """Undo what a source's snapshot took over and did not commit; without a version if it cannot be what
        it was.
        """
        if snapshot is None:
            return
        try:
            snapshot.roll_back()
        finally:
            if snapshot.inconsistent:
                self.version = NONE

    def reset(self) -> None:
        """Stand where a rank stands that never held anything."""
        self.version = NONE  # first: whatever else is not forgotten does not count then
        self.lineage, self.deltas, self.newest, self.aborted, self.seed_reason = 0, 0, NONE, False, 0


@dataclass(frozen=True, slots=True)
class SyncStep:
    """The fields that all frames of one version have in common.

    Attributes:
        schema: hash of the model map.
        lineage: lineage.
        base: version that they start from; NONE for a seed.
        version: version that they make.
    """

    schema: int
    lineage: int
    base: int
    version: int

    def of_lane(self, lane: int | None) -> SyncStep:
        """Return a step whose frames cannot be taken for those of another lane; None is the broadcast
        route.
        """
        if lane is None:
            return self
        return replace(self, schema=(self.schema ^ (lane + 1) * _LANE) & (1 << 63) - 1)

    @property
    def is_seed(self) -> bool:
        """Whether the frames hold everything."""
        return self.base == NONE

    def frame_head(self, source: int, chunks: int, chunk: Chunk) -> FrameHead:
        """Return what the frame of one of the `chunks` chunks of a source says of itself."""
        return FrameHead(
            schema=self.schema,
            lineage=self.lineage,
            base=self.base,
            version=self.version,
            source=source,
            number=chunk.number,
            count=chunks,
            width=chunk.width,
            first=chunk.first,
            length=chunk.length,
            seed=self.is_seed,
        )
