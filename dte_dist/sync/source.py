"""A source's side of the version chain: what it sends for the next version, and the snapshot of what
receivers hold.

1. `prepare` looks at the live tensors, once: a delta is found, taken over into the snapshot and encoded, or
   (full) the snapshot takes over all live bits. After that the live tensors may change; nothing below looks
   at them again.
2. `frames` gives the encoded delta.
3. `commit` settles what the snapshot took over; `rollback` puts back what it held before, and the next delta
   is a superset.
4. `seed_frames` gives the snapshot itself, densely: for receivers without a version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from dte_dist.codec import FAST, CodecSelector, PreviousDelta, dense_size
from dte_dist.detect.live_space import LiveSpace
from dte_dist.detect.snapshot import Detector, Snapshot
from dte_dist.layout import Layout, LiveTensors
from dte_dist.plan.chunks import SEGMENT, Chunk, ChunkPlan
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.model_map import ModelMap
from dte_dist.report import Phases
from dte_dist.sync.frame_builder import BroadcastLanes, FrameBuilder, Lanes
from dte_dist.sync.version import NONE, SyncStep, VersionState
from dte_dist.tensors.flat import FlatTensors

__all__ = ["Source", "dense_frame_bytes", "max_frame_bytes"]


class Source:
    """The state of one source between syncs, and its part of the next.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank contributes.
        schedule: how its flat spaces are cut.
        schema: hash of the model map, that frames carry.

    Attributes:
        state: version and lineage of the snapshot.
        snapshot: what the receivers hold; None before the first `prepare`.
        error: what went wrong since `prepare`, or None.
        changed: elements of the prepared delta.
        codecs: its segments by codec pair; known until `rollback`.
        relay: lanes of the broadcast route.
    """

    def __init__(self, layout: Layout, model: ModelMap, rank: int, schedule: ChunkPlan, schema: int) -> None:
        self._layout, self._model, self._rank, self._schedule, self._schema = (
            layout,
            model,
            rank,
            schedule,
            schema,
        )
        self.spaces: Mapping[int, FlatSpace] = model.source_spaces[rank]
        self._dtypes = {
            width: [model.slots[slot].torch_dtype for slot in space.pieces.slot.tolist()]
            for width, space in self.spaces.items()
        }
        self.state = VersionState()
        self.snapshot: Snapshot | None = None
        self.changed = 0
        self.codecs: Mapping[str, int] = {}
        self.error: Exception | None = None
        self.relay: Lanes = BroadcastLanes(rank, schedule.chunks(rank))
        self._lanes: Lanes = self.relay
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
        """Look at the live tensors, once, for a delta to `version` or a full sync.

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
            live, device = self._live(local), local.device
            if self.snapshot is None:
                totals = {width: space.numel for width, space in self.spaces.items()}
                self.snapshot = Snapshot(totals, device, SEGMENT)
        if self.snapshot.device != device:
            self.snapshot.move(device)
            self._history.reset()
        self._lanes = self.relay if lanes is None else lanes
        if full:
            self._take_over(live, self.snapshot, phases)
        else:
            step = SyncStep(self._schema, self.state.lineage, self.state.version, version)
            self._builder = self._lanes.builder(step, self.snapshot, selector, self._history)
            self._find(live, self.snapshot, self._builder, phases, detector)
            with phases("encode"):
                self._frames = self._builder.collect()
            self.codecs = self._builder.codecs
            self._layout.note_changes(self.changed)

    def _take_over(self, live: Mapping[int, LiveSpace], snapshot: Snapshot, phases: Phases) -> None:
        # From here on the snapshot is ahead of the receivers: only a full sync may follow.
        self.state.version = NONE
        self._history.reset()
        with phases("detect"):
            chunks = self._schedule.chunks(self._rank)
            snapshot.refresh(
                live, ((chunk.width, first, length) for chunk in chunks for first, length in chunk.segments())
            )
        self.changed = sum(space.numel for space in self.spaces.values())

    def _find(
        self,
        live: Mapping[int, LiveSpace],
        known: Snapshot,
        builder: FrameBuilder,
        phases: Phases,
        detector: Detector | None,
    ) -> None:
        """Take over all changes and put them into an frame builder, wave by wave."""
        for width in self.spaces:
            spans = [
                (chunk.first, chunk.length)
                for chunk in self._schedule.chunks(self._rank)
                if chunk.width == width
            ]
            waves = known.diff_and_update(live[width], width, spans, detector)
            while True:
                with phases("detect"):
                    wave = next(waves, None)
                if wave is None:
                    break
                with phases("encode"):
                    for changed in wave:
                        builder.add(width, changed)
                self.changed += sum(map(len, wave))

    def frames(self) -> list[Tensor]:
        """Return the encoded delta, in the order of the route's lanes and their chunks; empty where nothing
        changed.
        """
        return self._frames

    def seed_frames(self, step: SyncStep) -> list[Callable[[Tensor], None]]:
        """Return the snapshot itself, as functions that write the dense frame of each chunk into a buffer of
        its `seed_size`.

        They do not raise: a frame that could not be made is all zeros, which no receiver accepts, and `error`
            says why.
        """
        return [partial(self._write_seed, lane, chunk, step) for lane, chunk in self._lanes.chunks]

    def _write_seed(self, lane: int, chunk: Chunk, step: SyncStep, out: Tensor) -> None:
        try:
            self._lanes.write_seed(lane, chunk, step, self._known(), out)
        except Exception as error:  # told to all ranks when they acknowledge
            self.error = self.error or error
            out.zero_()

    def detach(self) -> None:
        """Keep the prepared delta though no receiver follows: the snapshot can seed, but no delta starts from
        it before a commit.
        """
        self._commit_snapshot()
        self._history.reset()

    def commit(self, version: int, lineage: int, *, full: bool, all_follow: bool = False) -> None:
        """Move to `version`: the receivers have what was prepared, as the snapshot has.

        Args:
            version, stream: that this sync makes.
            full: it was not a delta.
            all_follow: every receiver of the channel took the delta: its positions are known to all, and the
                next one may count on them.

        A receiver gets the next delta only if it holds `version` of `stream`. This sync alone makes these,
        and whoever came to them through it took the delta, read it to the end, and committed what it noted
        together with the version. It keeps that until it commits another version, which never is this one
        again. A receiver that failed after the vote, was closed or is new has no version, or has none of this
        channel's. So the history that the next delta counts on is held by all that follow, unless this source
        prepares in vain in between: then it is dropped (`rollback`), and so it is by whatever moves the
            snapshot in another way.
        """
        self._commit_snapshot()
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
            self.state.roll_back(self.snapshot)
        finally:
            self._drop()
            self.error = None
            self.changed, self.codecs = 0, {}

    def _commit_snapshot(self) -> None:
        """Let the snapshot be what it is, without a version yet."""
        self.state.version = NONE
        self._known().commit()
        self._drop()

    def _drop(self) -> None:
        self._builder, self._frames = None, []

    def _known(self) -> Snapshot:
        if self.snapshot is None:
            raise RuntimeError("a source has no snapshot before its first prepare()")
        return self.snapshot

    def known(self) -> Mapping[int, Tensor]:
        """Return the bits of the snapshot by width, each in the order of this source's space."""
        return self._known().bits

    def live(self) -> dict[int, LiveSpace]:
        """Return the live tensors by width, as they would be sent."""
        return self._live(self._layout.read())

    def _live(self, local: LiveTensors) -> dict[int, LiveSpace]:
        return {
            width: LiveSpace(
                FlatTensors.part(local, space.pieces.entry, width, space.starts), self._dtypes[width]
            )
            for width, space in self.spaces.items()
        }


def dense_frame_bytes(chunk: Chunk) -> int:
    """Return the bytes of the dense frame of a chunk."""
    return dense_size((length for _, length in chunk.segments()), chunk.width)


def max_frame_bytes(chunk: Chunk) -> int:
    """Return a bound on the bytes of any frame of a chunk: two padded streams instead of one per segment."""
    return dense_frame_bytes(chunk) + 16 * sum(1 for _ in chunk.segments())
