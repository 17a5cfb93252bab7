"""Unit tier, no ranks: a source or a receiver whose tensors lie on two devices.

There is one device here: see `tests.unit.far`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from dte_dist.sync.version import NONE
from dte_dist.tensors import devices
from dte_dist.tensors.devices import StandIns
from tests.unit.far import FAR, GPU, near_and_far
from tests.unit.sync.pair import Pair, bits, same_bits


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        devices, "_device_of", lambda tensor: GPU if tensor.data_ptr() in FAR else tensor.device
    )
    yield
    FAR.clear()


def near(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let tensors count as on the CPU again."""
    for tensor in tensors.values():
        FAR.pop(tensor.data_ptr(), None)
    return tensors


@pytest.mark.parametrize("sides", ["source", "receiver", "both"])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_seeds_and_deltas(sides: str, bucket_bytes: int) -> None:
    trained, copy = near_and_far(), near_and_far()
    for tensor in copy.values():
        tensor.zero_()
    for side in (trained if sides == "receiver" else {}, copy if sides == "source" else {}):
        near(side)
    addresses = {name: tensor.data_ptr() for name, tensor in copy.items()}
    pair = Pair(trained, copy, bucket_bytes=bucket_bytes)
    assert same_bits(trained, copy)
    for step in range(4):
        changed = 0
        for name in ("p0", "b.mean", "b.half", "b.wide")[: 4 if step % 2 else 2]:
            trained[name][step : step + 2] += 1.0
            trained[name][-2:] += (
                1.0  # in small buckets that is another frame: two writes at home, one where it lies
            )
            changed += 2 * trained[name][:2].numel()
        trained["b.steps"] += step % 2
        before = {name: tensor._version for name, tensor in copy.items()}
        assert pair.sync() == changed + step % 2
        assert same_bits(trained, copy) and pair.receiver.state.version == step + 2
        moved = {name: tensor._version - before[name] for name, tensor in copy.items()}
        assert (
            moved["b.flags"] == moved["p1"] == 0
            and moved["b.mean"] >= 1
            and (moved["b.steps"] >= 1) == bool(step % 2)
        )
    assert {name: tensor.data_ptr() for name, tensor in copy.items()} == addresses


def test_writes_by_others_are_noticed_where_the_tensors_are() -> None:
    pair = Pair(near_and_far(), near_and_far())
    pair.receiver.begin()
    assert pair.receiver.state.version == 1 and not pair.receiver.is_written()
    pair.copy["b.mean"][3] = 9
    assert pair.receiver.is_written() and pair.receiver.state.version == NONE
    pair.seed(version=2)
    pair.copy["b.steps"] += 1
    pair.receiver.begin()
    assert pair.receiver.state.version == NONE


def test_a_write_back_that_fails_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = near_and_far()
    pair = Pair(trained, near_and_far())
    trained["b.mean"][0] += 1
    assert pair.deliver(pair.prepare()) is None

    def broken(self: StandIns) -> None:
        raise MemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(StandIns, "write_back", broken)
        with pytest.raises(MemoryError):
            pair.receiver.apply()
    assert pair.receiver.state.version == NONE
    pair.rollback()
    pair.seed(version=2)
    assert same_bits(trained, pair.copy)


def test_the_bits_that_are_sent_are_those_of_prepare() -> None:
    pair = Pair(near_and_far())
    pair.trained["b.mean"][2] = 5
    expected = bits(pair.trained["b.mean"])
    frames = pair.prepare()
    pair.trained["b.mean"].fill_(7)
    assert pair.deliver(frames) is None
    pair.commit()
    assert bits(pair.copy["b.mean"]) == expected
