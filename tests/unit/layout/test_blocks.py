"""Geometry of blocks against torch.chunk applied to an arange."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.layout import Block, Cut, chunk_bounds, cut_block


def chunk(tensor, parts, index, dim):
    """torch.chunk, with the empty chunks that it leaves out."""
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def held(shape, mesh_shape, coordinate, cuts):
    """The flat positions that a rank holds, in the shape of its local tensor."""
    tensor = torch.arange(prod(shape)).reshape(shape)
    for cut in cuts:
        pieces = [chunk(tensor, cut.split_factor, piece, cut.dim) for piece in range(cut.split_factor)]
        kept = [chunk(piece, mesh_shape[cut.mesh_dim], coordinate[cut.mesh_dim], cut.dim) for piece in pieces]
        tensor = torch.cat(kept, cut.dim) if len(kept) > 1 else kept[0]
    return tensor


@st.composite
def geometries(draw, max_factor=1):
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh_dims = draw(st.permutations(range(len(mesh_shape))))[
        : draw(st.integers(0, len(mesh_shape))) if shape else 0
    ]
    dims = st.integers(0, max(len(shape) - 1, 0))
    return (
        tuple(shape),
        tuple(mesh_shape),
        tuple(Cut(draw(dims), mesh_dim, draw(st.integers(1, max_factor))) for mesh_dim in mesh_dims),
    )


def coordinates(mesh_shape):
    return product(*map(range, mesh_shape))


@given(geometries(max_factor=3))
def test_a_block_is_what_chunks_in_order_leave(geometry):
    shape, mesh_shape, cuts = geometry
    for coordinate in coordinates(mesh_shape):
        block, expected = (
            cut_block(shape, mesh_shape, coordinate, cuts),
            held(shape, mesh_shape, coordinate, cuts),
        )
        assert block.shape == tuple(expected.shape)
        assert block.numel == expected.numel()
        assert block.global_indices(shape).tolist() == expected.flatten().tolist()


@given(geometries(max_factor=3))
def test_blocks_partition_the_tensor(geometry):
    shape, mesh_shape, cuts = geometry
    cut_dims = {cut.mesh_dim for cut in cuts}
    owners = [
        c
        for c in coordinates(mesh_shape)
        if all(c[d] == 0 for d in range(len(mesh_shape)) if d not in cut_dims)
    ]
    blocks = [cut_block(shape, mesh_shape, owner, cuts) for owner in owners]
    everything = np.concatenate([block.global_indices(shape) for block in blocks])
    assert sorted(everything.tolist()) == list(range(prod(shape)))
    for index, one in enumerate(blocks):
        assert not any(one.overlaps(other) for other in blocks[:index])


@given(geometries(max_factor=3))
def test_positions_increase_and_runs_are_merged(geometry):
    shape, mesh_shape, cuts = geometry
    for coordinate in coordinates(mesh_shape):
        block = cut_block(shape, mesh_shape, coordinate, cuts)
        assert (np.diff(block.global_indices(shape)) > 0).all()
        assert Block(block.runs) == block
        assert block.fits(shape)


@given(st.integers(0, 60), st.integers(1, 12))
def test_chunk_bounds_are_those_of_torch_chunk(size, parts):
    chunks = [chunk(torch.arange(size), parts, index, 0).tolist() for index in range(parts)]
    assert [list(range(start, start + length)) for start, length in chunk_bounds(size, parts)] == chunks


def test_overlap_is_seen_in_every_dimension():
    one = Block.rectangle((0, 0), (2, 2))
    assert one.overlaps(Block.rectangle((1, 1), (2, 2)))
    assert not one.overlaps(Block.rectangle((1, 2), (2, 2)))
    assert not one.overlaps(Block.rectangle((2, 1), (2, 2)))
    assert not one.overlaps(Block.rectangle((0, 0), (0, 2)))


def test_a_scalar_has_one_element_and_an_empty_dimension_none():
    assert Block(()).numel == 1
    assert Block(()).global_indices(()).tolist() == [0]
    assert Block.whole((3, 0)).runs == (((0, 3),), ())
    assert Block.whole((3, 0)).global_indices((3, 0)).tolist() == []


def test_a_high_offset_costs_nothing():
    block = cut_block((1 << 40, 2), (1 << 39,), ((1 << 39) - 1,), [Cut(0, 0)])
    assert block.global_indices((1 << 40, 2)).tolist() == [
        (1 << 41) - 4,
        (1 << 41) - 3,
        (1 << 41) - 2,
        (1 << 41) - 1,
    ]


@pytest.mark.parametrize(
    "runs", [((2, 1), (0, 1)), ((0, 2), (1, 2)), ((0, 1), (1, 1)), ((0, 0),), ((-1, 2),)]
)
def test_runs_that_are_not_sorted_apart_and_filled_are_refused(runs):
    with pytest.raises(ValueError, match="runs must be sorted"):
        Block((runs,))


@pytest.mark.parametrize("coordinate", [(2, 0), (0,), (0, 0, 0), (-1, 0)])
def test_a_coordinate_outside_the_mesh_is_refused(coordinate):
    with pytest.raises(ValueError, match="is no coordinate"):
        cut_block((4,), (2, 2), coordinate, [Cut(0, 0)])


@pytest.mark.parametrize("cut", [Cut(1, 0), Cut(0, 2), Cut(-1, 0)])
def test_a_cut_of_a_dimension_that_is_not_there_is_refused(cut):
    with pytest.raises(ValueError, match="names a dimension"):
        cut_block((4,), (2, 2), (0, 0), [cut])


@pytest.mark.parametrize("full_shape", [(3,), (4, 5, 1), (5, 4), (4, 5)])
def test_a_block_of_another_tensor_is_refused(full_shape):
    block = Block.rectangle((1, 2), (4, 3))
    assert block.fits((5, 5))
    assert not block.fits(full_shape)
    with pytest.raises(ValueError, match="is no block"):
        block.global_indices(full_shape)
