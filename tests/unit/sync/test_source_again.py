"""Unit tier, no ranks: when a delta counts on the positions of the one before, and that it never does so
in vain.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist.codec import CodecSelector, PreviousDelta, read_frame, read_head
from dte_dist.errors import FrameError
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
from tests.unit.sync.pair import SCHEMA, STREAM, Pair, same_bits

SIZE = 99_960


class Steps(Pair):
    """A pair whose trainer changes mostly the same elements again; `sync` returns the bytes of the delta."""

    def __init__(
        self,
        codec: str = "small",
        dtype: torch.dtype = torch.bfloat16,
        share: float = 0.02,
        size: int = SIZE,
        again: float = 0.84,
        **options,
    ) -> None:
        self.rng, self.again = np.random.default_rng(0), again
        self.selector = CodecSelector(codec)
        start = torch.from_numpy(self.rng.integers(0, 100, size))
        self.flags = self.rng.random(size) < share
        super().__init__(
            {"a": start[: size // 3].to(dtype), "b": start[size // 3 :].to(dtype).view(-1, 7)[:, :7]},
            **options,
        )

    def step(self) -> None:
        """Change the last bits of some elements, most of which (`again`) were changed by the last step."""
        parts = [tensor.view(-1) for tensor in self.trained.values()]
        flags = torch.from_numpy(self.flags)
        for part, where in zip(parts, flags.split([len(part) for part in parts]), strict=True):
            part.view(torch.uint8).view(len(part), -1)[:, 0] ^= where.to(torch.uint8)
        share, size = self.flags.mean(), len(self.flags)
        self.flags = (self.flags & (self.rng.random(size) < self.again)) | (
            self.rng.random(size) < (1 - self.again) * share
        )

    def prepare(self, lanes: Lanes | None = None) -> list[Tensor]:
        self.step()
        self.source.prepare(
            self.source.state.version + 1, False, Phases(), self.detector, lanes, selector=self.selector
        )
        return self.source.frames()

    def commit(self, all_follow: bool = True) -> None:
        version, lineage = self.source.state.version + 1, self.source.state.lineage
        self.receiver.apply()
        self.receiver.commit(version, lineage)
        self.source.commit(version, lineage, full=False, all_follow=all_follow)

    def sync(self, **how: bool) -> bool:
        """Run a delta; return whether it counted on the one before."""
        frames = self.prepare()
        error = self.deliver(frames)
        if error is not None:
            self.rollback()
            raise error
        self.commit(**how)
        assert same_bits(self.trained, self.copy)
        self.rollback_after()
        return self.counted(frames)

    def rollback_after(self) -> None:
        """Do what a channel does after every sync."""
        self.source.rollback()
        self.receiver.rollback()

    def counted(self, frames: list[Tensor]) -> bool:
        """Read the frames as they are: is there a stream of `again` in the table?"""
        numbers = [
            frame[96 + 24 : 96 + 40 * int(frame[88:92].view(torch.int32)) : 40].tolist()
            for frame in frames
            if len(frame)
        ]
        assert all(read_head(frame).keep == self.selector.keeps for frame in frames if len(frame))
        return any(5 in used for used in numbers)


@pytest.mark.parametrize("codec", ["small", "again+planes", "again+raw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
def test_bytes_go_down_where_positions_come_again(codec: str, dtype: torch.dtype) -> None:
    """From the second delta on, for every width, in one chunk and in several."""
    for bucket_bytes in (1 << 20, 1 << 14):
        without = codec.replace("again", "ef").replace("small", "ef+planes")
        pair, plain = (Steps(each, dtype, bucket_bytes=bucket_bytes) for each in (codec, without))
        counts = []
        for number in range(4):
            sizes = []
            for each in (pair, plain):
                frames = each.prepare()
                sizes.append(sum(map(len, frames)))
                assert each.deliver(frames) is None
                each.commit()
                assert same_bits(each.trained, each.copy)
                counts.append(each.counted(frames))
            assert sizes[0] == sizes[1] if number == 0 else sizes[0] < sizes[1] - 0.4 * 0.02 * SIZE
        assert counts == [False, False] + [True, False] * 3
        assert plain.source._history.nbytes == plain.receiver._history.nbytes == 0
        assert pair.source._history.nbytes == pair.receiver._history.nbytes == 4 * pair.source.changed


@pytest.mark.parametrize("again", [0.0, 0.5, 0.84])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
@pytest.mark.parametrize("size", [42, 210, 5040, SIZE])
def test_what_is_known_is_not_what_comes_next(size: int, share: float, again: float) -> None:
    """The positions of a delta are kept as they were, though the memory that they were found in is used
    again: in spaces of any size.
    """
    pair = Steps(size=size, share=share, again=again)
    for _ in range(5):
        if pair.flags.any():
            pair.sync()


def test_segments_are_joined_in_another_way_each_time() -> None:
    """Densities move about, so segments of 2^20 elements are joined, sent alone, or whole."""
    rng, total = np.random.default_rng(1), 6 << 20
    pair = Pair({"w": torch.zeros(total, dtype=torch.bfloat16)}, bucket_bytes=2 * total)
    known, used = pair.trained["w"].view(torch.int16), set()
    for number in range(6):
        shares = np.repeat(rng.choice([0.0, 0.00001, 0.0004, 0.01, 0.2, 0.97, 1.0], 6), total // 6)
        flags = torch.from_numpy(
            (np.random.default_rng(2).random(total) < shares) | (rng.random(total) < 0.00003)
        )
        known[flags] ^= 1
        pair.source.prepare(number + 2, False, Phases(), selector=CodecSelector("again+planes"))
        assert pair.deliver(pair.source.frames()) is None
        used |= pair.source.codecs.keys()
        pair.receiver.apply()
        pair.receiver.commit(number + 2, STREAM)
        pair.source.commit(number + 2, STREAM, full=False, all_follow=True)
        assert torch.equal(known, pair.copy["w"].view(torch.int16))
    assert {"again+planes", "dense+planes"} <= used


# When it is not done ----------------------------------------------------------------------------------------


def test_after_a_failed_vote_the_next_delta_does_without() -> None:
    pair = Steps("again+planes")
    assert [pair.sync(), pair.sync()] == [False, True]
    frames = pair.prepare()
    assert pair.counted(frames) and pair.deliver(frames) is None
    pair.rollback()
    assert [pair.sync(), pair.sync()] == [False, True]


def test_after_an_error_before_anything_was_prepared_it_goes_on() -> None:
    """Receivers begin, sources do not come to prepare: nothing is lost on either side."""
    pair = Steps()
    pair.sync()
    pair.receiver.begin()
    pair.rollback_after()
    assert pair.sync()


def test_after_a_delta_that_not_all_followed() -> None:
    pair = Steps()
    pair.sync()
    assert [pair.sync(all_follow=False), pair.sync(), pair.sync()] == [True, False, True]


def test_after_a_seed() -> None:
    pair = Steps()
    pair.sync()
    pair.seed(3)
    assert pair.source._history.nbytes == pair.receiver._history.nbytes == 0
    assert [pair.sync(), pair.sync()] == [False, True]


def test_after_an_anchor_that_failed() -> None:
    pair = Steps()
    pair.sync()
    pair.source.prepare(3, True, Phases())
    pair.rollback_after()
    pair.seed(4)
    assert [pair.sync(), pair.sync()] == [False, True]


def test_after_a_move_to_another_device() -> None:
    pair = Steps()
    pair.sync()
    pair.source.snapshot.device = torch.device(
        "meta"
    )  # where it is said to be: the live tensors are elsewhere now
    assert [pair.sync(), pair.sync()] == [False, True]


def test_after_a_delta_that_nobody_followed() -> None:
    """The delta is taken over, and receivers are seeded from the snapshot."""
    pair = Steps()
    pair.sync()
    pair.prepare()
    pair.source.detach()
    pair.place(3)
    assert same_bits(pair.trained, pair.copy)
    assert [pair.sync(), pair.sync()] == [False, True]


def test_after_a_delta_without_changes_there_is_nothing_to_count_on() -> None:
    pair = Steps()
    pair.sync()
    flags, pair.flags = pair.flags, np.zeros(SIZE, bool)
    assert not pair.sync() and pair.source.changed == 0
    pair.flags = flags
    assert [pair.sync(), pair.sync()] == [False, True]


def test_the_choice_may_change_from_sync_to_sync() -> None:
    """As `auto` does when links turn out to be faster or slower."""
    pair, found = Steps(), []
    for codec in ("small", "fast", "small", "small", "ef+planes", "again+raw", "again+raw"):
        pair.selector = CodecSelector(codec)
        found.append(pair.sync())
    assert found == [False, False, False, True, False, False, True]


def test_onward_of_a_sync_that_broke_off() -> None:
    """The receiver takes the new stream with the delta, and its history goes with it."""
    pair = Steps()
    pair.sync()
    frames = pair.prepare()
    assert pair.counted(frames) and pair.deliver(frames) is None
    pair.receiver.apply()
    pair.receiver.commit(3, 99)
    pair.source.commit(3, 99, full=False, all_follow=True)
    assert pair.sync()


def test_a_receiver_without_the_history_says_so_and_the_next_sync_is_well() -> None:
    """It cannot come to that; should it, nothing is written, and no rank is stuck."""
    pair = Steps("again+planes")
    pair.sync()
    for lose in (PreviousDelta, lambda: pair.receiver._history):
        pair.receiver._history = lose()
        pair.receiver._history.commit(7, 7)
        before = {name: tensor.clone() for name, tensor in pair.copy.items()}
        with pytest.raises(
            FrameError, match=r"positions of the delta before.*sync again, the next delta does without"
        ):
            pair.sync()
        assert same_bits(before, pair.copy)
        assert [pair.sync(), pair.sync()] == [False, True]


def test_a_receiver_that_breaks_off_while_it_writes_is_seeded() -> None:
    pair = Steps()
    pair.sync()
    assert pair.deliver(pair.prepare()) is None
    pair.receiver._staged.sparse.append(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pair.receiver.apply()
    pair.source.commit(3, STREAM, full=False, all_follow=True)
    pair.receiver.rollback()
    assert pair.receiver.state.version == NONE
    pair.seed(4)
    assert [pair.sync(), pair.sync()] == [False, True]


# Lanes ------------------------------------------------------------------------------------------------------


def test_both_routes_by_turns() -> None:
    """A delta counts only on one of the same route; on the p2p route positions are those of the lane."""
    rng = np.random.default_rng(3)
    full = torch.from_numpy(rng.integers(0, 100, (300, 400))).bfloat16()
    columns, rows = Block((((0, 300),), ((100, 250),))), Block((((20, 200),), ((0, 400),)))
    own, theirs = ({2: FlatSpace.of(2, Pieces.of([Piece(0, 0, block)]))} for block in (columns, rows))
    pair = pair_spaces(own, theirs)
    schedule = ChunkPlan({0: {2: pair[2].numel}}, 30_000)
    lane = Lane(
        1, schedule.chunks(0), {2: build_index_maps(own[2], pair[2])}, {2: build_index_maps(pair[2], own[2])}
    )
    trained, copy = full[:, 100:350].contiguous(), full[20:220].clone()
    ends = Pair({"w": trained}, {"w": full[:, 100:350].clone()})
    source, lanes, kept = ends.source, Lanes(0, [lane]), PreviousDelta()
    flat = FlatTensors([copy], 2)
    targets = {
        name: Target(flat, {0: build_index_maps(space, theirs[2])})
        for name, space in (("p2p", pair[2]), ("broadcast", own[2]))
    }
    flags, counted = rng.random(trained.shape) < 0.03, []
    for version, route in enumerate(["p2p", "p2p", "p2p", "broadcast", "broadcast", "p2p", "p2p"], 2):
        trained.view(torch.int16)[torch.from_numpy(flags)] ^= 1
        flags = (flags & (rng.random(trained.shape) < 0.84)) | (rng.random(trained.shape) < 0.005)
        source.prepare(
            version, False, Phases(), lanes=lanes if route == "p2p" else None, selector=CodecSelector("small")
        )
        made, chunks = SyncStep(SCHEMA, source.state.lineage, version - 1, version), ends.chunks
        if route == "p2p":
            made, chunks = made.of_lane(1), lane.chunks
        staged, heads = StagedPatch(), [made.frame_head(0, len(chunks), chunk) for chunk in chunks]
        for head, frame in zip(heads, source.frames(), strict=True):
            for segment in read_frame(frame, head, kept) if len(frame) else ():
                staged.add(targets[route], 0, segment)
        staged.apply()
        kept.commit(version, STREAM)
        counted.append(any(name.startswith("again") for name in source.codecs))
        source.commit(version, STREAM, full=False, all_follow=True)
        assert torch.equal(copy[:, 100:350].view(torch.int16), trained[20:220].view(torch.int16))
    assert counted == [False, True, True, False, True, False, True]
