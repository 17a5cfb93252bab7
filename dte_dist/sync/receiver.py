"""A receiver's side of the version chain: frames are checked, translated and staged, then applied all or not
at all.

1. `begin` finds the live tensors of this sync. If somebody else wrote to them since the last commit, they
   have no version. `is_written` looks again, before the vote: what is staged was made for the bits that were
   there at `begin`.
2. `take` checks a frame to the last bit and stages it (a delta), or writes it straight into place (a seed).
   The first frame of a seed finds the live tensors once more, and keeps their memory until the end: it may
   come long after `begin`. The first error is kept in `error` and the rest of the sync is only drained, so
   that the ranks stay in step.
3. `apply`, after the vote, writes what is staged. A receiver that fails inside it is dirty: it has no version
   until it is seeded. `check_own` raises if anybody else wrote meanwhile, here and at the end of a seed.
4. `commit` moves to the new version; `rollback` forgets what is staged.

Where frames ask for it, the positions of the last delta stay known (`codec.previous_delta`), for the next one
to count on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, UntypedStorage

from dte_dist.codec import FrameHead, PreviousDelta, Segment, read_frame
from dte_dist.detect.fingerprint import Fingerprint, external_writes
from dte_dist.errors import DeltaError, FrameError
from dte_dist.layout import Layout, LiveTensors
from dte_dist.plan.index_map import IndexMap, build_index_maps
from dte_dist.plan.model_map import ModelMap
from dte_dist.sync.control import OTHER_CHANNEL, WRITTEN
from dte_dist.sync.staging import StagedPatch, Target
from dte_dist.sync.version import NONE, VersionState
from dte_dist.tensors.flat import FlatTensors

__all__ = ["Receiver"]


class Receiver:
    """The state of one receiver between syncs.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank holds, and what every source sends.

    Attributes:
        error: the first error of this sync, or None.
        index_maps: tables from the sources' own spaces.
        state: version and lineage; version NONE means never seeded, being seeded, or dirty.
    """

    def __init__(self, layout: Layout, model: ModelMap, rank: int) -> None:
        self._layout = layout
        self.state = VersionState()
        self.error: Exception | None = None
        self._spaces = model.receiver_spaces[rank]
        self.index_maps: Mapping[int, Mapping[int, Sequence[IndexMap]]] = {
            width: {
                source: build_index_maps(spaces[width], space)
                for source, spaces in model.source_spaces.items()
                if width in spaces
            }
            for width, space in self._spaces.items()
        }
        self._tables: Mapping[int, Mapping[int, Sequence[IndexMap]]] = self.index_maps
        self._staged = StagedPatch()
        self._history = PreviousDelta()
        self._targets: Mapping[int, Target] = {}
        self._memory: list[UntypedStorage] = []
        self._is_seeded = False
        self._local: LiveTensors | None = None
        self._begun: Fingerprint | None = None
        self._now: Fingerprint | None = None

    def begin(self, index_maps: Mapping[int, Mapping[int, Sequence[IndexMap]]] | None = None) -> None:
        """Find the live tensors, as they are at this moment; nothing is staged yet.

        Args:
            index_maps: by width and source, tables from the space that frames count in; None for the sources'
                own spaces.
        """
        self._staged.clear()
        self._history.discard()
        self.error, self._is_seeded = None, False
        self._tables = self.index_maps if index_maps is None else index_maps
        begun, held = self._find(), self.state.fingerprint
        if self.state.version != NONE and (held is None or not held.same(begun)):
            self.state.invalidate(WRITTEN)

    def _find(self) -> Fingerprint:
        """Find the live tensors, to which nothing has been written yet; return their fingerprint."""
        local = self._local = self._layout.read()
        # Whoever gives a tensor other memory meanwhile must not free what is read and written here.
        self._memory = [tensor.untyped_storage() for tensor in local.live.tensors]
        begun = self._begun = Fingerprint.of(local.live)
        self._now = None
        self._targets = {
            width: Target(
                FlatTensors.part(local, space.pieces.entry, width, space.starts), self._tables[width]
            )
            for width, space in self._spaces.items()
        }
        return begun

    def live(self) -> dict[int, FlatTensors]:
        """Return the live tensors by width, each in the order of this receiver's space."""
        local = self._layout.read()
        return {
            width: FlatTensors.part(local, space.pieces.entry, width, space.starts)
            for width, space in self._spaces.items()
        }

    def take(self, frame: Tensor, expected: FrameHead) -> None:
        """Check a frame and stage it, or write it into place if it is a seed; never raises, see `error`.

        What is staged are views of the frame, which is to stay as it is until `commit` or `rollback`.
        """
        if self.error is not None:
            return
        try:
            self._take(frame, expected)
        except Exception as error:  # it is raised on all ranks after the vote
            self.error = error

    def _take(self, frame: Tensor, expected: FrameHead) -> None:
        segments = read_frame(
            frame, expected, self._history, packed=frame.is_cpu
        )  # elsewhere to check a stream is to read it
        if expected.width not in self._targets:
            return
        if expected.seed:
            self._place(segments, expected)
        else:
            target = self._targets[expected.width]
            for segment in segments:
                self._staged.add(target, expected.source, segment)

    def _place(self, segments: Sequence[Segment], expected: FrameHead) -> None:
        """Write a seed into place; it must be the whole chunk."""
        if (
            any(segment.positions is not None for segment in segments)
            or sum(segment.length for segment in segments) != expected.length
        ):
            raise FrameError(
                "a seed is not the whole chunk", expected=f"{expected.length} elements", hint="sync again"
            )
        self._begin_to_write()
        if not self._is_seeded:
            # Others may have written since `begin`, or moved tensors: all is overwritten where it is now.
            self._find()
            self._is_seeded = True
        target = self._targets[expected.width]
        for segment in segments:
            target.place(expected.source, segment.first, segment.values)
        self._write_back()

    def is_written(self) -> bool:
        """Return whether somebody wrote to the live copy, or moved it, since `begin`; it has no version then,
        and waits for a seed.
        """
        if (
            self._local is None
            or self._begun is None
            or Fingerprint.of(self._local.live, moved=True).same(self._begun)
        ):
            return False
        self.state.invalidate(WRITTEN)
        self._staged.clear()
        self._history.discard()
        return True

    def apply(self) -> None:
        """Write what is staged into the live tensors; without a version from here to `commit`, and dirty if
        it fails.

        Raises:
            DeltaError: as `check_own`.
        """
        self._begin_to_write()
        self._staged.apply(self._targets)
        self._write_back()
        self.check_own()

    def _write_back(self) -> None:
        """Put what was written into the live tensors, where what was written to stands for some of them."""
        if self._local is not None:
            self._local.write_back()

    def _begin_to_write(self) -> None:
        """Give up the version, and those of other channels that hold some of the same tensors."""
        self.state.version = NONE
        for rival in self.state.overlapping:
            rival.invalidate(OTHER_CHANNEL)

    def check_own(self) -> None:
        """Check that nobody but this sync wrote to the live copy since `begin`; to be called when all is
        written.

        Raises:
            DeltaError: somebody did; names the first tensor. The content of the copy is not known then.
        """
        if self._local is None or self._begun is None:
            return
        own = np.zeros(len(self._local.tensors), np.int64)
        for width, target in self._targets.items():
            own[self._spaces[width].pieces.entry] = target.flat.writes
        self._now = Fingerprint.of(self._local.live, moved=True)
        foreign = external_writes(
            self._begun, self._now, self._local.own_writes(own), self._local.live.tensors
        )
        if foreign:
            self.state.invalidate(WRITTEN)
            name = self._layout.manifest.entries[foreign[0]].name
            what = (
                "somebody else wrote to a receiver's copy, or replaced a tensor of it, "
                "while a sync wrote to it"
            )
            hint = "write to the weights of a receiver between syncs only, in no other thread"
            raise DeltaError(what, tensor=name, got=f"{len(foreign)} such tensors", hint=hint)

    def commit(self, version: int, lineage: int, *, full: bool = False) -> None:
        """Move to `version`. The version moves last: an interrupt before that leaves a receiver without a
        version.

        Raises:
            DeltaError: as `check_own`, if that was not asked before.
        """
        self.state.version = NONE
        if self._now is None:
            self.check_own()
        self.state.fingerprint = self._now
        self._history.commit(version, lineage)
        self.state.advance_to(version, lineage, full=full)
        self.rollback()

    def rollback(self) -> None:
        """Forget what is staged."""
        self._staged.clear()
        self._history.discard()
        self._targets = {}
        self._local = self._begun = self._now = None
        self._memory, self._is_seeded = [], False
        self.error = None
