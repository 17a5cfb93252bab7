"""Lanes: what a source sends on one route, and how its changes become frames.

A lane is one stream of frames that some receivers get. Every frame covers one chunk of the lane's space.

* `BroadcastLanes` (broadcast route): one lane, whose space is the source's own. Frames are made as the
  changes are found.
* `P2PLanes` (p2p route): one lane for each kind of receiver, whose space is what the source and that receiver
  have in common (`plan.intersections`). Changes are translated into every lane; their frames are made when
  all are known. A lane for receivers that hold all that the source has needs no translation: its frames are
  made as on the broadcast route.

Neighbouring segments of like density are written as one (`sync.segments`). By the time that a change is
written, the snapshot has
taken it over: so a segment that is sent whole is what the snapshot holds.

The order of frames is that of lanes, then chunks: it is the order of the sizes in a control row.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import FAST, CodecSelector, FrameWriter, PreviousDelta
from dte_dist.detect.snapshot import Changed, Snapshot
from dte_dist.plan.chunks import Chunk, segments_of
from dte_dist.plan.index_map import IndexMap
from dte_dist.sync.segments import merge_segments
from dte_dist.sync.version import SyncStep

__all__ = ["BroadcastLanes", "FrameBuilder", "Lane", "Lanes", "P2PLanes", "lane_step"]

_LANE = 0x9E3779B97F4A7C15


def lane_step(step: SyncStep, lane: int) -> SyncStep:
    """Return a step whose frames cannot be taken for those of another lane."""
    return replace(step, schema=(step.schema ^ (lane + 1) * _LANE) & (1 << 63) - 1)


class FrameBuilder(ABC):
    """Takes the changes of one sync, in order, and makes frames of them.

    Attributes:
        codecs: segments by codec pair.
    """

    def __init__(self) -> None:
        self.codecs: Counter[str] = Counter()

    @abstractmethod
    def add(self, width: int, changed: Changed) -> None:
        """Add what changed in some segments of one chunk of the source's own space, in order; it is
        copied.
        """

    @abstractmethod
    def collect(self) -> list[Tensor]:
        """Return the frames by lane and chunk; empty where nothing changed. Nothing is added any more."""


class Lanes(ABC):
    """The frames of a source on one route.

    Attributes:
        chunks: (lane, chunk) of every frame, in order.
    """

    chunks: Sequence[tuple[int, Chunk]]

    @abstractmethod
    def builder(
        self,
        step: SyncStep,
        known: Snapshot,
        selector: CodecSelector = FAST,
        history: PreviousDelta | None = None,
    ) -> FrameBuilder:
        """Return an empty frame builder for a delta that makes `step`, on top of what is known.

        Args:
            step: from which version to which.
            known: the snapshot.
            selector: of the codecs.
            history: positions of the delta before, and where those of this one are noted.
        """

    @abstractmethod
    def write_seed(self, lane: int, chunk: Chunk, step: SyncStep, known: Snapshot, out: Tensor) -> None:
        """Write the dense frame of a chunk, of the snapshot itself, into a buffer of its size."""


class BroadcastLanes(Lanes):
    """One lane: the source's own space.

    Args:
        source: group rank.
        chunks: of its space.
    """

    def __init__(self, source: int, chunks: Sequence[Chunk]) -> None:
        self._source, self._count = source, len(chunks)
        self.chunks = [(0, chunk) for chunk in chunks]

    def builder(
        self,
        step: SyncStep,
        known: Snapshot,
        selector: CodecSelector = FAST,
        history: PreviousDelta | None = None,
    ) -> FrameBuilder:
        return _DirectBuilder(
            self._source, [chunk for _, chunk in self.chunks], step, known, selector, history=history
        )

    def write_seed(self, lane: int, chunk: Chunk, step: SyncStep, known: Snapshot, out: Tensor) -> None:
        writer = FrameWriter(step.frame_head(self._source, self._count, chunk), known.device)
        for first, length in chunk.segments():
            writer.add_dense(first, known.bits[chunk.width][first : first + length])
        _finish(writer, out, known.device)


class _DirectBuilder(FrameBuilder):
    def __init__(
        self,
        source: int,
        chunks: Sequence[Chunk],
        step: SyncStep,
        known: Snapshot,
        selector: CodecSelector,
        *,
        history: PreviousDelta | None,
    ) -> None:
        super().__init__()
        self._source, self._chunks, self._step = source, chunks, step
        self._known, self._selector, self._history = known, selector, history
        self._frames: list[Tensor] = []
        self._writer: FrameWriter | None = None

    def add(self, width: int, changed: Changed) -> None:
        self._reach(width, changed.first)
        known = self._known.bits[width]
        relative = self._selector.relative(width)
        values = (
            kernels.codecs_on(known.device).distances(changed.old, changed.new) if relative else changed.new
        )
        (cuts,) = _cut([list(segments_of(changed.first, changed.length))], changed.positions, changed.first)
        writer = self._writer = self._writer or self._next()
        for cut in cuts:
            positions, before = changed.positions, cut.first - changed.first
            if positions is not None and len(cuts) > 1:
                positions = positions[cut.here] - before if before else positions[cut.here]
            whole = partial(known.narrow, 0, cut.first, cut.length)
            writer.add(cut.first, cut.length, positions, values[cut.here], relative=relative, whole=whole)

    def _reach(self, width: int, position: int) -> None:
        """Finish the frames before that of the chunk that holds a position: one is in the making at a
        time.
        """
        while (
            chunk := self._chunks[len(self._frames)]
        ).width != width or position >= chunk.first + chunk.length:
            self._finish()

    def _next(self) -> FrameWriter:
        """Return a writer of the next frame."""
        head = self._step.frame_head(self._source, len(self._chunks), self._chunks[len(self._frames)])
        return FrameWriter(head, self._known.device, self._selector, self._history)

    def _finish(self) -> None:
        writer, self._writer = self._writer or self._next(), None
        self._frames.append(writer.finish())
        self.codecs.update(writer.codecs)

    def collect(self) -> list[Tensor]:
        while len(self._frames) < len(self._chunks):
            self._finish()
        return self._frames


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A lane of the p2p route.

    Attributes:
        chunks: of its space.
        into: by width, tables from the source's own space into the lane's.
        back: by width, tables from the lane's space into the source's own.
        is_own_space: True if the lane's space is the source's own: its receivers hold all that the source
            has.
    """

    chunks: Sequence[Chunk]
    into: Mapping[int, Sequence[IndexMap]]
    back: Mapping[int, Sequence[IndexMap]]
    is_identity: bool = False

    def fetch(self, width: int, first: int, length: int, known: Snapshot) -> Tensor:
        """Return the known bits of elements [first, first + length) of the lane's space, as a new tensor."""
        bits = torch.empty(length, dtype=known.bits[width].dtype, device=known.device)
        for index_map in self.back[width]:
            kernels.remaps_on(known.device).fetch(index_map, first, bits, known.bits[width])
        return bits


class P2PLanes(Lanes):
    """One lane for each kind of receiver.

    Args:
        source: group rank.
        lanes: by number.
    """

    def __init__(self, source: int, lanes: Mapping[int, Lane]) -> None:
        self._source, self._lanes = source, lanes
        self._own = frozenset(number for number, lane in lanes.items() if lane.is_identity)
        self.chunks = [(number, chunk) for number, lane in sorted(lanes.items()) for chunk in lane.chunks]

    def builder(
        self,
        step: SyncStep,
        known: Snapshot,
        selector: CodecSelector = FAST,
        history: PreviousDelta | None = None,
    ) -> FrameBuilder:
        def alone(number: int) -> _DirectBuilder:
            return _DirectBuilder(
                self._source,
                self._lanes[number].chunks,
                lane_step(step, number),
                known,
                selector,
                history=history,
            )

        translated = {number: lane for number, lane in self._lanes.items() if number not in self._own}
        direct = {number: alone(number) for number in self._own}
        return _TranslatingBuilder(
            self._source, translated, step, known, selector, direct=direct, history=history
        )

    def write_seed(self, lane: int, chunk: Chunk, step: SyncStep, known: Snapshot, out: Tensor) -> None:
        lane_ = self._lanes[lane]
        writer = FrameWriter(
            lane_step(step, lane).frame_head(self._source, len(lane_.chunks), chunk), known.device
        )
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
        # Where a source holds parts of a slot out of order.
        if not bool((positions[1:] > positions[:-1]).all()):
            positions, order = positions.sort()
            values = values[order]
        return positions, values


class _TranslatingBuilder(FrameBuilder):
    """Takes changes for several lanes; those that have the source's own space have an frame builder of their
    own.
    """

    def __init__(
        self,
        source: int,
        lanes: Mapping[int, Lane],
        step: SyncStep,
        known: Snapshot,
        selector: CodecSelector,
        *,
        direct: Mapping[int, _DirectBuilder],
        history: PreviousDelta | None,
    ) -> None:
        super().__init__()
        self._source, self._lanes, self._step, self._known, self._selector = (
            source,
            lanes,
            step,
            known,
            selector,
        )
        self._history, self._direct = history, direct
        self._found: dict[tuple[int, int], _Found] = {}

    def add(self, width: int, changed: Changed) -> None:
        for builder in self._direct.values():
            builder.add(width, changed)
        if not self._lanes:
            return
        positions, values = changed.listed(), changed.new
        if self._selector.relative(width):
            codecs = kernels.codecs_on(values.device)
            values = codecs.narrow(codecs.distances(changed.old, changed.new), values.dtype)
        translate = kernels.remaps_on(positions.device).translate
        for number, lane in self._lanes.items():
            for index_map in lane.into.get(width, ()):
                if index_map.meets(changed.first, changed.first + changed.length):
                    into = self._found.setdefault((number, width), _Found())
                    held = translate(index_map, changed.first, positions, values)
                    into.positions.append(held[0])
                    into.values.append(held[1])

    def collect(self) -> list[Tensor]:
        frames: list[Tensor] = []
        for number in sorted(self._lanes.keys() | self._direct.keys()):
            if number in self._direct:
                frames += self._direct[number].collect()
                self.codecs.update(self._direct[number].codecs)
                continue
            lane, step = self._lanes[number], lane_step(self._step, number)
            for width in sorted(lane.into):
                found = self._found.pop((number, width), None)
                chunks = [chunk for chunk in lane.chunks if chunk.width == width]
                frames += self._frames(lane, chunks, step, found)
        return frames

    def _frames(
        self, lane: Lane, chunks: Sequence[Chunk], step: SyncStep, found: _Found | None
    ) -> Iterator[Tensor]:
        """Cut the changes of one lane and width into the frames of its chunks."""
        device = self._known.device
        if found is None:
            yield from (torch.empty(0, dtype=torch.uint8, device=device) for _ in chunks)
            return
        positions, values = found.sorted()
        relative = self._selector.relative(values.element_size())
        for chunk, cuts in zip(
            chunks, _cut([list(chunk.segments()) for chunk in chunks], positions, 0), strict=True
        ):
            writer = FrameWriter(
                step.frame_head(self._source, len(lane.chunks), chunk), device, self._selector, self._history
            )
            for cut in cuts:
                here, held = (positions[cut.here] - cut.first).to(torch.int32), values[cut.here]
                wide = kernels.codecs_on(device).widen(held) if relative else held
                whole = partial(lane.fetch, chunk.width, cut.first, cut.length, self._known)
                writer.add(cut.first, cut.length, here, wide, relative=relative, whole=whole)
            yield writer.finish()
            self.codecs.update(writer.codecs)


class _Cut(NamedTuple):
    """A segment [first, first + length), and where its changes are among those found."""

    first: int
    length: int
    here: slice


def _cut(
    groups: Sequence[Sequence[tuple[int, int]]], positions: Tensor | None, origin: int
) -> Iterator[list[_Cut]]:
    """Cut changes into segments, neighbours of like density joined.

    Args:
        groups: (first, length) of segments, one after the other without gaps; those of different groups are
            not joined.
        positions: of the changes, ascending; None if everything changed.
        origin: what they count from.
    """
    segments = [segment for group in groups for segment in group]
    if positions is None:
        counts = [length for _, length in segments]
    elif len(segments) == 1:
        counts = [len(positions)]
    else:
        starts = [first - origin for first, _ in segments] + [sum(segments[-1]) - origin]
        counts = [
            high - low
            for low, high in itertools.pairwise(kernels.on(positions.device).borders(positions, starts))
        ]
    left, at = iter(counts), 0
    for group in groups:
        cuts: list[_Cut] = []
        for first, length, count in merge_segments(group, itertools.islice(left, len(group))):
            cuts.append(_Cut(first, length, slice(at, at + count)))
            at += count
        yield cuts


def _finish(writer: FrameWriter, out: Tensor, device: torch.device) -> None:
    if out.device == device:
        writer.finish(out)
    else:
        out.copy_(writer.finish())
