"""Unit tier, no ranks: what a tracker finds, and that nothing advances before it commits."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from dte_dist import DeltaTracker, Payload, reconstruct_against_base
from dte_dist.codec.named_tensors import read_payload
from dte_dist.kernels import cpu
from dte_dist.tensors.flat import BITS
from tests.unit.detect.snapshots import Failing


def test_the_rule_of_bytes() -> None:
    tracker, weights = DeltaTracker(), {"w": torch.zeros(100)}
    tracker.diff(weights, 0)
    tracker.commit()
    weights["w"][:50] = 1
    assert "w@delta_idx" in tracker.diff(weights, 1).tensors
    weights["w"][50] = 1
    assert "w" in tracker.diff(weights, 1).tensors
    assert not tracker.diff(weights, 1).full and tracker.version == 0


def test_only_bits_count_and_changes_cross_segments() -> None:
    zeros = {
        "nan": torch.full((4,), float("nan")),
        "big": torch.zeros((1 << 20) + 100),
        "zero": torch.zeros(1000),
        "end": torch.zeros(7),
    }
    tracker = DeltaTracker()
    tracker.diff(zeros, 1)
    tracker.commit()
    assert len(tracker.diff(zeros, 2).tensors) == 1
    tracker.commit()
    zeros["zero"][5] = -0.0
    zeros["big"][[0, (1 << 20) - 5, (1 << 20) - 4, (1 << 20) + 99]] = 1.0
    tensors = tracker.diff(zeros, 3).tensors
    assert (
        tensors["zero@delta_idx"].tolist() == [5]
        and "nan@delta_idx" not in tensors
        and "end@delta_idx" not in tensors
    )
    assert tensors["big@delta_idx"].tolist() == [0, (1 << 20) - 5, (1 << 20) - 4, (1 << 20) + 99]


def test_tracker_commit_and_rollback() -> None:
    tracker, weights = DeltaTracker(), {"w": torch.zeros(1000)}
    with pytest.raises(RuntimeError, match="nothing to commit"):
        tracker.commit()
    assert tracker.diff(weights, 1).full
    tracker.rollback()
    assert tracker.diff(weights, 1).full and tracker.version == -1
    tracker.commit()
    with pytest.raises(RuntimeError, match="nothing to commit"):
        tracker.commit()
    weights["w"][1] = 1
    assert tracker.diff(weights, 2).tensors["w@delta_idx"].tolist() == [1]
    tracker.rollback()
    weights["w"][2] = 1
    assert tracker.diff(weights, 2).tensors["w@delta_idx"].tolist() == [1, 2]


# Many ranges and batches, and what breaks off
# ------------------------------------------------------------------------------

SIZES = {"a": 300, "b": 1, "c": 90, "d": 0, "e": 555, "f": 70, "g": 64, "h": 5}
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.bfloat16,
    torch.uint8,
    torch.float32,
    torch.float64,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred elements make many segments, ranges and batches."""
    monkeypatch.setattr("dte_dist.sync.versioned_snapshot.SEGMENT", 32)
    monkeypatch.setattr("dte_dist.detect.snapshot._RANGE_SEGMENTS", 3)
    monkeypatch.setattr("dte_dist.detect.snapshot._BATCH_CHANGES", 50)


class Followed:
    """A tracker, the weights that it looks at, and a copy that all its payloads are applied to once they are
    committed.
    """

    def __init__(self) -> None:
        self.weights = {
            name: torch.arange(size).to(dtype)
            for (name, size), dtype in zip(SIZES.items(), DTYPES, strict=True)
        }
        self.copy = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.tracker, self.version = DeltaTracker(), 0
        self.sync()

    def diff(self) -> Payload:
        self.version += 1
        return self.tracker.diff(self.weights, self.version)

    def sync(self) -> Payload:
        payload = self.diff()
        self.copy = dict(reconstruct_against_base(payload, self.copy))
        self.tracker.commit()
        assert self.is_equal()
        return payload

    def is_equal(self) -> bool:
        return all(torch.equal(bits(self.copy[name]), bits(tensor)) for name, tensor in self.weights.items())

    def change(self, every: int, seed: int) -> None:
        """Change every so many elements of all tensors, and all of one of them."""
        for number, tensor in enumerate(self.weights.values()):
            bits(tensor)[:: every if number != seed % 8 else 1] ^= 1 + seed


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def changed(payload: Payload) -> dict[str, list[int]]:
    """Return by name what changed, all of it where a tensor is sent whole."""
    found = {
        name.removesuffix("@delta_idx"): part.tolist()
        for name, part in payload.tensors.items()
        if name.endswith("@delta_idx")
    }
    return found | {name: [*range(SIZES[name])] for name in payload.tensors.keys() & SIZES.keys()}


def test_deltas_of_many_waves(small: None) -> None:
    followed = Followed()
    for step, every in enumerate((7, 1, 40, 2, 300)):
        followed.change(every, step)
        assert not followed.sync().full
        assert changed(followed.diff()) == {}
        followed.tracker.commit()


def test_a_diff_that_is_forgotten_is_found_again_with_what_came_after(small: None) -> None:
    followed = Followed()
    followed.change(11, 1)
    first = changed(followed.diff())
    followed.tracker.rollback()
    followed.weights["a"][1] += 1
    second = changed(followed.diff())  # which forgets the one before
    assert second == first | {"a": sorted({*first["a"], 1})} != first
    followed.weights["a"][1] -= 1
    assert changed(followed.diff()) == first
    assert not followed.sync().full


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("every", [1, 11])
@pytest.mark.parametrize("told", [False, True])
def test_a_diff_that_breaks_off_is_followed_by_everything(
    small: None, told: bool, every: int, after: int
) -> None:
    """What was taken over until then is of no version; the payload after it is full, and the one after that
    is exact.
    """
    followed = Followed()
    followed.change(every, 2)
    known = followed.tracker._snapshot
    assert known is not None
    known._kernels = Failing(cpu, "advance", after, True)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        followed.diff()
    known._kernels = cpu
    if told:  # else the next diff does it
        followed.tracker.rollback()
        assert followed.tracker.version == -1
    followed.change(5, 3)
    assert followed.sync().full
    followed.weights["e"][7] = -1.0
    payload = followed.sync()
    assert not payload.full and changed(payload) == {"e": [7]}


@pytest.mark.parametrize("count", [5, 17, 40])
@pytest.mark.parametrize(
    ("own", "wire"), [(torch.float64, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_what_is_sent_whole_is_what_is_known(own: torch.dtype, wire: torch.dtype, count: int) -> None:
    """torch casts a NaN to one pattern in its vectors and to another behind them: it depends on what it is
    cast together with.
    """
    weights = {name: torch.zeros(size, dtype=own) for name, size in (("a", 7), ("b", count), ("c", 3))}
    tracker, dtypes = DeltaTracker(), dict.fromkeys(weights, wire)
    tracker.diff(weights, 1, wire=dtypes)
    tracker.commit()
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    tensors = tracker.diff(weights, 2, wire=dtypes).tensors
    assert tracker._snapshot is not None
    assert torch.equal(
        torch.cat([bits(tensors[name]) for name in weights]), tracker._snapshot.bits[wire.itemsize]
    )
    tracker.commit()
    assert (
        tracker.diff(weights, 3, wire=dtypes)
        .tensors.keys()
        .isdisjoint({*weights, *(f"{name}@delta_idx" for name in weights)})
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("wire", [None, {"c": torch.bfloat16}])
def test_tensors_in_another_order_are_the_same_tensors(
    full: bool, wire: dict[str, torch.dtype] | None
) -> None:
    """Of one width, of several, and of other sizes: names tell tensors apart, not places."""
    make = torch.Generator().manual_seed(7)
    shapes = {"a": (40,), "b": (40,), "c": (3, 50), "d": (7,), "e": (0,)}
    weights = {name: torch.rand(shape, generator=make) for name, shape in shapes.items()}
    weights["f"] = weights["a"].to(torch.bfloat16)
    copy = {name: tensor.to((wire or {}).get(name, tensor.dtype)) for name, tensor in weights.items()}
    tracker = DeltaTracker()
    for version, names in enumerate(permutations(weights), 1):
        if version > 60:
            break
        for tensor in weights.values():
            tensor[: version % 5] += 1
        order = {name: weights[name] for name in names}
        payload = tracker.diff(order, version, full=full and version % 3 == 0, wire=wire)
        tracker.commit()
        for change in read_payload(payload):
            if change.positions is None:
                copy[change.name] = change.values.clone()
            else:
                copy[change.name].view(-1)[change.positions.long()] = change.values
        for name, tensor in weights.items():
            assert torch.equal(bits(copy[name]), bits(tensor.to(copy[name].dtype))), (version, name)


def test_tensors_of_a_payload_come_in_the_order_of_widths_then_of_the_first_diff() -> None:
    """Also where the first tensor of a width is empty."""
    weights = {"e": torch.zeros(0), "h": torch.zeros(9, dtype=torch.bfloat16), "f": torch.zeros(9)}
    tracker = DeltaTracker()
    tracker.diff(weights, 1)
    tracker.commit()
    for tensor in weights.values():
        tensor.add_(1)
    names = [change.name for change in read_payload(tracker.diff(weights, 2))]
    assert names == ["f", "h"]
