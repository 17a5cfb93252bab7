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
from dte_dist.engine.chain import NONE, Chain
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.schedule import SEGMENT, Chunk, Schedule
from dte_dist.plan.space import FlatSpace
from dte_dist.report import Phases

__all__ = ["SourceState", "one_device"]


class SourceState:
    """What one source holds between syncs, and prepares for the next.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank contributes.
        schedule: how its flat spaces are cut.
        schema: hash of the model map, that frames carry.
        detector: see `change.snapshot`.
    """

    def __init__(
        self, layout: Layout, model: ModelMap, rank: int, schedule: Schedule, schema: int,
        *, detector: Detector | None = None,
    ) -> None:  # fmt: skip
        self._layout, self._model, self._rank, self._schedule, self._schema = layout, model, rank, schedule, schema
        self.spaces: Mapping[int, FlatSpace] = model.source_spaces[rank]
        self.chain = Chain()
        self._detector = detector
        self.snapshot: Snapshot | None = None
        self.changed = 0
        self.codecs: Counter[str] = Counter()
        self._pending: list[list[Tensor]] | None = None

    def prepare(self, version: int, full: bool, phases: Phases) -> None:
        """Look at the live tensors, once, for a delta to `version` or a full sync."""
        self.rollback()
        with phases("detect"):
            tensors = self._layout.tensors()
            live = self._live(tensors)
            if self.snapshot is None:
                totals = {width: space.numel for width, space in self.spaces.items()}
                self.snapshot = Snapshot(totals, one_device(tensors), SEGMENT, self._detector)
        if full:
            self._take_over(live, self.snapshot, phases)
        else:
            self._pending = [self._delta_round(live, number, version, phases) for number in range(self._schedule.rounds)]

    def _take_over(self, live: Mapping[int, LiveSpace], snapshot: Snapshot, phases: Phases) -> None:
        # From here on the snapshot is ahead of the receivers: only a full sync may follow.
        self.chain.version = NONE
        with phases("detect"):
            for chunk in self._schedule.chunks(self._rank):
                snapshot.refresh(live[chunk.width], chunk.width, chunk.segments())
        self.changed = sum(space.numel for space in self.spaces.values())

    def _delta_round(self, live: Mapping[int, LiveSpace], number: int, version: int, phases: Phases) -> list[Tensor]:
        return [self._delta(live[chunk.width], chunk, version, phases) for chunk in self._schedule.round(self._rank, number)]

    def _delta(self, live: LiveSpace, chunk: Chunk, version: int, phases: Phases) -> Tensor:
        known = self._known()
        writer = FrameWriter(self._head(chunk, version, seed=False), self._known().device)
        for first, length in chunk.segments():
            with phases("detect"):
                positions, bits = known.changes(live, chunk.width, first, length)
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

    def frames(self, number: int) -> list[Tensor]:
        """Return the encoded delta of one round, a frame per chunk (empty where nothing changed)."""
        return self._pending[number] if self._pending else []

    def seed_sizes(self, number: int) -> list[int]:
        """Return the bytes of each frame of one round of the snapshot itself."""
        chunks = self._schedule.round(self._rank, number)
        return [dense_size((length for _, length in chunk.segments()), chunk.width) for chunk in chunks]

    def seed_frames(self, number: int, version: int, stream: int) -> list[Callable[[Tensor], None]]:
        """Return one round of the snapshot itself, as functions that write a dense frame into a buffer of its size."""
        return [partial(self._write_seed, chunk, version, stream) for chunk in self._schedule.round(self._rank, number)]

    def _write_seed(self, chunk: Chunk, version: int, stream: int, out: Tensor) -> None:
        known = self._known()
        writer = FrameWriter(self._head(chunk, version, seed=True, stream=stream), known.device)
        for first, length in chunk.segments():
            writer.add_dense(first, known.bits[chunk.width][first : first + length])
        if out.device == known.device:
            writer.finish(out)
        else:
            out.copy_(writer.finish())

    def detach(self) -> None:
        """Take over the prepared delta though no receiver follows: the snapshot can seed, but no delta starts from it before a commit."""
        self.chain.version = NONE
        self._settle()

    def _settle(self) -> None:
        """Write the prepared delta into the snapshot, which then holds the live bits of `prepare`."""
        for frames in self._pending or ():
            for frame in frames:
                if len(frame):
                    head = read_head(frame)
                    for segment in read_frame(frame, head):
                        self._known().write(head.width, segment.first, segment.positions, segment.bits)
        self._pending = None

    def commit(self, version: int, stream: int, *, full: bool) -> None:
        """Move to `version`: the receivers have what was prepared, and the snapshot takes it over."""
        self._settle()
        self.chain.move(version, stream, full=full)

    def rollback(self) -> None:
        """Forget what was prepared; the snapshot is as it was."""
        self._pending = None
        self.changed = 0
        self.codecs.clear()

    def _known(self) -> Snapshot:
        if self.snapshot is None:
            raise RuntimeError("a source has no snapshot before its first prepare()")
        return self.snapshot

    def _head(self, chunk: Chunk, version: int, *, seed: bool, stream: int | None = None) -> FrameHead:
        return FrameHead(
            schema=self._schema, stream=self.chain.stream if stream is None else stream, base=NONE if seed else self.chain.version,
            version=version, source=self._rank, number=chunk.number, count=self._schedule.count(self._rank),
            width=chunk.width, first=chunk.first, length=chunk.length, seed=seed,
        )  # fmt: skip

    def _live(self, tensors: Sequence[Tensor]) -> dict[int, LiveSpace]:
        live = {}
        for width, space in self.spaces.items():
            dtypes = [self._model.slots[piece.slot].torch_dtype for piece in space.pieces]
            live[width] = LiveSpace([tensors[piece.entry] for piece in space.pieces], dtypes, width, space.starts)
        return live


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
