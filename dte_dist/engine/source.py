"""A source's side of the version chain: what it sends for the next version, and the snapshot that moves only after the vote.

1. `prepare` looks at the live tensors, once: a delta is found and encoded, or (full) the snapshot takes over all live bits.
   After that the live tensors may change; nothing below looks at them again.
2. `frames` gives the encoded delta, round by round.
3. `commit` writes the same delta into the snapshot; `rollback` forgets it, and the next delta is a superset.
4. `seed_frames` gives the snapshot itself, densely: for receivers without a version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dte_dist.change.live import LiveSpace
from dte_dist.change.snapshot import Detector, Snapshot
from dte_dist.codec import FrameHead, FrameWriter, dense_size, read_frame, read_head
from dte_dist.engine.chain import NONE, Chain, Step
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.schedule import SEGMENT, Chunk, Schedule
from dte_dist.plan.space import FlatSpace
from dte_dist.report import Phases

__all__ = ["SourceState", "most_size", "one_device", "seed_size"]


class SourceState:
    """What one source holds between syncs, and prepares for the next.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank contributes.
        schedule: how its flat spaces are cut.
        schema: hash of the model map, that frames carry.

    Attributes:
        chain: version and lineage of the snapshot.
        snapshot: what the receivers hold; None before the first `prepare`.
        error: what went wrong since `prepare`, or None.
        changed, codecs: elements and segments of the prepared delta.
    """

    def __init__(self, layout: Layout, model: ModelMap, rank: int, schedule: Schedule, schema: int) -> None:
        self._layout, self._model, self._rank, self._schedule, self._schema = layout, model, rank, schedule, schema
        self.spaces: Mapping[int, FlatSpace] = model.source_spaces[rank]
        self.chain = Chain()
        self.snapshot: Snapshot | None = None
        self.changed = 0
        self.codecs: Counter[str] = Counter()
        self.error: Exception | None = None
        self._pending: list[Tensor] | None = None

    def prepare(self, version: int, full: bool, phases: Phases, detector: Detector | None = None) -> None:
        """Look at the live tensors, once, for a delta to `version` or a full sync; `detector` as in `change.snapshot`."""
        self.rollback()
        with phases("detect"):
            tensors = self._layout.tensors()
            live = self._live(tensors)
            if self.snapshot is None:
                totals = {width: space.numel for width, space in self.spaces.items()}
                self.snapshot = Snapshot(totals, one_device(tensors), SEGMENT)
        if self.snapshot.device != one_device(tensors):
            self.snapshot.move(one_device(tensors))
        if full:
            self._take_over(live, self.snapshot, phases)
        else:
            step = Step(self._schema, self.chain.stream, self.chain.version, version)
            self._pending = [
                self._delta(live[chunk.width], self._head(chunk, step), chunk, phases, detector)
                for chunk in self._schedule.chunks(self._rank)
            ]

    def _take_over(self, live: Mapping[int, LiveSpace], snapshot: Snapshot, phases: Phases) -> None:
        # From here on the snapshot is ahead of the receivers: only a full sync may follow.
        self.chain.version = NONE
        with phases("detect"):
            for chunk in self._schedule.chunks(self._rank):
                snapshot.refresh(live[chunk.width], chunk.width, chunk.segments())
        self.changed = sum(space.numel for space in self.spaces.values())

    def _delta(self, live: LiveSpace, head: FrameHead, chunk: Chunk, phases: Phases, detector: Detector | None) -> Tensor:
        known = self._known()
        writer = FrameWriter(head, known.device)
        for first, length in chunk.segments():
            with phases("detect"):
                positions, bits = known.changes(live, chunk.width, first, length, detector)
            self.changed += len(positions)
            with phases("encode"):
                if writer.prefers_dense(length, len(positions)):
                    writer.add_dense(first, known.whole(live, chunk.width, first, length))
                else:
                    writer.add(first, length, positions, bits)
        with phases("encode"):
            frame = writer.finish()
        self.codecs.update(writer.codecs)
        return frame

    def frames(self) -> list[Tensor]:
        """Return the encoded delta, a frame per chunk; empty where nothing changed."""
        return self._pending or []

    def seed_frames(self, step: Step) -> list[Callable[[Tensor], None]]:
        """Return the snapshot itself, as functions that write the dense frame of each chunk into a buffer of its `seed_size`.

        They do not raise: a frame that could not be made is all zeros, which no receiver accepts, and `error` says why.
        """
        return [partial(self._write_seed, chunk, step) for chunk in self._schedule.chunks(self._rank)]

    def _write_seed(self, chunk: Chunk, step: Step, out: Tensor) -> None:
        try:
            known = self._known()
            writer = FrameWriter(self._head(chunk, step), known.device)
            for first, length in chunk.segments():
                writer.add_dense(first, known.bits[chunk.width][first : first + length])
            if out.device == known.device:
                writer.finish(out)
            else:
                out.copy_(writer.finish())
        except Exception as error:  # told to all ranks when they acknowledge
            self.error = self.error or error
            out.zero_()

    def detach(self) -> None:
        """Take over the prepared delta though no receiver follows: the snapshot can seed, but no delta starts from it before a commit."""
        self.chain.version = NONE
        for frame in self._pending or ():
            if len(frame):
                head = read_head(frame)
                for segment in read_frame(frame, head):
                    self._known().write(head.width, segment.first, segment.positions, segment.bits)
        self._pending = None

    def commit(self, version: int, stream: int, *, full: bool) -> None:
        """Move to `version`: the receivers have what was prepared, and the snapshot takes it over.

        If it breaks off, the snapshot is between two versions, so it has none.
        """
        self.detach()
        self.chain.move(version, stream, full=full)

    def rollback(self) -> None:
        """Forget what was prepared; the snapshot is as it was."""
        self._pending = None
        self.error = None
        self.changed = 0
        self.codecs.clear()

    def _known(self) -> Snapshot:
        if self.snapshot is None:
            raise RuntimeError("a source has no snapshot before its first prepare()")
        return self.snapshot

    def _head(self, chunk: Chunk, step: Step) -> FrameHead:
        return step.head(self._rank, len(self._schedule.chunks(self._rank)), chunk)

    def _live(self, tensors: Sequence[Tensor]) -> dict[int, LiveSpace]:
        live = {}
        for width, space in self.spaces.items():
            dtypes = [self._model.slots[piece.slot].torch_dtype for piece in space.pieces]
            live[width] = LiveSpace([tensors[piece.entry] for piece in space.pieces], dtypes, width, space.starts)
        return live


def seed_size(chunk: Chunk) -> int:
    """Return the bytes of the dense frame of a chunk."""
    return dense_size((length for _, length in chunk.segments()), chunk.width)


def most_size(chunk: Chunk) -> int:
    """Return a bound on the bytes of any frame of a chunk: two padded streams instead of one per segment."""
    return seed_size(chunk) + 16 * sum(1 for _ in chunk.segments())


def one_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device that all tensors are on.

    Raises:
        LayoutMismatch: they are on several.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        fix = "move the module to one device, or leave tensors out with select="
        raise LayoutMismatch("the tensors of a module are on several devices", got=sorted(map(str, devices)), fix=fix)
    return next(iter(devices), torch.device("cpu"))
