"""Unit tier, no ranks: a detector that keeps no bits; its changes travel as bits, and arrive like others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from dte_dist import kernels
from dte_dist.codec import CodecSelector, read_frame
from dte_dist.detect.detector import Changed, ChangeDetector
from dte_dist.detect.snapshot import Snapshot
from dte_dist.layout import Block
from dte_dist.plan.chunks import SEGMENT, ChunkPlan
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import IndexMap, build_index_maps
from dte_dist.sync.frame_builder import Lane, Lanes
from dte_dist.sync.version import SyncStep
from dte_dist.tensors.flat import FlatTensors

CPU = torch.device("cpu")


class EveryThird:
    """Tells every third element of a range, without a look at what it was."""

    def changes(
        self, live: FlatTensors, width: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[list[Changed]]:
        for first, length in ranges:
            bits = torch.empty(length, dtype=kernels.BITS[width])
            kernels.on(CPU).read(live, first, bits)
            positions = torch.arange(0, length, 3, dtype=torch.int32)
            yield [Changed(first, length, positions, None, bits[::3].contiguous())]


def identity(length: int) -> list[IndexMap]:
    space = FlatSpace.of(2, Pieces.of([Piece(0, 0, Block.whole((length,)))]))
    return list(build_index_maps(space, space))


@pytest.mark.parametrize("translated", [False, True], ids=["own space", "a lane of its own"])
@pytest.mark.parametrize("codec", ["fast", "small", "auto", "u16+planes", "ef+raw"])
def test_changes_without_old_bits_travel_as_bits(codec: str, translated: bool) -> None:
    detector: ChangeDetector = EveryThird()
    live = FlatTensors([torch.randn(700).bfloat16(), torch.randn(301).bfloat16()], 2)
    chunks = ChunkPlan({0: {2: len(live)}}, 512).chunks(0)
    known = Snapshot({2: len(live)}, CPU, SEGMENT)
    known.bits[2].zero_()
    maps = identity(len(live))
    lane = Lane(0, chunks, {2: maps}, {2: maps}) if translated else Lane(None, chunks)
    builder = Lanes(0, [lane]).builder(SyncStep(1, 2, 3, 4), known, CodecSelector(codec))
    for batch in detector.changes(live, 2, [(chunk.first, chunk.length) for chunk in chunks]):
        for changed in batch:
            builder.add(2, changed)
    arrived = torch.zeros(len(live), dtype=torch.int16)
    step = SyncStep(1, 2, 3, 4).of_lane(lane.number)
    for chunk, frame in zip(chunks, builder.collect(), strict=True):
        for segment in read_frame(frame, step.frame_head(0, len(chunks), chunk)):
            assert not segment.relative
            arrived[segment.first + segment.unpacked().long()] = segment.values
    expected = torch.empty(len(live), dtype=torch.int16)
    kernels.on(CPU).read(live, 0, expected)
    told = torch.cat([torch.arange(chunk.first, chunk.first + chunk.length, 3) for chunk in chunks])
    assert torch.equal(arrived[told], expected[told])
    assert int(arrived.count_nonzero()) == int(expected[told].count_nonzero())
