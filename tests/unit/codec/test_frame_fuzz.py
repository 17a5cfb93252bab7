"""Frames, damaged at random: a reader returns what was sent, or refuses.

Where a checksum or a guard goes with the input it is left as it was, and then nothing but what was sent may
come out; or it is mended, as a program with a fault would have written it, and then whatever comes out must
be safe to work with. Inputs are small, and so is the memory that reading may take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import (
    CodecSelector,
    FrameHead,
    FrameWriter,
    PreviousDelta,
    Segment,
    read_frame,
    read_head,
)
from dte_dist.codec.header import CHECKSUM_WORD
from dte_dist.codec.value_codecs import VALUE_CODECS
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.tensors.flat import BITS
from tests.unit.codec.pairs import EACH
from tests.unit.fuzzing import damage_bytes, limited_memory, refuses_or_is_harmless

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


HEAD_OF = FrameHead(
    schema=5, lineage=6, base=7, version=8, source=3, number=1, count=4, width=2, first=1000, length=200_000
)

CODECS = ["fast", "small", *EACH]


class Case:
    """A frame, what its reader expects and knows, and what comes out of it."""

    def __init__(self, codec: str, width: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        selector = CodecSelector(codec, sparse_bytes_ratio=1.0)
        self.expect = replace(HEAD_OF, width=width, source=seed)
        self.writer_history, self.history = PreviousDelta(), PreviousDelta()
        before = self._written(rng, selector, replace(self.expect, base=6, version=7), width)
        if len(before):
            read_frame(before, replace(self.expect, base=6, version=7), self.history)
        for history in (self.writer_history, self.history):
            history.commit(7, 6)
        self.frame = self._written(rng, selector, self.expect, width)
        self.segments = said(read_frame(self.frame, self.expect, self.history))
        self.data = self.frame.numpy().tobytes()

    def _written(
        self, rng: np.random.Generator, selector: CodecSelector, head: FrameHead, width: int
    ) -> Tensor:
        writer = FrameWriter(head, CPU, selector, self.writer_history)
        for first, length, density in (
            (1000, 300, 0.2),
            (1300, 70_000, 0.001),
            (80_000, 500, 1.0),
            (90_000, 64, 0.5),
        ):
            known = bits(rng, length, width)
            where = rng.random(length) < density if density < 1 else np.ones(length, np.bool_)
            new = known.clone()
            new[torch.from_numpy(where)] += torch.from_numpy(rng.integers(1, 4, int(where.sum()))).to(
                new.dtype
            )
            positions = torch.from_numpy(np.flatnonzero(where).astype(np.int32))
            relative = selector.relative(width)
            values = (
                torch_kernels.ulp_deltas(known[positions.long()], new[positions.long()])
                if relative
                else new[positions.long()]
            )
            writer.add(
                first,
                length,
                None if density == 1 else positions,
                values,
                relative=relative,
                whole=lambda new=new: new,
            )
        return writer.finish()


def bits(rng: np.random.Generator, count: int, width: int) -> Tensor:
    return (
        torch.from_numpy(rng.integers(0, 256, (count + 1) * width, np.uint8))
        .view(BITS[width])[:count]
        .clone()
    )


def said(segments: list[Segment]) -> list[Any]:
    """What segments mean, as values."""
    return [
        (
            each.first,
            each.length,
            each.relative,
            None if each.positions is None else each.unpacked().tolist(),
            each.values.tolist(),
        )
        for each in segments
    ]


DISTANCES = {codec.name for codec in VALUE_CODECS.values() if codec.relative}


@cache
def cases() -> list[Case]:
    found = []
    for seed, codec in enumerate(CODECS):
        for width in (1, 2, 4, 8):
            if width < 8 or codec.split("+")[-1] not in DISTANCES:
                found.append(Case(codec, width, seed))
    return found


def check_segments(segments: list[Segment], expect: FrameHead) -> None:
    """Whatever is given out can be applied without a further look."""
    assert segments
    border = expect.first
    for segment in segments:
        assert border <= segment.first < segment.first + segment.length <= expect.first + expect.length
        border = segment.first + segment.length
        assert segment.values.dtype == BITS[expect.width] and segment.values.dim() == 1
        if segment.positions is None:
            assert len(segment.values) == segment.length
        else:
            positions = segment.unpacked()
            assert len(segment.values) == len(positions) > 0
            assert positions.diff().gt(0).all() and 0 <= positions[0] <= positions[-1] < segment.length


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def sealed(data: bytes) -> Tensor:
    """Return a frame whose size and checksum are right, if it has a head."""
    frame = tensor_of(data).clone()
    if len(frame) >= 96:
        frame[16:24] = torch.from_numpy(np.array([len(frame)], "<u8").view(np.uint8))
        if len(frame) % 8 == 0:
            frame.view(torch.int64)[CHECKSUM_WORD] = cpu.checksum(frame, CHECKSUM_WORD)
    return frame


def a_frame(rng: Random) -> tuple[Case, bytes]:
    """Return a damaged frame, more often than not behind its head, which is looked at first."""
    case, others = rng.choice(cases()), [rng.choice(cases()).data for _ in range(2)]
    head = rng.choice([0, 96, 96])
    return case, case.data[:head] + damage_bytes(rng, case.data[head:], [other[head:] for other in others])


def frame_as_it_came(rng: Random) -> str:
    case, data = a_frame(rng)
    frame = tensor_of(data)
    read_head(frame) if len(frame) and rng.random() < 0.3 else None
    segments = read_frame(frame, case.expect, rng.choice([None, case.history]), packed=rng.random() < 0.5)
    assert data == case.data or said(segments) == case.segments, (
        "the checksum is right, but not what was sent"
    )
    return "read"


def frame_with_its_checksum_mended(rng: Random) -> str:
    case, data = a_frame(rng)
    segments = read_frame(
        sealed(data), case.expect, rng.choice([None, case.history]), packed=rng.random() < 0.5
    )
    check_segments(segments, case.expect)
    return "read"


def frame_on_a_device(rng: Random) -> str:
    """The same with the kernels of accelerators, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: torch_kernels)
        case, data = a_frame(rng)
        segments = read_frame(sealed(data), case.expect, rng.choice([None, case.history]))
        check_segments(segments, case.expect)
    return "read"


READERS: dict[Callable[[Random], str], int] = {
    frame_as_it_came: 3000,
    frame_with_its_checksum_mended: 4000,
    frame_on_a_device: 800,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])


def test_what_is_not_damaged_is_read() -> None:
    for case in cases():
        assert said(read_frame(tensor_of(case.data), case.expect, case.history)) == case.segments
        assert torch.equal(sealed(case.data), tensor_of(case.data))


def test_there_is_no_memory_for_a_huge_allocation() -> None:
    with limited_memory(), pytest.raises(RuntimeError, match="memory"):
        torch.empty(1 << 30, dtype=torch.uint8)
    torch.empty(1 << 30, dtype=torch.uint8)
