"""Unit tier, no ranks: patches of distances, staged and applied where an element has several homes."""

from __future__ import annotations

import pytest
import torch

from dte_dist import kernels
from dte_dist.codec import Segment, read_frame
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.layout import Block
from dte_dist.plan.chunks import ChunkPlan
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.intersections import pair_spaces
from dte_dist.report import Phases
from dte_dist.sync.frame_builder import Lane, Lanes
from dte_dist.sync.staging import StagedPatch, Target
from dte_dist.sync.version import SyncStep
from dte_dist.tensors.flat import FlatTensors
from tests.unit.codec.pairs import EACH
from tests.unit.sync.coded import Coded, bits_of, chooser_of, random, step, strided
from tests.unit.sync.pair import SCHEMA

both = pytest.mark.parametrize("codecs", [cpu, torch_kernels], ids=["cpu", "torch"])


@pytest.fixture(params=["at once", "in many batches"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model be found at once, as small ones are; or many ranges and batches lie in a frame, and many
    frames in a batch.
    """
    if request.param == "in many batches":
        monkeypatch.setattr("dte_dist.detect.snapshot._RANGE_SEGMENTS", 3)
        monkeypatch.setattr("dte_dist.detect.snapshot._BATCH_CHANGES", 150)
        monkeypatch.setattr("dte_dist.plan.chunks.SEGMENT", 64)
        monkeypatch.setattr("dte_dist.sync.versioned_snapshot.SEGMENT", 64)


@both
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("homes", ["apart", "one memory", "one memory, transposed"])
def test_distances_with_two_homes(codecs, dense: bool, homes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied tensor may lie in a receiver twice, or under two names in one place, where nothing may be added
    twice.
    """
    monkeypatch.setattr(kernels, "on", lambda device: codecs)
    block = Block.whole((4, 5))
    source = FlatSpace.of(2, Pieces.of([Piece(0, 0, block)]))
    receiver = FlatSpace.of(2, Pieces.of([Piece(0, 0, block), Piece(0, 1, block)]))
    first = torch.arange(20, dtype=torch.int16).view(4, 5)
    first = first.t().contiguous().t() if homes.endswith("transposed") else first
    tensors = [first, first if homes.startswith("one") else first.clone()]
    target = Target(FlatTensors(tensors, 2), {0: build_index_maps(source, receiver)})
    assert len(target.index_maps[0]) == 2
    positions = torch.tensor([0, 6, 19], dtype=torch.int32)
    distances = torch.tensor([5, -3, 7], dtype=torch.int16)
    if dense:
        distances = torch.zeros(20, dtype=torch.int16).index_put((positions.long(),), distances)
    staged = StagedPatch()
    staged.add(target, 0, Segment(0, 20, None if dense else positions, distances, relative=True))
    expected = torch.arange(20, dtype=torch.int16)
    assert all(torch.equal(tensor.reshape(-1), expected) for tensor in tensors)
    staged.apply()
    expected[[0, 6, 19]] += torch.tensor([5, -3, 7], dtype=torch.int16)
    assert all(torch.equal(tensor.reshape(-1), expected) for tensor in tensors)


@pytest.mark.parametrize("codec", EACH)
def test_tied_by_the_source_and_held_in_two_cuts(codec: str, batches: None) -> None:
    """On the p2p route the elements that are in both cuts travel twice, and each time they have two homes."""
    rng = torch.Generator().manual_seed(9)
    own, theirs = (
        {2: FlatSpace.of(2, Pieces.of([Piece(0, i, block) for i, block in enumerate(blocks)]))}
        for blocks in (
            [Block.whole((6, 8))],
            [Block((((0, 6),), ((0, 3),))), Block((((2, 3),), ((0, 8),)))],
        )
    )
    pair = pair_spaces(own, theirs)
    assert pair[2].numel == 18 + 24
    trained = random((6, 8), torch.bfloat16, rng)
    copies = [trained[:, :3].clone(), trained[2:5].clone()]
    chunks = ChunkPlan({0: {2: pair[2].numel}}, 64).chunks(0)
    lane = Lane(0, chunks, {2: build_index_maps(own[2], pair[2])}, {2: build_index_maps(pair[2], own[2])})
    target = Target(FlatTensors(copies, 2), {0: build_index_maps(pair[2], theirs[2])})
    source = Coded(codec, {"w": trained}).source
    for density in (0.3, 0.9):
        step({"w": trained}, rng, density, True)
        source.prepare(
            source.state.version + 1,
            False,
            Phases(),
            lanes=Lanes(0, [lane]),
            selector=chooser_of(codec),
        )
        made, staged = (
            SyncStep(SCHEMA, source.state.lineage, source.state.version, source.state.version + 1).of_lane(0),
            StagedPatch(),
        )
        for chunk, frame in zip(chunks, source.frames(), strict=True):
            for segment in read_frame(frame, made.frame_head(0, len(chunks), chunk)) if len(frame) else ():
                staged.add(target, 0, segment)
        staged.apply()
        source.commit(source.state.version + 1, source.state.lineage, full=False)
        assert torch.equal(bits_of(copies[0]), bits_of(trained[:, :3])) and torch.equal(
            bits_of(copies[1]), bits_of(trained[2:5])
        )


@both
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["contiguous", "transposed", "sliced"])
def test_collect_is_the_reverse_of_place(codecs, kind: int) -> None:
    """What a receiver does not hold stays as it is."""
    rows, columns = Block((((0, 6),), ((0, 8),))), Block((((1, 4),), ((0, 2), (5, 3))))
    source, receiver = (FlatSpace.of(4, Pieces.of([Piece(0, 0, block)])) for block in (rows, columns))
    held = strided(torch.zeros(4, 5, dtype=torch.int32), kind)
    held.copy_(torch.arange(20).view(4, 5) + 100)
    (index_map,) = build_index_maps(source, receiver)
    out = torch.full((40,), -1, dtype=torch.int32)
    codecs.gather_dense_flat(index_map, 4, out, FlatTensors([held], 4))
    expected = torch.full((6, 8), -1, dtype=torch.int32)
    expected[1:5, [0, 1, 5, 6, 7]] = held
    assert torch.equal(out, expected.view(-1)[4:44])
