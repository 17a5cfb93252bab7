"""Flat ranges as rectangles, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.layout.blocks import Block, range_blocks, row_major
from tests.unit import geometry
from tests.unit.layout.test_flattened import ranges


@given(ranges())
def test_a_range_is_a_few_rectangles_in_order(case):
    shape, begin, end = case
    blocks = range_blocks(shape, begin, end)
    found = [index for block in blocks for index in block.global_indices(shape).tolist()]
    assert found == list(range(begin, end))
    assert len(blocks) <= max(2 * len(shape) - 1, 1)
    assert all(len(runs) == 1 for block in blocks for runs in block.runs), "rectangles, none of them empty"


def test_a_range_needs_as_many_rectangles_as_it_may():
    """From the second to the last but one position of a cube: rows, slices, rows on both sides."""
    assert [len(range_blocks((3,) * dims, 1, 3**dims - 1)) for dims in range(1, 6)] == [1, 3, 5, 7, 9]


def test_ranges_of_tensors_without_dimensions_or_elements():
    assert range_blocks((), 0, 1) == (Block(()),)
    assert range_blocks((), 0, 0) == range_blocks((3, 0), 0, 0) == range_blocks((4, 2), 5, 5) == ()
    for shape, begin, end in (((), 0, 2), ((3, 0), 0, 1), ((4, 2), 7, 9), ((4, 2), -1, 3)):
        with pytest.raises(ValueError, match="has no positions"):
            range_blocks(shape, begin, end)


def test_ranges_of_large_tensors_cost_nothing():
    (block,) = range_blocks((1 << 20, 1 << 12), 1 << 31, (1 << 31) + (1 << 30))
    assert block.runs == (((1 << 19, 1 << 18),), ((0, 1 << 12),))
    assert row_major((1 << 20, 1 << 12, 3)) == [3 << 12, 3, 1]


@given(st.data())
def test_a_part_of_a_block_is_what_its_own_elements_say(data):
    shape = data.draw(geometry.SHAPES)
    outer = data.draw(geometry.blocks(shape))
    inner = data.draw(geometry.blocks(outer.shape))
    expected = outer.global_indices(shape)[inner.global_indices(outer.shape)]
    assert np.array_equal(outer.part(inner).global_indices(shape), expected)
