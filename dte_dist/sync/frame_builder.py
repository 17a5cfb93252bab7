"""Lanes: what a source sends on one route, and how its changes become frames.

A lane is one stream of frames that some receivers get; every frame covers one chunk of the lane's space. On
the broadcast route a source has one lane, whose space is the source's own. On the p2p route it has one for
each kind of receiver, whose space is what the source and that receiver have in common (`plan.intersections`).

1. `FrameBuilder.add` takes changes as they are found. A lane whose space is the source's own (also a receiver
   that holds all that the source has) writes them into the frame in the making. Every other lane translates
   them, and keeps them.
2. `FrameBuilder.collect` finishes what is in the making, and writes what was kept.

Neighbouring segments of like density are written as one (`merge_segments`): what a segment costs, whatever is
in it, is paid less often. The snapshot is updated before
changes are encoded, so a segment that is sent whole is read from the snapshot.

The order of frames is that of lanes, then chunks: it is the order of the sizes in a control row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import FAST, CodecSelector, FrameWriter, PreviousDelta
from dte_dist.detect.detector import Changed
from dte_dist.detect.snapshot import Snapshot
from dte_dist.plan.chunks import Chunk, segments_of
from dte_dist.plan.index_map import IndexMap
from dte_dist.sync.version import SyncStep

__all__ = ["FrameBuilder", "Lane", "Lanes", "merge_segments"]

_MOST_CHANGES: Final = 1 << 17
"""Changes that are worth a segment of their own: the work on them stays within a core's cache."""

_FEW: Final = 256
"""Changes too few for their density to matter."""

_MAX_ELEMENTS: Final = 1 << 26
"""Maximum number of elements in a merged segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One stream of frames of a source.

    Attributes:
        number: of the kind of receiver that gets it; None on the broadcast route, where all receivers do.
        chunks: of its space.
        into: by width, tables from the source's own space into the lane's; None if the two are one.
        back: by width, tables from the lane's space into the source's own; None if the two are one.
    """

    number: int | None
    chunks: Sequence[Chunk]
    into: Mapping[int, Sequence[IndexMap]] | None = None
    back: Mapping[int, Sequence[IndexMap]] | None = None

    def fetch(self, width: int, first: int, length: int, known: Snapshot) -> Tensor:
        """Return the known bits of elements [first, first + length) of the lane's space."""
        if self.back is None:
            return known.bits[width][first : first + length]
        bits = torch.empty(length, dtype=known.bits[width].dtype, device=known.device)
        for index_map in self.back[width]:
            kernels.on(known.device).gather_dense(index_map, first, bits, known.bits[width])
        return bits


class Lanes:
    """The frames of a source on one route.

    Args:
        source: group rank.
        lanes: in order.

    Attributes:
        chunks: (lane, chunk) of every frame, in order.
    """

    def __init__(self, source: int, lanes: Sequence[Lane]) -> None:
        self._source = source
        self._lanes = lanes
        self.chunks = [(lane, chunk) for lane in lanes for chunk in lane.chunks]

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
        common = _Common(self._source, step, known, selector, history)
        return FrameBuilder([_writer(lane, common) for lane in self._lanes], common)

    def write_seed(self, lane: Lane, chunk: Chunk, step: SyncStep, known: Snapshot, out: Tensor) -> None:
        """Write the dense frame of a chunk, of the snapshot itself, into a buffer of its size."""
        head = step.of_lane(lane.number).frame_head(self._source, len(lane.chunks), chunk)
        writer = FrameWriter(head, known.device)
        for first, length in chunk.segments():
            writer.add_dense(first, lane.fetch(chunk.width, first, length, known))
        if out.device == known.device:
            writer.finish(out)
        else:
            out.copy_(writer.finish())


@dataclass(frozen=True, slots=True, eq=False)
class _Common:
    """The fields that the frames of all lanes of one delta share; see `Lanes.builder`."""

    source: int
    step: SyncStep
    known: Snapshot
    selector: CodecSelector
    history: PreviousDelta | None

    def writer(self, lane: Lane, chunk: Chunk) -> FrameWriter:
        """Return a writer of the frame of a chunk."""
        head = self.step.of_lane(lane.number).frame_head(self.source, len(lane.chunks), chunk)
        return FrameWriter(head, self.known.device, self.selector, self.history)


class FrameBuilder:
    """Takes the changes of one sync, in order, and makes frames of them.

    Attributes:
        codecs: segments by codec pair.
    """

    def __init__(self, lanes: Sequence[_DirectLane | _TranslatedLane], common: _Common) -> None:
        self.codecs: Counter[str] = Counter()
        self._lanes = lanes
        self._selector = common.selector
        self._codecs = kernels.on(common.known.device)

    def add(self, width: int, changed: Changed) -> None:
        """Add what changed in some segments of one chunk of the source's own space, in order; it is
        copied.
        """
        old = changed.old if self._selector.relative(width) else None
        values = changed.new if old is None else self._codecs.ulp_deltas(old, changed.new)
        for lane in self._lanes:
            # A frame writer may overwrite distances, which other lanes need too.
            is_spoilt = old is not None and lane.is_direct and len(self._lanes) > 1
            lane.add(width, changed, values.clone() if is_spoilt else values, relative=old is not None)

    def collect(self) -> list[Tensor]:
        """Return the frames by lane and chunk; empty where nothing changed. Nothing is added any more."""
        frames = [frame for lane in self._lanes for frame in lane.collect()]
        for lane in self._lanes:
            self.codecs.update(lane.codecs)
        return frames


def _writer(lane: Lane, common: _Common) -> _DirectLane | _TranslatedLane:
    return _DirectLane(lane, common) if lane.into is None else _TranslatedLane(lane, lane.into, common)


class _DirectLane:
    """Write changes as they are found; one frame is in the making at a time."""

    is_direct = True

    def __init__(self, lane: Lane, common: _Common) -> None:
        self.codecs: Counter[str] = Counter()
        self._lane = lane
        self._common = common
        self._frames: list[Tensor] = []
        self._writer: FrameWriter | None = None

    def add(self, width: int, changed: Changed, values: Tensor, *, relative: bool) -> None:
        self._reach(width, changed.first)
        segments = [list(segments_of(changed.first, changed.length))]
        (cuts,) = _cut(segments, changed.positions, changed.first)
        writer = self._writer = self._writer or self._next()
        for cut in cuts:
            positions = changed.positions
            before = cut.first - changed.first
            if positions is not None and len(cuts) > 1:
                positions = positions[cut.here] - before if before else positions[cut.here]
            whole = partial(self._lane.fetch, width, cut.first, cut.length, self._common.known)
            writer.add(cut.first, cut.length, positions, values[cut.here], relative=relative, whole=whole)

    def _reach(self, width: int, position: int) -> None:
        """Finish the frames before that of the chunk that holds a position."""
        while True:
            chunk = self._lane.chunks[len(self._frames)]
            if chunk.width == width and position < chunk.first + chunk.length:
                return
            self._finish()

    def _next(self) -> FrameWriter:
        """Return a writer of the next frame."""
        return self._common.writer(self._lane, self._lane.chunks[len(self._frames)])

    def _finish(self) -> None:
        writer, self._writer = self._writer or self._next(), None
        self._frames.append(writer.finish())
        self.codecs.update(writer.codecs)

    def collect(self) -> list[Tensor]:
        while len(self._frames) < len(self._lane.chunks):
            self._finish()
        return self._frames


@dataclass(slots=True)
class _Found:
    """Changes translated into one lane, of one width; `relative` if the values are distances."""

    relative: bool
    positions: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Return all positions, ascending, and their values."""
        positions = torch.cat(self.positions)
        values = torch.cat(self.values)
        # Where a source holds parts of a slot out of order.
        if not bool((positions[1:] > positions[:-1]).all()):
            positions, order = positions.sort()
            values = values[order]
        return positions, values


class _TranslatedLane:
    """Translate changes as they are found; write their frames when all are known."""

    is_direct = False

    def __init__(self, lane: Lane, into: Mapping[int, Sequence[IndexMap]], common: _Common) -> None:
        self.codecs: Counter[str] = Counter()
        self._lane = lane
        self._into = into
        self._common = common
        self._found: dict[int, _Found] = {}

    def add(self, width: int, changed: Changed, values: Tensor, *, relative: bool) -> None:
        maps = [each for each in self._into.get(width, ()) if each.meets(*changed.bounds())]
        if not maps:
            return
        if relative:
            values = kernels.on(values.device).narrow(values, changed.new.dtype)
        translate = kernels.on(values.device).translate
        found = self._found.setdefault(width, _Found(relative))
        for index_map in maps:
            positions, held = translate(index_map, changed.first, changed.listed(), values)
            found.positions.append(positions)
            found.values.append(held)

    def collect(self) -> Iterator[Tensor]:
        for width in sorted(self._into):
            chunks = [chunk for chunk in self._lane.chunks if chunk.width == width]
            found = self._found.pop(width, None)
            if found is None:
                device = self._common.known.device
                yield from (torch.empty(0, dtype=torch.uint8, device=device) for _ in chunks)
            else:
                yield from self._write(chunks, *found.sorted(), relative=found.relative)

    def _write(
        self, chunks: Sequence[Chunk], positions: Tensor, values: Tensor, *, relative: bool
    ) -> Iterator[Tensor]:
        """Cut the changes of one width into the frames of its chunks."""
        widen: Callable[[Tensor], Tensor] = kernels.on(values.device).widen
        groups = [list(chunk.segments()) for chunk in chunks]
        for chunk, cuts in zip(chunks, _cut(groups, positions, 0), strict=True):
            writer = self._common.writer(self._lane, chunk)
            for cut in cuts:
                here = (positions[cut.here] - cut.first).to(torch.int32)
                held = values[cut.here]
                wide = widen(held) if relative else held
                whole = partial(self._lane.fetch, chunk.width, cut.first, cut.length, self._common.known)
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
    left = iter(_counts(segments, positions, origin))
    at = 0
    for group in groups:
        cuts: list[_Cut] = []
        for first, length, count in merge_segments(group, itertools.islice(left, len(group))):
            cuts.append(_Cut(first, length, slice(at, at + count)))
            at += count
        yield cuts


def _counts(segments: Sequence[tuple[int, int]], positions: Tensor | None, origin: int) -> Sequence[int]:
    """Return how many changes are in each segment."""
    if positions is None:
        return [length for _, length in segments]
    if len(segments) == 1:
        return [len(positions)]
    starts = [first - origin for first, _ in segments] + [sum(segments[-1]) - origin]
    below = kernels.on(positions.device).searchsorted(positions, starts)
    return [high - low for low, high in itertools.pairwise(below)]


def _is_alike(total: int, parts: int, count: int) -> bool:
    """Return whether a segment with `count` changes may join `parts` segments with `total` changes together.

    Example:
        >>> _is_alike(20_000, 2, 15_000), _is_alike(20_000, 2, 30_000), _is_alike(20, 2, 200)
        (True, False, True)
    """
    alike = 2 * count * parts >= total and count * parts <= 2 * total
    return total + count <= _MOST_CHANGES and (alike or max(total, count) <= _FEW)


def merge_segments(
    segments: Iterable[tuple[int, int]], counts: Iterable[int]
) -> Iterator[tuple[int, int, int]]:
    """Join neighbouring segments, given as (first, length) and how many changes are in each.

    Yields:
        (first, length, changes) of what is to be written as one.

    Example:
        >>> list(merge_segments([(0, 10), (10, 10), (20, 5)], [300, 400, 5000]))
        [(0, 20, 700), (20, 5, 5000)]
    """
    first = 0
    end = 0
    total = 0
    parts = 0
    for (start, length), count in zip(segments, counts, strict=True):
        if parts and not (start + length - first <= _MAX_ELEMENTS and _is_alike(total, parts, count)):
            yield first, end - first, total
            parts = 0
        if not parts:
            first = start
            total = 0
        end = start + length
        total = total + count
        parts = parts + 1
    if parts:
        yield first, end - first, total
