"""The index codec `again` and the history that it counts on: kernels, streams, places, choice, frames."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import FAST, CodecSelector, FrameHead, FrameWriter, PreviousDelta, read_frame, read_head
from dte_dist.codec.header import ENTRY, HEAD
from dte_dist.codec.index_codecs import AGAIN, EF, INDEX_CODECS, Again
from dte_dist.codec.previous_delta import DeltaPositions
from dte_dist.codec.value_codecs import VALUE_CODECS, Values
from dte_dist.errors import FrameError
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.sizes import bitmap_nbytes, ef_size
from dte_dist.sync.frame_builder import merge_segments
from dte_dist.tensors.flat import BITS
from tests.unit import codec_reference as reference
from tests.unit.kernels.test_cpu_codecs import lengths, segments

both = pytest.mark.parametrize("kernel", [cpu, torch_kernels], ids=["cpu", "torch"])
KERNELS = {"cpu": cpu, "torch": torch_kernels}


@pytest.fixture(params=["cpu", "torch"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let all tensors be seen to by the kernels of one kind of device."""
    use(request.param, monkeypatch)
    return request.param


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on", lambda device: KERNELS[kind])


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions of two deltas in one segment, and its length: nothing, some or all of the first comes again
    in the second.
    """
    previous, length = draw(segments())
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    again = previous[rng.random(len(previous)) < draw(st.sampled_from([0.0, 0.3, 0.84, 0.99, 1.0]))]
    fresh = np.flatnonzero(rng.random(length) < draw(st.sampled_from([0.0, 0.0005, 0.01, 0.3])))
    return previous, np.union1d(again, fresh).astype(np.int32), length


# Kernels ----------------------------------------------------------------------------------------------------
# -------------


@both
@settings(max_examples=80, deadline=None)
@given(steps())
def test_kernels(kernel: ModuleType, step: tuple[np.ndarray, np.ndarray, int]) -> None:
    previous, positions, _ = step
    known, now = torch.from_numpy(previous), torch.from_numpy(positions)
    plane, fresh = kernel.split_again(known, now)
    assert plane.numpy().tobytes() == reference.words(np.isin(previous, positions))
    assert fresh.dtype == torch.int32 and fresh.tolist() == np.setdiff1d(positions, previous).tolist()
    assert kernel.count_again(plane, len(known)) == len(now) - len(fresh)
    joined = kernel.join_again(known, plane, fresh, len(now))
    assert joined.dtype == torch.int32 and torch.equal(joined, now)


@both
@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 130])
def test_bits_beyond_the_previous_positions(kernel: ModuleType, size: int) -> None:
    plane = torch.zeros(bitmap_nbytes(size), dtype=torch.uint8)
    for bit in range(8 * len(plane)):
        plane.zero_()
        plane[bit // 8] = 1 << bit % 8
        assert kernel.count_again(plane, size) == (1 if bit < size else -1)


# Streams ----------------------------------------------------------------------------------------------------
# -------------


@settings(max_examples=80, deadline=None)
@given(steps())
def test_positions_come_back(step: tuple[np.ndarray, np.ndarray, int]) -> None:
    previous, positions, length = step
    known, now = torch.from_numpy(previous), torch.from_numpy(positions)
    if not len(known) or not len(now):
        return
    for kind in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            use(kind, patch)
            codec = Again(known, now)
            lineage, low = codec.encode(now, length)
            assert lineage.numpy().tobytes() == reference.again(previous, positions, length, low)
            assert codec.size(len(now), length) == len(lineage)
            decoded, sound = Again(known).decode(lineage, len(now), length, low)
            assert bool(sound) and torch.equal(decoded, now)
            assert (codec.number, codec.name) == (AGAIN.number, AGAIN.name) == (5, "again") and INDEX_CODECS[
                5
            ] is AGAIN


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.84, 1.0])
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_the_estimate_is_near(kind: str, density: float, share: float) -> None:
    """Some runs tell within a few percent what all positions would; of few positions all are looked at."""
    rng, length = np.random.default_rng(1), 1 << 20
    previous = np.flatnonzero(rng.random(length) < density).astype(np.int32)
    others = np.flatnonzero(rng.random(length) < density * (1 - share)).astype(np.int32)
    positions = np.union1d(previous[rng.random(len(previous)) < share], others).astype(np.int32)
    codec = Again(torch.from_numpy(previous), torch.from_numpy(positions))
    size = codec.size(len(positions), length)
    assert abs(codec.estimate(len(positions), length) - size) < 0.1 * size
    few = Again(torch.from_numpy(previous[:2000]), torch.from_numpy(positions))
    assert few.estimate(len(positions), length) == few.size(len(positions), length)


@settings(max_examples=120, deadline=None)
@given(steps(), st.data())
def test_damaged_streams(step: tuple[np.ndarray, np.ndarray, int], data: st.DataObject) -> None:
    """Both kinds of kernels refuse the same ones, and what they believe is in order and in range."""
    previous, positions, length = step
    known, now = torch.from_numpy(previous), torch.from_numpy(positions)
    if not len(known) or not len(now):
        return
    lineage, low = Again(known, now).encode(now, length)
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4)
    ):
        lineage[place % len(lineage)] = value
    lineage = lineage[: len(lineage) - data.draw(st.sampled_from([0, 0, 0, 1, 8]))]
    count = max(1, len(now) + data.draw(st.sampled_from([0, 0, 0, 1, -1])))
    low = data.draw(st.sampled_from([low, low, low, low + 1, 0, 25]))
    known = known[: max(1, len(known) - data.draw(st.sampled_from([0, 0, 0, 1])))]  # not the same history
    found = []
    for kind in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            use(kind, patch)
            try:
                decoded, sound = Again(known).decode(lineage, count, length, low)
            except FrameError:
                found.append(None)
                continue
            found.append(decoded.tolist() if bool(sound) else None)
    assert found[0] == found[1]
    if found[0] is not None:
        assert (
            len(found[0]) == count
            and found[0][0] >= 0
            and found[0][-1] < length
            and (np.diff(found[0]) > 0).all()
        )


@pytest.mark.parametrize("size", [1, 8, 24, 200])
def test_any_bytes(kind: str, size: int) -> None:
    rng, believed = np.random.default_rng(size), 0
    for _ in range(300):
        length = int(rng.integers(64, 400))
        known = torch.from_numpy(np.sort(rng.permutation(length)[: rng.integers(57, 65)]).astype(np.int32))
        data = rng.integers(0, 256, size, np.uint8) & rng.integers(0, 256, size, np.uint8)
        data[8:] = np.packbits(rng.random(8 * len(data[8:])) < 0.02)
        count = int(np.unpackbits(data[:8]).sum()) + int(rng.integers(0, 3))
        try:
            decoded, sound = Again(known).decode(
                torch.from_numpy(data), count, length, int(rng.integers(0, 3))
            )
        except FrameError:
            continue
        if bool(sound):
            believed += 1
            assert bool(torch_kernels.strictly_increasing(decoded, length))
    assert believed or size not in {8, 24}


def test_hostile_streams(kind: str) -> None:
    known, now = (torch.tensor(values, dtype=torch.int32) for values in ([1, 5, 9], [1, 4, 9, 11]))
    lineage, low = Again(known, now).encode(now, 20)
    assert Again(known).decode(lineage, 4, 20, low)[0].tolist() == [1, 4, 9, 11]
    wrong = {
        "short": (lineage[:-8], 4, low),
        "long": (torch.cat([lineage, lineage]), 4, low),
        "empty": (lineage[:0], 4, low),
        "no plane": (lineage[:7], 4, low),
        "more": (lineage, 60, low),
        "fewer than again": (lineage, 1, low),
        "low": (lineage, 4, 25),
    }
    for name, (stream_, count, low_) in wrong.items():
        with pytest.raises(FrameError):
            Again(known).decode(stream_, count, 20, low_)
            pytest.fail(name)
    beyond = lineage.clone()
    beyond[7] = 0x80
    with pytest.raises(FrameError, match="others"):
        Again(known).decode(beyond, 4, 20, low)
    assert not bool(Again(known).decode(lineage, 4, 11, low)[1])  # 11 is beyond the segment
    twice = torch.cat([lineage[:8], EF.encode(torch.tensor([4, 9], dtype=torch.int32), 20)[0]])
    assert not bool(
        Again(known).decode(twice, 4, 20, EF.encode(torch.tensor([4, 9], dtype=torch.int32), 20)[1])[1]
    )
    all_again = Again(known, known).encode(known, 20)
    assert len(all_again[0]) == 8 and all_again[1] == 0
    with pytest.raises(FrameError, match="low bits"):
        Again(known).decode(all_again[0], 3, 20, 1)


def test_without_a_history_nothing_is_read() -> None:
    with pytest.raises(FrameError, match=r"delta before.*sync again"):
        AGAIN.decode(torch.zeros(8, dtype=torch.uint8), 1, 10, 0)
    with pytest.raises(ValueError, match="no positions to write"):
        Again(torch.tensor([1], dtype=torch.int32)).encode(torch.tensor([1], dtype=torch.int32), 10)


# Places -----------------------------------------------------------------------------------------------------
# -------------


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3000), st.data())
def test_places_within_any_range(seed: int, total: int, data: st.DataObject) -> None:
    """Whatever segments the positions came in; gaps between segments are those that were sent whole or did
    not change.
    """
    rng, origin = np.random.default_rng(seed), data.draw(st.sampled_from([0, 7, 1 << 40]))
    flags = rng.random(total) < data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    borders = [0, *sorted(rng.integers(0, total, rng.integers(0, 8)).tolist()), total]
    places = DeltaPositions()
    for low, high in pairwise(borders):
        if high > low and flags[low:high].any():
            if rng.random() < 0.2:
                flags[low:high] = False
                continue
            places.add(
                origin + low, high - low, torch.from_numpy(np.flatnonzero(flags[low:high]).astype(np.int32))
            )
    for _ in range(6):
        first, end = sorted(rng.integers(0, total + 1, 2).tolist())
        expected = np.flatnonzero(flags[first:end]).tolist()
        found = places.within(origin + first, end - first)
        assert (found is None) == (not expected)
        assert found is None or (found.dtype == torch.int32 and found.tolist() == expected)
    assert places.nbytes == 4 * int(flags.sum())


def test_positions_far_apart_in_a_chunk() -> None:
    """Chunks may be longer than 2^31 elements, segments 2^28."""
    places, most = DeltaPositions(), (1 << 28) - 1
    for first in (0, 1 << 28, 1 << 33):
        places.add(first, 1 << 28, torch.tensor([0, most], dtype=torch.int32))
    assert places.within(1 << 33, 1 << 28).tolist() == [0, most]
    assert places.within(most, 2).tolist() == [0, 1]
    assert places.within((1 << 33) + most, 1).tolist() == [0]
    assert places.within(1 << 34, 1 << 28) is None


def test_a_view_does_not_keep_what_it_is_a_view_of() -> None:
    frame = torch.zeros(1 << 20, dtype=torch.uint8)
    places = DeltaPositions()
    places.add(0, 100, frame[64:104].view(torch.int32))
    assert places.within(0, 100).untyped_storage().nbytes() == 40


def head_at(version: int, **fields: int) -> FrameHead:
    shape = {
        "schema": 1,
        "lineage": 9,
        "source": 0,
        "number": 0,
        "count": 1,
        "width": 2,
        "first": 0,
        "length": 1 << 20,
    }
    return FrameHead(**{**shape, "base": version - 1, "version": version, **fields})


def test_a_history_speaks_of_one_version() -> None:
    history, places = PreviousDelta(), DeltaPositions()
    places.add(0, 10, torch.tensor([1], dtype=torch.int32))
    history.record(head_at(2), places)
    assert history.before(head_at(3)) is None and history.nbytes == 4
    history.commit(2, 9)
    assert history.before(head_at(3)) is places
    others = [
        head_at(4),
        head_at(2),
        head_at(3, lineage=8),
        head_at(3, schema=2),
        head_at(3, source=1),
        head_at(3, number=1),
    ]
    assert all(history.before(other) is None for other in others)
    history.record(head_at(3), DeltaPositions())
    history.discard()
    assert history.before(head_at(3)) is places
    history.commit(3, 9)  # nothing changed
    assert history.before(head_at(3)) is None and history.before(head_at(4)) is None and history.nbytes == 0
    history.record(head_at(4), places)
    history.reset()
    history.commit(4, 9)
    assert history.before(head_at(5)) is None


# The choice -------------------------------------------------------------------------------------------------
# -------------


def positions_of(rng: np.random.Generator, length: int, share: float) -> Tensor:
    return torch.from_numpy(np.flatnonzero(rng.random(length) < share).astype(np.int32))


def after(rng: np.random.Generator, previous: Tensor, length: int, overlap: float) -> Tensor:
    """Return as many positions, of which so many were there before."""
    kept = previous.numpy()[rng.random(len(previous)) < overlap]
    fresh = np.flatnonzero(rng.random(length) < (1 - overlap) * len(previous) / length)
    return torch.from_numpy(np.union1d(kept, fresh).astype(np.int32))


def ones(count: int) -> Values:
    return Values(torch.ones(count, dtype=torch.int32), True, 2)


@pytest.mark.parametrize("codec", ["small", "again+planes"])
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    lengths,
    st.sampled_from([0.001, 0.01, 0.1, 0.5]),
    st.sampled_from([0.0, 0.2, 0.5, 0.84, 1.0]),
)
def test_again_is_taken_only_where_it_is_smaller(
    codec: str, seed: int, length: int, share: float, overlap: float
) -> None:
    rng = np.random.default_rng(seed)
    previous = positions_of(rng, length, share)
    positions = after(rng, previous, length, overlap)
    if not len(previous) or not 0 < len(positions) < length:
        return
    again, selector = Again(previous, positions), CodecSelector(codec)
    index, value, whole = selector.select(
        len(positions), length, ones(len(positions)), whole=False, again=again
    )
    without = selector.select(len(positions), length, ones(len(positions)), whole=False)
    sizes = again.size(len(positions), length), without[0].size(len(positions), length)
    assert not whole and value is without[1]
    most = 1 if codec == "again+planes" else 0.875
    # Of many positions some are asked first.
    if len(previous) <= 2000 or not 0.9 * most < sizes[0] / sizes[1] < most:
        assert index is (again if sizes[0] < most * sizes[1] else without[0])
    assert codec == "small" or without[0] is EF


def test_who_asks_for_positions_to_be_kept() -> None:
    assert CodecSelector("small").keeps and all(
        CodecSelector(f"again+{value.name}").keeps for value in VALUE_CODECS.values()
    )
    others = [
        FAST,
        CodecSelector("auto"),
        *(CodecSelector(f"{index.name}+planes") for index in INDEX_CODECS.values() if index is not AGAIN),
    ]
    assert not any(selector.keeps for selector in others)
    assert [CodecSelector("auto", speed).keeps for speed in (1e6, 1e8, 1e10)] == [True, True, False]


def test_auto_weighs_the_pass_over_the_positions() -> None:
    rng = np.random.default_rng(0)
    previous = positions_of(rng, 1 << 20, 0.01)
    positions = after(rng, previous, 1 << 20, 0.84)
    names = []
    for speed in (1e6, 5e7, 1e9):
        again = Again(previous, positions)
        names.append(
            CodecSelector("auto", speed)
            .select(len(positions), 1 << 20, ones(len(positions)), whole=True, again=again)[0]
            .name
        )
    assert names[:2] == ["again", "again"] and names[2] != "again"
    again = Again(previous, positions)
    assert FAST.select(len(positions), 1 << 20, ones(len(positions)), whole=True, again=again)[0] is not again


def test_no_pass_where_it_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "split_again", lambda *of: pytest.fail("a pass for nothing"))
    many, few = torch.arange(0, 1 << 16, 2, dtype=torch.int32), torch.tensor([5, 77], dtype=torch.int32)
    assert (
        CodecSelector("small").select(2, 1 << 16, ones(2), whole=True, again=Again(many, few))[0].name
        != "again"
    )


# Frames -----------------------------------------------------------------------------------------------------
# -------------


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


@pytest.mark.parametrize("codec", ["small", "again+planes", "again+raw", "again+ulp8"])
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
    lineage, low = codec.encode(positions, 1 << 20)
    fresh = len(np.setdiff1d(positions.numpy(), previous.numpy()))
    assert len(lineage) == bitmap_nbytes(len(previous)) + ef_size(fresh, 1 << 20, low)
    assert len(lineage) < 0.45 * len(positions) and len(lineage) < 0.4 * EF.size(len(positions), 1 << 20)
