"""DTensor placements become ordered chunks: against torch's own decoder, and with what must be refused."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Cut, Layout, ShardSpec, cut_block
from dte_dist.layout.sharding import chunking_of


class FakeMesh:
    """As much of a mesh as torch's decoder looks at."""

    def __init__(self, shape):
        self.shape = shape

    def size(self, dim):
        return self.shape[dim]


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(meshes, st.data())
def test_the_order_behind_strided_shards_is_recovered(mesh_shape, data):
    order = data.draw(st.permutations(range(len(mesh_shape))))[: data.draw(st.integers(1, len(mesh_shape)))]
    plain = [Shard(0) if mesh_dim in order else Replicate() for mesh_dim in range(len(mesh_shape))]
    entry = ShardOrderEntry(tensor_dim=0, mesh_dims=tuple(order))
    written = DTensorSpec._convert_shard_order_to_StridedShard((entry,), tuple(plain), FakeMesh(mesh_shape))
    size = data.draw(st.integers(0, 30))
    expected = [Cut(0, mesh_dim) for mesh_dim in order]
    cuts = chunking_of("w", (size,), mesh_shape, written)
    assert all(cut.split_factor == 1 for cut in cuts)
    for coordinate in product(*map(range, mesh_shape)):
        assert cut_block((size,), mesh_shape, coordinate, cuts) == cut_block(
            (size,), mesh_shape, coordinate, expected
        )


shard_like = st.one_of(
    st.builds(Shard, st.integers(0, 1)),
    st.just(Replicate()),
    st.builds(
        lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 1), st.integers(1, 6)
    ),
)


@given(st.lists(st.tuples(st.integers(2, 4), shard_like), min_size=1, max_size=3))
def test_the_decoder_agrees_with_that_of_torch(axes):
    mesh_shape, placements = tuple(size for size, _ in axes), tuple(placement for _, placement in axes)
    theirs = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, FakeMesh(mesh_shape))
    if theirs is None:  # 7 divides by none of the meshes: what has no order has no meaning either
        with pytest.raises(LayoutMismatch, match=r"tensor 'w'.*redistribute"):
            chunking_of("w", (7, 7), mesh_shape, placements)
    else:
        expected = [Cut(entry.tensor_dim, mesh_dim) for entry in theirs for mesh_dim in entry.mesh_dims]
        assert list(chunking_of("w", (7, 7), mesh_shape, placements)) == expected


def test_an_explicit_shard_order_is_followed():
    cuts = chunking_of("w", (7, 3), (2, 3), (Shard(0), Shard(0)), shard_order=(ShardOrderEntry(0, (1, 0)),))
    assert cuts == (Cut(0, 1), Cut(0, 0))


def test_negative_dimensions_are_normalised_and_single_coordinates_cut_nothing():
    assert chunking_of("w", (7, 3), (2, 2), (Shard(-1), Shard(-2))) == (Cut(0, 1), Cut(1, 0))
    assert chunking_of("w", (7, 3), (1, 2), (_StridedShard(0, split_factor=5), Shard(0))) == (Cut(0, 1),)


def test_a_split_factor_of_no_order_is_taken_literally_where_it_divides_evenly():
    placements = (_StridedShard(0, split_factor=3), Shard(0))
    assert chunking_of("w", (12,), (2, 2), placements) == (Cut(0, 0, 3), Cut(0, 1))
    with pytest.raises(LayoutMismatch, match="divides evenly"):
        chunking_of("w", (14,), (2, 2), placements)
    with pytest.raises(LayoutMismatch, match="divides evenly"):
        chunking_of("w", (6,), (2, 2), placements)


def test_split_factors_are_taken_literally_where_the_spec_says_so():
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert chunking_of("w", (8,), (2, 2), placements, decode=False) == (Cut(0, 0, 2), Cut(0, 1))
    assert chunking_of("w", (7,), (2, 2), placements) == (Cut(0, 1), Cut(0, 0))
    with pytest.raises(LayoutMismatch, match="divides evenly"):
        chunking_of("w", (7,), (2, 2), placements, decode=False)


class UnknownShard(Shard):
    """A placement from elsewhere: what it means is not known here."""


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Partial(), "not reduced yet"),
        (Partial("avg"), "not reduced yet"),
        (_MaskPartial(offset_shape=(4, 2), offset_dim=0), "not reduced yet"),
        (_StridedShard(0, split_factor=2), "does not say where its pieces lie"),
        (UnknownShard(0), "is not known"),
        (Shard(2), "not there"),
        (Shard(-3), "not there"),
    ],
)
def test_what_has_no_layout_is_refused_by_name(placement, text):
    with pytest.raises(LayoutMismatch, match=rf"{text}.*tensor 'layers.0.w'"):
        chunking_of("layers.0.w", (8, 8), (2,), (placement,))


@pytest.mark.parametrize("arguments", [((4,), "cpu", (Shard(0),)), ((4,), None, (Shard(0),))])
def test_a_spec_of_the_wrong_types_is_refused(arguments):
    with pytest.raises(ValueError, match="mesh"):
        ShardSpec(*arguments)


@pytest.fixture(scope="module")
def fake_world():
    """1024 ranks that answer every collective at once; this process is rank 777."""
    dist.init_process_group("fake", store=FakeStore(), rank=777, world_size=1024)
    yield
    dist.destroy_process_group()


def all_blocks(layout, index):
    """The blocks of one entry on all coordinates of its mesh that no other one repeats."""
    placement, meshes = layout.manifest.entries[index].placement, layout.manifest.meshes
    cut = {cut.mesh_dim for cut in placement.cuts}
    for coordinate in product(
        *(range(size) if dim in cut else (0,) for dim, size in enumerate(meshes[placement.mesh].shape))
    ):
        yield layout.manifest.block(index, [coordinate] * len(meshes))


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("rows", "mesh_shape"),
    [
        (50257, (512, 2)),
        (32003, (256, 4)),
        (49953, (128, 8)),
        (151936, (128, 8)),
        (1000, (512, 2)),
        (7, (128, 8)),
    ],
)
def test_blocks_of_1024_ranks_partition_a_vocabulary_under_fsdp_over_tp(rows, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(rows, 2), mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    assert hasattr(module.weight.placements[0], "split_factor")
    layout = Layout.from_module(module)
    held = [
        row
        for block in all_blocks(layout, 0)
        for start, length in block.runs[0]
        for row in range(start, start + length)
    ]
    assert sorted(held) == list(range(rows))
    assert layout.manifest.block(0, layout.coordinates).numel == layout.tensors()[0].numel()


@pytest.mark.usefixtures("fake_world")
def test_hsdp_and_three_cuts_on_1024_ranks():
    mesh = init_device_mesh("cpu", (4, 32, 8), mesh_dim_names=("replicate", "dp", "tp"))
    module = nn.Linear(13, 1001)
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh["tp"], [Shard(0)]))
    module.bias = nn.Parameter(distribute_tensor(module.bias, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["replicate", "dp"])
    cut = distribute_tensor(torch.zeros(1001, 3), mesh, [Shard(0)] * 3)
    for layout in (Layout.from_module(module), Layout.from_tensors({"cut": cut})):
        for index, entry in enumerate(layout.manifest.entries):
            assert sum(block.numel for block in all_blocks(layout, index)) == prod(entry.shape)
