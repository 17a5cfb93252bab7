"""Frames come back bit for bit, and no damaged or hostile one gives out a segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import CodecSelector, FrameHead, FrameWriter, Segment, read_frame, read_head
from dte_dist.codec.header import CHECKSUM_WORD, ENTRY, HEAD
from dte_dist.errors import FrameError, VersionError, VersionGap, VersionReplay, VersionRestart
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.tensors.flat import BITS

EXPECT = FrameHead(
    schema=2**64 - 1,
    lineage=2**63 + 5,
    base=7,
    version=8,
    source=3,
    number=1,
    count=4,
    width=2,
    first=1000,
    length=200_000,
)
HOSTILE = [
    0,
    1,
    2,
    3,
    7,
    8,
    0x7FFF,
    0xFFFF,
    65536,
    2**28,
    2**28 + 1,
    2**31 - 1,
    2**31,
    2**32 - 8,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


@pytest.fixture(params=[cpu, torch_kernels], ids=["cpu", "torch"], autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with the kernels of both kinds of device, over CPU memory; sizes are always worked out on
    the host.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield


def make_frame(head: FrameHead = EXPECT) -> Tensor:
    """Return a small frame with a segment of each index codec, some streams padded."""
    writer = FrameWriter(head, "cpu")
    writer.add(
        1000,
        70_000,
        torch.tensor([0, 9, 65535, 65536, 69_999], dtype=torch.int32),
        torch.arange(5, dtype=torch.int16),
    )
    writer.add(
        80_000,
        100_000,
        torch.tensor([65536, 99_999, 99_999], dtype=torch.int32)[:2],
        torch.tensor([-1, 0x7F81], dtype=torch.int16),
    )
    writer.add_dense(190_000, torch.arange(7, dtype=torch.int16))
    return writer.finish()


def seal(frame: np.ndarray) -> Tensor:
    """Return a frame with the checksum it should have."""
    sealed = torch.from_numpy(frame.copy())
    sealed.view(torch.int64)[CHECKSUM_WORD] = kernels.on("cpu").checksum(sealed, CHECKSUM_WORD)
    return sealed


def refused(frame: Tensor, kind: type[Exception] = FrameError) -> None:
    with pytest.raises(kind):
        read_frame(frame, EXPECT)


def check_invariants(segments: list[Segment]) -> None:
    """Whatever is given out can be applied without a further look."""
    border = EXPECT.first
    for segment in segments:
        assert border <= segment.first <= segment.first + segment.length <= EXPECT.first + EXPECT.length
        border = segment.first + segment.length
        if segment.positions is None:
            assert len(segment.values) == segment.length
        else:
            assert len(segment.values) == len(segment.positions) > 0
            assert segment.positions.diff().gt(0).all()
            assert 0 <= segment.positions[0] <= segment.positions[-1] < segment.length


def test_a_frame_comes_back() -> None:
    frame = make_frame()
    assert len(frame) % 8 == 0
    assert read_head(frame) == EXPECT
    first, second, third = read_frame(frame, EXPECT)
    assert (first.first, first.length, first.positions.tolist()) == (
        1000,
        70_000,
        [0, 9, 65535, 65536, 69_999],
    )
    assert first.values.tolist() == [*range(5)]
    assert (second.first, second.positions.tolist(), second.values.tolist()) == (
        80_000,
        [65536, 99_999],
        [-1, 0x7F81],
    )
    assert (third.first, third.length, third.positions, third.values.tolist()) == (
        190_000,
        7,
        None,
        [*range(7)],
    )


def test_the_layout_is_the_one_specified() -> None:
    """The numbers of docs/protocol.md, read with nothing of ours."""
    frame = make_frame(replace(EXPECT, seed=True)).numpy()
    assert (HEAD.itemsize, ENTRY.itemsize) == (96, 40)
    assert frame[:8].tobytes() == b"DTEF\x03\x00\x01\x00"
    assert frame[16:72].view("<u8").tolist() == [len(frame), 2**64 - 1, 2**63 + 5, 7, 8, 1000, 200_000]
    assert frame[72:96].view("<u4").tolist() == [3, 1, 4, 2, 3, 0]
    assert frame[96:104].view("<u8").tolist() == [1000]
    assert frame[104:136].view("<u4").tolist() == [70_000, 5, 18, 10, 2, 0, 0, 0]
    assert frame[216:234].tobytes() == np.array([3, 0, 2, 0, 0, 9, 65535, 0, 4463], "<u2").tobytes()
    assert frame[234:240].tolist() == [0] * 6
    assert frame[240:250].view("<i2").tolist() == [*range(5)]


positions_of = {
    "none": lambda length: np.arange(0),
    "first": lambda length: np.array([0]),
    "last": lambda length: np.array([length - 1]),
    "all": np.arange,
    "ends": lambda length: np.unique([0, length - 1]),
    "every third": lambda length: np.arange(0, length, 3),
    "border": lambda length: np.arange(65534, min(length, 65538)),
    "rare": lambda length: np.arange(length // 2, length, 5000),
}


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 9, 65535, 65536, 65537, 1 << 20]),
            st.sampled_from([*positions_of, "dense"]),
            st.integers(0, 3),
        ),
        max_size=5,
    ),
    st.sampled_from([0, 5, 1 << 40]),
)
def test_any_frame_comes_back(width: int, parts: list[tuple[int, str, int]], start: int) -> None:
    at, added, rng = start, [], np.random.default_rng(width)
    head = replace(EXPECT, width=width, first=start, length=10 << 20)
    writer = FrameWriter(head, "cpu")
    for length, kind, gap in parts:
        at += gap
        positions = torch.from_numpy(
            positions_of["all" if kind == "dense" else kind](length).astype(np.int32)
        )
        bits = torch.from_numpy(rng.integers(0, 256, (len(positions) + 1) * width, np.uint8)).view(
            BITS[width]
        )[:-1]
        if kind == "dense":
            writer.add_dense(at, bits)
        else:
            writer.add(at, length, positions, bits)
        added += [(at, length, positions, bits)] if len(positions) else []
        at += length
    frame = writer.finish()
    assert len(frame) > 0 if added else len(frame) == 0
    for got, (first, length, positions, bits) in zip(
        read_frame(frame, head) if added else [], added, strict=True
    ):
        assert (got.first, got.length) == (first, length)
        assert torch.equal(got.values, bits)
        assert torch.equal(
            torch.arange(length, dtype=torch.int32) if got.positions is None else got.positions, positions
        )


def test_the_writer_copies_changes_at_once_and_dense_segments_when_it_finishes() -> None:
    positions, bits = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int16)
    whole = bits.clone()
    writer = FrameWriter(EXPECT, "cpu")
    writer.add(1000, 10, positions, bits)
    writer.add_dense(1010, whole)
    positions.zero_()
    bits.zero_()
    frame = writer.finish()
    whole.zero_()
    sparse, dense = read_frame(frame, EXPECT)
    assert (sparse.positions.tolist(), sparse.values.tolist(), dense.values.tolist()) == (
        [3, 4],
        [5, 6],
        [5, 6],
    )


@pytest.mark.parametrize(("ratio", "last"), [(1.0, 49_997), (0.5, 24_997)])
def test_segments_are_sent_whole_where_that_is_smaller(ratio: float, last: int) -> None:
    """Of 100,000 elements of 2 bytes, each change takes 4 bytes, and 8 more go for the counts of blocks."""
    whole = torch.full((100_000,), 7, dtype=torch.int16)
    for count, pair in ((1, "i32+raw"), (last, "u16+raw"), (last + 1, "dense+raw"), (100_000, "dense+raw")):
        writer = FrameWriter(EXPECT, "cpu", CodecSelector(sparse_bytes_ratio=ratio))
        whole[:count] = 0
        writer.add(
            1000,
            100_000,
            torch.arange(count, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int16),
            whole=lambda: whole,
        )
        assert writer.codecs == {pair: 1}
        (segment,) = read_frame(writer.finish(), EXPECT)
        assert segment.values[:count].eq(0).all() and segment.values[count:].eq(7).all()


def test_the_writer_refuses_segments_out_of_place() -> None:
    one, bit = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int16)
    for first, length in ((999, 10), (1000, 200_001), (1004, 3)):
        writer = FrameWriter(EXPECT, "cpu")
        writer.add(1000, 5, one, bit)
        with pytest.raises(ValueError, match="not within"):
            writer.add(first, length, one, bit)
    writer = FrameWriter(EXPECT, "cpu")
    with pytest.raises(ValueError, match="takes"):
        writer.add(1000, 5, one, bit.long())
    for positions, values in (
        (one, bit.repeat(2)),
        (None, bit),
        (None, bit.repeat(6)),
        (one.repeat(6), bit.repeat(6)),
    ):
        with pytest.raises(ValueError, match="positions"):
            writer.add(1000, 5, positions, values)
    assert not writer.finish().numel()


def test_a_frame_at_any_address() -> None:
    """A bucket may hold a frame anywhere: the reader copes with every alignment."""
    frame = make_frame()
    for shift in range(8):
        bucket = torch.zeros(len(frame) + shift, dtype=torch.uint8)
        bucket[shift:] = frame
        assert [len(segment.values) for segment in read_frame(bucket[shift:], EXPECT)] == [5, 2, 7]


def test_a_table_longer_than_the_first_look() -> None:
    writer = FrameWriter(EXPECT, "cpu")
    for i in range(1000):
        writer.add(
            1000 + 10 * i, 10, torch.tensor([i % 10], dtype=torch.int32), torch.tensor([i], dtype=torch.int16)
        )
    assert [segment.values.item() for segment in read_frame(writer.finish(), EXPECT)] == list(range(1000))


def test_what_is_no_tensor_of_bytes_is_the_callers_fault() -> None:
    for wrong in (
        torch.zeros(100),
        torch.zeros(2, 100, dtype=torch.uint8),
        torch.zeros(200, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(ValueError, match="contiguous uint8"):
            read_frame(wrong, EXPECT)


# Accidents: the checksum is not repaired.


def test_every_flip_is_caught() -> None:
    frame = make_frame()
    for place in range(len(frame)):
        for flip in (0xFF, *(1 << bit for bit in range(8))):
            frame[place] ^= flip
            refused(frame)
            frame[place] ^= flip
    assert len(read_frame(frame, EXPECT)) == 3


def test_every_swap_of_words_is_caught() -> None:
    words = make_frame().view(torch.int64)
    for i, j in combinations(range(len(words)), 2):
        swapped = words.clone()
        swapped[i], swapped[j] = words[j], words[i]
        if words[i] != words[j]:
            refused(swapped.view(torch.uint8))


def test_the_same_flip_in_two_words_is_caught() -> None:
    words = make_frame().view(torch.int64)
    for i, j in combinations(range(len(words)), 2):
        for bit in (0, 31, 63):
            flipped = words.clone()
            flipped[[i, j]] ^= 1 << bit if bit < 63 else -(1 << 63)
            refused(flipped.view(torch.uint8))


def test_every_cut_and_extension_is_caught() -> None:
    frame = make_frame()
    for size in range(len(frame)):
        refused(frame[:size])
    for extra in range(1, 17):
        refused(torch.cat([frame, torch.zeros(extra, dtype=torch.uint8)]))
    refused(torch.cat([frame, frame]))


# Intent: the checksum fits, so that everything else has to hold on its own.


@pytest.mark.parametrize(
    "field", sorted(set(HEAD.names) - {"checksum", "lineage", "base", "version", "segments"})
)
def test_hostile_heads(field: str) -> None:
    """A wrong number anywhere in the head is refused; two frames that changed places have each other's
    number.
    """
    frame = make_frame().numpy()
    for value in [b"DTEX"] if field == "magic" else HOSTILE:
        row = frame[: HEAD.itemsize].copy().view(HEAD)
        if field != "magic" and (value == row[field][0] or value > np.iinfo(row[field].dtype).max):
            continue
        if field == "flags" and value == 2:  # asks to keep positions, which any delta may
            continue
        row[field] = value
        refused(seal(np.concatenate([row.view(np.uint8), frame[HEAD.itemsize :]])))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"lineage": 0}, VersionRestart),
        ({"lineage": 0, "base": 9, "version": 10}, VersionRestart),
        ({"base": 8, "version": 9}, VersionGap),
        ({"base": 2**63 - 2, "version": 2**63 - 1}, VersionGap),
        ({"base": 6, "version": 7}, VersionReplay),
        ({"base": -(2**63), "version": -(2**63)}, VersionReplay),
        ({"base": 7, "version": 7}, VersionReplay),
        ({"base": 7, "version": 9}, VersionError),
        ({"base": 6, "version": 8}, VersionError),
    ],
)
def test_wrong_versions_are_told_apart(changes: dict[str, int], kind: type[Exception]) -> None:
    frame = make_frame(replace(EXPECT, **changes))
    with pytest.raises(kind) as caught:
        read_frame(frame, EXPECT)
    assert type(caught.value) is kind


def test_another_schema_is_no_question_of_versions() -> None:
    refused(make_frame(replace(EXPECT, schema=5, lineage=5)))
    refused(make_frame(replace(EXPECT, seed=True)))


@pytest.mark.parametrize("entry", [0, 1, 2])
@pytest.mark.parametrize("field", list(ENTRY.names))
def test_hostile_tables(entry: int, field: str) -> None:
    """A wrong number in the table is refused; one that could be right (a place, bits taken for distances)
    leaves everything in bounds.
    """
    frame = make_frame().numpy()
    for value in HOSTILE:
        table = frame[HEAD.itemsize : HEAD.itemsize + 3 * ENTRY.itemsize].copy().view(ENTRY)
        if value == table[field][entry] or value > np.iinfo(table[field].dtype).max:
            continue
        table[field][entry] = value
        hostile = seal(
            np.concatenate(
                [frame[: HEAD.itemsize], table.view(np.uint8), frame[HEAD.itemsize + 3 * ENTRY.itemsize :]]
            )
        )
        if (field in {"first", "length"} and entry < 2) or (field, value) == ("value", 1):
            try:
                check_invariants(read_frame(hostile, EXPECT))
            except FrameError:
                continue
        else:
            refused(hostile)


@pytest.mark.parametrize("segments", [value for value in HOSTILE if value != 3 and value < 2**32])
def test_hostile_numbers_of_segments(segments: int) -> None:
    frame = make_frame().numpy()
    frame[: HEAD.itemsize].view(HEAD)["segments"] = segments
    refused(seal(frame))


def entry_changes() -> list[tuple[str, list[tuple[int, str, int]]]]:
    return [
        ("overlap", [(1, "first", 70_999)]),
        ("same place", [(1, "first", 1000)]),
        ("order", [(0, "first", 80_000), (1, "first", 1000)]),
        ("before the chunk", [(0, "first", 999)]),
        ("behind the chunk", [(2, "first", 200_994)]),
        ("no elements", [(0, "length", 0)]),
        ("more changes than elements", [(2, "length", 6)]),
        ("fewer changes than elements", [(2, "length", 8)]),
        ("out of range", [(0, "length", 69_999)]),
        ("another count of blocks", [(0, "length", 60_000)]),
        ("bytes from one stream to the next", [(0, "index_bytes", 26), (0, "value_bytes", 2)]),
        ("swapped codecs", [(0, "index", 1), (1, "index", 2)]),
        ("sparse as dense", [(0, "index", 0)]),
        ("unknown codec", [(0, "value", 9)]),
        ("a codec that was", [(0, "value", 2)]),
    ]


@pytest.mark.parametrize(
    "changes", [changes for _, changes in entry_changes()], ids=[name for name, _ in entry_changes()]
)
def test_tables_that_contradict_themselves(changes: list[tuple[int, str, int]]) -> None:
    frame = make_frame().numpy()
    for entry, field, value in changes:
        frame[HEAD.itemsize : HEAD.itemsize + 3 * ENTRY.itemsize].view(ENTRY)[field][entry] = value
    refused(seal(frame))


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_a_codec_that_was_is_as_unknown_as_one_that_never_was(entry: int) -> None:
    """The same error for number 2 of the values as for one that was never used, whatever the stream."""
    texts = []
    for number in (2, 9):
        frame = make_frame().numpy()
        frame[HEAD.itemsize : HEAD.itemsize + 3 * ENTRY.itemsize].view(ENTRY)["value"][entry] = number
        with pytest.raises(FrameError, match=rf"codecs \d, {number}, 0") as raised:
            read_frame(seal(frame), EXPECT)
        texts.append(str(raised.value).replace(f", {number}, 0", ""))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "positions", [[-1, 5], [5, 5], [6, 5], [5, 100_000], [5, -1], [-(2**31), 2**31 - 1], [2**31 - 1, 5]]
)
def test_hostile_i32_positions(positions: list[int]) -> None:
    frame = make_frame().numpy()
    at = bytes(frame).index(np.array([65536, 99_999], "<i4").tobytes())
    frame[at : at + 8] = np.array(positions, "<i4").view(np.uint8)
    refused(seal(frame))


@pytest.mark.parametrize(
    ("counts", "offsets"),
    [
        *[
            ([3, 2], offsets)
            for offsets in (
                [9, 0, 65535, 0, 4463],
                [0, 0, 65535, 0, 4463],
                [0, 9, 65535, 4463, 0],
                [0, 9, 65535, 0, 4464],
            )
        ],
        *[
            (counts, [0, 9, 65535, 0, 4463])
            for counts in (
                [2, 3],
                [4, 1],
                [3, 3],
                [3, 1],
                [0, 0],
                [2**32 - 1, 6],
                [2**31, 5],
                [65537, 2],
                [2**32 - 65533, 2],
            )
        ],
    ],
)
def test_hostile_u16_positions(counts: list[int], offsets: list[int]) -> None:
    frame = make_frame().numpy()
    at = HEAD.itemsize + 3 * ENTRY.itemsize
    frame[at : at + 18] = np.concatenate(
        [np.array(counts, "<u4").view(np.uint8), np.array(offsets, "<u2").view(np.uint8)]
    )
    refused(seal(frame))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_sealed_damage_is_refused_or_harmless(damage: list[tuple[int, int]]) -> None:
    frame = make_frame().numpy()
    for place, value in damage:
        frame[place % len(frame)] = value
    try:
        segments = read_frame(seal(frame), EXPECT)
    except (FrameError, VersionError):
        return
    check_invariants(segments)
