"""Flat ranges as rectangles, against brute force, and as views of what a rank keeps of a parameter."""

from __future__ import annotations

import weakref
from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.blocks import Block, range_blocks, row_major
from dte_dist.layout.flattened import FlatUnit, _refuse_gaps, _whole
from dte_dist.layout.fsdp1 import Original
from tests.unit import geometry

SIZES = st.sampled_from([1, 1, 2, 3, 4, 5])


@st.composite
def ranges(draw, sizes=SIZES, dims=4):
    """Draw a shape of up to four dimensions, and any range of its positions."""
    shape = tuple(draw(st.lists(sizes, max_size=dims)))
    begin, end = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, begin, end


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


def original_of(parameter, begin, end, offset=0):
    return Original(((0, "weight"),), tuple(parameter.shape), parameter.stride(), begin, end, offset, None)


def flattened(parameter, begin, end, offset):
    """What a unit says of a range of a parameter, and what the rank keeps: the range behind others."""
    original = original_of(parameter, begin, end, offset)
    stored = parameter.detach().as_strided((parameter.numel(),), (1,))
    unit = FlatUnit(weakref.ref(nn.Module()), [])
    views = list(unit._views(0, original, _whole("weight", original, None)))
    return views, torch.cat([torch.full((offset,), -1.0), stored[begin:end], torch.full((3,), -1.0)])


@given(ranges(), st.data())
def test_views_of_a_range_are_the_elements_that_their_blocks_say(case, data):
    """In any order of the dimensions in memory: torch flattens a parameter as it lies."""
    shape, begin, end = case
    order = data.draw(st.permutations(range(len(shape)))) if shape else []
    parameter = torch.arange(float(prod(shape))).reshape(shape).permute(order)
    if not parameter.dim():
        return  # torch flattens no tensor without dimensions
    views, kept = flattened(parameter, begin, end, data.draw(st.integers(0, 5)))
    seen = []
    for view in views:
        block, tensor = view.region.block, view.of(kept)
        assert tensor.shape == block.shape
        assert view.region.full_shape == parameter.shape
        expected = parameter.reshape(-1)[torch.from_numpy(block.global_indices(parameter.shape))]
        assert torch.equal(tensor.reshape(-1), expected)
        seen += tensor.reshape(-1).tolist()
    stored = parameter.as_strided((parameter.numel(),), (1,))[begin:end].tolist()
    assert sorted(seen) == sorted(stored), "all of them, each once"
    if begin == end:
        assert len(views) == 1, "the slot is known on every rank"
        assert views[0].region.block.numel == 0


def test_views_are_written_to_where_they_lie():
    for order in permutations(range(3)):
        parameter = torch.arange(60.0).reshape(3, 4, 5).permute(order)
        views, kept = flattened(parameter, 7, 52, 2)
        for view in views:
            view.of(kept).mul_(-1)
        assert torch.equal(kept[2:-3], -parameter.as_strided((60,), (1,))[7:52])
        assert kept[:2].tolist() + kept[-3:].tolist() == [-1.0] * 5


GAPS = [torch.zeros(4, 6)[:, :3], torch.zeros(4, 1).expand(4, 3), torch.zeros(5, 5).diagonal()]


@pytest.mark.parametrize("parameter", GAPS)
def test_a_parameter_with_gaps_is_refused_by_name(parameter):
    with pytest.raises(LayoutMismatch, match=r"no array without gaps.*tensor 'layer\.weight'.*contiguous"):
        _refuse_gaps("layer.weight", original_of(parameter, 0, 1))


def test_strides_of_single_indices_say_nothing():
    parameter = torch.zeros(4, 1).as_strided((4, 1), (1, 77))
    (view,), kept = flattened(parameter, 1, 4, 0)
    assert view.region.block == Block.rectangle((1, 0), (3, 1))
    assert np.array_equal(view.of(kept).numpy(), np.zeros((3, 1)))
