"""Flat ranges as views of what a rank keeps of a parameter."""

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
from dte_dist.layout.blocks import Block
from dte_dist.layout.flattened import FlatUnit, _refuse_gaps, _whole
from dte_dist.layout.fsdp1 import Original

SIZES = st.sampled_from([1, 1, 2, 3, 4, 5])


@st.composite
def ranges(draw, sizes=SIZES, dims=4):
    """Draw a shape of up to four dimensions, and any range of its positions."""
    shape = tuple(draw(st.lists(sizes, max_size=dims)))
    begin, end = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, begin, end


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
