"""Unit tier, no ranks: version chains over every pair of codecs, distances above all; over both kinds of
lanes.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dte_dist.codec import read_frame
from dte_dist.layout import Block
from dte_dist.plan.chunks import ChunkPlan
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.intersections import pair_spaces
from dte_dist.report import Phases
from dte_dist.sync.frame_builder import Lane, Lanes
from dte_dist.sync.staging import StagedPatch, Target
from dte_dist.sync.version import NONE, SyncStep
from dte_dist.tensors.flat import FlatTensors
from tests.unit.codec.pairs import PAIRS
from tests.unit.sync.coded import Coded, bits_of, chooser_of, random, step, strided
from tests.unit.sync.pair import SCHEMA, same_bits

CHOICES = [*PAIRS, "fast", "small", "auto"]
every_codec = pytest.mark.parametrize("codec", CHOICES)
DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
)


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


def weights(rng: torch.Generator) -> dict[str, Tensor]:
    """Tensors of many dtypes, of no dimension, of one element, with a border in the middle of nowhere."""
    shapes = [(20, 30), (), (1,), (900,), (5, 4, 6)]
    return {
        f"{i}.{str(dtype)[6:]}": random(shape, dtype, rng)
        for i, (shape, dtype) in enumerate(product(shapes, DTYPES))
    }


@every_codec
def test_chains_of_deltas_are_bit_exact(codec: str, batches: None) -> None:
    """Into contiguous, transposed and sliced copies; densities alternate, and the last bits move or all of
    them.
    """
    rng = torch.Generator().manual_seed(3)
    trained = weights(rng)
    copy = {name: strided(tensor, i % 3) for i, (name, tensor) in enumerate(trained.items())}
    pair = Coded(codec, trained, copy, bucket_bytes=1 << 12)
    for density, near in (
        (0.02, True),
        (1.0, False),
        (0.3, True),
        (0.0, True),
        (0.9, True),
        (0.02, False),
        (1.0, True),
    ):
        before = {name: (tensor._version, bits_of(tensor).clone()) for name, tensor in copy.items()}
        step(trained, rng, density, near)
        frames = pair.prepare()
        kept = [frame.clone() for frame in frames]
        assert pair.deliver(frames) is None
        assert all(
            torch.equal(bits_of(tensor), before[name][1]) for name, tensor in copy.items()
        )  # nothing live before the vote
        pair.commit()
        assert all(torch.equal(bits_of(copy[name]), bits_of(tensor)) for name, tensor in trained.items())
        assert all(torch.equal(*two) for two in zip(frames, kept, strict=True))
        whole = any(used.startswith("dense") for used in pair.source.codecs)
        for name, tensor in copy.items():
            assert whole or (tensor._version > before[name][0]) != torch.equal(
                bits_of(tensor), before[name][1]
            )
        for width, known in pair.source.snapshot.bits.items():
            live = [
                bits_of(tensor) for _, tensor in sorted(trained.items()) if tensor.element_size() == width
            ]
            assert torch.equal(torch.cat(live), known)
        assert pair.sync() == 0


@pytest.mark.parametrize("codec", ["small", "ef+planes", "dense+planes", "u16+ulp"])
def test_a_delta_that_is_rolled_back_is_a_superset_the_next_time(codec: str, batches: None) -> None:
    rng = torch.Generator().manual_seed(4)
    pair = Coded(codec, weights(rng), bucket_bytes=1 << 12)
    for density in (0.1, 0.2):
        step(pair.trained, rng, density, True)
        assert pair.deliver(pair.prepare()) is None
        pair.rollback()
    step(pair.trained, rng, 0.05, False)
    pair.sync()
    assert same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("codec", ["small", "ef+planes", "dense+ulp"])
def test_a_receiver_that_breaks_off_while_it_writes_is_seeded(codec: str) -> None:
    """Distances that are half added must not be added again: there is no version to start from."""
    rng = torch.Generator().manual_seed(5)
    pair = Coded(codec, weights(rng), bucket_bytes=1 << 12)
    step(pair.trained, rng, 0.5, True)
    assert pair.deliver(pair.prepare()) is None
    staged, parts = (
        pair.receiver._staged,
        len(pair.receiver._staged.sparse) + len(pair.receiver._staged.dense),
    )
    assert parts > 3
    (staged.sparse or staged.dense).append(None)  # type: ignore[arg-type]
    with pytest.raises((AttributeError, TypeError)):
        pair.receiver.apply()
    assert pair.receiver.state.version == NONE
    pair.rollback()
    pair.seed(5)
    assert same_bits(pair.trained, pair.copy)
    step(pair.trained, rng, 0.5, True)
    pair.sync()
    assert same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("codec", ["small", "ef+raw"])
def test_a_detector_may_name_elements_that_did_not_change(codec: str, batches: None) -> None:
    rng = torch.Generator().manual_seed(6)
    pair = Coded(codec, weights(rng), detector=lambda live, known: torch.arange(0, len(live), 1))
    step(pair.trained, rng, 0.05, True)
    pair.sync()
    assert same_bits(pair.trained, pair.copy)


def test_inference_tensors_take_distances() -> None:
    with torch.inference_mode():
        trained, copy = {"w": torch.ones(100)}, {"w": torch.zeros(100)}
    pair = Coded("ef+planes", trained, copy)
    with torch.inference_mode():
        trained["w"][::7] += 1e-6
    pair.sync()
    assert same_bits(trained, copy)


def test_the_small_codecs_are_small() -> None:
    """One step in the last bit of every hundredth element: position 8.6 bits, value 2 and a little."""
    rng = torch.Generator().manual_seed(7)
    pair = Coded("small", {"w": torch.randn(1 << 20, generator=rng).bfloat16()})
    pair.trained["w"][torch.randperm(1 << 20, generator=rng)[: 1 << 13]] *= 1.008
    frames = pair.prepare()
    assert pair.source.codecs == {"ef+planes": 2}
    assert sum(map(len, frames)) < 1.5 * (1 << 13)
    pair.deliver(frames)
    pair.commit()
    assert same_bits(pair.trained, pair.copy)


@every_codec
@pytest.mark.parametrize("part", [slice(3, 17), slice(0, 1), slice(0, 40)], ids=["rows", "one row", "whole"])
def test_lanes_of_pairs(codec: str, part: slice, batches: None) -> None:
    """A source cuts columns, the receiver rows: positions are translated twice, and every bit arrives."""
    rng = torch.Generator().manual_seed(8)
    full = random((40, 60), torch.bfloat16, rng)
    columns, rows = (
        Block(((((0, 40)),), ((20, 30),))),
        Block((((part.start, part.stop - part.start),), ((0, 60),))),
    )
    own, theirs = ({2: FlatSpace.of(2, Pieces.of([Piece(0, 0, block)]))} for block in (columns, rows))
    pair = pair_spaces(own, theirs)
    schedule = ChunkPlan({0: {2: pair[2].numel}}, 600)
    lane = Lane(
        1, schedule.chunks(0), {2: build_index_maps(own[2], pair[2])}, {2: build_index_maps(pair[2], own[2])}
    )
    trained, copy = full[:, 20:50].contiguous(), full[part].clone()
    source = Coded(codec, {"w": trained}).source
    target = Target(FlatTensors([copy], 2), {0: build_index_maps(pair[2], theirs[2])})
    lanes = Lanes(0, [lane])
    for density, near in ((0.1, True), (1.0, True), (0.6, False), (0.02, True)):
        step({"w": trained}, rng, density, near)
        source.prepare(source.state.version + 1, False, Phases(), lanes=lanes, selector=chooser_of(codec))
        made = SyncStep(SCHEMA, source.state.lineage, source.state.version, source.state.version + 1).of_lane(
            1
        )
        staged = StagedPatch()
        for chunk, frame in zip(lane.chunks, source.frames(), strict=True):
            for segment in (
                read_frame(frame, made.frame_head(0, len(lane.chunks), chunk)) if len(frame) else ()
            ):
                staged.add(target, 0, segment)
        staged.apply()
        source.commit(source.state.version + 1, source.state.lineage, full=False)
        full[:, 20:50] = trained
        assert torch.equal(bits_of(copy[:, 20:50]), bits_of(full[part, 20:50]))
        assert torch.equal(source.snapshot.bits[2], bits_of(trained))
    assert torch.equal(bits_of(copy[:, :20]), bits_of(full[part, :20]))


@every_codec
def test_lanes_of_one_source_do_not_spoil_each_other(codec: str, batches: None) -> None:
    """Three kinds of receivers: two hold all that the source has, the one between them some rows."""
    rng = torch.Generator().manual_seed(9)
    trained = random((40, 30), torch.bfloat16, rng)
    whole, rows = Block.whole((40, 30)), Block((((3, 20),), ((0, 30),)))
    own, part = ({2: FlatSpace.of(2, Pieces.of([Piece(0, 0, block)]))} for block in (whole, rows))
    pair = pair_spaces(own, part)
    into, back = {2: build_index_maps(own[2], pair[2])}, {2: build_index_maps(pair[2], own[2])}
    coded, chunks = Coded(codec, {"w": trained}), ChunkPlan({0: {2: pair[2].numel}}, 600).chunks(0)
    lanes = [Lane(0, coded.chunks), Lane(1, chunks, into, back), Lane(2, coded.chunks)]
    copies = [trained.clone(), trained[3:23].clone(), trained.clone()]
    homes = [build_index_maps(own[2], own[2]), build_index_maps(pair[2], part[2])]
    targets = [Target(FlatTensors([copy], 2), {0: homes[number == 1]}) for number, copy in enumerate(copies)]
    source = coded.source
    for density, near in ((0.1, True), (1.0, True), (0.6, False), (0.02, True)):
        step({"w": trained}, rng, density, near)
        made = SyncStep(SCHEMA, source.state.lineage, source.state.version, source.state.version + 1)
        source.prepare(made.version, False, Phases(), lanes=Lanes(0, lanes), selector=chooser_of(codec))
        frames, staged = iter(source.frames()), StagedPatch()
        for lane, target in zip(lanes, targets, strict=True):
            for chunk, frame in zip(lane.chunks, frames, strict=False):
                head = made.of_lane(lane.number).frame_head(0, len(lane.chunks), chunk)
                for segment in read_frame(frame, head) if len(frame) else ():
                    staged.add(target, 0, segment)
        staged.apply()
        source.commit(made.version, source.state.lineage, full=False)
        for copy, expected in zip(copies, (trained, trained[3:23], trained), strict=True):
            assert torch.equal(bits_of(copy), bits_of(expected))
