"""Unit tier, no ranks: a receiver follows deltas, and refuses damage and frames off the chain before
anything moves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dte_dist.errors import (
    FrameError,
    VersionError,
    VersionGap,
    VersionReplay,
    VersionRestart,
)
from dte_dist.sync.version import NONE
from tests.unit.sync.pair import SCHEMA, STREAM, Pair, Tamper, bits, flip, same_bits, weights


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
