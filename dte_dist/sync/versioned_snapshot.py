"""The snapshot of a source with its place in the chain of versions, whatever carries the changes.

1. `take_over_changes` looks at the live tensors, once: each change is taken over into the snapshot and given
   to a `ChangeSink`, which encodes it. `take_over_all` takes over all live bits instead; then only a full
   version may follow. After that the live tensors may change; nothing below looks at them again.
2. `commit` settles what the snapshot took over: receivers hold it, at this version.
3. `rollback` puts back what the snapshot held before; the changes found next are a superset.

`sync.source.Source` sends frames on it, `sync.tracker.DeltaTracker` named tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dte_dist.detect.detector import Changed, Detector
from dte_dist.detect.snapshot import Snapshot
from dte_dist.layout import LiveTensors
from dte_dist.plan.chunks import SEGMENT, Chunk
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.report import Phases
from dte_dist.sync.changed_pieces import ChangedPieces
from dte_dist.sync.version import NONE, VersionState
from dte_dist.tensors.flat import FlatTensors

__all__ = ["ChangeSink", "VersionedSnapshot"]


class ChangeSink(Protocol):
    """Takes the changes of one sync, in order, and makes a message of them."""

    def add(self, width: int, changed: Changed) -> None:
        """Add what changed in some segments of one chunk of the source's own space, in order; it is
        copied.
        """


class VersionedSnapshot:
    """The bits that receivers hold, and which version of which lineage they are.

    Args:
        spaces: by width, what this source sends, as pieces of the tensors that are read.
        dtypes: by width, of each piece as it is sent.
        chunks: of the spaces; what is found in different chunks is told apart.

    Attributes:
        state: version and lineage of the snapshot.
        snapshot: the bits; None before the first reading.
        changed: elements found changed since the last `commit` or `rollback`.
        pieces: which pieces of the spaces they are in; None before the first reading.
    """

    def __init__(
        self,
        spaces: Mapping[int, FlatSpace],
        dtypes: Mapping[int, Sequence[torch.dtype]],
        chunks: Sequence[Chunk],
        state: VersionState | None = None,
    ) -> None:
        self.spaces = spaces
        self._dtypes = dtypes
        self._chunks = chunks
        self.state = VersionState() if state is None else state
        self.snapshot: Snapshot | None = None
        self.changed = 0
        self.pieces: ChangedPieces | None = None

    def open(self, device: torch.device) -> Snapshot:
        """Return the snapshot, where the live tensors are now."""
        if self.snapshot is None:
            totals = {width: space.numel for width, space in self.spaces.items()}
            self.snapshot = Snapshot(totals, device, SEGMENT)
        elif self.snapshot.device != device:
            self.snapshot.move(device)
        return self.snapshot

    def take_over_changes(
        self, local: LiveTensors, sink: ChangeSink, phases: Phases, detector: Detector | None = None
    ) -> None:
        """Take over all changes and give them to a sink, batch by batch."""
        snapshot = self.open(local.device)
        live = self.live_spaces(local)
        pieces = self.pieces = ChangedPieces(self.spaces, local.device)
        for width in self.spaces:
            ranges = [(chunk.first, chunk.length) for chunk in self._chunks if chunk.width == width]
            batches = snapshot.changes(live[width], width, ranges, detector)
            while True:
                with phases("detect"):
                    batch = next(batches, None)
                if batch is None:
                    break
                with phases("encode"):
                    for changed in batch:
                        pieces.note(width, changed)
                        sink.add(width, changed)
                self.changed += sum(len(changed.new) for changed in batch)

    def take_over_all(self, local: LiveTensors, phases: Phases) -> None:
        """Take over all live bits; from here on the snapshot is ahead of the receivers."""
        snapshot = self.open(local.device)
        live = self.live_spaces(local)
        self.state.version = NONE
        self.pieces = ChangedPieces(self.spaces, local.device)
        self.pieces.note_all()
        with phases("detect"):
            segments = ((chunk.width, *segment) for chunk in self._chunks for segment in chunk.segments())
            snapshot.refresh(live, segments)
        self.changed = sum(space.numel for space in self.spaces.values())

    def commit(self, version: int, lineage: int, *, full: bool) -> None:
        """Move to `version`: the receivers hold what the snapshot holds."""
        self.settle()
        self.state.advance_to(version, lineage, full=full)

    def settle(self) -> None:
        """Let the snapshot be what it is, without a version yet."""
        self.state.version = NONE
        self.held().commit()

    def rollback(self) -> None:
        """Put back what the snapshot held before, unless it was committed; without a version if that cannot
        be done.
        """
        snapshot = self.snapshot
        try:
            if snapshot is not None and (snapshot.undo_log or snapshot.inconsistent):
                self.state.roll_back(snapshot)
        finally:
            self.changed = 0
            self.pieces = None

    def held(self) -> Snapshot:
        """Return the snapshot.

        Raises:
            RuntimeError: nothing was read yet.
        """
        if self.snapshot is None:
            raise RuntimeError("a source has no snapshot before its first reading")
        return self.snapshot

    def known(self) -> Mapping[int, Tensor]:
        """Return the bits of the snapshot by width, each in the order of this source's space."""
        return self.held().bits

    def live_spaces(self, local: LiveTensors) -> dict[int, FlatTensors]:
        """Return the live tensors by width, as they would be sent."""
        return {
            width: FlatTensors.part(local, space.pieces.entry, width, space.starts).read_as(
                self._dtypes[width]
            )
            for width, space in self.spaces.items()
        }
