"""Steps against torch: a view with steps is what index_select takes of the full tensor."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dte_dist
from dte_dist import Layout
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Block, Manifest
from dte_dist.layout.run_steps import MOST_RUNS, pack_runs, step_runs, unpack_runs
from tests.unit.geometry import runs

STEPS = st.one_of(
    st.integers(1, 4),
    st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair))),
)


def taken(offset: int, step: int | tuple[int, int], size: int) -> list[int]:
    """Return the indices, of `size` in all, that a step takes from an offset on."""
    length, distance = step if isinstance(step, tuple) else (1, step)
    return [index for index in range(offset, size) if (index - offset) % distance < length]


def select(full: Tensor, indices: list[list[int]]) -> Tensor:
    """Return what index_select takes of a tensor, one list of indices per dimension."""
    for dim, here in enumerate(indices):
        full = full.index_select(dim, torch.tensor(here, dtype=torch.int64))
    return full


@st.composite
def views(draw, shape):
    """Draw offsets and steps of a view of a tensor, and the indices that it takes along each dimension."""
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    steps = tuple(draw(STEPS) for _ in shape)
    lines = [taken(*each) for each in zip(offsets, steps, shape, strict=True)]
    indices = [line[: draw(st.integers(0, len(line)))] for line in lines]
    return offsets, steps, indices


SHAPES = st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple)


@given(st.data())
def test_a_view_with_steps_is_what_index_select_takes(data):
    shape = data.draw(SHAPES)
    offsets, steps, indices = data.draw(views(shape))
    expected = select(torch.arange(prod(shape)).view(shape), indices)
    layout = Layout.from_views([("w", torch.zeros(expected.shape), shape, offsets, steps)])
    block = layout.manifest.block(0, ())
    assert block.shape == expected.shape
    assert block.global_indices(shape).tolist() == expected.flatten().tolist()
    again = Manifest.from_bytes(layout.manifest.to_bytes())
    assert again == layout.manifest and again.digest() == layout.manifest.digest()


@given(st.data())
def test_two_views_are_refused_exactly_if_they_share_an_element(data):
    shape = data.draw(SHAPES)
    drawn = [data.draw(views(shape)) for _ in range(2)]
    held = [set(select(torch.arange(prod(shape)).view(shape), each).flatten().tolist()) for *_, each in drawn]
    given_views = [
        ("w", torch.zeros(tuple(map(len, indices))), shape, offsets, steps)
        for offsets, steps, indices in drawn
    ]
    if held[0] & held[1]:
        with pytest.raises(LayoutMismatch, match="two regions of a slot overlap"):
            Layout.from_views(given_views)
    else:
        Layout.from_views(given_views)


@given(st.data())
def test_blocks_of_any_runs_overlap_exactly_if_they_share_an_element(data):
    shape = data.draw(SHAPES)
    blocks = [Block(tuple(data.draw(runs(size)) for size in shape)) for _ in range(2)]
    held = [set(block.global_indices(shape).tolist()) for block in blocks]
    assert blocks[0].overlaps(blocks[1]) == bool(held[0] & held[1])


@given(st.integers(0, 40).flatmap(runs))
def test_runs_are_packed_and_come_back(drawn):
    packed = pack_runs(drawn)
    assert tuple(unpack_runs(packed)) == drawn and len(packed) <= len(drawn)


@given(st.integers(0, 9), st.integers(7, 60), st.integers(1, 3), st.integers(1, 5))
def test_a_step_is_packed_as_one_item_and_the_rest_of_it(start, size, length, gap):
    stepped = step_runs(start, size, (length, length + gap))
    whole, rest = divmod(size, length)
    assert len(pack_runs(stepped)) == (1 if whole >= 3 else whole) + (rest > 0)


def test_a_step_without_gaps_is_no_step():
    for steps in ((1, 1), ((1, 1), 1), ((4, 4), (2, 2))):
        layout = Layout.from_views([("w", torch.zeros(6, 3), (9, 4), (2, 1), steps)])
        plain = Layout.from_views([("w", torch.zeros(6, 3), (9, 4), (2, 1))])
        assert layout.manifest == plain.manifest


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (0, "1 to n indices"),
        (-2, "1 to n indices"),
        ((0, 2), "1 to n indices"),
        ((3, 2), "1 to n indices"),
        ((1, 2, 3), "a step is n"),
        (True, "a step is n"),
        (1.0, "a step is n"),
        ("2", "a step is n"),
    ],
)
def test_what_is_no_step_is_refused(step, text):
    with pytest.raises(ValueError, match=text):
        Layout.from_views([("w", torch.zeros(2), (8,), (0,), (step,))])


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (("w", torch.zeros(3), (4,), (0,), (2,)), "leaves the slot"),
        (("w", torch.zeros(3), (6,), (1,), ((2, 5),)), "leaves the slot"),
        (("w", torch.zeros(3), (9,), (0,), (2, 1)), "same number of dimensions"),
    ],
)
def test_a_region_that_cannot_be_is_refused_by_name(view, text):
    with pytest.raises(LayoutMismatch, match=rf"{text}.*tensor 'w'"):
        Layout.from_views([view])


def test_a_view_of_six_items_is_refused():
    with pytest.raises(ValueError, match="a view is"):
        Layout.from_views([("w", torch.zeros(2), (4,), (0,), (2,), None)])


def test_more_runs_than_there_is_room_for_are_refused():
    rows = torch.zeros(1, dtype=torch.int8).expand(MOST_RUNS + 1)
    with pytest.raises(ValueError, match="at most 1,048,576 runs"):
        Layout.from_views([("w", rows, (4 * MOST_RUNS,), (0,), (2,))])
    many = torch.zeros(MOST_RUNS // 2 + 1, dtype=torch.int8)
    layout = Layout.from_views(
        [(name, many, (2 * MOST_RUNS,), (first,), (2,)) for first, name in enumerate("ab")]
    )
    with pytest.raises(LayoutMismatch, match="too many runs"):
        layout.manifest.to_bytes()


def test_pieces_of_a_fused_tensor_arrive_at_other_pieces_of_it():
    """One sender has every third row, another the others; receivers have heads, and columns with gaps."""
    full = torch.randn(12, 10)
    thirds, others = full[2::3].clone(), full[[row for row in range(12) if row % 3 < 2]].clone()
    q, kv = torch.zeros(4, 10), torch.zeros(8, 10)
    columns = torch.zeros(12, 5)
    layouts = {
        0: Layout.from_views([("qkv", thirds, (12, 10), (2, 0), (3, 1))]),
        1: Layout.from_views([("qkv", others, (12, 10), (0, 0), ((2, 3), 1))]),
        2: Layout.from_views(
            [("qkv", q, (12, 10), (0, 0), ((2, 6), 1)), ("qkv", kv, (12, 10), (2, 0), ((4, 6), 1))]
        ),
        3: Layout.from_views([("qkv", columns, (12, 10), (0, 1), (1, 2))], partial=True),
    }
    plan = dte_dist.Plan.between(
        {rank: layouts[rank] for rank in (0, 1)}, {rank: layouts[rank] for rank in (2, 3)}
    )
    transport = dte_dist.LoopbackTransport()
    engines = [dte_dist.DeltaEngine(transport, plan=plan, rank=rank) for rank in range(4)]
    rng = Random(3)
    for version in range(1, 5):
        for rank in (0, 1):
            engines[rank].push(layouts[rank], version)
        for rank in (2, 3):
            engines[rank].pull(layouts[rank], version)
        full[2::3] = thirds
        full[[row for row in range(12) if row % 3 < 2]] = others
        heads = full.view(2, 6, 10)
        assert torch.equal(q.view(2, 2, 10), heads[:, :2]) and torch.equal(kv.view(2, 4, 10), heads[:, 2:])
        assert torch.equal(columns, full[:, 1::2])
        thirds[rng.randrange(4), rng.randrange(10)] += 1
        others[rng.randrange(8), rng.randrange(10)] -= 1
