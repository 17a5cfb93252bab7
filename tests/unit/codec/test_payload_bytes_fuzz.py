"""Descriptions and pieces of a payload, damaged at random: a reader returns what was sent, or refuses.

Where a checksum or a guard goes with the input it is left as it was, and then nothing but what was sent may
come out; or it is mended, as a program with a fault would have written it, and then whatever comes out must
be safe to work with. Inputs are small, and so is the memory that reading may take.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor

from dte_dist import Payload, kernels
from dte_dist.codec.named_tensors import (
    Change,
    write_payload,
)
from dte_dist.codec.payload_bytes import Arrival, Packed, frame_sizes
from dte_dist.codec.payload_bytes import Description as PayloadDescription
from dte_dist.tensors.flat import BITS
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import damage_bytes, damage_json, refuses_or_is_harmless

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@cache
def packed() -> list[Packed]:
    tensors = {"w": torch.arange(6.0).view(2, 3), "é": torch.ones(3, dtype=torch.bool), "s": torch.tensor(7)}
    delta = write_payload(
        7, 4, [Change("w", torch.tensor([1, 5]), torch.ones(2)), Change("b", None, torch.ones(3))], lineage=9
    )
    return [
        Packed(Payload(3, -1, True, tensors, 5, 0, 2, b"plan")),
        Packed(delta),
        Packed(Payload(1, 0, False, {})),
    ]


def described(rng: Random) -> str:
    """The description of a payload, damaged as bytes or as JSON."""
    each = rng.choice(packed())
    text = (
        damage_json(rng, json.loads(each.text))
        if rng.random() < 0.7
        else damage_bytes(rng, each.text, [p.text for p in packed()])
    )
    found = PayloadDescription.from_bytes(text)
    assert PayloadDescription.from_bytes(found.to_bytes()) == found and found.nbytes % 8 == 0
    arrival = Arrival(len(found.to_bytes()), min(found.nbytes, 1 << 20), CPU)
    arrival._describe(found.to_bytes())
    return "read"


def pieces_of(pieces: list[tuple[int, Callable[[Tensor], object]]]) -> list[bytes]:
    made = [torch.empty(size, dtype=torch.uint8) for size, _ in pieces]
    for (_, write), piece in zip(pieces, made, strict=True):
        write(piece)
    return [piece.numpy().tobytes() for piece in made]


@cache
def all_pieces() -> list[bytes]:
    return [piece for each in packed() for piece in pieces_of(each.frames())]


def pieces_as_they_came(rng: Random) -> str:
    """Damaged pieces of a description and of data: what comes out is what went in."""
    each = rng.choice(packed())
    frames = pieces_of(each.frames())
    assert [len(frame) for frame in frames] == frame_sizes(len(each.text), each.nbytes)
    arrival = Arrival(len(each.text), each.nbytes, CPU)
    for number, frame in enumerate(frames):
        came = damage_bytes(rng, frame, all_pieces(), most=2) if rng.random() < 0.4 else frame
        arrival.take(number, tensor_of((came + bytes(len(frame)))[: len(frame)]))
    assert pieces_of(Packed(arrival.payload()).frames()) == frames
    return "read"


READERS: dict[Callable[[Random], str], int] = {
    described: 3000,
    pieces_as_they_came: 1500,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])


def test_what_is_not_damaged_is_read() -> None:
    for each in packed():
        assert PayloadDescription.from_bytes(each.text).nbytes == each.nbytes
