"""Chunks and buckets: everything is sent once, and all ranks cut alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.plan.chunks import SEGMENT, Chunk, ChunkPlan, Parcel, pack_buckets

WIDTHS = [1, 2, 4, 8]
TOTALS = st.dictionaries(
    st.integers(0, 5), st.dictionaries(st.sampled_from(WIDTHS), st.integers(0, 3000)), min_size=1
)
BUCKETS = st.one_of(st.integers(1, 70), st.integers(1, 5000))
like = settings(max_examples=150, deadline=None)


@like
@given(TOTALS, BUCKETS)
def test_chunks_tile_every_flat_space(totals, bucket_bytes) -> None:
    schedule = ChunkPlan(totals, bucket_bytes)
    for source, widths in totals.items():
        chunks = schedule.chunks(source)
        assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.width for chunk in chunks] == sorted(chunk.width for chunk in chunks)
        for width, total in widths.items():
            mine = [(chunk.first, chunk.first + chunk.length) for chunk in chunks if chunk.width == width]
            assert [end for _, end in mine] == [begin for begin, _ in mine[1:]] + [total] * bool(mine)
            assert (mine[0][0] if mine else total) == 0
        assert all(0 < chunk.length * chunk.width <= max(bucket_bytes, chunk.width) for chunk in chunks)
    assert schedule.most_chunks == max(len(schedule.chunks(source)) for source in totals)


@pytest.mark.slow
@like
@given(TOTALS, BUCKETS, st.randoms())
def test_ranks_cut_alike_whatever_order_they_learnt_of_each_other_in(totals, bucket_bytes, random) -> None:
    def shuffled(items):
        items = list(items)
        random.shuffle(items)
        return dict(items)

    one, other = (
        ChunkPlan(totals, bucket_bytes),
        ChunkPlan(shuffled((s, shuffled(w.items())) for s, w in totals.items()), bucket_bytes),
    )
    assert one.most_chunks == other.most_chunks
    assert all(one.chunks(source) == other.chunks(source) for source in totals)


def test_sources_that_hold_nothing_have_no_chunks() -> None:
    schedule = ChunkPlan({0: {}, 1: {4: 0}, 2: {2: 9}}, 64)
    assert [len(schedule.chunks(source)) for source in range(3)] == [0, 0, 1]
    assert ChunkPlan({0: {}, 1: {4: 0}}, 64).most_chunks == ChunkPlan({}, 64).most_chunks == 0


def lengths(widths: dict[int, int], bucket_bytes: int) -> list[int]:
    return [chunk.length for chunk in ChunkPlan({0: widths}, bucket_bytes).chunks(0)]


def test_chunks_end_at_whole_words_where_a_bucket_has_room() -> None:
    assert lengths({4: 100}, 190) == [40, 40, 20]
    assert lengths({8: 3}, 1) == [1, 1, 1]
    assert lengths({2: 10}, 14) == [7, 3]


@pytest.mark.parametrize("total", [(1 << 14) * 15, (1 << 14) * 15 - 1, (1 << 14) * 16 + 1, 3 << 31])
def test_a_tiny_bucket_makes_no_more_than_2_to_14_chunks(total: int) -> None:
    """All sizes of a sync go round together, so their number has a bound."""
    cut = lengths({1: total}, 8)
    assert (1 << 13) <= len(cut) <= (1 << 14)
    assert sum(cut) == total


def test_a_space_beyond_2_to_31() -> None:
    chunks = ChunkPlan({0: {1: (3 << 31) + 7}}, 64 << 20).chunks(0)
    assert (len(chunks), chunks[-1]) == (97, Chunk(96, 1, 3 << 31, 7))


@given(
    st.integers(0, 1 << 40),
    st.one_of(st.integers(1, 3 * SEGMENT), st.sampled_from([SEGMENT - 1, SEGMENT, SEGMENT + 1])),
)
def test_segments_tile_a_chunk(first: int, length: int) -> None:
    segments = list(Chunk(0, 1, first, length).segments())
    assert segments[0][0] == first
    assert sum(segments[-1]) == first + length
    assert all(sum(one) == two[0] for one, two in pairwise(segments))
    assert all(size == SEGMENT for _, size in segments[:-1])
    assert 0 < segments[-1][1] <= SEGMENT


SIZES = st.integers(1, 4).flatmap(
    lambda chunks: st.dictionaries(
        st.integers(0, 9),
        st.lists(st.one_of(st.just(0), st.integers(1, 90)), min_size=chunks, max_size=chunks),
        max_size=5,
    )
)


@like
@given(SIZES, st.integers(1, 200))
def test_buckets_hold_every_frame_once_in_order(sizes, bucket_bytes) -> None:
    buckets = pack_buckets(sizes, bucket_bytes)
    assert all(buckets)
    chunks = max(map(len, sizes.values()), default=0)
    frames = [(chunk, source) for chunk in range(chunks) for source in sizes if sizes[source][chunk]]
    assert [(parcel.chunk, parcel.source) for bucket in buckets for parcel in bucket] == frames
    for bucket in buckets:
        assert bucket[0].begin == 0
        assert all(one.end == two.begin for one, two in pairwise(bucket))
        assert all(parcel.end - parcel.begin == sizes[parcel.source][parcel.chunk] for parcel in bucket)
        assert bucket[-1].end <= bucket_bytes or len(bucket) == 1
    assert all(one[-1].end + two[0].end > bucket_bytes for one, two in pairwise(buckets))


def test_a_frame_larger_than_a_bucket_has_one_of_its_own() -> None:
    buckets = pack_buckets({4: [10, 100, 10], 7: [10, 10, 0]}, 30)
    small, large = Parcel(4, 0, 0, 10), Parcel(4, 1, 0, 100)
    assert buckets == [
        [small, Parcel(7, 0, 10, 20)],
        [large],
        [Parcel(7, 1, 0, 10), Parcel(4, 2, 10, 20)],
    ]


def test_sources_with_fewer_chunks_and_syncs_without_frames() -> None:
    assert pack_buckets({0: [5], 1: [5, 6]}, 64) == [
        [Parcel(0, 0, 0, 5), Parcel(1, 0, 5, 10), Parcel(1, 1, 10, 16)]
    ]
    assert pack_buckets({}, 64) == pack_buckets({0: []}, 64) == pack_buckets({0: [0, 0], 1: [0, 0]}, 64) == []
