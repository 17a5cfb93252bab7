"""Unit tier, no ranks: a source or receiver breaks off midway, and knows afterwards which version it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist.codec import FrameWriter
from dte_dist.detect import snapshot
from dte_dist.kernels import cpu
from dte_dist.sync.version import NONE
from tests.unit.detect.snapshots import Failing
from tests.unit.sync.pair import STREAM, Pair, same_bits, weights


@pytest.fixture(params=[1, 1 << 21], ids=["a batch each", "one batch"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range with changes ends a batch, or none does."""
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
    batches: None, after: int, done: bool
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
    batches: None, after: int, monkeypatch: pytest.MonkeyPatch
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
    batches: None, after: int, monkeypatch: pytest.MonkeyPatch
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
def test_a_source_that_cannot_go_back_has_no_version(batches: None, after: int) -> None:
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
