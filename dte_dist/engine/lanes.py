"""Lanes: what a source sends on one route, and how its changes become frames.

A lane is one stream of frames that some receivers get. Every frame covers one chunk of the lane's space.

* `RelayLanes` (broadcast route): one lane, whose space is the source's own. Frames are made as the changes are found, and the
  changes are read back from them at commit. Neighbouring segments of like density are written as one (`engine.joined`).
* `PairLanes` (p2p route): one lane for each kind of receiver, whose space is what the source and that receiver have in common
  (`plan.pairs`). Changes are translated into every lane; their frames are made when all are known. A lane for receivers that hold
  all that the source has needs no translation: its frames are made as on the broadcast route.

The order of frames is that of lanes, then chunks: it is the order of the sizes in a control row.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.change.snapshot import Snapshot
from dte_dist.codec import FAST, Chooser, FrameWriter, Segment, read_own
from dte_dist.engine.chain import Step
from dte_dist.engine.joined import Joiner, join_alike
from dte_dist.plan.remap import Remap
from dte_dist.plan.schedule import Chunk

__all__ = ["Change", "Lanes", "Outbox", "PairLane", "PairLanes", "RelayLanes", "step_of_lane"]

Change = tuple[int, Segment]
"""Width, and what changed in a segment of the source's own space."""

_LANE = 0x9E3779B97F4A7C15


def step_of_lane(step: Step, lane: int) -> Step:
    """Return a step whose frames cannot be taken for those of another lane."""
    return replace(step, schema=(step.schema ^ (lane + 1) * _LANE) & (1 << 63) - 1)


class Outbox(ABC):
    """Takes the changes of one sync, in order, and makes frames of them.

    Attributes:
        codecs: segments by codec pair.
    """

    def __init__(self) -> None:
        self.codecs: Counter[str] = Counter()

    @abstractmethod
    def add(self, chunk: Chunk, first: int, length: int, found: tuple[Tensor, Tensor]) -> None:
        """Add the changes of one segment of a chunk of the source's own space.

        Args:
            chunk: the chunk that the segment is in.
            first, length: the segment.
            found: positions counted from `first`, and bits; they are copied.
        """

    @abstractmethod
    def close(self) -> list[Tensor]:
        """Return the frames by lane and chunk; empty where nothing changed. Nothing is added any more."""

    @abstractmethod
    def changes(self) -> Iterator[Change]:
        """Yield everything that was added; after `close`."""


class Lanes(ABC):
    """What a source sends on one route.

    Attributes:
        chunks: (lane, chunk) of every frame, in order.
    """

    chunks: Sequence[tuple[int, Chunk]]

    @abstractmethod
    def outbox(self, step: Step, known: Snapshot, chooser: Chooser = FAST) -> Outbox:
        """Return an empty outbox for a delta that makes `step`, on top of what is known; `chooser` chooses its codecs."""

    @abstractmethod
    def write_seed(self, lane: int, chunk: Chunk, step: Step, known: Snapshot, out: Tensor) -> None:
        """Write the dense frame of a chunk, of the snapshot itself, into a buffer of its size."""


class RelayLanes(Lanes):
    """One lane: the source's own space.

    Args:
        source: group rank.
        chunks: of its space.
    """

    def __init__(self, source: int, chunks: Sequence[Chunk]) -> None:
        self._source, self._count = source, len(chunks)
        self.chunks = [(0, chunk) for chunk in chunks]

    def outbox(self, step: Step, known: Snapshot, chooser: Chooser = FAST) -> Outbox:
        return _RelayOutbox(self._source, [chunk for _, chunk in self.chunks], step, known, chooser)

    def write_seed(self, lane: int, chunk: Chunk, step: Step, known: Snapshot, out: Tensor) -> None:
        writer = FrameWriter(step.head(self._source, self._count, chunk), known.device)
        for first, length in chunk.segments():
            writer.add_dense(first, known.bits[chunk.width][first : first + length])
        _finish(writer, out, known.device)


class _RelayOutbox(Outbox):
    def __init__(self, source: int, chunks: Sequence[Chunk], step: Step, known: Snapshot, chooser: Chooser) -> None:
        super().__init__()
        self._heads = [step.head(source, len(chunks), chunk) for chunk in chunks]
        self._known, self._chooser = known, chooser
        self._joiner = Joiner(chooser, known.device)
        self._frames: list[Tensor] = []
        self._writer: FrameWriter | None = None

    def add(self, chunk: Chunk, first: int, length: int, found: tuple[Tensor, Tensor]) -> None:
        self._joiner.add(self._writer_of(chunk.number), self._known.bits[chunk.width], first, length, found)

    def _writer_of(self, number: int) -> FrameWriter:
        """Return the writer of a chunk; the frames before it are finished, so that one is in the making at a time."""
        if len(self._frames) < number:
            self._finish(number)
        if self._writer is None:
            self._writer = FrameWriter(self._heads[number], self._known.device, self._chooser)
        return self._writer

    def _finish(self, until: int) -> None:
        while len(self._frames) < until:
            number = len(self._frames)
            writer, self._writer = self._writer_of(number), None
            self._joiner.flush(writer, self._known.bits[self._heads[number].width])
            self._frames.append(writer.finish())
            self.codecs.update(writer.codecs)

    def close(self) -> list[Tensor]:
        self._finish(len(self._heads))
        return self._frames

    def changes(self) -> Iterator[Change]:
        for frame in self._frames:
            if len(frame):
                yield from read_own(frame)


@dataclass(frozen=True, slots=True, eq=False)
class PairLane:
    """A lane of the p2p route.

    Attributes:
        chunks: of its space.
        into: by width, tables from the source's own space into the lane's.
        back: by width, tables from the lane's space into the source's own.
        is_own_space: True if the lane's space is the source's own: its receivers hold all that the source has.
    """

    chunks: Sequence[Chunk]
    into: Mapping[int, Sequence[Remap]]
    back: Mapping[int, Sequence[Remap]]
    is_own_space: bool = False

    def fetch(self, width: int, first: int, length: int, known: Snapshot) -> Tensor:
        """Return the known bits of elements [first, first + length) of the lane's space."""
        bits = torch.empty(length, dtype=known.bits[width].dtype, device=known.device)
        for remap in self.back[width]:
            kernels.remaps_on(known.device).fetch(remap, first, bits, known.bits[width])
        return bits


class PairLanes(Lanes):
    """One lane for each kind of receiver.

    Args:
        source: group rank.
        lanes: by number.
    """

    def __init__(self, source: int, lanes: Mapping[int, PairLane]) -> None:
        self._source, self._lanes = source, lanes
        self._own = frozenset(number for number, lane in lanes.items() if lane.is_own_space)
        self.chunks = [(number, chunk) for number, lane in sorted(lanes.items()) for chunk in lane.chunks]

    def outbox(self, step: Step, known: Snapshot, chooser: Chooser = FAST) -> Outbox:
        def alone(number: int) -> _RelayOutbox:
            return _RelayOutbox(self._source, self._lanes[number].chunks, step_of_lane(step, number), known, chooser)

        translated = {number: lane for number, lane in self._lanes.items() if number not in self._own}
        return _PairOutbox(self._source, translated, step, known, chooser, direct={number: alone(number) for number in self._own})

    def write_seed(self, lane: int, chunk: Chunk, step: Step, known: Snapshot, out: Tensor) -> None:
        lane_ = self._lanes[lane]
        writer = FrameWriter(step_of_lane(step, lane).head(self._source, len(lane_.chunks), chunk), known.device)
        for first, length in chunk.segments():
            writer.add_dense(first, lane_.fetch(chunk.width, first, length, known))
        _finish(writer, out, known.device)


@dataclass(slots=True)
class _Found:
    """Changes translated into one lane, of one width."""

    positions: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Return all positions, ascending, and their values."""
        positions, values = torch.cat(self.positions), torch.cat(self.values)
        if not bool((positions[1:] > positions[:-1]).all()):  # where a source holds parts of a slot out of order
            positions, order = positions.sort()
            values = values[order]
        return positions, values


class _PairOutbox(Outbox):
    """Takes changes for several lanes; those that have the source's own space have an outbox of their own."""

    def __init__(
        self, source: int, lanes: Mapping[int, PairLane], step: Step, known: Snapshot, chooser: Chooser,
        *, direct: Mapping[int, _RelayOutbox],
    ) -> None:  # fmt: skip
        super().__init__()
        self._source, self._lanes, self._step, self._known, self._chooser = source, lanes, step, known, chooser
        self._direct = direct
        self._found: dict[tuple[int, int], _Found] = {}
        self._changes: list[Change] = []

    def add(self, chunk: Chunk, first: int, length: int, found: tuple[Tensor, Tensor]) -> None:
        positions, bits = found
        if not len(positions):
            return
        for outbox in self._direct.values():
            outbox.add(chunk, first, length, found)
        if not self._direct:
            self._changes.append((chunk.width, Segment(first, length, positions.clone(), bits.clone())))
        if not self._lanes:
            return
        values = bits
        if self._chooser.relative(chunk.width):
            known = self._known.bits[chunk.width][first : first + length]
            codecs = kernels.codecs_on(known.device)
            values = codecs.narrow(codecs.distances(known, positions, bits), bits.dtype)
        translate = kernels.remaps_on(positions.device).translate
        for number, lane in self._lanes.items():
            for remap in lane.into.get(chunk.width, ()):
                if remap.meets(first, first + length):
                    into = self._found.setdefault((number, chunk.width), _Found())
                    held = translate(remap, first, positions, values)
                    into.positions.append(held[0])
                    into.values.append(held[1])

    def close(self) -> list[Tensor]:
        frames: list[Tensor] = []
        for number in sorted(self._lanes.keys() | self._direct.keys()):
            if number in self._direct:
                frames += self._direct[number].close()
                self.codecs.update(self._direct[number].codecs)
                continue
            lane, step = self._lanes[number], step_of_lane(self._step, number)
            for width in sorted(lane.into):
                found = self._found.pop((number, width), None)
                chunks = [chunk for chunk in lane.chunks if chunk.width == width]
                frames += self._frames(lane, chunks, step, found)
        return frames

    def _frames(self, lane: PairLane, chunks: Sequence[Chunk], step: Step, found: _Found | None) -> Iterator[Tensor]:
        """Cut the changes of one lane and width into the frames of its chunks."""
        device = self._known.device
        if found is None:
            yield from (torch.empty(0, dtype=torch.uint8, device=device) for _ in chunks)
            return
        positions, values = found.sorted()
        segments = [segment for chunk in chunks for segment in chunk.segments()]
        starts = torch.tensor([first for first, _ in segments] + [sum(segments[-1])], dtype=torch.int64, device=device)
        borders = torch.searchsorted(positions, starts).tolist()
        counts, at = iter(np.diff(borders).tolist()), borders[0]
        for chunk in chunks:
            writer = FrameWriter(step.head(self._source, len(lane.chunks), chunk), device, self._chooser)
            relative = self._chooser.relative(chunk.width)
            parts = list(chunk.segments())
            for first, length, count in join_alike(parts, itertools.islice(counts, len(parts))):
                here = (positions[at : at + count] - first).to(torch.int32)
                known = partial(lane.fetch, chunk.width, first, length, self._known)
                held = values[at : at + count]
                wide = kernels.codecs_on(device).widen(held) if relative else held
                writer.add(first, length, here, wide, relative=relative, known=known)
                at += count
            yield writer.finish()
            self.codecs.update(writer.codecs)

    def changes(self) -> Iterator[Change]:
        yield from next(iter(self._direct.values())).changes() if self._direct else self._changes


def _finish(writer: FrameWriter, out: Tensor, device: torch.device) -> None:
    if out.device == device:
        writer.finish(out)
    else:
        out.copy_(writer.finish())
