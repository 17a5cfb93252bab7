"""Unit tier, no ranks: payloads of the Delta Transfer Engine, in both directions, byte by byte.

Nothing here is made by the package's own writer: the bytes are put together from the description of the
format. A delta
is bare tensors with a header of six int64: magic "AWEX" (0x41574558), codec 1, version, base version, number
of pairs, number of whole tensors. A full payload is bare tensors and nothing else; whoever receives it says
which version it makes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist import (
    DeltaEngine,
    DeltaTracker,
    FrameError,
    LayoutMismatch,
    LoopbackTransport,
    Payload,
    Transport,
    VersionError,
    VersionGap,
    VersionReplay,
    VersionRestart,
    payload_of,
    reconstruct_against_base,
)

HEADER = "__awex_delta_header__"
Bytes = tuple[torch.dtype, tuple[int, ...], bytes]
"""A tensor by hand: dtype, shape, bytes in row-major order."""

_INT32 = torch.int32
_W = [0x00000000, 0x80000000, 0x7FC00001, 0xFF800001, 0x00000001, 0x3F800000]
"""Bits of w, float32[2, 3]: 0.0, -0.0, two NaNs with a payload, a subnormal, 1.0."""
_B = [0x3F80, 0x8000, 0x7F81, 0x0001, 0xFFFF]
"""Bits of b, bfloat16[5]."""


def words(code: str, *values: int) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def w(*changed: tuple[int, int]) -> Bytes:
    bits = dict(enumerate(_W)) | dict(changed)
    return torch.float32, (2, 3), words("I", *bits.values())


def b(*bits: int) -> Bytes:
    return torch.bfloat16, (5,), words("H", *bits)


def header(version: int, base: int, pairs: int, whole: int) -> Bytes:
    return torch.int64, (6,), words("q", 0x41574558, 1, version, base, pairs, whole)


REST: dict[str, Bytes] = {"step": (torch.int64, (), words("q", -3)), "none": (torch.float16, (0, 4), b"")}
STEPS: dict[int, dict[str, Bytes]] = {
    7: {"w": w(), "b": b(*_B), **REST},
    8: {
        HEADER: header(8, 7, 1, 0),
        "w@delta_idx": (_INT32, (2,), words("i", 1, 4)),
        "w@delta_val": (torch.float32, (2,), words("I", 0x7FA00003, 0x00000000)),
    },
    9: {HEADER: header(9, 8, 0, 0)},
    10: {HEADER: header(10, 9, 0, 1), "b": b(0, 0x7FFF, 1, 2, 3)},
    11: {"w": w((0, 5)), "b": b(0, 0x7FFF, 1, 2, 3), **REST},
    12: {
        HEADER: header(12, 11, 1, 1),
        "w@delta_idx": (_INT32, (1,), words("i", 5)),
        "w@delta_val": (torch.float32, (1,), words("I", 0xFFFFFFFF)),
        "b": b(9, 8, 7, 6, 5),
    },
}
"""A run from version 7 on: full, in part, nothing, whole, full again, both."""

STATES: dict[int, dict[str, Bytes]] = {
    7: STEPS[7],
    8: {**STEPS[7], "w": w((1, 0x7FA00003), (4, 0))},
    9: {**STEPS[7], "w": w((1, 0x7FA00003), (4, 0))},
    10: {**STEPS[7], "w": w((1, 0x7FA00003), (4, 0)), "b": b(0, 0x7FFF, 1, 2, 3)},
    11: STEPS[11],
    12: {**STEPS[11], "w": w((0, 5), (5, 0xFFFFFFFF)), "b": b(9, 8, 7, 6, 5)},
}
"""The tensors as they are at each version."""


def tensors_of(by_hand: Mapping[str, Bytes]) -> dict[str, Tensor]:
    return {
        name: (
            torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
            if data
            else torch.empty(0, dtype=dtype)
        ).view(shape)
        for name, (dtype, shape, data) in by_hand.items()
    }


def by_hand(tensors: Mapping[str, Tensor]) -> dict[str, Bytes]:
    return {
        name: (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in tensors.items()
    }


class Bare(Transport):
    """Carries bare named tensors, as transports of a Delta Transfer Engine do, and nothing beside them."""

    def __init__(self, sent: Mapping[int, Mapping[str, Tensor]] | None = None) -> None:
        self.sent = dict(sent or {})

    def send(self, payload: Payload, *, timeout: float) -> None:
        self.sent[payload.version] = payload.tensors

    def receive(self, version: int, *, sender: int = 0, timeout: float) -> Payload:
        return payload_of(self.sent[version], version)

    def close(self) -> None:
        self.sent.clear()


class Ancestor:
    """A receiver that does what the description of the Delta Transfer Engine says, and no more."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.version: int | None = None

    def receive(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if HEADER not in tensors:
            self.held, self.version = {name: tensor.clone() for name, tensor in tensors.items()}, version
            return
        magic, codec, makes, base, pairs, whole = tensors[HEADER].tolist()
        if self.version is None or base != self.version:
            raise RuntimeError(f"chain broken: base {base}, held {self.version}")
        names = [name for name in tensors if name != HEADER]
        assert (magic, codec, tensors[HEADER].dtype) == (0x41574558, 1, torch.int64)
        assert (2 * pairs, whole) == (
            sum("@delta_" in name for name in names),
            sum("@delta_" not in name for name in names),
        )
        for name in names:
            if name.endswith("@delta_idx"):
                target = self.held[name.removesuffix("@delta_idx")].view(-1)
                target[tensors[name].long()] = tensors[name.removesuffix("idx") + "val"]
            elif not name.endswith("@delta_val"):
                self.held[name] = tensors[name].clone()
        self.version = makes


def targets() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors_of(STATES[7]).items()}


def test_a_run_is_read() -> None:
    engine, copy = (
        DeltaEngine(Bare({version: tensors_of(step) for version, step in STEPS.items()})),
        targets(),
    )
    for version, state in STATES.items():
        engine.pull(copy, version)
        assert by_hand(copy) == state and engine.version == version


def test_a_run_is_read_against_a_base() -> None:
    base = targets()
    for version, step in STEPS.items():
        base = reconstruct_against_base(payload_of(tensors_of(step), version), base)
        assert by_hand(base) == STATES[version]


def test_a_run_is_written() -> None:
    """Every byte is that of the description, names and order too."""
    transport = Bare()
    engine = DeltaEngine(transport, header=False)
    for version, state in STATES.items():
        engine.push(tensors_of(state), version, full=version == 11)
        assert list(by_hand(transport.sent[version]).items()) == list(STEPS[version].items())


def test_what_is_written_is_understood() -> None:
    transport, ancestor = Bare(), Ancestor()
    engine = DeltaEngine(transport, anchor_interval=3, header=False)
    weights = {"w": torch.randn(40, 7), "b": torch.zeros(9, dtype=torch.bfloat16)}
    fulls = []
    for version in range(20):
        weights["w"].view(-1)[version::30] += version % 3
        weights["b"][version % 9] = -0.0
        engine.push(weights, version)
        ancestor.receive(transport.sent[version], version)
        assert by_hand(ancestor.held) == by_hand(weights) and ancestor.version == version
        fulls.append(HEADER not in transport.sent[version])
    assert [version for version, full in enumerate(fulls) if full] == [0, 4, 8, 12, 16]


def test_by_default_a_full_payload_says_what_it_is() -> None:
    transport = Bare()
    DeltaEngine(transport).push(tensors_of(STATES[7]), 7)
    assert by_hand(transport.sent[7]) == {HEADER: header(7, -1, 0, 4), **STATES[7]}
    assert HEADER not in DeltaTracker(header=False).diff(tensors_of(STATES[7]), 7).tensors
    with pytest.raises(RuntimeError, match="chain broken"):
        Ancestor().receive(transport.sent[7], 7)


@pytest.mark.parametrize("wrong", [None, 0, 1, "no"])
def test_the_option_is_a_truth_value(wrong: Any) -> None:
    for make in (DeltaTracker, lambda header: DeltaEngine(LoopbackTransport(), header=header)):
        with pytest.raises(ValueError, match="header is True or False"):
            make(header=wrong)


BROKEN: dict[str, tuple[int, type[Exception], str]] = {
    "later": (9, VersionGap, "later version"),
    "again": (8, VersionReplay, r"already.*drop it; if its sender started anew, make a new engine"),
    "full again": (7, VersionReplay, r"already.*drop it; if its sender started anew, make a new engine"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_chain_goes_by_versions_alone(case: str) -> None:
    version, kind, match = BROKEN[case]
    held = 7 if case == "later" else 8
    engine, copy = (
        DeltaEngine(Bare({version: tensors_of(step) for version, step in STEPS.items()})),
        targets(),
    )
    for before in range(7, held + 1):
        engine.pull(copy, before)
    with pytest.raises(kind, match=match):
        engine.pull(copy, version)
    assert by_hand(copy) == STATES[held] and engine.version == held
    engine.pull(copy, 11)
    assert by_hand(copy) == STATES[11]


def test_a_delta_of_a_version_that_was_passed_over_is_refused() -> None:
    engine, copy = (
        DeltaEngine(Bare({version: tensors_of(step) for version, step in STEPS.items()})),
        targets(),
    )
    engine.pull(copy, 11)
    engine._transport.sent[13] = tensors_of({HEADER: header(13, 9, 0, 0)})  # type: ignore[attr-defined]
    with pytest.raises(VersionRestart):
        engine.pull(copy, 13)
    assert by_hand(copy) == STATES[11]


def test_between_ends_of_dte_dist_lineages_count_without_a_header_too() -> None:
    """Lineages travel beside the tensors: a sender that starts anew is noticed, wherever its versions are."""
    transport = LoopbackTransport()
    weights, copy = {"w": torch.zeros(100)}, {"w": torch.ones(100)}
    sender, receiver = DeltaEngine(transport, header=False), DeltaEngine(transport)
    for version in (5, 6):
        sender.push(weights, version)
        receiver.pull(copy, version)
    anew = DeltaEngine(transport, header=False)
    for version, match in ((5, "counts anew"), (6, "counts anew"), (7, "comes from another run")):
        weights["w"][version] = version
        anew.push(weights, version)
        with pytest.raises(VersionRestart, match=match):
            receiver.pull(copy, version)
    assert not copy["w"].any()
    anew.push(weights, 8, full=True)
    receiver.pull(copy, 8)
    assert torch.equal(copy["w"], weights["w"])


BARE = tensors_of(STEPS[7])
HOSTILE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "positions": ({"w@delta_idx": torch.tensor([1], dtype=_INT32)}, FrameError, "w@delta_idx"),
    "values": ({"w@delta_val": torch.zeros(1)}, FrameError, "w@delta_val"),
    "a pair": (
        {"w": None, "w@delta_idx": torch.tensor([1], dtype=_INT32), "w@delta_val": torch.zeros(1)},
        FrameError,
        "w@delta_idx",
    ),
    "too little": ({"b": None}, LayoutMismatch, "'b'"),
    "too much": ({"x": torch.zeros(1)}, LayoutMismatch, "'x'"),
    "another shape": ({"w": torch.zeros(3, 2)}, LayoutMismatch, "'w'"),
    "another dtype": ({"b": torch.zeros(5)}, LayoutMismatch, "'b'"),
    "no tensor": ({"b": 3}, FrameError, "'b'"),
    "a header that is none": ({HEADER: None, "b": BARE["b"]}, FrameError, "full"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_full_payload_is_refused_by_name(case: str) -> None:
    edits, kind, said = HOSTILE[case]
    copy, full = targets(), case != "a header that is none"
    tensors = {name: tensor for name, tensor in (BARE | edits).items() if tensor is not None}
    engine = DeltaEngine(LoopbackTransport())
    engine._transport.send(Payload(7, -1 if full else 6, full, tensors), timeout=1.0)
    with pytest.raises(kind, match=said):
        engine.pull(copy, 7)
    assert not any(
        bool(tensor.view(torch.uint8).any()) for tensor in copy.values() if tensor.dim() and tensor.numel()
    )


def test_what_a_payload_is_follows_from_its_tensors() -> None:
    full, delta = payload_of(BARE, 7), payload_of(tensors_of(STEPS[8]))
    assert (full.version, full.base_version, full.full, full.lineage) == (7, -1, True, 0)
    assert (delta.version, delta.base_version, delta.full, delta.lineage) == (8, 7, False, 0)
    assert payload_of(tensors_of(STEPS[8]), 8, lineage=3, base_lineage=4).base_lineage == 4
    with pytest.raises(FrameError, match="version="):
        payload_of(BARE)
    with pytest.raises(FrameError, match=r"makes another version.*expected 9; got 8"):
        payload_of(tensors_of(STEPS[8]), 9)
    with pytest.raises(FrameError, match="is none"):
        payload_of({HEADER: 3}, 9)  # type: ignore[dict-item]
    for wrong, kind in ((-1, ValueError), (True, ValueError), ("7", ValueError), (1 << 62, VersionError)):
        with pytest.raises(kind):
            payload_of(BARE, wrong)  # type: ignore[arg-type]
