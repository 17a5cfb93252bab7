"""Letters: what fits, what every rank concludes from the same sizes, and that frames come out as they went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.collectives.letters import LETTERS, Letters


def test_nothing_fits_before_the_first_delta_but_nothing() -> None:
    letters = Letters(3)
    assert letters.hold({0: [0, 0], 1: []}) and not letters.hold({0: [8], 1: []})


@pytest.mark.parametrize("sources", [1, 2, 5, 64])
def test_the_room_of_all_sources_together_is_bounded(sources: int) -> None:
    letters = Letters(sources)
    most = LETTERS // sources // 8 * 8
    letters.learn({0: [most - 8, 8]})
    assert letters.room == most and letters.hold({0: [most]})
    letters.learn({0: [most, 8]})
    assert letters.room == 0


@given(st.lists(st.lists(st.integers(0, 2000).map(lambda n: 8 * n), max_size=5), min_size=1, max_size=4))
def test_the_next_delta_may_be_half_as_large_again(rows: list[list[int]]) -> None:
    letters, sizes = Letters(len(rows)), dict(enumerate(rows))
    letters.learn(sizes)
    largest = max(map(sum, rows))
    assert letters.room % 8 == 0 and letters.room * len(rows) <= LETTERS
    assert letters.room == 0 or largest <= letters.room <= 1.5 * largest
    assert letters.hold(sizes) == (largest <= letters.room)


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 1000))
def test_frames_come_out_as_they_went_in(words: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    frames = [torch.randint(0, 256, (8 * count,), dtype=torch.uint8, generator=generator) for count in words]
    sizes = [len(frame) for frame in frames]
    letters = Letters(1)
    letters.learn({0: sizes})
    place = torch.zeros(letters.room, dtype=torch.uint8)
    letters.write(frames, place)
    assert all(map(torch.equal, letters.read(place, sizes), frames)) and len(letters.read(place, sizes)) == len(frames)


def test_frames_that_do_not_fit_are_left_out() -> None:
    letters = Letters(1)
    letters.learn({0: [80]})
    place = torch.zeros(letters.room, dtype=torch.uint8)
    letters.write([torch.ones(letters.room + 8, dtype=torch.uint8)], place)
    assert not place.any()
