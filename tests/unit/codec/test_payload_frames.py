"""Unit tier, no ranks: a payload as frames of bytes, over a file and damaged on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dte_dist
from dte_dist import DeltaEngine, FrameError, Payload, Transport, payload_from_frames, payload_to_frames
from tests.distributed.cases import same_bits


def some() -> Payload:
    tensors = {"w": torch.randn(50, 3).bfloat16(), "i": torch.arange(7), "e": torch.zeros(0, 2)}
    return Payload(7, 6, False, tensors, 3, 2, 5, b"plan")


def test_a_payload_comes_back() -> None:
    sent = some()
    came = payload_from_frames(payload_to_frames(sent))
    assert list(came.tensors) == list(sent.tensors)
    assert all(same_bits(came.tensors[name], tensor) for name, tensor in sent.tensors.items())
    names = ("version", "base_version", "full", "lineage", "base_lineage", "sender", "plan")
    assert all(getattr(came, name) == getattr(sent, name) for name in names)


class Files(Transport):
    """Versions as files of bytes: a length before each frame."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def send(self, payload: Payload, *, timeout: float) -> None:
        with open(self.folder / str(payload.version), "wb") as file:
            for frame in payload_to_frames(payload):
                file.write(len(frame).to_bytes(8, "little") + frame.numpy().tobytes())

    def receive(self, version: int, *, sender: int = 0, timeout: float) -> Payload:
        data, frames = (self.folder / str(version)).read_bytes(), []
        while data:
            end = 8 + int.from_bytes(data[:8], "little")
            frames.append(torch.frombuffer(bytearray(data[8:end]), dtype=torch.uint8))
            data = data[end:]
        return payload_from_frames(frames)

    def close(self) -> None:
        """Nothing to close."""


def test_an_engine_over_files_of_bytes(tmp_path: Path) -> None:
    weights, copy = {"w": torch.randn(900).bfloat16()}, {"w": torch.zeros(900, dtype=torch.bfloat16)}
    engine = DeltaEngine(Files(tmp_path))
    for version in range(4):
        weights["w"].view(torch.int16)[version * 10 : version * 10 + 5] ^= 1
        engine.push(weights, version)
        engine.pull(copy, version)
        assert same_bits(weights["w"], copy["w"])
    assert engine.tracker.deltas == 3


SPOILT: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "nothing": lambda frames: [],
    "no head": lambda frames: frames[1:],
    "a frame is missing": lambda frames: frames[:-1],
    "one too many": lambda frames: [*frames, frames[-1]],
    "a short head": lambda frames: [frames[0][:8], *frames[1:]],
    "other sizes": lambda frames: [torch.tensor([40, 8]).view(torch.uint8), *frames[1:]],
    "sizes that cannot be": lambda frames: [torch.tensor([1 << 60, -8]).view(torch.uint8), *frames[1:]],
    "swapped": lambda frames: [frames[0], *frames[:0:-1]],
    "floats": lambda frames: [frames[0], *(frame.float() for frame in frames[1:])],
    "a bit": lambda frames: [*frames[:-1], frames[-1] ^ torch.eye(1, len(frames[-1]), dtype=torch.uint8)[0]],
}


@pytest.mark.parametrize("how", SPOILT)
def test_frames_that_are_spoilt_are_refused(how: str) -> None:
    with pytest.raises(FrameError):
        payload_from_frames(SPOILT[how](payload_to_frames(some())))
    assert dte_dist.payload_to_frames is payload_to_frames
