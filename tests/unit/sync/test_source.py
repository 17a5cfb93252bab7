"""Unit tier, no ranks: what a source sends and a receiver accepts, with frames handed from one to the other
in memory.

`Pair` runs the protocol of one sync over real states: prepare, frames, take, vote, apply, commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist.codec import FrameHead, FrameWriter
from dte_dist.codec.index_codecs import INDEX_CODECS
from dte_dist.codec.value_codecs import VALUE_CODECS
from dte_dist.detect import snapshot
from dte_dist.detect.detector import Detector
from dte_dist.errors import (
    FrameError,
    LayoutMismatch,
    VersionError,
    VersionGap,
    VersionReplay,
    VersionRestart,
)
from dte_dist.kernels import cpu
from dte_dist.layout import Layout
from dte_dist.plan.chunks import SEGMENT, Chunk, ChunkPlan
from dte_dist.plan.model_map import ModelMap, RankLayout, WireTypes
from dte_dist.report import Phases
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.routes import dense_frame_bytes, max_frame_bytes
from dte_dist.sync.source import Source
from dte_dist.sync.version import NONE, SyncStep
from tests.unit.detect.test_snapshot import Failing

Tamper = Callable[[list[Tensor]], list[Tensor]]
SCHEMA, STREAM = 1234, 77


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor: no comparison of floats anywhere."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(bits(ours[name]) == bits(theirs[name]) for name in theirs)


class Pair:
    """One source and one receiver, seeded."""

    def __init__(
        self,
        trained: dict[str, Tensor],
        copy: dict[str, Tensor] | None = None,
        *,
        wire: WireTypes = None,
        bucket_bytes: int = 1 << 20,
        detector: Detector | None = None,
        seed: bool = True,
    ) -> None:
        self.trained = trained
        self.copy = (
            {name: torch.zeros_like(tensor) for name, tensor in trained.items()} if copy is None else copy
        )
        self.layouts = Layout.from_tensors(self.trained), Layout.from_tensors(self.copy)
        ours, theirs = (RankLayout(layout.manifest, layout.coordinates) for layout in self.layouts)
        self.model = ModelMap({0: replace(ours, wire=wire)}, {1: theirs})
        totals = {width: space.numel for width, space in self.model.source_spaces[0].items()}
        self.schedule = ChunkPlan({0: totals}, bucket_bytes)
        self.source = Source(self.layouts[0], self.model, 0, self.schedule, SCHEMA)
        self.receiver = Receiver(self.layouts[1], self.model, 1)
        self.detector = detector
        if seed:
            self.seed()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.schedule.chunks(0)

    def head(self, chunk: Chunk, *, source: int = 0, seed: bool | None = None, **step: int) -> FrameHead:
        """What the receiver expects a frame to say: the next version after its own, unless told otherwise."""
        at = self.receiver.state
        known = {
            "schema": SCHEMA,
            "lineage": at.lineage,
            "base": at.version,
            "version": at.version + 1,
            **step,
        }
        head = SyncStep(**known).frame_head(source, len(self.chunks), chunk)
        return head if seed is None else replace(head, seed=seed)

    def seed(self, version: int = 1, lineage: int = STREAM, tamper: Tamper | None = None) -> None:
        self.source.prepare(version, True, Phases())
        self.place(version, lineage, tamper)

    def place(self, version: int, lineage: int = STREAM, tamper: Tamper | None = None) -> None:
        """Send the snapshot as it is."""
        frames = self.seed_frames(version, lineage)
        self.receiver.begin()
        for chunk, frame in zip(self.chunks, tamper(frames) if tamper else frames, strict=True):
            self.receiver.take(frame, self.head(chunk, base=NONE, version=version, lineage=lineage))
        error = self.source.error or self.receiver.error
        if error is not None:
            self.rollback()
            raise error
        self.receiver.commit(version, lineage)
        self.source.commit(version, lineage, full=True)

    def seed_frames(self, version: int, lineage: int = STREAM) -> list[Tensor]:
        """Let the source write its dense frames into buffers of the sizes that all ranks know."""
        buffers = [torch.empty(dense_frame_bytes(chunk), dtype=torch.uint8) for chunk in self.chunks]
        for write, buffer in zip(
            self.source.seed_frames(SyncStep(SCHEMA, lineage, NONE, version)), buffers, strict=True
        ):
            write(buffer)
        return buffers

    def prepare(self) -> list[Tensor]:
        """Return all frames of the next delta."""
        self.source.prepare(self.source.state.version + 1, False, Phases(), self.detector)
        frames = self.source.frames()
        assert all(
            len(frame) <= max_frame_bytes(chunk) for frame, chunk in zip(frames, self.chunks, strict=True)
        )
        return frames

    def deliver(self, frames: list[Tensor], **expected: int) -> Exception | None:
        """Let the receiver take frames and return what it says."""
        self.receiver.begin()
        for chunk, frame in zip(self.chunks, frames, strict=True):
            if len(frame):
                self.receiver.take(frame, self.head(chunk, **expected))
        return self.receiver.error

    def rollback(self) -> None:
        self.source.rollback()
        self.receiver.rollback()

    def commit(self) -> None:
        version, lineage = self.source.state.version + 1, self.source.state.lineage
        self.receiver.apply()
        self.receiver.commit(version, lineage)
        self.source.commit(version, lineage, full=False)

    def sync(self, tamper: Tamper | None = None) -> int:
        """Run a whole delta and return how many elements it sent."""
        frames = self.prepare()
        changed = self.source.changed
        error = self.deliver(tamper(frames) if tamper else frames)
        if error is not None:
            self.rollback()
            raise error
        self.commit()
        return changed


def weights(*numels: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(numels))
    return {f"w{i}": torch.randn(n, generator=generator).to(dtype) for i, n in enumerate(numels)}


# Versions and failures
# ---------------------------------------------------------------------------------------------------


def test_a_seed_and_deltas_keep_the_copy_bit_equal() -> None:
    pair = Pair(weights(300, 20), bucket_bytes=256)
    assert len(pair.chunks) == 5 and same_bits(pair.trained, pair.copy)
    for step in range(5):
        pair.trained["w0"][step :: 7 + step] += 1.0
        assert pair.sync() == len(range(step, 300, 7 + step))
        assert same_bits(pair.trained, pair.copy)
        assert pair.source.state.version == pair.receiver.state.version == step + 2


def test_nothing_changed_sends_no_frame_and_moves_the_version_on_both_sides() -> None:
    pair = Pair(weights(100))
    assert [len(frame) for frame in pair.prepare()] == [0] and pair.source.changed == 0
    pair.commit()
    assert pair.source.state.version == pair.receiver.state.version == 2


def test_only_the_tensor_that_changed_is_in_a_frame() -> None:
    pair = Pair(weights(64, 64, 64), bucket_bytes=256)
    pair.trained["w1"][5] = -0.5
    assert [bool(len(frame)) for frame in pair.prepare()] == [False, True, False]


def test_after_a_rollback_nothing_has_moved_and_the_next_delta_is_a_superset() -> None:
    pair = Pair(weights(100))
    before, known = bits(pair.copy["w0"]), bits(pair.source.snapshot.bits[4])
    pair.trained["w0"][:10] += 1
    assert pair.deliver(pair.prepare()) is None and pair.source.changed == 10
    pair.rollback()
    assert bits(pair.copy["w0"]) == before and bits(pair.source.snapshot.bits[4]) == known
    assert pair.source.state.version == pair.receiver.state.version == 1
    pair.trained["w0"][50] += 1
    assert pair.sync() == 11 and same_bits(pair.trained, pair.copy)


def test_what_changes_back_before_the_next_try_is_not_sent() -> None:
    pair = Pair(weights(100))
    old = pair.trained["w0"].clone()
    pair.trained["w0"][:10] += 1
    pair.prepare()
    pair.rollback()
    pair.trained["w0"].copy_(old)
    assert pair.sync() == 0 and same_bits(pair.trained, pair.copy)


def test_the_bits_that_travel_are_those_of_prepare() -> None:
    pair = Pair(weights(100))
    pair.trained["w0"][3] = 5.0
    frames = pair.prepare()
    pair.trained["w0"][3] = 6.0
    pair.trained["w0"][4] = 7.0
    assert pair.deliver(frames) is None
    pair.commit()
    assert pair.copy["w0"][3] == 5.0 and pair.copy["w0"][4] != 7.0
    assert pair.sync() == 2 and same_bits(pair.trained, pair.copy)


def flip(frame: Tensor, byte: int, bit: int = 0) -> Tensor:
    damaged = frame.clone()
    damaged[byte] ^= 1 << bit
    return damaged


def swap_words(frame: Tensor, a: int, b: int) -> Tensor:
    damaged = frame.clone()
    words = damaged.view(torch.int64)
    words[[a, b]] = words[[b, a]]
    return damaged


FRAME_DAMAGES: dict[str, Tamper] = {
    "a bit of a value flipped": lambda f: [f[0], flip(f[1], -8), f[2]],
    "a bit of the head flipped": lambda f: [f[0], flip(f[1], 40), f[2]],
    "the same bit flipped in two words": lambda f: [f[0], flip(flip(f[1], -8), -16), f[2]],
    "two words swapped": lambda f: [f[0], swap_words(f[1], -1, -2), f[2]],
    "cut short": lambda f: [f[0], f[1][:-8], f[2]],
    "cut to its head": lambda f: [f[0], f[1][:96], f[2]],
    "too long": lambda f: [f[0], torch.cat([f[1], f[1][:8]]), f[2]],
    "zeros": lambda f: [f[0], torch.zeros_like(f[1]), f[2]],
    "two frames swapped": lambda f: [f[1], f[0], f[2]],
    "one frame twice": lambda f: [f[0], f[0], f[2]],
}
DAMAGES = [(damage, FrameError) for damage in FRAME_DAMAGES.values()]
DAMAGES += [(lambda f: [f[0], f[1].view(torch.int64), f[2]], ValueError)]


@pytest.mark.parametrize(("damage", "kind"), DAMAGES, ids=[*FRAME_DAMAGES, "not a frame tensor"])
def test_frame_two_of_three_damaged_leaves_the_old_version_whole(
    damage: Tamper, kind: type[Exception]
) -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    before = bits(pair.copy["w0"])
    pair.trained["w0"].neg_()
    with pytest.raises(kind) as caught:
        pair.sync(damage)
    assert type(caught.value) is kind
    assert bits(pair.copy["w0"]) == before and pair.receiver.state.version == pair.source.state.version == 1
    assert pair.sync() == 192 and same_bits(pair.trained, pair.copy)


def test_a_receiver_that_refused_one_frame_takes_no_later_one_of_that_sync() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    pair.trained["w0"].neg_()
    frames = pair.prepare()
    error = pair.deliver([frames[0], flip(frames[1], -8), frames[2]])
    assert isinstance(error, FrameError) and pair.receiver._staged.nbytes < 2 * 64 * 12


def test_a_seed_damaged_midway_leaves_a_receiver_without_a_version_until_it_is_seeded() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    pair.trained["w0"].neg_()
    with pytest.raises(FrameError):
        pair.seed(2, tamper=lambda frames: [frames[0], flip(frames[1], -8), frames[2]])
    assert pair.receiver.state.version == NONE and pair.source.state.version == NONE
    pair.seed(3)
    assert same_bits(pair.trained, pair.copy) and pair.receiver.state.version == 3


def test_a_seed_whose_first_frame_is_damaged_touches_nothing() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    before = bits(pair.copy["w0"])
    pair.trained["w0"].neg_()
    with pytest.raises(FrameError):
        pair.seed(2, tamper=lambda frames: [flip(frames[0], -8), *frames[1:]])
    assert bits(pair.copy["w0"]) == before and pair.receiver.state.version == 1


def test_a_receiver_that_fails_while_it_writes_has_no_version() -> None:
    pair = Pair(weights(64))
    pair.trained["w0"].neg_()
    assert pair.deliver(pair.prepare()) is None

    def failing(*_: object) -> None:
        raise OSError("the device is gone")

    pair.receiver._staged = type(
        "Failing", (), {"apply": staticmethod(failing), "clear": lambda self: None}
    )()  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        pair.receiver.apply()
    assert pair.receiver.state.version == NONE
    pair.receiver.rollback()
    assert pair.receiver.state.version == NONE


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        ({"base": 2, "version": 3}, VersionGap),
        ({"base": 4, "version": 5}, VersionReplay),
        ({"base": 9, "version": 10}, VersionReplay),
        ({"base": 3, "version": 5}, VersionError),
        ({"lineage": STREAM + 1}, VersionRestart),
        ({"schema": SCHEMA + 1}, FrameError),
        ({"source": 1}, FrameError),
        ({"seed": True}, FrameError),
    ],
    ids=[
        "gap",
        "replay",
        "old replay",
        "other step",
        "restart",
        "other model",
        "other source",
        "delta for seed",
    ],
)
def test_a_frame_off_the_chain_is_told_apart_by_name_and_touches_nothing(
    held: dict[str, int], kind: type[Exception]
) -> None:
    pair = Pair(weights(64), seed=False)
    pair.seed(3)
    before = bits(pair.copy["w0"])
    pair.trained["w0"].neg_()
    error = pair.deliver(pair.prepare(), **{"base": 3, "version": 4, **held})
    assert type(error) is kind
    assert bits(pair.copy["w0"]) == before and not pair.receiver._staged.nbytes


def test_a_lost_version_is_a_gap() -> None:
    pair = Pair(weights(64))
    for _ in range(2):  # version 2 arrives, 3 is lost
        pair.trained["w0"] += 1
        frames = pair.prepare()
        lost = pair.source.state.version == 2
        if not lost:
            pair.deliver(frames)
            pair.receiver.apply()
            pair.receiver.commit(2, STREAM)
        pair.source.commit(pair.source.state.version + 1, STREAM, full=False)
    pair.trained["w0"] += 1
    assert isinstance(pair.deliver(pair.prepare()), VersionGap)


def test_the_same_delta_is_not_taken_twice() -> None:
    pair = Pair(weights(64))
    pair.trained["w0"] += 1
    frames = pair.prepare()
    pair.deliver(frames)
    pair.commit()
    after = bits(pair.copy["w0"])
    assert isinstance(pair.deliver(frames), VersionReplay)
    assert bits(pair.copy["w0"]) == after


def test_a_trainer_that_starts_anew_is_a_restart_even_at_the_same_numbers() -> None:
    old, new = Pair(weights(64)), Pair(weights(64), seed=False)
    new.seed(1, STREAM + 1)
    new.trained["w0"] += 1
    assert isinstance(old.deliver(new.prepare()), VersionRestart)


# Detectors --------------------------------------------------------------------------------------------------
# -------------


def differing(live: Tensor, known: Tensor) -> Tensor:
    return (live != known).nonzero().flatten()


def test_a_detector_of_the_caller_sees_integer_bits_and_its_answer_is_sent() -> None:
    seen = []

    def detector(live: Tensor, known: Tensor) -> Tensor:
        seen.append((live.dtype, known.dtype, len(live), len(known)))
        return differing(live, known)

    pair = Pair(weights(100, dtype=torch.bfloat16), detector=detector)
    pair.trained["w0"][[1, 50]] = 9.0
    assert pair.sync() == 2 and same_bits(pair.trained, pair.copy)
    assert seen == [(torch.int16, torch.int16, 100, 100)]


def test_a_detector_may_name_too_many() -> None:
    pair = Pair(weights(100), detector=lambda live, known: torch.arange(len(live)))
    pair.trained["w0"][7] = 9.0
    assert pair.sync() == 100 and same_bits(pair.trained, pair.copy)


RUBBISH: dict[str, tuple[Any, type[Exception]]] = {
    "descending": (lambda live, known: torch.tensor([3, 2]), ValueError),
    "twice": (lambda live, known: torch.tensor([2, 2]), ValueError),
    "negative": (lambda live, known: torch.tensor([-1, 2]), ValueError),
    "past the end": (lambda live, known: torch.tensor([1, len(live)]), ValueError),
    "beyond 32 bits": (lambda live, known: torch.tensor([1, 1 << 32]), ValueError),
    "a mask": (lambda live, known: live != known, ValueError),
    "floats": (lambda live, known: torch.tensor([1.0]), ValueError),
    "two dimensions": (lambda live, known: torch.tensor([[1], [2]]), ValueError),
    "a list": (lambda live, known: [1, 2], AttributeError),
    "nothing": (lambda live, known: None, AttributeError),
    "raising": (lambda live, known: 1 // 0, ZeroDivisionError),
}


@pytest.mark.parametrize(("detector", "kind"), RUBBISH.values(), ids=RUBBISH)
def test_a_detector_that_returns_rubbish_fails_in_prepare_and_nothing_moves(
    detector: Detector, kind: type[Exception]
) -> None:
    pair = Pair(weights(100), detector=detector)
    before = bits(pair.source.snapshot.bits[4])
    pair.trained["w0"][:5] += 1
    with pytest.raises(kind) as caught:
        pair.prepare()
    assert type(caught.value) is kind
    pair.rollback()
    assert (
        pair.source.changed == 0
        and pair.source.state.version == 1
        and bits(pair.source.snapshot.bits[4]) == before
    )
    pair.detector = None
    assert pair.sync() == 5 and same_bits(pair.trained, pair.copy)


def test_every_sync_may_have_another_detector() -> None:
    pair = Pair(weights(100))
    asked = []

    def named(name: str) -> Detector:
        return lambda live, known: (asked.append(name), differing(live, known))[1]

    for detector in (named("one"), None, named("two"), named("two"), None):
        pair.detector = detector
        pair.trained["w0"][len(asked)] += 1
        assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)
    assert asked == ["one", "two", "two"]


@pytest.mark.parametrize("wire", [None, {"w": "bfloat16"}], ids=["as held", "cast"])
def test_a_detector_gets_copies_and_what_it_does_to_them_is_nobodys_loss(wire: WireTypes) -> None:
    def spoiling(live: Tensor, known: Tensor) -> Tensor:
        found = differing(live, known)
        live.fill_(7)
        known.fill_(7)
        return found

    copy = {"w": torch.zeros(100, dtype=torch.bfloat16 if wire else torch.float32)}
    pair = Pair({"w": torch.randn(100)}, copy, wire=wire, detector=spoiling)
    for step in range(3):
        pair.trained["w"][step::10] += 1
        trained = bits(pair.trained["w"])
        assert pair.sync() == 10
        assert bits(pair.trained["w"]) == trained
        assert (
            bits(pair.copy["w"])
            == bits(pair.trained["w"].to(copy["w"].dtype))
            == bits(pair.source.snapshot.bits[copy["w"].itemsize])
        )


# What is sent, and how
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "in the middle", "last"])
@pytest.mark.parametrize("bucket_bytes", [SEGMENT, 4 * SEGMENT], ids=["frames of their own", "one frame"])
def test_a_dense_segment_next_to_sparse_ones_arrives_right(at: int, bucket_bytes: int) -> None:
    length = 2 * SEGMENT + 999
    pair = Pair({"w": torch.zeros(length, dtype=torch.uint8)}, bucket_bytes=bucket_bytes)
    whole = slice(at * SEGMENT, (at + 1) * SEGMENT)
    pair.trained["w"][::29_000] = pair.trained["w"][-40:] = 9
    pair.trained["w"][whole] = torch.arange(len(range(length)[whole])) % 251 + 1
    pair.trained["w"][whole][17] = 0  # did not change, but is sent with the rest of its segment
    frames = pair.prepare()
    assert sum(map(bool, map(len, frames))) == (1 if bucket_bytes > SEGMENT else 3)
    joined = at != 1 and bucket_bytes > SEGMENT  # neighbours that are alike are written as one
    assert pair.source.codecs == {"dense+raw": 1, "u16+raw": 1 if joined else 2}
    assert pair.deliver(frames) is None
    assert not pair.copy["w"].any()
    pair.commit()
    assert torch.equal(pair.trained["w"], pair.copy["w"]) and torch.equal(
        pair.source.snapshot.bits[1], pair.trained["w"]
    )
    assert pair.sync() == 0


def test_codecs_count_the_segments_of_the_delta_until_it_is_forgotten() -> None:
    pair = Pair(weights(SEGMENT + 100))
    assert pair.source.codecs == {}
    pair.trained["w0"][[1, SEGMENT // 2]] += 1
    pair.trained["w0"][SEGMENT:].neg_()
    pair.deliver(pair.prepare())
    expected = {"i32+raw": 2, "dense+raw": 1}  # a chunk has at most 2^18 elements here
    assert pair.source.codecs == expected
    pair.commit()
    assert pair.source.codecs == expected  # for the report, which comes last
    pair.rollback()
    assert pair.source.codecs == {}
    assert pair.sync() == 0 and pair.source.codecs == {}


def frame_of(
    pair: Pair, number: int, parts: list[tuple[int, Tensor | None, Tensor]], version: int = 2
) -> Tensor:
    """A seed frame that a source would not make, of segments (first, positions, bits)."""
    writer = FrameWriter(pair.head(pair.chunks[number], base=NONE, version=version), "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dte_dist.codec.selector.CodecSelector.select",
            lambda *of, **how: (INDEX_CODECS[1], VALUE_CODECS[0], False),
        )
        for first, positions, values in parts:
            if positions is None:
                writer.add_dense(first, values)
            else:
                writer.add(first, len(values), positions.int(), values[positions])
    return writer.finish()


SEEDS: dict[str, list[tuple[int, Tensor | None, Tensor]]] = {
    "sparse": [(64, torch.tensor([0, 5]), torch.arange(64).int())],
    "sparse, but all of it": [(64, torch.arange(64), torch.arange(64).int())],
    "its front half": [(64, None, torch.arange(32).int())],
    "its back half": [(96, None, torch.arange(32).int())],
    "a hole in it": [(64, None, torch.arange(31).int()), (96, None, torch.arange(32).int())],
    "half dense, half sparse": [
        (64, None, torch.arange(32).int()),
        (96, torch.arange(32), torch.arange(32).int()),
    ],
}


@pytest.mark.parametrize("parts", SEEDS.values(), ids=SEEDS)
def test_a_seed_that_is_not_the_whole_chunk_is_refused_and_not_written(
    parts: list[tuple[int, Tensor | None, Tensor]],
) -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    before = bits(pair.copy["w0"][64:])
    pair.trained["w0"].neg_()
    with pytest.raises(FrameError, match="not the whole chunk"):
        pair.seed(2, tamper=lambda frames: [frames[0], frame_of(pair, 1, parts), frames[2]])
    assert bits(pair.copy["w0"][64:]) == before
    assert pair.receiver.state.version == NONE
    pair.seed(3)
    assert same_bits(pair.trained, pair.copy)


def test_a_seed_that_is_not_whole_in_its_first_frame_leaves_the_version_as_it_was() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    part = frame_of(pair, 0, [(0, None, torch.arange(63).int())])
    with pytest.raises(FrameError, match="not the whole chunk"):
        pair.seed(2, tamper=lambda frames: [part, *frames[1:]])
    assert pair.receiver.state.version == 1


def test_a_whole_seed_in_several_dense_segments_is_taken() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    parts = frame_of(pair, 1, [(64, None, torch.arange(32).int()), (96, None, torch.arange(32, 64).int())])
    pair.seed(2, tamper=lambda frames: [frames[0], parts, frames[2]])
    assert (
        pair.copy["w0"][64:128].view(torch.int32).tolist() == [*range(64)]
        and pair.receiver.state.version == 2
    )


def test_a_seed_frame_that_could_not_be_made_is_refused_and_the_source_says_why() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    before = bits(pair.copy["w0"])
    pair.trained["w0"].neg_()
    pair.source.prepare(2, True, Phases())
    write, made = pair.source.own_lanes.write_seed, []

    def failing(*args: Any) -> None:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no room")
        write(*args)

    pair.source.own_lanes.write_seed = failing  # type: ignore[method-assign]
    frames = pair.seed_frames(2)
    assert [bool(frame.any()) for frame in frames] == [True, False, True]
    assert type(pair.source.error) is MemoryError
    pair.receiver.begin()
    pair.receiver.take(frames[1], pair.head(pair.chunks[1], base=NONE, version=2, lineage=STREAM))
    assert type(pair.receiver.error) is FrameError and bits(pair.copy["w0"]) == before
    pair.rollback()
    pair.seed(3)
    assert pair.source.error is None and same_bits(pair.trained, pair.copy)


# Breaking off midway
# ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 1 << 21], ids=["a wave each", "one wave"])
def waves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range with changes ends a wave, or none does."""
    monkeypatch.setattr(snapshot, "_BATCH_CHANGES", request.param)


def of_two_widths() -> Pair:
    """Two times three chunks, whose changes are taken over one after the other; all have some."""
    pair = Pair(weights(192) | {"b": (torch.arange(300) % 100).bfloat16()}, bucket_bytes=256)
    assert [chunk.width for chunk in pair.chunks] == [2, 2, 2, 4, 4, 4]
    pair.trained["w0"].neg_()
    pair.trained["b"][::7] += 1
    return pair


def is_seeded(pair: Pair, before: dict[str, Tensor]) -> None:
    """The source has no version, the receiver is where it was, and a full sync brings both together, whatever
    was trained since.
    """
    assert pair.source.state.version == NONE and pair.source.state.newest == 1
    assert pair.receiver.state.version == 1 and same_bits(before, pair.copy)
    pair.trained["w0"][::5] += 1
    pair.trained["b"][::7] -= 1
    pair.seed(3)
    assert (
        same_bits(pair.trained, pair.copy) and pair.receiver.state.version == pair.source.state.version == 3
    )
    assert not pair.source.snapshot.inconsistent
    pair.trained["w0"][7] = 5.0
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("done", [False, True], ids=["at once", "when it was done"])
@pytest.mark.parametrize("after", range(6))
def test_a_source_that_breaks_off_while_it_takes_changes_over_has_no_version(
    waves: None, after: int, done: bool
) -> None:
    pair = of_two_widths()
    before, known = {name: tensor.clone() for name, tensor in pair.copy.items()}, pair.source.snapshot
    known._kernels = Failing(cpu, "advance", after, done)
    with pytest.raises(OSError, match="gone"):
        pair.prepare()
    known._kernels = cpu
    pair.rollback()
    is_seeded(pair, before)


@pytest.mark.parametrize("after", range(3))
def test_a_source_without_memory_for_what_was_there_has_no_version(
    waves: None, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, asked = of_two_widths(), []
    before = {name: tensor.clone() for name, tensor in pair.copy.items()}
    of_range = snapshot.Snapshot.record

    def failing(*args: Any) -> Any:
        asked.append(args)
        if len(asked) > after:
            raise MemoryError("no room")
        return of_range(*args)

    monkeypatch.setattr(snapshot.Snapshot, "record", failing)
    with pytest.raises(MemoryError):
        pair.prepare()
    pair.rollback()
    is_seeded(pair, before)


@pytest.mark.parametrize("after", range(6))
def test_a_source_that_cannot_make_its_frames_stays_where_it_was(
    waves: None, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken over before is put back: the next delta is a superset."""
    pair, added = of_two_widths(), []
    known = {width: bits.clone() for width, bits in pair.source.snapshot.bits.items()}
    add = FrameWriter.add

    def failing(*args: Any, **options: Any) -> None:
        added.append(args)
        if len(added) > after:
            raise MemoryError("no room")
        add(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FrameWriter, "add", failing)
        with pytest.raises(MemoryError):
            pair.prepare()
    assert not pair.source.snapshot.inconsistent
    pair.rollback()
    assert pair.source.state.version == 1 and all(
        torch.equal(pair.source.snapshot.bits[width], bits) for width, bits in known.items()
    )
    pair.trained["b"][1] += 1
    assert pair.sync() == 192 + len(range(0, 300, 7)) + 1 and same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("after", range(3))
def test_a_source_that_cannot_go_back_has_no_version(waves: None, after: int) -> None:
    pair = of_two_widths()
    before, known = {name: tensor.clone() for name, tensor in pair.copy.items()}, pair.source.snapshot
    pair.trained["w0"].copy_(pair.copy["w0"])
    pair.trained["w0"][::9] += 1  # few changes in each chunk: what was there is noted where it changed
    pair.prepare()
    known._kernels = Failing(cpu, "scatter_1d", after, False)
    with pytest.raises(OSError, match="gone"):
        pair.source.rollback()
    known._kernels = cpu
    assert pair.source.state.version == NONE and not pair.source.frames()
    pair.rollback()
    is_seeded(pair, before)


def test_a_delta_that_was_committed_is_not_undone() -> None:
    """All ranks forget what they prepared when a sync ends, committed or not."""
    pair = of_two_widths()
    for _ in range(3):
        pair.sync()
        known = {width: bits.tolist() for width, bits in pair.source.snapshot.bits.items()}
        pair.rollback()
        assert {width: bits.tolist() for width, bits in pair.source.snapshot.bits.items()} == known
        pair.trained["b"][::3] += 1
    assert pair.sync() == 100 and same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
def test_frames_are_read_only_and_must_stay_until_they_are_applied(bucket_bytes: int) -> None:
    """What is staged are views of them: nothing writes there, and what is written there is what is
    applied.
    """
    pair = Pair(weights(3000), bucket_bytes=bucket_bytes)
    pair.trained["w0"][::7].neg_()
    frames = pair.prepare()
    kept = [frame.clone() for frame in frames]
    assert pair.deliver(frames) is None
    assert pair.receiver._staged.nbytes == sum(map(len, frames))
    pair.commit()
    assert all(torch.equal(*two) for two in zip(frames, kept, strict=True)) and same_bits(
        pair.trained, pair.copy
    )
    assert pair.receiver._staged.nbytes == 0


def test_a_receiver_has_no_version_between_apply_and_commit() -> None:
    pair = Pair(weights(64))
    pair.trained["w0"].neg_()
    assert pair.deliver(pair.prepare()) is None and pair.receiver.state.version == 1
    pair.receiver.apply()
    assert pair.receiver.state.version == NONE and same_bits(pair.trained, pair.copy)
    pair.receiver.commit(2, STREAM)
    assert pair.receiver.state.version == 2


# Values -----------------------------------------------------------------------------------------------------
# -------------


def from_bits(*patterns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.tensor(
        [p - (1 << 16) if dtype.itemsize == 2 and p >> 15 else p for p in patterns], dtype=integer
    ).view(dtype)


def test_nan_payloads_travel_and_a_nan_that_stays_sends_nothing() -> None:
    pair = Pair({"w": from_bits(0x7FC0, 0x7F81, 0xFFFF, 0x7FC0)})
    assert pair.sync() == 0
    pair.trained["w"].copy_(from_bits(0x7FC1, 0x7F81, 0xFFFE, 0x7FC0))
    assert pair.sync() == 2 and same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_sign_of_zero_and_changes_of_the_high_byte_alone_are_sent(dtype: torch.dtype) -> None:
    pair = Pair({"w": torch.tensor([0.0, 1.0, 1.0, 1.0, -0.0], dtype=dtype)})
    pair.trained["w"].copy_(torch.tensor([-0.0, -1.0, 4.0, 0.25, -0.0], dtype=dtype))
    assert pair.sync() == 4 and same_bits(pair.trained, pair.copy)


def test_subnormals_and_infinities_are_bits_like_others() -> None:
    pair = Pair({"w": torch.tensor([1e-45, 0.0, 1.0])})
    pair.trained["w"].copy_(torch.tensor([0.0, 1e-45, float("inf")]))
    assert pair.sync() == 3 and same_bits(pair.trained, pair.copy)


ANY = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def test_tensors_of_all_dtypes_change_in_one_commit() -> None:
    pair = Pair(
        {str(dtype): torch.zeros(5).to(dtype) for dtype in ANY}
        | {"scalar": torch.zeros((), dtype=torch.int64)}
    )
    for dtype in ANY:
        pair.trained[str(dtype)].view(torch.uint8)[1] = 1
    pair.trained["scalar"] += 1
    assert pair.sync() == len(ANY) + 1 and same_bits(pair.trained, pair.copy)


def test_an_fp8_weight_and_its_scale_change_in_one_commit_or_not_at_all() -> None:
    pair = Pair({"w": torch.zeros(64).to(torch.float8_e4m3fn), "scale": torch.ones(1)})
    before = {name: tensor.clone() for name, tensor in pair.copy.items()}
    pair.trained["w"].view(torch.uint8)[:] = 7
    pair.trained["scale"][0] = 0.5
    frames = pair.prepare()
    assert len(frames) == 2 and all(len(frame) for frame in frames)
    for damaged in ([flip(frames[0], -8), frames[1]], [frames[0], flip(frames[1], -8)]):
        assert isinstance(pair.deliver(damaged), FrameError)
        assert same_bits(before, pair.copy)
    pair.rollback()
    pair.sync()
    assert same_bits(pair.trained, pair.copy)


def test_fp32_masters_send_only_what_the_cast_to_bf16_changes() -> None:
    trained = {"w": torch.linspace(1, 2, 129)[:128]}
    copy = {"w": torch.zeros(128, dtype=torch.bfloat16)}
    pair = Pair(trained, copy, wire={"w": "bfloat16"})
    assert bits(copy["w"]) == bits(trained["w"].bfloat16())
    trained["w"] += 2.0**-12 * (torch.arange(128) % 2)  # an ulp of bf16 is 2^-7 here
    assert pair.sync() == 0
    trained["w"][3] += 2.0**-7
    assert pair.sync() == 1 and bits(copy["w"]) == bits(trained["w"].bfloat16())


def test_many_changes_below_half_an_ulp_are_sent_once_they_add_up() -> None:
    trained, copy = {"w": torch.ones(1)}, {"w": torch.zeros(1, dtype=torch.bfloat16)}
    pair = Pair(trained, copy, wire={"w": "bfloat16"})
    sent = []
    for _ in range(8):
        trained["w"] += 2.0**-10
        sent.append(pair.sync())
        assert bits(copy["w"]) == bits(trained["w"].bfloat16())
    assert sent == [0, 0, 0, 0, 1, 0, 0, 0]  # half an ulp is 2^-8, and a tie goes to even


# Where the copy lies
# -----------------------------------------------------------------------------------------------------


def strided() -> dict[str, Tensor]:
    return {
        "transposed": torch.zeros(7, 5).t(),
        "sliced": torch.zeros(8, 9)[1:6, 2:9],
        "stepped": torch.zeros(60)[5:50:3],
        "whole": torch.zeros(4),
    }


@pytest.mark.parametrize("side", ["receiver", "source", "both"])
def test_transposed_and_sliced_tensors_are_read_and_written_in_place(side: str) -> None:
    views, plain = strided(), {name: torch.zeros(tensor.shape) for name, tensor in strided().items()}
    pair = Pair(views if side != "receiver" else plain, plain if side == "source" else strided(), seed=False)
    for number, tensor in enumerate(pair.trained.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + number)
    addresses = [(tensor.data_ptr(), tensor.stride()) for tensor in pair.copy.values()]
    pair.seed()
    assert same_bits(pair.trained, pair.copy)
    for tensor in pair.trained.values():
        tensor[1] += 100.5
    assert pair.sync() == 7 + 7 + 1 + 1 and same_bits(pair.trained, pair.copy)
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in pair.copy.values()] == addresses


def test_memory_around_a_sliced_copy_is_left_alone() -> None:
    whole = torch.full((8, 9), 3.0)
    pair = Pair({"w": torch.randn(5, 7)}, {"w": whole[1:6, 2:9]})
    pair.trained["w"].neg_()
    pair.sync()
    outside = torch.ones(8, 9, dtype=torch.bool)
    outside[1:6, 2:9] = False
    assert bits(whole[outside]) == bits(torch.full((72 - 35,), 3.0))


def test_a_tied_tensor_is_sent_once_and_both_names_change() -> None:
    one, other = torch.randn(50), torch.zeros(50)
    pair = Pair({"a": one, "b": one, "c": torch.randn(3)}, {"a": other, "b": other, "c": torch.zeros(3)})
    assert pair.model.numel == 53
    one[4] = 8.0
    assert pair.sync() == 1
    assert same_bits(pair.trained, pair.copy) and pair.copy["b"].data_ptr() == pair.copy["a"].data_ptr()


def test_names_tied_on_the_sources_only_are_both_written() -> None:
    one = torch.randn(50)
    pair = Pair({"a": one, "b": one}, {"a": torch.zeros(50), "b": torch.zeros(50)})
    one[4] = 8.0
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


def test_inference_tensors_are_written_too() -> None:
    with torch.inference_mode():
        copy = {"w": torch.zeros(40), "t": torch.zeros(4, 3).t()}
    pair = Pair({"w": torch.randn(40), "t": torch.randn(3, 4)}, copy)
    pair.trained["w"][::3] = 1.0
    pair.trained["t"][1] = 1.0
    assert pair.sync() == 14 + 4 and same_bits(pair.trained, pair.copy)


def test_addresses_stay_and_version_counters_of_written_tensors_move() -> None:
    pair = Pair(weights(40, 40, 40), bucket_bytes=160)
    for tensor in pair.copy.values():
        tensor.requires_grad_(True)
    addresses = [tensor.data_ptr() for tensor in pair.copy.values()]
    before = [tensor._version for tensor in pair.copy.values()]
    product = pair.copy["w1"] * pair.copy["w1"]
    pair.trained["w1"][3] = 9.0
    pair.sync()
    after = [tensor._version for tensor in pair.copy.values()]
    assert after[1] > before[1] and (after[0], after[2]) == (before[0], before[2])
    assert [tensor.data_ptr() for tensor in pair.copy.values()] == addresses
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_seed_moves_version_counters() -> None:
    pair = Pair(weights(40))
    before = pair.copy["w0"]._version
    pair.seed(2)
    assert pair.copy["w0"]._version > before


def test_a_sync_of_parameters_leaves_no_trace_in_autograd() -> None:
    trained = {"w": torch.nn.Parameter(torch.randn(30))}
    copy = {"w": torch.nn.Parameter(torch.zeros(30))}
    pair = Pair(trained, copy)
    with torch.no_grad():
        trained["w"][2] = 4.0
    pair.sync()
    assert (
        same_bits(trained, copy)
        and copy["w"].grad_fn is None
        and copy["w"].requires_grad
        and copy["w"].grad is None
    )


def test_a_tensor_replaced_between_syncs_is_found_by_its_layout_or_refused_by_name() -> None:
    module, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    pair = Pair(dict(module.named_parameters()), dict(copy.named_parameters()), seed=False)
    pair.layouts = Layout.from_module(module), Layout.from_module(copy)
    pair.source = Source(pair.layouts[0], pair.model, 0, pair.schedule, SCHEMA)
    pair.receiver = Receiver(pair.layouts[1], pair.model, 1)
    pair.seed()
    module.weight = torch.nn.Parameter(torch.ones(2, 3))
    pair.sync()
    assert same_bits(dict(module.named_parameters()), dict(copy.named_parameters()))
    copy.weight = torch.nn.Parameter(copy.weight.detach().clone())
    pair.seed(3)
    assert same_bits(dict(module.named_parameters()), dict(copy.named_parameters()))
    copy.weight = torch.nn.Parameter(torch.zeros(2, 4))
    pair.prepare()
    with pytest.raises(LayoutMismatch, match="'weight'"):
        pair.receiver.begin()


@pytest.mark.parametrize("how", ["written", "written in part", "replaced", "written back"])
def test_a_copy_that_others_wrote_to_has_no_version_until_it_is_seeded(how: str) -> None:
    pair = Pair(weights(40, 40))
    old = pair.copy["w1"].clone()
    copy = pair.copy["w1"]
    if how == "replaced":
        copy.data = old
    elif how == "written back":
        copy.add_(1)
        copy.copy_(old)
    else:
        copy[3 if how == "written in part" else slice(None)] = 1.0
    pair.trained["w0"][5] = 2.0
    pair.receiver.begin()
    assert (
        pair.receiver.state.seed_reason
        and pair.receiver.state.version == NONE
        and pair.receiver.state.newest == 1
    )
    pair.receiver.rollback()
    pair.seed(2)
    assert same_bits(pair.trained, pair.copy)
    pair.trained["w1"][5] = 2.0
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy) and not pair.receiver.state.seed_reason


def test_reading_a_copy_and_what_the_package_writes_disturb_nothing() -> None:
    pair = Pair(weights(40, 40))
    for step in range(3):
        pair.trained["w1"][step] = 2.0
        assert pair.copy["w0"].sum() is not None and pair.copy["w1"].clone() is not None
        pair.receiver.begin()
        assert not pair.receiver.state.seed_reason
        pair.sync()


def test_empty_and_scalar_tensors_take_part() -> None:
    pair = Pair({"empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5), "w": torch.zeros(2)})
    pair.trained["scalar"].fill_(2.5)
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


def test_a_tensor_larger_than_the_bucket_and_buckets_of_one_element() -> None:
    pair = Pair(weights(1000), bucket_bytes=64)
    pair.trained["w0"].neg_()
    assert len(pair.chunks) == 63 and pair.sync() == 1000 and same_bits(pair.trained, pair.copy)


def test_a_second_prepare_forgets_the_first() -> None:
    pair = Pair(weights(100))
    pair.trained["w0"][:10] += 1
    pair.prepare()
    pair.trained["w0"][:9] -= 1
    pair.trained["w0"].copy_(torch.where(torch.arange(100) < 9, pair.copy["w0"], pair.trained["w0"]))
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


def test_a_delta_that_nobody_follows_is_taken_over_and_can_seed() -> None:
    pair = Pair(weights(100))
    pair.trained["w0"][:10] += 1
    pair.prepare()
    pair.trained["w0"][20] += 1  # after the call: belongs to the next version
    pair.source.detach()
    assert pair.source.state.version == NONE
    pair.place(2)
    assert bits(pair.copy["w0"][:20]) == bits(pair.trained["w0"][:20]) and bits(pair.copy["w0"][20]) != bits(
        pair.trained["w0"][20]
    )
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)
