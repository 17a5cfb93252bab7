"""Unit tier, no ranks: the named-tensor payload, written and read; what is not sound is refused by name
before anything is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import FrameError, LayoutMismatch, Payload, reconstruct_against_base
from dte_dist.codec.named_tensors import (
    HEADER,
    MAGIC,
    Change,
    payload_of,
    read_payload,
    refuse_reserved,
    write_payload,
)
from dte_dist.errors import DeltaError
from dte_dist.sync.payload_apply import apply_payload

BASE = {"w": torch.arange(12, dtype=torch.float32).view(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}


def i32(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def sound() -> dict[str, Tensor]:
    """The tensors of a delta 4 -> 7 that changes w in part and b whole."""
    changes = [
        Change("w", i32(1, 5, 11), torch.tensor([7.0, -0.0, float("nan")])),
        Change("b", None, torch.ones(5, dtype=torch.bfloat16)),
    ]
    return dict(write_payload(7, 4, changes).tensors)


def payload(tensors: dict[Any, Any], version: int = 7, base: int = 4, full: bool = False) -> Payload:
    return Payload(version, base, full, tensors)


def test_the_format() -> None:
    tensors = sound()
    assert list(tensors) == [HEADER, "w@delta_idx", "w@delta_val", "b"]
    assert HEADER == "__awex_delta_header__" and tensors[HEADER].dtype is torch.int64
    assert tensors[HEADER].tolist() == [0x41574558, 1, 7, 4, 1, 1]
    read = payload_of(tensors)
    assert (read.version, read.base_version, read.full, read.nbytes) == (7, 4, False, 48 + 12 + 12 + 10)
    changes = {change.name: change for change in read_payload(read)}
    assert changes["w"].positions is not None and changes["w"].positions.tolist() == [1, 5, 11]
    assert changes["b"].positions is None


def test_reconstruct() -> None:
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    made = reconstruct_against_base(payload(sound()), base)
    expected = BASE["w"].clone()
    expected.view(-1)[[1, 5, 11]] = torch.tensor([7.0, -0.0, float("nan")])
    assert torch.equal(made["w"].view(torch.int32), expected.view(torch.int32))
    assert made["b"].tolist() == [1.0] * 5
    assert all(
        torch.equal(base[name], BASE[name]) and base[name].data_ptr() != made[name].data_ptr()
        for name in base
    )


HOSTILE: dict[str, tuple[dict[Any, Any], type[DeltaError], str]] = {
    "no header": ({HEADER: None}, FrameError, HEADER),
    "header of floats": ({HEADER: torch.zeros(6)}, FrameError, HEADER),
    "short header": ({HEADER: torch.zeros(5, dtype=torch.int64)}, FrameError, HEADER),
    "magic": ({HEADER: torch.tensor([MAGIC + 1, 1, 7, 4, 1, 1])}, FrameError, "magic"),
    "codec": ({HEADER: torch.tensor([MAGIC, 2, 7, 4, 1, 1])}, FrameError, "codec"),
    "other version": ({HEADER: torch.tensor([MAGIC, 1, 8, 4, 1, 1])}, FrameError, "contradicts"),
    "other base": ({HEADER: torch.tensor([MAGIC, 1, 7, -1, 1, 1])}, FrameError, "contradicts"),
    "negative version": ({HEADER: torch.tensor([MAGIC, 1, -7, 4, 1, 1])}, FrameError, "version"),
    "base of -2": ({HEADER: torch.tensor([MAGIC, 1, 7, -2, 1, 1])}, FrameError, "base version"),
    "backwards": ({HEADER: torch.tensor([MAGIC, 1, 7, 7, 1, 1])}, FrameError, "version"),
    "sparse count": ({HEADER: torch.tensor([MAGIC, 1, 7, 4, 2, 1])}, FrameError, "not complete"),
    "dense count": ({HEADER: torch.tensor([MAGIC, 1, 7, 4, 1, 0])}, FrameError, "not complete"),
    "count of -1": ({HEADER: torch.tensor([MAGIC, 1, 7, 4, -1, 1])}, FrameError, "sparse count"),
    "no values": ({"w@delta_val": None}, FrameError, "'w'"),
    "no positions": ({"w@delta_idx": None}, FrameError, "w@delta_val"),
    "both": ({"w": torch.zeros(3, 4)}, FrameError, "'w'"),
    "positions of int16": ({"w@delta_idx": torch.tensor([1, 5, 11], dtype=torch.int16)}, FrameError, "'w'"),
    "positions of int64": ({"w@delta_idx": torch.tensor([1, 5, 11])}, FrameError, "'w'"),
    "positions of two dimensions": ({"w@delta_idx": i32(1, 5, 11).view(1, 3)}, FrameError, "'w'"),
    "all of two dimensions": (
        {"w@delta_idx": i32(1, 5, 11).view(1, 3), "w@delta_val": torch.zeros(1, 3)},
        FrameError,
        "'w'",
    ),
    "lengths": ({"w@delta_idx": i32(1, 5)}, FrameError, "'w'"),
    "repeated": ({"w@delta_idx": i32(1, 5, 5)}, FrameError, "'w'"),
    "falling": ({"w@delta_idx": i32(1, 11, 5)}, FrameError, "'w'"),
    "negative": ({"w@delta_idx": i32(-1, 5, 11)}, FrameError, "'w'"),
    "out of range": ({"w@delta_idx": i32(1, 5, 12)}, FrameError, "'w'"),
    "value dtype": ({"w@delta_val": torch.zeros(3, dtype=torch.float16)}, LayoutMismatch, "'w'"),
    "dense dtype": ({"b": torch.zeros(5)}, LayoutMismatch, "'b'"),
    "dense shape": ({"b": torch.zeros(1, 5, dtype=torch.bfloat16)}, LayoutMismatch, "'b'"),
    "unknown": ({"b": None, "stranger": torch.zeros(2)}, LayoutMismatch, "stranger"),
    "no tensor": ({"b": 3}, FrameError, "'b'"),
    "name of no text": ({"b": None, 3: torch.zeros(2)}, FrameError, "'3'"),
    "meta": ({"b": torch.zeros(5, device="meta")}, LayoutMismatch, "'b'"),
    "sparse layout": ({"b": torch.zeros(5).to_sparse()}, LayoutMismatch, "'b'"),
    "expanded": ({"b": torch.zeros(1, dtype=torch.bfloat16).expand(5)}, LayoutMismatch, "'b'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_payloads(case: str) -> None:
    edits, kind, said = HOSTILE[case]
    tensors: dict[Any, Any] = {
        name: tensor for name, tensor in (sound() | edits).items() if tensor is not None
    }
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    with pytest.raises(kind, match=said):
        reconstruct_against_base(payload(tensors), base)
    assert all(torch.equal(base[name], BASE[name]) for name in base)


def test_a_full_payload_is_complete_and_whole() -> None:
    full = dict(write_payload(7, -1, [Change(name, None, tensor) for name, tensor in BASE.items()]).tensors)
    assert reconstruct_against_base(payload(full, base=-1, full=True), BASE).keys() == BASE.keys()
    lacking = write_payload(7, -1, [Change("w", None, BASE["w"])])
    with pytest.raises(LayoutMismatch, match="'b'"):
        reconstruct_against_base(lacking, BASE)
    with pytest.raises(FrameError, match="not whole"):
        read_payload(write_payload(7, -1, [Change("w", i32(1), torch.zeros(1))]))
    with pytest.raises(FrameError, match="contradicts"):
        read_payload(payload(full, base=-1, full=False))


def test_reserved_names() -> None:
    for name in (HEADER, "w@delta_idx", "w@delta_val"):
        with pytest.raises(LayoutMismatch, match="reserved"):
            refuse_reserved([name])


def test_strided_arrays_of_a_payload_and_empty_pairs() -> None:
    positions, values = i32(0, 9, 3, 9, 7, 9)[::2], torch.arange(6.0)[::2]
    made = reconstruct_against_base(write_payload(2, 1, [Change("w", positions, values)]), BASE)
    assert made["w"].view(-1)[[0, 3, 7]].tolist() == [0.0, 2.0, 4.0]
    nothing = write_payload(2, 1, [Change("w", i32(), torch.zeros(0))])
    assert torch.equal(reconstruct_against_base(nothing, BASE)["w"], BASE["w"])


def test_names_of_one_memory_must_get_one_change() -> None:
    weight = torch.zeros(4)
    targets = {"a": weight, "b": weight}
    same = [Change(name, i32(1), torch.ones(1)) for name in targets]
    apply_payload(write_payload(7, 4, same), targets)
    assert weight.tolist() == [0, 1, 0, 0]
    for other in (
        [same[0]],
        [same[0], Change("b", i32(2), torch.ones(1))],
        [same[0], Change("b", i32(1), torch.zeros(1))],
    ):
        with pytest.raises(LayoutMismatch, match="share memory"):
            apply_payload(write_payload(7, 4, other), targets)


NUMBERS = st.one_of(st.integers(-3, 15), st.integers(-(1 << 62), 1 << 62), st.sampled_from([MAGIC, 7, 4]))


@settings(max_examples=150, deadline=None)
@given(
    header=st.one_of(st.none(), st.lists(NUMBERS, min_size=0, max_size=8)),
    positions=st.lists(st.integers(-2, 13), max_size=5),
    count=st.integers(0, 5),
    index=st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.float32, torch.bool]),
    value=st.sampled_from([torch.float32, torch.int32, torch.bfloat16]),
    names=st.sets(st.sampled_from(["w@delta_idx", "w@delta_val", "b", "w", "x", "@delta_idx", ""])),
)
def test_whatever_comes_is_refused_or_applied_as_it_says(  # noqa: PLR0917
    header: list[int] | None,
    positions: list[int],
    count: int,
    index: torch.dtype,
    value: torch.dtype,
    names: set[str],
) -> None:
    arrays = {
        "w@delta_idx": torch.tensor(positions, dtype=torch.int64).to(index),
        "w@delta_val": torch.full((count,), 99).to(value),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "w": torch.zeros(3, 4),
        "x": torch.zeros(2),
        "@delta_idx": i32(0),
        "": torch.zeros(1),
    }
    pairs = "w@delta_idx" in names
    counts = [MAGIC, 1, 7, 4, int(pairs), len(names & {"b", "w", "x", ""})] if header is None else header
    tensors = {HEADER: torch.tensor(counts, dtype=torch.int64), **{name: arrays[name] for name in names}}
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    try:
        made = reconstruct_against_base(payload(tensors), base)
    except (FrameError, LayoutMismatch):
        made = None
    assert all(torch.equal(base[name], BASE[name]) for name in base)
    good = index is torch.int32 and value is torch.float32 and len(positions) == count
    good &= positions == sorted(set(positions)) and all(0 <= position < 12 for position in positions)
    if (
        header is None
        and names <= {"w@delta_idx", "w@delta_val", "b"}
        and (pairs == ("w@delta_val" in names))
    ):
        assert (made is not None) == (good or not pairs)
    if made is not None and pairs:
        assert made["w"].view(-1)[positions].tolist() == [99.0] * count
        assert int((made["w"] != BASE["w"]).sum()) == count
