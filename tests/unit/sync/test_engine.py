"""Unit tier, no ranks: push and pull over a transport in memory. What holds over any transport is in
distributed/test_transports.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice, permutations

import pytest
import torch
from torch import Tensor, nn

import dte_dist
from dte_dist import (
    ApplyFailed,
    DeltaEngine,
    FrameError,
    LayoutMismatch,
    LoopbackTransport,
    Payload,
    VersionError,
    VersionGap,
    VersionReplay,
)
from dte_dist.codec.named_tensors import flat_bits
from dte_dist.detect.snapshot import Snapshot
from dte_dist.sync.staging import StagedPatch

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
)


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Any bit patterns: NaNs of all kinds, -0.0 and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(flat_bits(ours[name]), flat_bits(theirs[name])) for name in ours
    )


def empty_like(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def change(tensor: Tensor, seed: int, count: int = 3) -> None:
    """Write other bits to some elements."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.randint(0, tensor.numel(), (count,), generator=generator)
    bits = tensor.view(-1).view(torch.uint8).view(tensor.numel(), -1)
    bits[where, 0] ^= 1


class Pair:
    """Weights, a copy, and an engine on each side."""

    def __init__(self, *, numel: int = 1000, transport: LoopbackTransport | None = None) -> None:
        self.weights = {"w": torch.randn(numel), "b": torch.zeros(8, dtype=torch.bfloat16)}
        self.copy = empty_like(self.weights)
        self.transport = transport or LoopbackTransport()
        self.sender, self.receiver = (
            DeltaEngine(self.transport, timeout=0.05),
            DeltaEngine(self.transport, timeout=0.05),
        )

    def push(self, version: int, *, full: bool = False) -> Payload:
        self.sender.push(self.weights, version, full=full)
        return self.transport.receive(version, timeout=1.0)

    def pull(self, version: int) -> None:
        self.receiver.pull(self.copy, version)

    def step(self, version: int) -> Payload:
        change(self.weights["w"], version)
        payload = self.push(version)
        self.pull(version)
        assert same_bits(self.weights, self.copy) and self.receiver.version == version
        return payload


def test_the_quickstart() -> None:
    model, rollout = (
        nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)),
        nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)),
    )
    target_params = dict(rollout.named_parameters())
    before = {name: (tensor.data_ptr(), tensor._version) for name, tensor in target_params.items()}
    kinds = ""
    transport = LoopbackTransport()
    engine = dte_dist.DeltaEngine(transport=transport, mode="delta", anchor_interval=10)
    for step in range(25):
        if step % 4:
            with torch.no_grad():
                model[0].weight[step] += 1
        engine.push(model.named_parameters(), version=step)
        engine.pull(target_params, version=step)
        payload = transport.receive(step, timeout=1.0)
        kinds += "F" if payload.full else "d" if len(payload.tensors) > 1 else "-"
        assert same_bits(dict(model.named_parameters()), target_params) and engine.version == step
    assert kinds == "Fddd-ddd-ddF-ddd-ddd-dFd-"
    assert all(
        tensor.data_ptr() == before[name][0] and tensor._version > before[name][1]
        for name, tensor in target_params.items()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparse_bytes_ratio", [0.0, 1.0])
def test_any_bits_of_any_dtype(dtype: torch.dtype, sparse_bytes_ratio: float) -> None:
    weights = {
        "w": random_bits(dtype, 30, 70),
        "scalar": random_bits(dtype),
        "none": random_bits(dtype, 0, 3),
        "v": random_bits(dtype, 9),
    }
    copy = empty_like(weights)
    transport = LoopbackTransport()
    engine = DeltaEngine(transport, sparse_bytes_ratio=sparse_bytes_ratio)
    for version in range(4):
        engine.push(weights.items(), version)
        engine.pull(copy, version)
        assert same_bits(weights, copy)
        change(weights["w"], version, 5)
        change(weights["scalar"], version, 1)
    names = transport.receive(2, timeout=1.0).tensors.keys()
    assert ("w@delta_idx" in names) == (sparse_bytes_ratio == 1.0) and ("w" in names) == (
        sparse_bytes_ratio == 0.0
    )
    assert not any(name.startswith(("v", "none")) for name in names)


def test_a_payload_is_what_was_there_at_the_call() -> None:
    pair = Pair()
    sent = {name: tensor.clone() for name, tensor in pair.weights.items()}
    pair.push(1)
    pair.weights["w"].zero_()
    pair.pull(1)
    assert same_bits(pair.copy, sent)
    pair.copy["w"].fill_(3)
    again = empty_like(sent)
    DeltaEngine(pair.transport).pull(again, 1)
    assert same_bits(again, sent)


def test_versions_pushed_must_increase() -> None:
    pair = Pair()
    pair.step(4)
    for version in (4, 3, 0):
        with pytest.raises(VersionReplay):
            pair.push(version)
    for wrong in (-1, True, "5"):
        with pytest.raises(ValueError, match="a version is"):
            pair.push(wrong)  # type: ignore[arg-type]
    with pytest.raises(VersionError):
        pair.push(1 << 62)
    assert not pair.step(5).full


def test_mode_full_keeps_no_copy() -> None:
    pair = Pair()
    pair.sender = DeltaEngine(pair.transport, mode="full")
    assert all(pair.step(version).full for version in range(3))
    assert pair.sender.tracker._snapshot is None


def test_live_apply_in_two_steps() -> None:
    pair = Pair()
    pair.step(1)
    before = pair.copy["w"].clone()
    change(pair.weights["w"], 8)
    pair.push(2)
    staged = pair.receiver.decode_for_live_apply(2)
    assert torch.equal(pair.copy["w"], before) and (staged.version, pair.receiver.version) == (2, 1)
    pair.receiver.commit_live_apply(staged, pair.copy)
    assert same_bits(pair.weights, pair.copy)
    with pytest.raises(VersionReplay):
        pair.receiver.commit_live_apply(staged, pair.copy)


def _pulled_by_another(copy: dict[str, Tensor]) -> None:
    engine = DeltaEngine(LoopbackTransport())
    engine.push(copy, 1)
    engine.pull(copy, 1)


WRITES = {
    "in place": lambda copy: copy["w"].mul_(2),
    "through a view": lambda copy: copy["w"][3:5].zero_(),
    "the same bits": lambda copy: copy["b"].copy_(copy["b"].clone()),
    "replaced": lambda copy: copy.update(b=copy["b"].clone()),
    "another engine": _pulled_by_another,
}


@pytest.mark.parametrize("how", WRITES)
def test_targets_that_others_wrote_to(how: str) -> None:
    """A delta raises and the version is gone; a full payload repairs, be it an older one that is still kept,
    and what follows it.
    """
    pair = Pair()
    pair.step(1)
    pair.push(2, full=True)
    pair.pull(2)
    pair.step(3)
    old = {name: tensor.clone() for name, tensor in pair.copy.items()}
    assert pair.copy["w"].sum().isfinite()
    WRITES[how](pair.copy)
    kept = {name: tensor.clone() for name, tensor in pair.copy.items()}
    change(pair.weights["w"], 4)
    pair.push(4)
    for said in ("somebody else wrote", "before anything"):
        with pytest.raises(VersionGap, match=said):
            pair.pull(4)
        assert pair.receiver.version == -1 and same_bits(kept, pair.copy)
    for version in (2, 3):
        pair.pull(version)
    assert same_bits(old, pair.copy)
    pair.pull(4)
    assert same_bits(pair.weights, pair.copy)
    pair.step(5)


def test_a_target_that_another_tensor_took_the_address_of() -> None:
    """With the same counter: only that the memory of the first one was freed tells them apart."""
    weights = torch.arange(500, dtype=torch.float32)
    memory = bytearray(4 * 500)
    target = torch.frombuffer(memory, dtype=torch.float32)
    engine = DeltaEngine(LoopbackTransport())
    for version in (1, 2):
        weights[version] = -1
        engine.push({"w": weights}, version)
        engine.pull({"w": target}, version)
    counter, address = target._version, target.data_ptr()
    del target
    target = torch.frombuffer(memory, dtype=torch.float32)
    while target._version < counter:
        target.fill_(7.0)
    assert (target._version, target.data_ptr()) == (counter, address)
    weights[3] = -1
    engine.push({"w": weights}, 3)
    with pytest.raises(VersionGap, match="or replaced them"):
        engine.pull({"w": target}, 3)
    assert engine.version == -1 and target.eq(7.0).all()
    engine.push({"w": weights}, 4, full=True)
    engine.pull({"w": target}, 4)
    assert same_bits({"w": weights}, {"w": target})


def test_names_in_any_order_on_either_side() -> None:
    """In full payloads, deltas and targets: names tell tensors apart, not places."""
    pair = Pair()
    pair.weights |= {"c": torch.zeros(8, dtype=torch.bfloat16), "d": torch.ones(1000)}
    pair.copy = empty_like(pair.weights)
    orders = [list(order) for order in islice(permutations(pair.weights), 24)]
    for version, (push, pull) in enumerate(zip(orders, reversed(orders), strict=True), 1):
        for seed, tensor in enumerate(pair.weights.values()):
            change(tensor, 100 * version + seed)
        pair.sender.push({name: pair.weights[name] for name in push}, version, full=version % 7 == 0)
        pair.receiver.pull({name: pair.copy[name] for name in pull}, version)
        assert same_bits(pair.weights, pair.copy), (version, push, pull)


def test_writing_to_other_tensors_and_reading_disturbs_nothing() -> None:
    fused = torch.zeros(1010)
    pair = Pair()
    pair.copy["b"] = torch.nn.Parameter(pair.copy["b"])
    pair.step(1)
    (pair.copy["b"].float() * 2).sum().backward()
    fused.copy_(torch.cat([pair.copy["w"], torch.zeros(10)]))
    assert not pair.step(2).full


def test_layouts_that_differ() -> None:
    pair = Pair()
    pair.step(1)
    wrong = {
        "missing": {"w": pair.weights["w"]},
        "not expected": pair.weights | {"x": torch.zeros(2)},
        "shape": pair.weights | {"w": torch.zeros(10, 100)},
        "dtype": pair.weights | {"w": torch.zeros(1000, dtype=torch.int32)},
    }
    for said, tensors in wrong.items():
        with pytest.raises(LayoutMismatch, match=said):
            pair.sender.push(tensors, 2)
    pair.push(2)
    pair.push(3, full=True)
    for tensors in wrong.values():
        for version in (2, 3):
            with pytest.raises(LayoutMismatch):
                pair.receiver.pull(tensors, version)
    assert pair.receiver.version == 1
    pair.pull(3)
    for name in ("w@delta_idx", "__awex_delta_header__"):
        with pytest.raises(LayoutMismatch, match="reserved"):
            pair.sender.push({name: torch.zeros(3)}, 9, full=True)


def test_named_tensors_are_checked() -> None:
    pair = Pair()
    with pytest.raises(LayoutMismatch, match="'w'"):
        pair.sender.push([("w", torch.zeros(2)), ("w", torch.zeros(2))], 1)
    with pytest.raises(LayoutMismatch, match="'w'"):
        pair.sender.push({"w": torch.zeros(2, dtype=torch.complex128)}, 1)
    for wrong in (torch.zeros(3), [("w", 3)], {3: torch.zeros(2)}):
        with pytest.raises(ValueError, match="a named tensor is"):
            pair.sender.push(wrong, 1)  # type: ignore[arg-type]


def test_tied_and_strided_targets() -> None:
    weight = torch.randn(6, 50)
    weights = {"a": weight, "b": weight, "c": torch.randn(50, 6).t(), "d": torch.randn(6)}
    tied, fused = torch.zeros(50, 6).t(), torch.zeros(6, 60)
    copy = {"a": tied, "b": tied, "c": fused[:, :50], "d": fused[:, 55]}
    engine = DeltaEngine(LoopbackTransport())
    for version in range(3):
        before = [tensor._version for tensor in copy.values()]
        engine.push(weights, version)
        engine.pull(copy, version)
        assert same_bits(weights, copy)
        assert all(new._version > old for new, old in zip(copy.values(), before, strict=True))
        weight[version, 3:9] += 1
        weights["c"][2, 7:20] += 1
        weights["d"][version] += 1
    assert not fused[:, 50:55].any()
    overlapping = torch.zeros(400)
    targets = copy | {"a": overlapping[:300].view(6, 50), "b": overlapping[100:].view(6, 50)}
    engine.push(weights, 9, full=True)
    with pytest.raises(LayoutMismatch, match="overlaps"):
        engine.pull(targets, 9)


def test_inference_mode() -> None:
    weights = {"w": torch.randn(500)}
    engine = DeltaEngine(LoopbackTransport())
    with torch.inference_mode():
        copy = {"w": torch.zeros(500)}
        engine.push(weights, 1)
        engine.pull(copy, 1)
    weights["w"][3] = 5
    engine.push(weights, 2)
    engine.pull(copy, 2)
    assert same_bits(weights, copy)


def test_writing_that_breaks_off_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.step(1)
    pair.push(2)

    def broken(*_: object) -> None:
        raise MemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(StagedPatch, "apply", broken)
        with pytest.raises(ApplyFailed, match="MemoryError"):
            pair.pull(2)
    assert pair.receiver.version == -1
    with pytest.raises(VersionGap):
        pair.pull(2)
    pair.push(3, full=True)
    pair.pull(3)
    assert same_bits(pair.weights, pair.copy)


def test_a_copy_that_cannot_be_written_sends_everything_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.step(1)

    def broken(*_: object) -> None:
        raise MemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "commit", broken)
        with pytest.raises(MemoryError):
            pair.push(2)
    assert pair.step(3).full


def test_options_are_checked() -> None:
    transport = LoopbackTransport()
    for wrong in (
        {"mode": "half"},
        {"anchor_interval": 0},
        {"anchor_interval": True},
        {"sparse_bytes_ratio": -1.0},
        {"timeout": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DeltaEngine(transport, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transport"):
        DeltaEngine(None)  # type: ignore[arg-type]


def test_a_transport_that_returns_something_else() -> None:
    pair = Pair()
    payload = pair.push(1)
    pair.transport.receive = lambda version, *, sender, timeout: payload  # type: ignore[method-assign]
    with pytest.raises(FrameError, match="something else"):
        pair.pull(2)


def test_an_iterator_that_was_used_up_is_told_from_other_names() -> None:
    engine = DeltaEngine(LoopbackTransport())
    model, copy = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    targets = copy.named_parameters()
    engine.push(model.named_parameters(), 1)
    engine.pull(targets, 1)
    engine.push(model.named_parameters(), 2)
    with pytest.raises(LayoutMismatch, match="an iterator that was used before gives none"):
        engine.pull(targets, 2)
    engine.pull(copy.named_parameters(), 2)


def test_names_of_the_last_pull_are_those_that_it_wrote_to() -> None:
    weights = {
        "b": torch.zeros(3),
        "a": torch.zeros(2, 2),
        "none": torch.zeros(0),
        "wide": torch.zeros(2).double(),
    }
    copy = empty_like(weights)
    copy["tied"], weights["tied"] = copy["b"], weights["b"]
    engine = DeltaEngine(LoopbackTransport())
    assert engine.changed_names == ()
    expected = [("a", "b", "tied", "wide"), ("a",), (), ("b", "tied", "wide")]
    for version, names in enumerate(expected):
        for name in names if version else ():
            weights[name].view(-1)[0] += 1 if name != "tied" else 0
        engine.push(weights, version)
        engine.pull(copy, version)
        assert engine.changed_names == names and same_bits(weights, copy)
    engine.push(weights, 9)
    with pytest.raises(dte_dist.LayoutMismatch):
        engine.pull({"a": copy["a"]}, 9)
