"""Unit tier, no ranks: tensors of a rank on two devices, and what stands in for those that are away.

There is one device here. `FAR` is memory that counts as lying on a GPU: `tensors.devices` asks for devices in
one place only, and is told so there. What is really copied across, and how a real GPU is waited for, is in
tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

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
from dte_dist.detect.fingerprint import Fingerprint
from dte_dist.layout import brought_home, home_of, one_device
from dte_dist.sync.version import NONE
from dte_dist.tensors import devices
from dte_dist.tensors.devices import StandIns
from tests.unit.sync.pair import Pair, bits, same_bits
from tests.unit.sync.test_engine import random_bits

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
FAR: dict[int, Tensor] = {}  # by address, and kept, so that no other tensor comes to lie there
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.float64,
)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        devices, "_device_of", lambda tensor: GPU if tensor.data_ptr() in FAR else tensor.device
    )
    yield
    FAR.clear()


def far(tensor: Tensor) -> Tensor:
    """Let a tensor count as one on the GPU."""
    FAR[tensor.data_ptr()] = tensor.detach()
    return tensor


def near(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let tensors count as on the CPU again."""
    for tensor in tensors.values():
        FAR.pop(tensor.data_ptr(), None)
    return tensors


def near_and_far(numel: int = 300) -> dict[str, Tensor]:
    """Parameters on the CPU; buffers on the GPU, of several widths, one strided and one under two names."""
    generator = torch.Generator().manual_seed(numel)
    made = {f"p{i}": torch.randn(numel, generator=generator) for i in range(2)}
    made |= {
        "b.mean": far(torch.randn(20, generator=generator)),
        "b.steps": far(torch.tensor(7)),
        "b.flags": far(torch.ones(5).bool()),
    }
    made["b.wide"] = far(torch.randn(4, 8, generator=generator).t())
    made["b.half"] = made["b.half.tied"] = far(torch.randn(9, generator=generator).bfloat16())
    return made


# Where home is ----------------------------------------------------------------------------------------------

HOMES = {
    "one": ([(CPU, 4), (CPU, 9)], CPU, []),
    "an accelerator": ([(GPU, 4), (GPU, 9)], GPU, []),
    "none": ([], CPU, []),
    "offloaded": ([(CPU, 90), (GPU, 4), (CPU, 90), (GPU, 0)], CPU, [1, 3]),
    "a counter on the CPU": ([(GPU, 90), (CPU, 1)], GPU, [1]),
    "as much on both": ([(GPU, 5), (CPU, 5)], CPU, [0]),
    "nothing on both": ([(GPU, 0), (CPU, 0)], CPU, [0]),
}


@pytest.mark.parametrize("case", HOMES)
def test_home_is_where_most_bytes_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, home, away = HOMES[case]
    tensors = [torch.zeros(numel) for _, numel in places]
    where = {id(tensor): device for tensor, (device, _) in zip(tensors, places, strict=True)}
    monkeypatch.setattr(devices, "_device_of", lambda tensor: where[id(tensor)])
    assert home_of(tensors, list(map(str, range(len(tensors))))) == (home, away)


def test_several_accelerators_are_refused_with_what_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    where = [GPU, GPU, OTHER, CPU, OTHER, GPU]
    tensors = [torch.zeros(1) for _ in where]
    monkeypatch.setattr(
        devices, "_device_of", lambda tensor: where[[each is tensor for each in tensors].index(True)]
    )
    with pytest.raises(LayoutMismatch) as caught:
        home_of(tensors, list("abcdef"))
    assert str(caught.value) == (
        "the tensors of this rank are on several accelerators [tensor 'c'; got 'c' on cuda:1, 'd' on cpu, "
        "'e' on cuda:1, the other 3 on cuda:0]. Hint: move them to cuda:0, or leave them out with select=."
    )


def test_where_one_device_is_needed_the_others_are_named() -> None:
    tensors = [torch.zeros(2), *(far(torch.zeros(2)) for _ in range(7)), *(torch.zeros(2) for _ in range(8))]
    with pytest.raises(
        LayoutMismatch,
        match=r"several devices \[tensor '1'; got '1' on cuda:0, .*'4' on cuda:0 and 3 more, the other 9 on",
    ):
        one_device(tensors, list(map(str, range(len(tensors)))))
    assert (
        one_device(tensors[:1], ["0"]) == one_device([], []) == CPU
        and one_device(tensors[1:3], ["1", "2"]) == GPU
    )


# What stands in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stand_ins_have_the_bits_and_give_back_what_is_written(dtype: torch.dtype) -> None:
    live = [
        random_bits(dtype, 6, 10),
        random_bits(dtype, 7, 5, seed=1).t(),
        random_bits(dtype),
        random_bits(dtype, 0, 3),
    ]
    new = random_bits(dtype, 5, 7, seed=2)
    before = [(tensor.data_ptr(), tensor._version, bits(tensor)) for tensor in live]
    stand_ins = StandIns.of(live, range(4), CPU)
    assert [bits(copy) for copy in stand_ins.copies] == [held for *_, held in before]
    assert all(
        copy.is_contiguous() and copy.shape == tensor.shape
        for copy, tensor in zip(stand_ins.copies, live, strict=True)
    )
    assert not {copy.data_ptr() for copy in stand_ins.copies if copy.numel()} & {
        tensor.data_ptr() for tensor in live
    }
    stand_ins.write_back()
    assert [
        (tensor.data_ptr(), tensor._version, bits(tensor)) for tensor in live
    ] == before  # nothing was written, so nothing is
    stand_ins.copies[1].view(torch.uint8 if dtype is torch.bool else dtype).copy_(new)
    for _ in range(2):
        stand_ins.write_back()
    assert (
        bits(live[1]) == bits(new)
        and live[1]._version == before[1][1] + 1
        and live[1].data_ptr() == before[1][0]
    )
    assert [bits(live[index]) for index in (0, 2, 3)] == [before[index][2] for index in (0, 2, 3)]
    assert stand_ins.writes.tolist() == [0, 1, 0, 0]


def test_names_of_one_memory_share_a_stand_in_and_its_writes() -> None:
    tied, empty = torch.zeros(4), torch.zeros(0)
    tensors = [torch.zeros(9), tied, empty, tied.view(2, 2), tied, empty, torch.zeros(3)]
    stand_ins = StandIns.of(tensors, [1, 2, 3, 4, 5], CPU)
    assert stand_ins.places.tolist() == [0, 1, 2, 0, 3]
    stand_ins.copies[0].fill_(1)
    stand_ins.write_back()
    assert tied.tolist() == [1.0] * 4
    assert stand_ins.own_writes(np.array([5, 1, 0, 0, 1, 0, 2])).tolist() == [5, 1, 0, 0, 0, 0, 2]


def test_inference_tensors_are_stood_in_for_anywhere() -> None:
    with torch.inference_mode():
        live = torch.zeros(3)
        stand_ins = StandIns.of([live], [0], CPU)
    assert not stand_ins.copies[0].is_inference()
    stand_ins.copies[0].fill_(2)
    stand_ins.write_back()
    assert live.tolist() == [2.0] * 3 and live.is_inference() and stand_ins.writes.tolist() == [1]


def test_a_layout_is_read_at_home_and_found_where_it_lies() -> None:
    tensors = near_and_far() | {"c": far(torch.zeros(3, dtype=torch.complex128))}
    layout = Layout.from_tensors(tensors)
    read, names = layout.read(), [entry.name for entry in layout.manifest.entries]
    by_name = dict(zip(names, read.tensors, strict=True))
    assert (
        read.device == CPU and {name for name, tensor in by_name.items() if tensor.data_ptr() in FAR} == set()
    )
    assert all(bits(by_name[name]) == bits(tensor) for name, tensor in tensors.items())
    assert read.addresses.tolist() == [tensor.data_ptr() for tensor in read.tensors]
    assert read.contiguous.tolist() == [tensor.is_contiguous() for tensor in read.tensors]
    assert by_name["p0"] is tensors["p0"] and by_name["b.half"] is by_name["b.half.tied"]
    assert [tensor.data_ptr() for tensor in layout.tensors()] == [tensors[name].data_ptr() for name in names]
    assert Fingerprint.of(layout.read().live).same(Fingerprint.of(read.live))
    by_name["b.mean"].fill_(3)
    by_name["c"].fill_(4)
    read.write_back()
    assert tensors["b.mean"].tolist() == [3.0] * 20 and tensors["c"].tolist() == [4 + 4j] * 3


def test_nothing_stands_in_on_one_device() -> None:
    layout = Layout.from_tensors({"a": torch.zeros(3), "b": torch.zeros(2)})
    read = layout.read()
    assert read.live is read and read.stand_ins is None
    read.write_back()
    assert read.own_writes(own := np.array([1, 2])) is own


def test_a_tensor_that_moves_away_or_home_is_noticed() -> None:
    tensors = {"a": torch.zeros(30), "b": torch.ones(3)}
    layout = Layout.from_tensors(tensors)
    assert layout.read().stand_ins is None
    tensors["b"].data = far(torch.ones(3) * 2)
    stand_ins = layout.read().stand_ins
    assert stand_ins is not None and stand_ins.indices.tolist() == [1]
    tensors["b"].data = torch.ones(3) * 3
    assert layout.read().stand_ins is None


# Syncs ------------------------------------------------------------------------------------------------------


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


# Engines ----------------------------------------------------------------------------------------------------


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
