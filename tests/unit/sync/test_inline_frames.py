"""Inline frames: what fits, what every rank concludes from the same sizes, and that frames come out as they
went in.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.sync.inline_frames import INLINE_BYTES, InlineFrames


def test_nothing_fits_before_the_first_delta_but_nothing() -> None:
    inline = InlineFrames(3)
    assert inline.holds({0: [0, 0], 1: []}) and not inline.holds({0: [8], 1: []})


@pytest.mark.parametrize("sources", [1, 2, 5, 64])
def test_the_room_of_all_sources_together_is_bounded(sources: int) -> None:
    inline = InlineFrames(sources)
    most = INLINE_BYTES // sources // 8 * 8
    inline.adapt({0: [most - 8, 8]})
    assert inline.capacity == most and inline.holds({0: [most]})
    inline.adapt({0: [most, 8]})
    assert inline.capacity == 0


@given(st.lists(st.lists(st.integers(0, 2000).map(lambda n: 8 * n), max_size=5), min_size=1, max_size=4))
def test_the_next_delta_may_be_half_as_large_again(rows: list[list[int]]) -> None:
    inline, sizes = InlineFrames(len(rows)), dict(enumerate(rows))
    inline.adapt(sizes)
    largest = max(map(sum, rows))
    assert inline.capacity % 8 == 0 and inline.capacity * len(rows) <= INLINE_BYTES
    assert inline.capacity == 0 or largest <= inline.capacity <= 1.5 * largest
    assert inline.holds(sizes) == (largest <= inline.capacity)


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 1000))
def test_frames_come_out_as_they_went_in(words: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    frames = [torch.randint(0, 256, (8 * count,), dtype=torch.uint8, generator=generator) for count in words]
    sizes = [len(frame) for frame in frames]
    inline = InlineFrames(1)
    inline.adapt({0: sizes})
    place = torch.zeros(inline.capacity, dtype=torch.uint8)
    inline.write(frames, place)
    assert all(map(torch.equal, inline.read(place, sizes), frames)) and len(inline.read(place, sizes)) == len(
        frames
    )


def test_frames_that_do_not_fit_are_left_out() -> None:
    inline = InlineFrames(1)
    inline.adapt({0: [80]})
    place = torch.zeros(inline.capacity, dtype=torch.uint8)
    inline.write([torch.ones(inline.capacity + 8, dtype=torch.uint8)], place)
    assert not place.any()
