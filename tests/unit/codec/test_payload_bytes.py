"""Unit tier, no ranks: payloads as bytes; whatever is damaged is a FrameError."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist import FrameError, LayoutMismatch, Payload
from dte_dist.codec import payload_bytes as packing
from dte_dist.codec.payload_bytes import Arrival, Description, Packed, frame_sizes, piece_sizes
from dte_dist.layout import DTYPES

CPU = torch.device("cpu")


def arrive(packed: Packed) -> Payload:
    arrival = Arrival(len(packed.text), packed.nbytes, CPU)
    for number, (size, write) in enumerate(packed.frames()):
        piece = torch.full((size,), 255, dtype=torch.uint8)
        write(piece)
        arrival.take(number, piece)
    return arrival.payload()


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 5)], ids=str)
def test_any_tensor_arrives_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    kind, numel = DTYPES[dtype], torch.Size(shape).numel()
    rng = torch.Generator().manual_seed(3)
    data = torch.randint(
        0, 2 if kind is torch.bool else 256, (numel * kind.itemsize,), dtype=torch.uint8, generator=rng
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that complex32 is experimental
        tensors = {
            "byte": torch.ones(3, dtype=torch.uint8),
            "w": data.view(kind).view(shape),
            "t": torch.arange(6.0).view(2, 3).t(),
        }
        came = arrive(Packed(Payload(7, 6, False, tensors, 3, 2, 5, b"plan")))
        assert (came.version, came.base_version, came.full, came.lineage, came.base_lineage) == (
            7,
            6,
            False,
            3,
            2,
        )
        assert (came.sender, came.plan) == (5, b"plan")
        assert list(came.tensors) == list(tensors)
        for name, tensor in tensors.items():
            assert (came.tensors[name].dtype, came.tensors[name].shape) == (tensor.dtype, tensor.shape)
            assert raw(came.tensors[name]) == raw(tensor)


@pytest.mark.parametrize("piece", [8, 24, 40, 64])
def test_pieces_cross_tensors_and_the_last_is_padded(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(packing, "PIECE", piece)
    tensors = {
        f"t{n}": torch.arange(n, dtype=kind)
        for n, kind in enumerate((torch.int8, torch.int64, torch.int16, torch.float32) * 3)
    }
    packed = Packed(Payload(1, -1, True, tensors))
    assert packed.nbytes % 8 == 0
    assert sum(piece_sizes(packed.nbytes)) == packed.nbytes + 8 * -(-packed.nbytes // piece)
    came = arrive(packed)
    assert all(torch.equal(came.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_payload_without_tensors() -> None:
    packed = Packed(Payload(1, 0, False, {}))
    assert (packed.nbytes, len(packed.frames())) == (0, 1)
    assert arrive(packed).tensors == {}


def test_what_cannot_be_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for tensor in (
        torch.zeros(2, dtype=torch.complex128),
        torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
    ):
        with pytest.raises(LayoutMismatch, match="'w'"):
            Packed(Payload(1, 0, False, {"w": tensor}))
    for wrong in ("payload", Payload(1, 0, False, {"w": 3})):  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="named tensors"):
            Packed(wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(packing, "MOST_DATA", 16)
    with pytest.raises(LayoutMismatch, match="too large"):
        Packed(Payload(1, 0, False, {"w": torch.zeros(5)}))


def test_damaged_frames_and_missing_ones() -> None:
    packed = Packed(Payload(1, 0, False, {"w": torch.arange(9.0), "b": torch.ones(3, dtype=torch.uint8)}))
    frames = written(packed.frames())
    assert [len(frame) for frame in frames] == frame_sizes(len(packed.text), packed.nbytes)
    for place, frame in enumerate(frames):
        for at in range(len(frame)):
            arrival, wrong = Arrival(len(packed.text), packed.nbytes, CPU), frame.clone()
            wrong[at] ^= 1 << (at % 8)
            for number, other in enumerate(frames[:place]):
                arrival.take(number, other)
            with pytest.raises(FrameError, match="checksum"):
                arrival.take(place, wrong)
            with pytest.raises(FrameError, match="not complete"):
                arrival.payload()
    with pytest.raises(FrameError, match="not what it describes"):
        Arrival(len(packed.text), packed.nbytes + 8, CPU).take(0, frames[0])


def written(pieces: list[packing.Piece]) -> list[torch.Tensor]:
    made = [torch.full((size,), 255, dtype=torch.uint8) for size, _ in pieces]
    for (_, write), piece in zip(pieces, made, strict=True):
        write(piece)
    return made


ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        [
            "format",
            "version",
            "base_version",
            "full",
            "lineage",
            "base_lineage",
            "sender",
            "plan",
            "names",
            "dtypes",
            "shapes",
        ]
    ),
    ANY,
)
def test_whatever_stands_in_a_description_it_is_read_or_refused(key: str, value: object) -> None:
    said = json.loads(Packed(Payload(3, 2, False, {"w": torch.zeros(2, 3)})).text)
    text = json.dumps(said | {key: value}).encode()
    try:
        found = Description.from_bytes(text)
    except FrameError:
        return
    assert json.loads(found.to_bytes()) | {"plan": ""} == json.loads(text) | {"plan": ""}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 200))
def test_bytes_cut_out_and_put_in_are_read_or_refused(put: bytes, at: int, cut: int) -> None:
    text = Packed(Payload(3, 2, False, {"w": torch.zeros(2, 3)})).text
    damaged = text[:at] + put + text[at + cut :]
    try:
        found = Description.from_bytes(damaged)
    except FrameError:
        return
    assert json.loads(found.to_bytes()) | {"plan": ""} == json.loads(damaged) | {"plan": ""}


def test_a_description_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE", 64)
    packed = Packed(Payload(3, -1, True, {f"name{n:09}": torch.zeros(n) for n in range(5)}))
    frames = written(packed.frames())
    assert len(packed.text) % 8 == 0 and len(frames) > 4
    assert [len(frame) for frame in frames] == frame_sizes(len(packed.text), packed.nbytes)
    arrival = Arrival(len(packed.text), packed.nbytes, CPU)
    for number, frame in enumerate(frames):
        with pytest.raises(FrameError, match="not complete"):
            arrival.payload()
        arrival.take(number, frame)
    assert list(arrival.payload().tensors) == [f"name{n:09}" for n in range(5)]


def test_no_frame_is_taken_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for that of another place, nor of another payload of its size, nor a description for data."""
    monkeypatch.setattr(packing, "PIECE", 24)
    tensors = {"w": torch.zeros(18)}
    packed, other = (Packed(Payload(version, 0, False, tensors)) for version in (1, 2))
    frames, others = (written(each.frames()) for each in (packed, other))
    text = len(piece_sizes(len(packed.text)))
    arrival = Arrival(len(packed.text), packed.nbytes, CPU)
    zeros = torch.zeros(32, dtype=torch.uint8)
    for number, wrong in [(0, frames[1]), (0, frames[text]), (1, zeros)]:
        with pytest.raises(FrameError, match="checksum"):
            arrival.take(number, wrong)
    for number in range(text):
        arrival.take(number, frames[number])
    wrong = [(0, frames[text + 1]), (2, frames[text]), (1, others[text + 1]), (0, zeros), (0, frames[0])]
    for number, frame in wrong:
        with pytest.raises(FrameError, match="checksum"):
            arrival.take(text + number, frame)
    for number, frame in enumerate(frames[text:], text):
        arrival.take(number, frame)
    assert torch.equal(arrival.payload().tensors["w"], tensors["w"])
