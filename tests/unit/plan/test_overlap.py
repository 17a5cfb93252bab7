"""Overlaps of blocks against the sets of elements that the blocks hold."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.layout import Block, Cut, cut_block
from dte_dist.plan.coverage import disjoint
from dte_dist.plan.overlap import Axis, overlap_of
from tests.unit.geometry import SHAPES, blocks, global_index, local_index, mesh_blocks

LIKE = settings(max_examples=100, deadline=None)


def spelled(overlap):
    """Write an overlap as a dict from positions in A to positions in B, straight from what its attributes
    promise.
    """
    if overlap is None:
        return {}
    if overlap.runs:
        return {at + k: other + k for at, length, other in overlap.runs for k in range(length)}
    found = {}
    tables = [
        [(at + k, other + k) for at, length, other in axis.segments for k in range(length)]
        for axis in overlap.axes
    ]
    for coordinates in product(*tables):
        mine = theirs = 0
        for axis, (at, other) in zip(overlap.axes, coordinates, strict=True):
            mine, theirs = mine * axis.extent + at, theirs * axis.other + other
        found[mine] = theirs
    return found


@LIKE
@given(st.data())
def test_an_overlap_is_what_both_blocks_hold(data):
    shape = data.draw(SHAPES)
    a, b = data.draw(blocks(shape)), data.draw(blocks(shape))
    place = {index: position for position, index in enumerate(b.global_indices(shape).tolist())}
    expected = {
        position: place[index]
        for position, index in enumerate(a.global_indices(shape).tolist())
        if index in place
    }
    overlap = overlap_of(a, b)
    assert spelled(overlap) == expected
    if overlap is not None:
        assert (overlap.begin, overlap.end) == (min(expected), max(expected) + 1)
        assert len(overlap.axes) != 1
        assert all(low + length <= high for (low, length, _), (high, _, _) in pairwise(overlap.runs))


@LIKE
@given(st.data())
def test_a_block_meets_itself_in_one_run(data):
    """Two ranks that are placed alike need no look at coordinates, whatever their runs are."""
    shape = data.draw(SHAPES)
    block = data.draw(blocks(shape))
    overlap = overlap_of(block, block)
    if block.numel:
        assert overlap.runs == ((0, block.numel, 0),)
    else:
        assert overlap is None


def test_the_ways_an_overlap_is_written():
    whole = Block.whole((64, 32))
    assert overlap_of(whole, Block.rectangle((8, 0), (8, 32))).runs == ((256, 256, 0),)
    assert overlap_of(whole, Block.rectangle((60, 4), (1, 8))).runs == ((60 * 32 + 4, 8, 0),)
    columns = overlap_of(whole, Block.rectangle((0, 4), (64, 8)))
    assert columns.axes == (Axis(64, 64, ((0, 64, 0),)), Axis(32, 8, ((4, 8, 0),)))
    assert (columns.begin, columns.end) == (4, 63 * 32 + 12)
    assert overlap_of(Block(()), Block(())).runs == ((0, 1, 0),)


def test_many_runs_of_one_dimension_need_no_axes():
    strided = Block((tuple((4 * k, 2) for k in range(50)), ((0, 3),)))
    assert overlap_of(Block.whole((200, 3)), strided).runs == tuple((12 * k, 6, 6 * k) for k in range(50))
    assert len(overlap_of(Block.whole((1, 200)), Block((((0, 1),), strided.runs[0]))).runs) == 50


@LIKE
@given(st.data())
def test_blocks_of_any_kind_are_disjoint_or_not(data):
    shape = data.draw(SHAPES)
    some = (
        data.draw(st.lists(blocks(shape).filter(lambda block: block.numel), max_size=5))
        if 0 not in shape
        else []
    )
    together = np.concatenate([np.zeros(0, np.int64), *(block.global_indices(shape) for block in some)])
    assert disjoint(some) == (len(set(together.tolist())) == len(together))


@LIKE
@given(st.data())
def test_blocks_of_a_mesh_are_disjoint_but_for_one_that_is_spoilt(data):
    shape = data.draw(SHAPES)
    held = [block for block in dict.fromkeys(data.draw(mesh_blocks(shape))) if block.numel]
    assert disjoint(held)
    if held:
        assert not disjoint([*held, data.draw(blocks(shape).filter(lambda block: block.numel))])


def test_large_grids_are_checked_as_grids(monkeypatch):
    """Thousands of blocks are millions of pairs; none of them is compared."""
    cuts = [Cut(0, 2), Cut(0, 0), Cut(1, 1)]
    held = [cut_block((1000, 640), (16, 16, 16), at, cuts) for at in product(range(16), repeat=3)]
    held = [block for block in held if block.numel]  # the rows do not divide evenly, so some are empty
    assert len(held) > 3000
    monkeypatch.setattr(Block, "overlaps", None)
    assert disjoint(held)


@LIKE
@given(st.data())
def test_the_oracle_for_large_blocks(data):
    shape = data.draw(SHAPES)
    block = data.draw(blocks(shape))
    held = block.global_indices(shape).tolist()
    assert [global_index(block, shape, position) for position in range(block.numel)] == held
    for index in range(int(np.prod(shape))):
        assert local_index(block, shape, index) == (held.index(index) if index in held else None)
