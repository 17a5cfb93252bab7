"""Unit tier, no ranks: a receiver notices who else wrote to its copy, and when; its own writes are not taken
for another's.

`Pair` runs the protocol; here somebody comes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist.errors import DeltaError
from dte_dist.report import Phases
from dte_dist.sync.control import INVALIDATED, OTHER_CHANNEL, WRITTEN
from dte_dist.sync.staging import StagedPatch
from dte_dist.sync.version import NONE
from tests.unit.sync.pair import STREAM, Pair, same_bits, weights

Disturb = Callable[[dict[str, Tensor]], None]


@torch.no_grad()
def write(copy: dict[str, Tensor]) -> None:
    copy["w1"][3] = 123.0


@torch.no_grad()
def write_the_same(copy: dict[str, Tensor]) -> None:
    copy["w1"].copy_(copy["w1"].clone())


def move(copy: dict[str, Tensor]) -> None:
    copy["w1"].data = torch.full_like(copy["w1"], 5.0)


DISTURBANCES: dict[str, Disturb] = {
    "a write": write,
    "a write of the same bits": write_the_same,
    "other memory": move,
}
disturbances = pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)


def a_pair(**options: Any) -> Pair:
    pair = Pair(weights(40, 30, 20), bucket_bytes=64, **options)
    for weight in pair.trained.values():
        weight[:5] += 1
    return pair


def seed_now(pair: Pair, version: int = 2) -> None:
    """Seed within the sync that a delta was prepared for, as where no follower is left."""
    pair.source.detach()
    for chunk, frame in zip(pair.chunks, pair.seed_frames(version), strict=True):
        pair.receiver.take(frame, pair.head(chunk, base=NONE, version=version, lineage=STREAM))
    assert pair.receiver.error is None
    pair.receiver.check_own()
    pair.receiver.commit(version, STREAM, full=True)
    pair.source.commit(version, STREAM, full=True)


# Before the vote --------------------------------------------------------------------------------------------


@disturbances
def test_a_write_since_begin_is_noticed_before_the_vote_and_the_same_sync_seeds(disturb: Disturb) -> None:
    pair = a_pair()
    before = pair.copy["w1"].untyped_storage()
    assert pair.deliver(pair.prepare()) is None
    disturb(pair.copy)
    kept = bytes(before.tolist())
    assert pair.receiver.is_written()
    assert (
        pair.receiver.state.version == NONE
        and pair.receiver.state.seed_reason == WRITTEN
        and not pair.receiver._staged.nbytes
    )
    seed_now(pair)
    assert (
        same_bits(pair.trained, pair.copy)
        and pair.receiver.state.version == 2
        and pair.receiver.state.seed_reason == 0
    )
    assert disturb is not move or bytes(before.tolist()) == kept, (
        "memory was written to that the tensor had left"
    )
    pair.trained["w1"].neg_()
    assert pair.sync() == 30 and same_bits(pair.trained, pair.copy)


@disturbances
def test_a_write_since_the_last_commit_is_noticed_at_begin(disturb: Disturb) -> None:
    pair = a_pair()
    disturb(pair.copy)
    pair.deliver(pair.prepare())
    assert pair.receiver.state.version == NONE and pair.receiver.state.seed_reason == WRITTEN


def test_a_write_between_the_last_look_and_the_commit_is_noticed_by_the_next_sync() -> None:
    pair = a_pair()
    assert pair.deliver(pair.prepare()) is None
    pair.receiver.apply()
    write(pair.copy)
    pair.receiver.commit(2, STREAM)
    pair.source.commit(2, STREAM, full=False)
    pair.receiver.begin()
    assert pair.receiver.state.seed_reason == WRITTEN


def test_nobody_wrote() -> None:
    pair = a_pair()
    assert not pair.receiver.is_written(), "there is no sync"
    assert pair.deliver(pair.prepare()) is None
    assert not pair.receiver.is_written() and not pair.receiver.is_written()
    pair.commit()
    assert same_bits(pair.trained, pair.copy) and pair.receiver.state.version == 2


# While it writes --------------------------------------------------------------------------------------------


@disturbances
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_after_the_vote_leaves_a_receiver_without_a_version(
    monkeypatch: pytest.MonkeyPatch, disturb: Disturb, when: str
) -> None:
    pair = a_pair()
    assert pair.deliver(pair.prepare()) is None and not pair.receiver.is_written()
    apply = StagedPatch.apply

    def disturbed(staged: StagedPatch) -> None:
        if when == "before" and disturb is not move:  # a tensor that is moved now is written to where it was
            disturb(pair.copy)
        apply(staged)
        if when == "after" or disturb is move:
            disturb(pair.copy)

    monkeypatch.setattr(StagedPatch, "apply", disturbed)
    with pytest.raises(DeltaError, match=r"somebody else wrote .*w1.*1 such tensor"):
        pair.receiver.apply()
    assert pair.receiver.state.version == NONE and pair.receiver.state.seed_reason == WRITTEN
    pair.source.commit(2, STREAM, full=False)
    pair.receiver.rollback()
    monkeypatch.undo()
    pair.seed(3)
    assert same_bits(pair.trained, pair.copy) and pair.receiver.state.version == 3


def test_a_commit_without_a_last_look_looks() -> None:
    pair = a_pair()
    assert pair.deliver(pair.prepare()) is None
    pair.receiver.begin_to_write()
    pair.receiver._staged.apply()
    write(pair.copy)
    with pytest.raises(DeltaError, match="somebody else wrote"):
        pair.receiver.commit(2, STREAM)
    assert pair.receiver.state.version == NONE


# Seeds ------------------------------------------------------------------------------------------------------


def seed_disturbed(pair: Pair, disturb: Disturb, before: int) -> None:
    """Seed, and let somebody come in before frame number `before`."""
    pair.source.prepare(2, True, Phases())
    frames = pair.seed_frames(2)
    pair.receiver.begin()
    for number, (chunk, frame) in enumerate(zip(pair.chunks, frames, strict=True)):
        if number == before:
            disturb(pair.copy)
        pair.receiver.take(frame, pair.head(chunk, base=NONE, version=2, lineage=STREAM))
    assert pair.receiver.error is None


@disturbances
@pytest.mark.parametrize("first", [False, True], ids=["again", "for the first time"])
def test_a_write_before_a_seed_comes_does_no_harm(disturb: Disturb, first: bool) -> None:
    """A receiver may wait for long, and all of it is overwritten, where it is then."""
    pair = a_pair(seed=not first)
    left = pair.copy["w1"].untyped_storage()
    kept = bytes(left.tolist())
    seed_disturbed(pair, disturb, 0)
    pair.receiver.check_own()
    pair.receiver.commit(2, STREAM, full=True)
    pair.source.commit(2, STREAM, full=True)
    assert same_bits(pair.trained, pair.copy)
    assert disturb is not move or bytes(left.tolist()) == kept, (
        "memory was written to that the tensor had left"
    )
    pair.trained["w1"].neg_()
    assert pair.sync() == 30 and same_bits(pair.trained, pair.copy)


@disturbances
@pytest.mark.parametrize("before", [1, 5])
def test_a_write_in_the_middle_of_a_seed_leaves_a_receiver_without_a_version(
    disturb: Disturb, before: int
) -> None:
    pair = a_pair()
    seed_disturbed(pair, disturb, before)
    with pytest.raises(DeltaError, match=r"somebody else wrote .*w1"):
        pair.receiver.check_own()
    assert pair.receiver.state.version == NONE and pair.receiver.state.seed_reason == WRITTEN
    pair.rollback()
    pair.seed(3)
    assert same_bits(pair.trained, pair.copy)


def test_memory_that_a_tensor_leaves_in_the_middle_of_a_seed_stays_until_its_end() -> None:
    """The loops write by address; freed memory belongs to somebody else."""
    pair = a_pair()
    pair.source.prepare(2, True, Phases())
    frames = pair.seed_frames(2)
    pair.receiver.begin()
    pair.receiver.take(frames[0], pair.head(pair.chunks[0], base=NONE, version=2, lineage=STREAM))
    held = pair.copy["w2"].untyped_storage().data_ptr()
    pair.copy["w2"].data = torch.zeros(20)
    assert held in {storage.data_ptr() for storage in pair.receiver._memory}
    pair.rollback()
    assert not pair.receiver._memory


# Nobody but the sync ----------------------------------------------------------------------------------------


def fused() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A trainer's parts, and an engine's views of one tensor, the last of them transposed, with padding after
    it.
    """
    whole = torch.zeros(12, 6)
    return {"q": torch.ones(4, 6), "k": torch.ones(3, 6), "v": torch.ones(6, 3)}, {
        "q": whole[:4],
        "k": whole[4:7],
        "v": whole[7:10].t(),
    }


def tied() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    embed, theirs = torch.ones(5, 4), torch.zeros(5, 4)
    return {"embed": embed, "head": embed, "norm": torch.ones(3)}, {
        "embed": theirs,
        "head": theirs,
        "norm": torch.zeros(3),
    }


def untied() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trained, _ = tied()
    return trained, {name: torch.zeros_like(tensor) for name, tensor in trained.items()}


def pairs_of_doubles() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trained = {"z": torch.ones(6, dtype=torch.complex128), "c": torch.ones(4, dtype=torch.complex64)}
    return trained, {name: torch.zeros_like(tensor) for name, tensor in trained.items()}


def odd() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trained = {
        "e": torch.zeros(0),
        "s": torch.tensor(1.0),
        "t": torch.ones(5, 4),
        "p": torch.nn.Parameter(torch.ones(8)),
    }
    parameter = torch.nn.Parameter(torch.zeros(16)[::2])
    return trained, {"e": torch.zeros(0), "s": torch.tensor(0.0), "t": torch.zeros(4, 5).t(), "p": parameter}


def frozen() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.inference_mode():
        return {"a": torch.ones(30), "b": torch.ones(20)}, {"a": torch.zeros(30), "b": torch.zeros(20)}


MODELS = {
    "views of a fused tensor": fused,
    "tied": tied,
    "untied by the receiver": untied,
    "complex": pairs_of_doubles,
    "empty, of no dimension, strided, a parameter": odd,
    "of inference mode": frozen,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_receivers_own_writes_are_never_taken_for_anothers(model: Callable[[], Any]) -> None:
    """Over seeds and deltas, in which some tensors change, or all, or none."""
    pair = Pair(*model(), bucket_bytes=64)
    names = sorted(name for name, tensor in pair.trained.items() if tensor.numel())
    with torch.inference_mode(), torch.no_grad():
        for step in range(6):
            if step == 3:
                pair.seed(pair.source.state.version + 1)
            for name in (names[:1], names, [], names[-1:], names, names[1:])[step]:
                pair.trained[name].view(-1)[step % pair.trained[name].numel()] += 1
            assert pair.deliver(pair.prepare()) is None
            assert pair.receiver.state.version == pair.source.state.version, "taken for another's write"
            assert not pair.receiver.is_written()
            pair.commit()
            assert same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("name", ["q", "v"])
def test_a_write_to_one_view_of_a_fused_tensor_while_a_sync_writes_to_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair = Pair(*fused())
    pair.trained["k"].neg_()
    assert pair.deliver(pair.prepare()) is None
    apply = StagedPatch.apply

    def disturbed(staged: StagedPatch) -> None:
        apply(staged)
        pair.copy[name][0, 0] = 7.0

    monkeypatch.setattr(StagedPatch, "apply", disturbed)
    with pytest.raises(DeltaError, match="3 such tensors"):
        pair.receiver.apply()


def test_a_copy_of_inference_mode_that_is_reloaded_is_noticed_at_begin_and_before_the_vote() -> None:
    pair = Pair(*frozen())
    with torch.inference_mode():
        pair.copy["a"][4] = 9.0
    pair.deliver(pair.prepare())
    assert pair.receiver.state.seed_reason == WRITTEN
    pair.seed(2)
    assert pair.deliver(pair.prepare()) is None and pair.receiver.state.version == 2
    with torch.inference_mode():
        pair.copy["b"][4] = 9.0
    assert pair.receiver.is_written()
    seed_now(pair, 3)
    assert same_bits(pair.trained, pair.copy)


# Several channels, and the reasons --------------------------------------------------------------------------


def test_a_receiver_that_writes_takes_the_version_of_its_rivals() -> None:
    one, other = a_pair(), a_pair()
    one.receiver.state.overlapping = [other.receiver.state]
    assert one.deliver(one.prepare()) is None
    assert other.receiver.state.version == 1, "nothing has been written yet"
    one.commit()
    assert other.receiver.state.version == NONE and other.receiver.state.seed_reason == OTHER_CHANNEL
    other.seed(2)
    assert other.receiver.state.seed_reason == 0 and one.receiver.state.version == 2, (
        "one is no rival of the other"
    )
    one.receiver.state.overlapping = []
    other.receiver.state.overlapping = [one.receiver.state]
    other.seed(3)
    assert one.receiver.state.seed_reason == OTHER_CHANNEL, "seeds are writes, too"


def test_the_first_reason_stays_until_a_seed() -> None:
    pair = a_pair()
    for reason in (INVALIDATED, WRITTEN, OTHER_CHANNEL):
        pair.receiver.state.invalidate(reason)
    assert pair.receiver.state.seed_reason == INVALIDATED and pair.receiver.state.version == NONE
    pair.seed(2)
    pair.receiver.state.invalidate(WRITTEN)
    assert pair.receiver.state.seed_reason == WRITTEN
