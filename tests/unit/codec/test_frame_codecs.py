"""Frames of every pair of codecs: what they say comes back bit for bit for those who hold the base, and
hostile ones do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import CodecSelector, FrameHead, FrameWriter, Segment, dense_size, read_frame
from dte_dist.codec.header import ENTRY, HEAD
from dte_dist.errors import FrameError, VersionError
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.tensors.flat import BITS
from tests.unit.codec.pairs import PAIRS
from tests.unit.codec.test_frame import HOSTILE, seal

CHOICES = [*PAIRS, "fast", "small", "auto"]
HEAD_OF = FrameHead(
    schema=5, lineage=6, base=7, version=8, source=3, number=1, count=4, width=2, first=0, length=1 << 20
)
ALL = {
    1: np.arange(256, dtype=np.uint8).view(np.uint8),
    2: np.arange(1 << 16, dtype=np.uint16).view(np.int16),
}


@pytest.fixture(params=[cpu, torch_kernels], ids=["cpu", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with the kernels of both kinds of device, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield


def chooser_of(codec: str) -> CodecSelector:
    return CodecSelector(codec, bytes_per_second=1e7 if codec == "auto" else None)


def write(writer: FrameWriter, selector: CodecSelector, first: int, known: Tensor, new: Tensor) -> None:
    """Add what differs between two states of a segment, as a source does, whose memory is used again at
    once.
    """
    where = (known != new).nonzero().view(-1)
    positions, values = None if len(where) == len(known) else where.to(torch.int32), new[where]
    relative = selector.relative(known.element_size())
    if relative:
        values = torch_kernels.ulp_deltas(known[where], values)
    writer.add(first, len(known), positions, values, relative=relative, whole=lambda: new)
    values.fill_(-1 if values.dtype.is_signed else 255)
    if positions is not None:
        positions.fill_(-1)


def applied(segment: Segment, known: Tensor) -> Tensor:
    """Return the new state of a segment's elements."""
    bits = known.clone()
    positions = (
        torch.arange(len(known), dtype=torch.int32) if segment.positions is None else segment.positions
    )
    assert len(positions) == len(segment.values)
    bits[positions.long()] = (
        torch_kernels.add(known[positions.long()], segment.values) if segment.relative else segment.values
    )
    return bits


def random_bits(rng: np.random.Generator, count: int, width: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, 256, (count + 1) * width, np.uint8)).view(BITS[width])[:count]


def moved(rng: np.random.Generator, known: Tensor, where: np.ndarray, kind: str) -> Tensor:
    """Return a state that differs from the known one at some places: by steps of training, by any bits, by
    NaNs, by the extremes.
    """
    width, count = known.element_size(), int(where.sum())
    top = 1 << (8 * width - 1)
    distances = {
        "steps": rng.geometric(0.7, count) * rng.choice([-1, 1], count),
        "any": rng.integers(-top, top - 1, count),
        "far": rng.choice(np.array([-top, top - 1, 127, 128, -128, 256, 257, 300, 1], np.int64), count),
        "scale": rng.integers(1, min(top, 3000), count),
    }
    wrapped = distances[kind] if width == 8 else (distances[kind] + top) % (2 * top) - top
    signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[width]
    new = known.clone()
    at = torch.from_numpy(np.flatnonzero(where))
    new[at] = torch_kernels.add(known[at], torch.from_numpy(wrapped.astype(signed)).view(BITS[width]))
    return new


WHERE = {
    "one": lambda rng, n: np.arange(n) == n // 2,
    "first": lambda rng, n: np.arange(n) == 0,
    "last": lambda rng, n: np.arange(n) == n - 1,
    "all": lambda rng, n: np.ones(n, bool),
    "all but one": lambda rng, n: np.arange(n) != n // 3,
    "run": lambda rng, n: (np.arange(n) > n // 4) & (np.arange(n) < n // 2),
    "rare": lambda rng, n: rng.random(n) < 0.003,
    "some": lambda rng, n: rng.random(n) < 0.1,
    "many": lambda rng, n: rng.random(n) < 0.6,
    "alternating": lambda rng, n: rng.random(n) < np.where(np.arange(n) // 999 % 2, 0.9, 0.001),
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CHOICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_kind_of_change(kernel: None, codec: str, width: int) -> None:
    """Several segments a frame; it is never larger than the chunk sent whole."""
    rng, selector = np.random.default_rng(width), chooser_of(codec)
    lengths = [1, 2, 63, 2048, 7001]
    for kind in ("steps", "any", "far", "scale"):
        head = replace(HEAD_OF, width=width)
        writer, at, states = FrameWriter(head, "cpu", selector), 0, []
        for (name, where), length in zip(WHERE.items(), lengths * 2, strict=True):
            known = random_bits(rng, length, width)
            new = moved(rng, known, where(rng, length), kind)
            write(writer, selector, at, known, new)
            states += [(name, at, known, new)] if (known != new).any() else []
            at += length
        frame = writer.finish()
        assert len(frame) <= dense_size([len(known) for *_, known, _ in states], width) + 16 * len(states)
        assert sum(writer.codecs.values()) == len(states)
        for segment, (name, first, known, new) in zip(read_frame(frame, head), states, strict=True):
            assert (segment.first, segment.length) == (first, len(known))
            assert torch.equal(applied(segment, known), new), (kind, name)


@pytest.mark.slow
@pytest.mark.parametrize("codec", PAIRS)
@pytest.mark.parametrize("width", [1, 2])
def test_all_bits(kernel: None, codec: str, width: int) -> None:
    """From any bit pattern to the next one of a permutation: NaNs of all payloads, zeros of both signs,
    infinities.
    """
    known = torch.from_numpy(ALL[width].copy())
    for step in (1, 77, len(known) // 2):
        new, head, selector = known.roll(step), replace(HEAD_OF, width=width), chooser_of(codec)
        writer = FrameWriter(head, "cpu", selector)
        write(writer, selector, 0, known, new)
        (segment,) = read_frame(writer.finish(), head)
        assert torch.equal(applied(segment, known), new)


@pytest.mark.parametrize("codec", [pair for pair in PAIRS if not pair.startswith("dense")])
def test_a_pair_is_used_where_it_was_asked_for(codec: str) -> None:
    rng, selector = np.random.default_rng(0), chooser_of(codec)
    known = random_bits(rng, 100_000, 2)
    writer = FrameWriter(HEAD_OF, "cpu", selector)
    write(writer, selector, 0, known, moved(rng, known, rng.random(100_000) < 0.02, "steps"))
    assert writer.codecs == {codec.replace("again", "ef"): 1}  # there was no delta before
    assert all(
        segment.relative == (not codec.endswith("raw")) for segment in read_frame(writer.finish(), HEAD_OF)
    )


def test_both_kinds_of_device_write_the_same_frame() -> None:
    rng = np.random.default_rng(1)
    for width, codec in product((1, 2, 4), CHOICES):
        selector, head, frames = chooser_of(codec), replace(HEAD_OF, width=width), []
        known = random_bits(rng, 30_000, width)
        new = moved(rng, known, rng.random(30_000) < 0.05, "steps")
        for on in (cpu, torch_kernels):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "on", lambda device, on=on: on)
                writer = FrameWriter(head, "cpu", selector)
                write(writer, selector, 0, known, new)
                frames.append(writer.finish())
        assert torch.equal(*frames)


def test_distances_are_not_for_seeds_nor_for_eight_bytes() -> None:
    one, away = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int16)
    for head in (replace(HEAD_OF, seed=True), replace(HEAD_OF, width=8)):
        with pytest.raises(ValueError, match="distances"):
            FrameWriter(head, "cpu").add(0, 10, one, away.int(), relative=True)
    for head in (replace(HEAD_OF, seed=True), replace(HEAD_OF, width=8)):
        writer = FrameWriter(head, "cpu")
        writer.add(0, 10, one, away.to(BITS[head.width]))
        frame = writer.finish().numpy()
        frame[HEAD.itemsize : HEAD.itemsize + ENTRY.itemsize].view(ENTRY)["value"] = 1
        with pytest.raises(FrameError, match="not sound"):
            read_frame(seal(frame), head)


@cache
def frame_of_all() -> Tensor:
    """Return a frame with a segment of each pair."""
    rng = np.random.default_rng(5)
    head, at, frames = HEAD_OF, 0, []
    writer = FrameWriter(head, "cpu")
    for pair in PAIRS:
        selector = chooser_of(pair)
        writer._selector = selector
        known = random_bits(rng, 300, 2)
        write(
            writer,
            selector,
            at,
            known,
            moved(rng, known, rng.random(300) < 0.1, "far" if len(frames) % 2 else "steps"),
        )
        at += 300
    return writer.finish()


def check_invariants(segments: list[Segment]) -> None:
    """Whatever is given out can be applied without a further look."""
    border = HEAD_OF.first
    for segment in segments:
        assert border <= segment.first <= segment.first + segment.length <= HEAD_OF.first + HEAD_OF.length
        border = segment.first + segment.length
        assert segment.values.dtype == torch.int16
        if segment.positions is None:
            assert len(segment.values) == segment.length
        else:
            assert (
                len(segment.values) == len(segment.positions) > 0 and segment.positions.dtype == torch.int32
            )
            assert segment.positions.diff().gt(0).all()
            assert 0 <= segment.positions[0] <= segment.positions[-1] < segment.length


def read_or_refuse(frame: Tensor) -> None:
    """Read a frame, with its streams of u16 as they are too: the verdict is the same, and so is what is
    read.
    """
    try:
        segments = read_frame(frame, HEAD_OF)
    except (FrameError, VersionError) as error:
        with pytest.raises(type(error)):
            read_frame(frame, HEAD_OF, packed=True)
        return
    check_invariants(segments)
    same_packed(segments, read_frame(frame, HEAD_OF, packed=True))


def same_packed(segments: list[Segment], packed: list[Segment]) -> None:
    """What was read with positions unpacked is what was read without."""
    for one, other in zip(segments, packed, strict=True):
        assert (one.first, one.length, one.relative) == (other.first, other.length, other.relative)
        assert (
            torch.equal(one.values, other.values)
            and not one.packed
            and (one.positions is None) == (other.positions is None)
        )
        if one.positions is not None:
            assert torch.equal(one.positions, other.unpacked())


def test_positions_of_u16_may_be_left_as_they_are(kernel: None) -> None:
    """Those of all other codecs are read, and whatever is left is a view of the frame."""
    frame = frame_of_all()
    segments = read_frame(frame, HEAD_OF, packed=True)
    same_packed(read_frame(frame, HEAD_OF), segments)
    left = [segment.positions for segment in segments if segment.packed and segment.positions is not None]
    assert len(left) == sum(pair.startswith("u16") for pair in PAIRS)
    memory = frame.untyped_storage().data_ptr()
    assert all(
        stream.dtype == torch.uint8 and stream.untyped_storage().data_ptr() == memory for stream in left
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_sealed_damage_is_refused_or_harmless(damage: list[tuple[int, int]]) -> None:
    frame = frame_of_all().numpy().copy()
    for place, value in damage:
        frame[place % len(frame)] = value
    for on in (cpu, torch_kernels):
        with pytest.MonkeyPatch.context() as patch:
            sealed = seal(frame)
            patch.setattr(kernels, "on", lambda device, on=on: on)
            read_or_refuse(sealed)


@pytest.mark.slow
@pytest.mark.parametrize("field", list(ENTRY.names))
def test_hostile_tables(kernel: None, field: str) -> None:
    """Any number in any entry of the table, with a checksum that fits: refused, or everything is in
    bounds.
    """
    frame = frame_of_all().numpy().copy()
    segments = int(frame[: HEAD.itemsize].view(HEAD)["segments"][0])
    table = frame[HEAD.itemsize : HEAD.itemsize + segments * ENTRY.itemsize].view(ENTRY)
    for entry, value in product(range(segments), HOSTILE):
        if value <= np.iinfo(table[field].dtype).max:
            before = table[field][entry]
            table[field][entry] = value
            read_or_refuse(seal(frame))
            table[field][entry] = before
    assert len(read_frame(seal(frame), HEAD_OF)) == segments
