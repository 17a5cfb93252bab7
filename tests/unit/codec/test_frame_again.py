"""Frames with a history at both ends, and readers that lack it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist.codec import CodecSelector, FrameWriter, PreviousDelta, read_frame, read_head
from dte_dist.codec.header import ENTRY, HEAD
from dte_dist.codec.index_codecs import EF, Again
from dte_dist.codec.previous_delta import DeltaPositions
from dte_dist.errors import FrameError
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.sizes import bitmap_nbytes, ef_size
from dte_dist.sync.frame_builder import merge_segments
from dte_dist.tensors.flat import BITS
from tests.unit.codec.histories import KERNELS, after, head_at, ones, positions_of, use


@pytest.fixture(params=["cpu", "torch"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let all tensors be seen to by the kernels of one kind of device."""
    use(request.param, monkeypatch)
    return request.param


class Ends:
    """A writer and a reader of the deltas of one chunk, and what each remembers."""

    def __init__(self, codec: str, length: int, width: int = 2) -> None:
        self.selector, self.length, self.width = CodecSelector(codec), length, width
        self.writer, self.reader, self.version = PreviousDelta(), PreviousDelta(), 1

    def send(
        self, flags: np.ndarray, parts: list[tuple[int, int]], rng: np.random.Generator, commit: bool = True
    ) -> tuple[Tensor, dict]:
        """Write changes in these parts (first, length), read them, and return the frame and its codecs."""
        head = head_at(self.version + 1, length=self.length, width=self.width)
        writer, relative, sent = (
            FrameWriter(head, "cpu", self.selector, self.writer),
            self.selector.relative(self.width),
            [],
        )
        for first, length in parts:
            positions = torch.from_numpy(np.flatnonzero(flags[first : first + length]).astype(np.int32))
            values = torch.from_numpy(
                rng.integers(1, 3, len(positions)).astype(np.int32 if relative else np.uint8)
            )
            values = values if relative else values.to(BITS[self.width])
            sent += [(first, length, positions, values.clone())] if len(positions) else []
            writer.add(first, length, positions, values, relative=relative)
        frame = writer.finish()
        self.reader.discard()
        read = read_frame(frame, head, self.reader, packed=True) if len(frame) else []
        for segment, (first, length, positions, values) in zip(read, sent, strict=True):
            assert (segment.first, segment.length) == (first, length)
            assert segment.positions is None or torch.equal(segment.unpacked(), positions)
            assert segment.values.tolist() == values.tolist()
        if commit:
            self.version += 1
            self.writer.commit(self.version, head.lineage)
            self.reader.commit(self.version, head.lineage)
        else:
            self.writer.reset()
        return frame, dict(writer.codecs)


def parts_of(rng: np.random.Generator, flags: np.ndarray) -> list[tuple[int, int]]:
    """Cut a chunk at random and join what is alike."""
    borders = [0, *sorted({int(place) for place in rng.integers(1, len(flags), 9)}), len(flags)]
    cuts = [(low, high - low) for low, high in pairwise(borders)]
    joined = merge_segments(cuts, [int(flags[low : low + length].sum()) for low, length in cuts])
    return [(first, length) for first, length, _ in joined]


@pytest.mark.parametrize("codec", ["small", "again+planes", "again+raw", "again+ulp"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_frames_with_a_history(kind: str, codec: str, width: int) -> None:
    """Segments are cut and joined in another way each time; some are empty, some all changes."""
    rng, length = np.random.default_rng(width), 20_000
    ends, flags, used = Ends(codec, length, width), rng.random(length) < 0.02, set()
    for step in range(8):
        frame, codecs = ends.send(flags, parts_of(rng, flags), rng, commit=step != 4)
        assert read_head(frame).keep and (step in (0, 5)) != any(name.startswith("again") for name in codecs)
        used |= codecs.keys()
        flags = (flags & (rng.random(length) < 0.84)) | (rng.random(length) < 0.003)
        flags[5000:6000] = step % 3 == 1
    assert {
        "again+raw" if width == 8 or codec == "again+raw" else codec.replace("small", "again+planes")
    } <= used


def test_both_kinds_of_device_write_the_same_frames() -> None:
    found = []
    for kind in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            use(kind, patch)
            rng, frames = np.random.default_rng(3), []
            ends, flags = Ends("again+planes", 5000), rng.random(5000) < 0.1
            for _ in range(4):
                frames.append(ends.send(flags, parts_of(rng, flags), rng)[0].tolist())
                flags = (flags & (rng.random(5000) < 0.84)) | (rng.random(5000) < 0.01)
            found.append(frames)
    assert found[0] == found[1]


def test_fast_asks_nobody_to_keep_anything() -> None:
    rng = np.random.default_rng(4)
    ends, flags = Ends("fast", 5000), rng.random(5000) < 0.1
    for _ in range(2):
        assert not read_head(ends.send(flags, [(0, 5000)], rng)[0]).keep
        assert ends.writer.nbytes == ends.reader.nbytes == 0


def test_four_bytes_a_change_at_both_ends() -> None:
    rng = np.random.default_rng(5)
    ends, flags = Ends("small", 1 << 16), rng.random(1 << 16) < 0.05
    for _ in range(3):
        ends.send(flags, [(0, 1 << 15), (1 << 15, 1 << 15)], rng)
        assert ends.writer.nbytes == ends.reader.nbytes == 4 * int(flags.sum())


def test_a_reader_without_the_history_refuses(kind: str) -> None:
    rng = np.random.default_rng(6)
    flags = rng.random(5000) < 0.1
    for lost in ("never", "other version", "other places"):
        ends = Ends("again+planes", 5000)
        ends.send(flags, [(0, 5000)], rng)
        if lost == "never":
            ends.reader = PreviousDelta()
        elif lost == "other version":
            ends.reader.commit(ends.version + 1, 9)
        else:
            flags_ = flags.copy()
            flags_[:300] = False
            places = DeltaPositions()
            places.add(0, 5000, torch.from_numpy(np.flatnonzero(flags_).astype(np.int32)))
            ends.reader.record(head_at(2, length=5000), places)
            ends.reader.commit(2, 9)
        with pytest.raises(FrameError, match="sync again"):
            ends.send(flags, [(0, 5000)], rng)
        with pytest.raises(FrameError, match="sync again"):
            head = head_at(3, length=5000)
            writer = FrameWriter(head, "cpu", ends.selector, ends.writer)
            writer.add(
                0,
                5000,
                torch.from_numpy(np.flatnonzero(flags).astype(np.int32)),
                ones(int(flags.sum())).values,
                relative=True,
            )
            read_frame(writer.finish(), head)


def test_no_number_of_a_table_is_believed(kind: str) -> None:
    """Refused, or in bounds; and what is refused leaves nothing noted."""
    rng = np.random.default_rng(7)
    ends, flags = Ends("again+planes", 4000), rng.random(4000) < 0.1
    ends.send(flags, [(0, 2000), (2000, 2000)], rng)
    head = head_at(3, length=4000)
    writer = FrameWriter(head, "cpu", ends.selector, ends.writer)
    flags[100:130] ^= True
    for first in (0, 2000):
        positions = torch.from_numpy(np.flatnonzero(flags[first : first + 2000]).astype(np.int32))
        writer.add(first, 2000, positions, torch.ones(len(positions), dtype=torch.int32), relative=True)
    assert writer.codecs == {"again+planes": 2}
    frame = writer.finish().numpy().copy()
    table = frame[HEAD.itemsize : HEAD.itemsize + 2 * ENTRY.itemsize].view(ENTRY)
    for field, entry in product(ENTRY.names, range(2)):
        before = int(table[field][entry])
        for value in {
            0,
            1,
            2,
            3,
            5,
            255,
            before - 1,
            before + 1,
            before + 8,
            int(np.iinfo(table[field].dtype).max),
        } - {before}:
            if not 0 <= value <= np.iinfo(table[field].dtype).max:
                continue
            table[field][entry] = value
            ends.reader.discard()
            try:
                read = read_frame(sealed(frame), head, ends.reader)
            except FrameError:
                assert not ends.reader._noted
                continue
            border = 0
            for segment in read:
                assert border <= segment.first <= segment.first + segment.length <= 4000
                assert segment.positions is None or bool(
                    torch_kernels.strictly_increasing(segment.positions, segment.length)
                )
                border = segment.first + segment.length
        table[field][entry] = before
    assert len(read_frame(sealed(frame), head, ends.reader)) == 2


def sealed(frame: np.ndarray) -> Tensor:
    """Return a copy of a frame with a checksum that fits."""
    out = torch.from_numpy(frame.copy())
    out.view(torch.int64)[1] = int(cpu.checksum(out, 1))
    return out


def test_a_seed_keeps_nothing_and_flags_of_both_are_refused() -> None:
    head = replace(head_at(2, base=-1, length=10), seed=True)
    writer = FrameWriter(head, "cpu", CodecSelector("small"), PreviousDelta())
    writer.add_dense(0, torch.arange(10, dtype=torch.int16))
    frame = writer.finish()
    assert read_head(frame).seed and not read_head(frame).keep
    for flags in (3, 4, 0xFFFF):
        wrong = frame.numpy().copy()
        wrong[: HEAD.itemsize].view(HEAD)["flags"] = flags
        with pytest.raises(FrameError, match="flags"):
            read_frame(sealed(wrong), head)


def test_sizes_are_those_of_the_specification() -> None:
    rng = np.random.default_rng(8)
    previous = positions_of(rng, 1 << 20, 0.0033)
    positions = after(rng, previous, 1 << 20, 0.84)
    codec = Again(previous, positions)
    stream, low = codec.encode(positions, 1 << 20)
    fresh = len(np.setdiff1d(positions.numpy(), previous.numpy()))
    assert len(stream) == bitmap_nbytes(len(previous)) + ef_size(fresh, 1 << 20, low)
    assert len(stream) < 0.45 * len(positions) and len(stream) < 0.4 * EF.size(len(positions), 1 << 20)
