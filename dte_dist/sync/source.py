"""A source's side of the version chain: the frames that it sends for the next version.

1. `prepare` looks at the live tensors, once (`sync.versioned_snapshot`): a delta is found, taken over into
   the snapshot and encoded, or (full) the snapshot takes over all live bits.
2. `frames` gives the encoded delta.
3. `commit` settles what the snapshot took over; `rollback` puts back what it held before, and the next delta
   is a superset.
4. `seed_frames` gives the snapshot itself, densely: for receivers without a version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from dte_dist.codec import FAST, CodecSelector, PreviousDelta
from dte_dist.detect.detector import Detector
from dte_dist.layout import Layout
from dte_dist.plan.chunks import Chunk, ChunkPlan
from dte_dist.plan.model_map import ModelMap
from dte_dist.report import ChangedNames, Phases
from dte_dist.sync.frame_builder import FrameBuilder, Lane, Lanes
from dte_dist.sync.version import SyncStep
from dte_dist.sync.versioned_snapshot import VersionedSnapshot
from dte_dist.tensors.flat import FlatTensors

__all__ = ["Source"]


class Source(VersionedSnapshot):
    """The state of one source between syncs, and its part of the next.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank contributes.
        schedule: how its flat spaces are cut.
        schema: hash of the model map, that frames carry.

    Attributes:
        error: what went wrong since `prepare`, or None.
        codecs: segments of the prepared delta by codec pair; known until `rollback`.
        own_lanes: of the broadcast route: one, whose space is the source's own.
    """

    def __init__(self, layout: Layout, model: ModelMap, rank: int, schedule: ChunkPlan, schema: int) -> None:
        spaces = model.source_spaces[rank]
        chunks = schedule.chunks(rank)
        dtypes = {
            width: [model.slots[slot].torch_dtype for slot in space.pieces.slot.tolist()]
            for width, space in spaces.items()
        }
        super().__init__(spaces, dtypes, chunks)
        self._layout = layout
        self._names = [entry.name for entry in layout.manifest.entries]
        self._ties = layout.manifest.ties
        self._schema = schema
        self.codecs: Mapping[str, int] = {}
        self.error: Exception | None = None
        self.own_lanes = Lanes(rank, [Lane(None, chunks)])
        self._lanes = self.own_lanes
        self._builder: FrameBuilder | None = None
        self._frames: list[Tensor] = []
        self._history = PreviousDelta()

    def prepare(
        self,
        version: int,
        full: bool,
        phases: Phases,
        detector: Detector | None = None,
        lanes: Lanes | None = None,
        *,
        selector: CodecSelector = FAST,
    ) -> None:
        """Look at the live tensors, once: find, take over and encode a delta to `version`, or take all over.

        Args:
            version: to make; of no meaning for a full sync.
            full: take over all live bits instead of looking for changes.
            phases: where the time goes.
            detector: see `detect.snapshot`.
            lanes: of the route that frames will take; None is the broadcast route.
            selector: of the codecs of a delta.
        """
        self.rollback()
        with phases("detect"):
            if self.snapshot is not None:
                self._layout.refuse_copies()
            local = self._layout.read()
        if full or self.snapshot is None or self.snapshot.device != local.device:
            self._history.reset()
        self._lanes = self.own_lanes if lanes is None else lanes
        if full:
            self.take_over_all(local, phases)
            return
        step = SyncStep(self._schema, self.state.lineage, self.state.version, version)
        self._builder = self._lanes.builder(step, self.open(local.device), selector, self._history)
        self.take_over_changes(local, self._builder, phases, detector)
        with phases("encode"):
            self._frames = self._builder.collect()
        self.codecs = self._builder.codecs
        self._layout.note_changes(self.changed)

    def frames(self) -> list[Tensor]:
        """Return the encoded delta, in the order of the route's lanes and their chunks; empty where nothing
        changed.
        """
        return self._frames

    def changed_names(self) -> ChangedNames:
        """Return the names of the tensors of which something changed; known until `rollback`."""
        if self.pieces is None:
            return ChangedNames()
        return ChangedNames(self._names, self._ties, self.pieces.marks())

    def seed_frames(self, step: SyncStep) -> list[Callable[[Tensor], None]]:
        """Return the snapshot itself, as functions that write the dense frame of each chunk into a buffer of
        its `dense_frame_bytes`.

        They do not raise: a frame that could not be made is all zeros, which no receiver accepts, and `error`
        says why.
        """
        return [partial(self._write_seed, lane, chunk, step) for lane, chunk in self._lanes.chunks]

    def _write_seed(self, lane: Lane, chunk: Chunk, step: SyncStep, out: Tensor) -> None:
        try:
            self._lanes.write_seed(lane, chunk, step, self.held(), out)
        except Exception as error:  # told to all ranks when they acknowledge
            self.error = self.error or error
            out.zero_()

    def detach(self) -> None:
        """Keep the prepared delta though no receiver follows: the snapshot can seed, but no delta starts from
        it before a commit.
        """
        self.settle()
        self._drop()
        self._history.reset()

    def commit(self, version: int, lineage: int, *, full: bool, all_follow: bool = False) -> None:
        """Move to `version`: the receivers have what was prepared, as the snapshot has.

        Args:
            version, lineage: that this sync makes.
            full: it was not a delta.
            all_follow: every receiver of the channel took the delta: its positions are known to all, and the
                next one may count on them.

        A receiver gets the next delta only if it holds `version` of `lineage`. This sync alone makes these,
        and whoever came to them through it took the delta, read it to the end, and committed what it noted
        together with the version. It keeps that until it commits another version, which never is this one
        again. A receiver that failed after the vote, was closed or is new has no version, or has none of this
        channel's. So the history that the next delta counts on is held by all that follow, unless this source
        prepares in vain in between: then it is dropped (`rollback`), and so it is by whatever moves the
        snapshot in another way.
        """
        self.settle()
        self._drop()
        if all_follow and not full:
            self._history.commit(version, lineage)
        else:
            self._history.reset()
        self.state.advance_to(version, lineage, full=full)

    def rollback(self) -> None:
        """Forget what was prepared, unless it was committed: the snapshot is as it was, or has no version if
        that cannot be done.

        The next delta counts on no history then: if that was what went wrong, trying again must not go wrong
        again.
        """
        if self._builder is not None:
            self._history.reset()
        try:
            super().rollback()
        finally:
            self._drop()
            self.error, self.codecs = None, {}

    def _drop(self) -> None:
        self._builder, self._frames = None, []

    def live(self) -> dict[int, FlatTensors]:
        """Return the live tensors by width, as they would be sent."""
        return self.live_spaces(self._layout.read())
