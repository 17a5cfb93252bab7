"""Unit tier, no ranks: engines whose tensors lie on two devices.

There is one device here: see `tests.unit.far`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dte_dist import (
    DeltaEngine,
    DeltaTracker,
    Layout,
    LayoutMismatch,
    LoopbackTransport,
    Payload,
    Plan,
    reconstruct_against_base,
)
from dte_dist.layout import brought_home
from dte_dist.tensors import devices
from tests.unit.far import CPU, FAR, GPU, far, near_and_far
from tests.unit.sync.pair import same_bits


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        devices, "_device_of", lambda tensor: GPU if tensor.data_ptr() in FAR else tensor.device
    )
    yield
    FAR.clear()


def test_an_engine_sends_from_two_devices_and_receives_on_two() -> None:
    weights, copy, transport = near_and_far(), near_and_far(), LoopbackTransport()
    for tensor in copy.values():
        tensor.zero_()
    engine = DeltaEngine(transport)
    for version in range(3):
        engine.push(weights, version)
        payload = transport.receive(version, timeout=1.0)
        assert not any(tensor.data_ptr() in FAR for tensor in payload.tensors.values()) and payload.full == (
            version == 0
        )
        engine.pull(copy, version)
        assert same_bits(weights, copy)
        weights["b.mean"][version] += 1
        weights["p1"][version] += 1
        weights["b.half"][version] += 1


def test_a_payload_on_two_devices_is_read() -> None:
    weights = near_and_far()
    made = reconstruct_against_base(
        Payload(1, -1, True, weights), {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    )
    assert same_bits(weights, made)
    tracker = DeltaTracker()
    tracker.diff(weights, 1)
    tracker.commit()
    weights["p0"][3] += 1
    weights["b.mean"][4] += 1
    payload = tracker.diff(weights, 2)
    far(payload.tensors["b.mean@delta_val"])
    far(payload.tensors["p0@delta_idx"])
    assert same_bits(weights, reconstruct_against_base(payload, made))


def test_a_receiver_along_a_plan_says_which_tensors_are_away() -> None:
    layouts = [Layout.from_tensors({"a": torch.ones(3), "b": torch.ones(3)}) for _ in range(2)]
    plan, transport = Plan.between({0: layouts[0]}, {1: layouts[1]}), LoopbackTransport()
    DeltaEngine(transport, plan=plan, rank=0).push(layouts[0], 1)
    far(layouts[1].tensors()[1])
    moved = Layout.from_tensors(dict(zip("ab", layouts[1].tensors(), strict=True)))
    with pytest.raises(LayoutMismatch, match=r"several devices.*'b' on cuda:0"):
        DeltaEngine(transport, plan=plan, rank=1).pull(moved, 1)


def test_tensors_that_are_at_home_are_not_copied() -> None:
    weights = near_and_far()
    home, found = brought_home(weights)
    assert home == CPU and list(found) == list(weights)
    assert {name for name, tensor in found.items() if tensor is weights[name]} == {"p0", "p1"}
