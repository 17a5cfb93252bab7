"""The live tensors of a receiver with their place in the chain of versions, whatever brings the changes.

1. `begin_with` finds the live tensors of this sync. If somebody else wrote to them since the last commit,
   they have no version. `is_written` looks again, before the vote: what is staged was made for the bits that
   were there at `begin_with`.
2. `stage` keeps checked changes; nothing live is touched.
3. `apply`, after the vote, writes what is staged. A receiver that fails inside it is dirty: it has no version
   until it is seeded. `check_own` raises if anybody else wrote meanwhile.
4. `commit` moves to the new version; `rollback` forgets what is staged.

`sync.receiver.Receiver` stages frames, `sync.engine.DeltaEngine` named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor, UntypedStorage

from dte_dist.codec import Segment
from dte_dist.detect.fingerprint import Fingerprint, external_writes
from dte_dist.errors import DeltaError
from dte_dist.layout import LiveTensors
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.index_map import IndexMap
from dte_dist.report import ChangedNames
from dte_dist.sync.control import OTHER_CHANNEL, WRITTEN
from dte_dist.sync.staging import StagedPatch, Target
from dte_dist.sync.version import NONE, VersionState
from dte_dist.tensors.flat import FlatTensors

__all__ = ["IndexMaps", "VersionedCopy"]

IndexMaps = Mapping[int, Mapping[int, Sequence[IndexMap]]]
"""By key of a receiver's space and by source, tables from the source's space to the receiver's."""


class VersionedCopy:
    """The live tensors of a receiver, and which version of which lineage they hold.

    Args:
        spaces: what this receiver holds, as pieces of the tensors that are read; by width.
        names: of the tensors.
        ties: groups of names that are one tensor, of which the spaces have one.

    Attributes:
        state: version and lineage; version NONE means never seeded, being seeded, or dirty.
        changed_names: of the tensors that the last version that was committed wrote to.
    """

    def __init__(
        self,
        spaces: Mapping[int, FlatSpace],
        names: Sequence[str],
        state: VersionState | None = None,
        ties: Sequence[Sequence[str]] = (),
    ) -> None:
        self.state = VersionState() if state is None else state
        self._spaces = spaces
        self._names = names
        self._ties = ties
        self.changed_names = ChangedNames()
        self._staged = StagedPatch()
        self._targets: Mapping[int, Target] = {}
        self._memory: list[UntypedStorage] = []
        self._local: LiveTensors | None = None
        self._begun: Fingerprint | None = None
        self._now: Fingerprint | None = None

    def begin_with(self, read: Callable[[], LiveTensors], index_maps: IndexMaps) -> None:
        """Find the live tensors, as they are at this moment; nothing is staged yet.

        Args:
            read: finds them.
            index_maps: from the spaces that what is staged counts in.
        """
        self._staged.clear()
        self.changed_names = ChangedNames()
        begun = self.locate(read, index_maps)
        held = self.state.fingerprint
        if self.state.version != NONE and (held is None or not held.same(begun)):
            self.state.invalidate(WRITTEN)

    def written(self) -> list[str]:
        """Return the names of tensors that somebody else wrote to, or replaced, between the last commit and
        `begin_with`.
        """
        held = self.state.fingerprint
        begun = self._begun
        if held is None or begun is None:
            return []
        return [self._names[index] for index in held.differences(begun)]

    def locate(self, read: Callable[[], LiveTensors], index_maps: IndexMaps) -> Fingerprint:
        """Find the live tensors, to which nothing has been written yet; return their fingerprint."""
        local = self._local = read()
        live = local.live
        # Whoever gives a tensor other memory meanwhile must not free what is read and written here.
        self._memory = list(map(Tensor.untyped_storage, live.tensors))
        begun = self._begun = Fingerprint.of(live)
        self._now = None
        self._targets = {key: Target(flat, index_maps[key]) for key, flat in self.flat_tensors(local).items()}
        return begun

    def flat_tensors(self, local: LiveTensors) -> dict[int, FlatTensors]:
        """Return the live tensors by width, each in the order of this receiver's space."""
        return {
            key: FlatTensors.part(local, space.pieces.entry, space.width, space.starts)
            for key, space in self._spaces.items()
        }

    def stage(self, key: int, source: int, segment: Segment) -> None:
        """Keep the changes of a segment of a source's space; the tensors must stay as they are until `commit`
        or `rollback`.
        """
        self._staged.add(self._targets[key], source, segment)

    def is_written(self) -> bool:
        """Return whether somebody wrote to the live copy, or moved it, since `begin_with`; it has no version
        then, and waits for a seed.
        """
        if (
            self._local is None
            or self._begun is None
            or Fingerprint.of(self._local.live, moved=True).same(self._begun)
        ):
            return False
        self.state.invalidate(WRITTEN)
        self._staged.clear()
        return True

    def apply(self) -> None:
        """Write what is staged into the live tensors; without a version from here to `commit`, and dirty if
        it fails.

        Raises:
            DeltaError: as `check_own`.
        """
        self.begin_to_write()
        self._staged.apply()
        self.write_back()
        self.check_own()

    def write_back(self) -> None:
        """Put what was written into the live tensors, where what was written to stands for some of them."""
        if self._local is not None:
            self._local.write_back()

    def begin_to_write(self) -> None:
        """Give up the version, and those of other channels that hold some of the same tensors."""
        self.state.version = NONE
        for rival in self.state.overlapping:
            rival.invalidate(OTHER_CHANNEL)

    def check_own(self) -> None:
        """Check that nobody but this sync wrote to the live copy since `begin_with`; to be called when all is
        written.

        Raises:
            DeltaError: somebody did; names the first tensor. The content of the copy is not known then.
        """
        if self._local is None or self._begun is None:
            return
        own = np.zeros(len(self._local.tensors), np.int64)
        for key, target in self._targets.items():
            own[self._spaces[key].pieces.entry] = target.flat.writes
        live = self._local.live
        self._now = Fingerprint.of(live, moved=True)
        foreign = external_writes(self._begun, self._now, self._local.own_writes(own), live.tensors)
        if foreign:
            self.state.invalidate(WRITTEN)
            what = (
                "somebody else wrote to a receiver's copy, or replaced a tensor of it, "
                "while a sync wrote to it"
            )
            hint = "write to the weights of a receiver between syncs only, in no other thread"
            got = f"{len(foreign)} such tensors"
            raise DeltaError(what, tensor=self._names[foreign[0]], got=got, hint=hint)

    def confirm(self) -> None:
        """Give up the version, and check what was written unless that was done.

        Raises:
            DeltaError: as `check_own`.
        """
        self.state.version = NONE
        if self._now is None:
            self.check_own()

    def commit(self, version: int, lineage: int, *, full: bool = False) -> None:
        """Move to `version`. The version moves last: an interrupt before that leaves a receiver without a
        version.

        Raises:
            DeltaError: as `check_own`, if that was not asked before.
        """
        self.confirm()
        now = self._now
        self.state.fingerprint = None if now is None else now.watching(self._memory, self.state.fingerprint)
        marks = [
            (self._spaces[key].pieces.entry, target.flat.writes > 0) for key, target in self._targets.items()
        ]
        self.changed_names = ChangedNames(self._names, self._ties, marks)
        self.state.advance_to(version, lineage, full=full)
        self.rollback()

    def rollback(self) -> None:
        """Forget what is staged."""
        self._staged.clear()
        self._targets = {}
        self._local = self._begun = self._now = None
        self._memory = []
