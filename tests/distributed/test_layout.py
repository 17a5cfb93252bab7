"""Layouts of real DTensors and real FSDP modules on eight ranks.

Every parameter holds its own flat positions (an arange), so what a rank really holds can be read off the
values, and must be what `Block.global_indices` says; the parent computes that from the bytes of the manifest
and the coordinates.
"""

from __future__ import annotations

import gc
import weakref
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout, Manifest, ShardSpec
from tests.distributed.launcher import Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8) as ranks:
        yield ranks


def positions(shape):
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


def numbered(module):
    """The module, not sharded yet, with every parameter and buffer set to its own flat positions."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(positions(tensor.shape))
    return module


def report(layout):
    """What the parent needs to check a rank."""
    return (
        layout.manifest.to_bytes(),
        layout.coordinates,
        [tensor.flatten().tolist() for tensor in layout.tensors()],
    )


def check(reports, *, complete=True):
    """Every rank holds what its blocks say, and together they hold everything; returns the shapes by name."""
    held, shapes = {}, {}
    for rank, (data, coordinates, tensors) in reports.items():
        manifest = Manifest.from_bytes(data)
        assert len(tensors) == len(manifest.entries)
        for entry, values in zip(manifest.entries, tensors, strict=True):
            block = manifest.block(entry, coordinates)
            expected = [] if block is None else block.global_indices(entry.shape).tolist()
            assert values == expected, f"rank {rank}, {entry}"
            held.setdefault(entry.name, set()).update(values)
            shapes[entry.name] = entry.shape
    for name, shape in shapes.items() if complete else ():
        assert held[name] == set(range(prod(shape))), name
    return shapes


def members(results):
    return {rank: result for rank, result in enumerate(results) if result is not None}


CASES = [
    ((5, 3), (4,), [Shard(0)]),
    ((1, 3), (4,), [Shard(0)]),
    ((3, 5), (4,), [Shard(1)]),
    ((3, 5), (8,), [Shard(-1)]),
    ((), (4,), [Replicate()]),
    ((6,), (1,), [Shard(0)]),
    ((4, 0), (2, 2), [Shard(0), Replicate()]),
    ((0, 4), (4,), [Shard(0)]),
    ((7, 3), (2, 2), [Shard(0), Shard(0)]),
    ((7, 5), (2, 2), [Shard(0), Shard(1)]),
    ((7, 5), (2, 4), [Shard(1), Shard(0)]),
    ((6, 4), (2, 4), [Replicate(), Shard(0)]),
    ((11, 3), (2, 2, 2), [Shard(0), Shard(0), Shard(0)]),
    ((5, 7), (2, 2, 2), [Shard(1), Shard(0), Shard(1)]),
    ((5, 3, 4), (2, 2, 2), [Shard(2), Replicate(), Shard(0)]),
]


def distributed_tensors(rank, world):
    meshes = {shape: DeviceMesh("cpu", torch.arange(prod(shape)).view(shape)) for _, shape, _ in CASES}
    return report(
        Layout.from_tensors(
            (f"{i}", distribute_tensor(positions(shape), meshes[mesh], cut))
            for i, (shape, mesh, cut) in enumerate(CASES)
        )
    )


@pytest.mark.slow
def test_distributed_tensors_hold_what_their_blocks_say(ranks):
    results = ranks.run(distributed_tensors)
    check(members(results))
    outside = Manifest.from_bytes(results[7][0])
    assert (
        sum(outside.block(entry, results[7][1]) is None for entry in outside.entries)
        == sum(prod(mesh) < 8 for _, mesh, _ in CASES)
        == 9
    )
    assert len({data for data, _, _ in results}) == 1, "a manifest does not depend on the rank"


class Model(nn.Module):
    """Uneven rows, a tie, a frozen parameter, buffers, and parameters with fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.small = nn.Linear(6, 3)
        self.back = nn.Linear(3, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.small.bias.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.back(self.small(self.norm(self.inner(self.embed(tokens)))))
        return self.head(hidden)


TOKENS = torch.arange(8) % 5


def sharded(mesh, **options):
    model = numbered(Model())
    fully_shard(model.inner, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_variants(rank, world, variant):
    flat, hybrid = (
        init_device_mesh("cpu", (8,)),
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")),
    )
    models = {
        "plain": lambda: sharded(flat),
        "hybrid": lambda: sharded(hybrid),
        "offloaded": lambda: sharded(flat, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "mixed": lambda: sharded(flat, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        "bfloat16": lambda: sharded(flat).to(torch.bfloat16),
    }
    layout = Layout.from_module(model := models[variant]())
    before = report(layout)
    if variant in ("mixed", "bfloat16"):  # in which batch norm cannot run
        model.unshard()
    else:
        with torch.no_grad():
            model.eval()(TOKENS)
    return before, report(layout), layout.manifest.ties


@pytest.mark.parametrize("variant", ["plain", "hybrid", "offloaded", "mixed", "bfloat16"])
def test_fully_sharded_modules_hold_what_their_blocks_say(ranks, variant):
    results = ranks.run(fsdp_variants, variant)
    shapes = check(members([before for before, _, _ in results]))
    assert [before for before, _, _ in results] == [after for _, after, _ in results], (
        "being unsharded in between changes nothing"
    )
    assert shapes["embed.weight"] == shapes["head.weight"] == (11, 6)
    assert shapes["norm.num_batches_tracked"] == ()
    assert len(shapes) == 12
    assert {ties for _, _, ties in results} == {(("embed.weight", "head.weight"),)}, (
        "also where the shard is empty"
    )
    assert len({before[0] for before, _, _ in results}) == 1


def over_tensor_parallel(rank, world, mesh_shape, shape, dims):
    """One parameter, tensor parallel along the first of `dims`, fully sharded along the second; None outside
    the mesh.
    """
    names = ("replicate", "dp", "tp")[-len(mesh_shape) :]
    mesh = DeviceMesh("cpu", torch.arange(prod(mesh_shape)).view(mesh_shape), mesh_dim_names=names)
    if rank >= prod(mesh_shape):
        return None
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(positions(shape), mesh["tp"], [Shard(dims[0])]))
    fully_shard(module, mesh=mesh[names[:-1]], shard_placement_fn=lambda parameter: Shard(dims[1]))
    local = module.weight._local_tensor
    spec = ShardSpec(shape, module.weight._spec.mesh, module.weight.placements)
    by_hand = Layout.from_shards([("weight", local, spec)])
    layout = Layout.from_module(module)
    return (
        report(layout),
        layout.manifest.digest() == by_hand.manifest.digest(),
        any(hasattr(p, "split_factor") for p in spec.placements),
    )


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "dims", "strided"),
    [
        ((3, 2), (7, 3), (0, 0), True),  # the helper of torch has this one wrong
        ((4, 2), (7, 3), (0, 0), True),
        ((2, 4), (7, 3), (0, 0), True),
        ((4, 2), (57, 2), (0, 0), True),
        ((2, 2, 2), (13, 2), (0, 0), True),
        ((4, 2), (7, 5), (1, 0), False),
        ((2, 3), (3, 7), (1, 0), False),
        ((4, 2), (5, 8), (0, 1), False),
        ((2, 4), (3, 16), (1, 1), True),
        ((4, 2), (1, 3), (0, 0), True),
    ],
)
def test_fsdp_over_tensor_parallel_holds_what_its_blocks_say(ranks, mesh_shape, shape, dims, strided):
    results = members(ranks.run(over_tensor_parallel, mesh_shape, shape, dims))
    assert len(results) == prod(mesh_shape)
    check({rank: result[0] for rank, result in results.items()})
    assert all(by_hand for _, by_hand, _ in results.values())
    assert all(is_strided == strided for _, _, is_strided in results.values()), (
        "the case is the one that it says it is"
    )


def parallelized(rank, world):
    """Column and row parallel layers, a norm on the data-parallel mesh only, and a bias that is tensor
    parallel.
    """
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = numbered(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 5), nn.LayerNorm(5)))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    layout = Layout.from_module(fully_shard(model, mesh=mesh["dp"]))
    return report(layout), [mesh.shape for mesh in layout.manifest.meshes]


def test_parallelized_modules_hold_what_their_blocks_say(ranks):
    results = ranks.run(parallelized)
    shapes = check(members([result for result, _ in results]))
    assert shapes == {
        "0.bias": (9,),
        "0.weight": (9, 5),
        "1.bias": (5,),
        "1.weight": (5, 9),
        "2.bias": (5,),
        "2.weight": (5,),
    }
    assert all(sorted(meshes) == [(4,), (4, 2)] for _, meshes in results)


def moving_parameter(rank, world):
    mesh = init_device_mesh("cpu", (8,))
    weights = {f"half{half}": DeviceMesh("cpu", list(range(4 * half, 4 * half + 4))) for half in (0, 1)}
    tensors = {name: distribute_tensor(positions((7, 2)), half, [Shard(0)]) for name, half in weights.items()}
    tensors["all"] = distribute_tensor(positions((7, 2)), mesh, [Shard(0)])
    layout = Layout.from_tensors(tensors)
    return report(layout), layout.coordinates


def test_parameters_on_different_meshes(ranks):
    results = ranks.run(moving_parameter)
    check(members([result for result, _ in results]))
    assert [coordinates for _, coordinates in results] == [
        ((rank,), (rank,), None) if rank < 4 else ((rank,), None, (rank - 4,)) for rank in range(8)
    ]


def fresh_after_forward(rank, world, reshard):
    """Train one step by hand around a layout that was built before; return what it reads and what was
    registered.
    """
    mesh = init_device_mesh("cpu", (8,))
    model = fully_shard(numbered(nn.Linear(6, 16)), mesh=mesh, reshard_after_forward=reshard)
    layout = Layout.from_module(model)
    sharded_bias, sharded_weight = layout.tensors()
    model(torch.ones(2, 6)).sum()
    registered = model.weight
    stale = (
        not isinstance(registered, DTensor)
        or registered._local_tensor.data_ptr() != sharded_weight.data_ptr()
    )
    early = Layout.from_module(model) if rank % 2 else layout
    again = [tensor.data_ptr() for tensor in early.tensors()]
    with torch.no_grad():
        model.weight.to_local().add_(1)
    values = layout.tensors()[1].flatten().tolist()
    first = 12 * rank
    return {
        "stale": stale,
        "same": again == [sharded_bias.data_ptr(), sharded_weight.data_ptr()],
        "values": values == [float(first + step + 1) for step in range(12)],
        "placements": str(early.manifest.entries[1].placement.cuts),
    }


@pytest.mark.parametrize(("reshard", "stale"), [(False, True), (2, True), (True, False), (None, True)])
def test_after_a_forward_the_sharded_parameters_are_read(ranks, reshard, stale):
    for result in ranks.run(fresh_after_forward, reshard):
        assert result == {
            "stale": stale,
            "same": True,
            "values": True,
            "placements": "(Cut(dim=0, mesh_dim=0, split_factor=1),)",
        }


def read_inside_forward(rank, world, build_before):
    model = fully_shard(nn.Sequential(nn.Linear(2, 8), nn.ReLU()), mesh=init_device_mesh("cpu", (8,)))
    layout = Layout.from_module(model)
    texts = []

    def read(*_):
        with pytest.raises(LayoutMismatch) as caught:
            layout.tensors() if build_before else Layout.from_module(model)
        texts.append(str(caught.value))

    model[0].register_forward_hook(read)
    model(torch.ones(1, 2))
    return texts


@pytest.mark.parametrize("build_before", [True, False])
def test_inside_a_forward_is_refused_by_name(ranks, build_before):
    for (text,) in ranks.run(read_inside_forward, build_before):
        assert "stays unsharded" in text
        assert "tensor '0.weight'" in text
        assert "not inside" in text


def sharded_module_dies(rank, world):
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (8,)))
    with torch.no_grad():
        model.eval()(TOKENS)
    layout, alive = Layout.from_module(model), weakref.ref(model)
    layout.tensors()
    del model
    gc.collect()
    return alive() is None


def test_a_layout_keeps_no_sharded_module_alive(ranks):
    assert ranks.run(sharded_module_dies) == [True] * 8


def sharded_later(rank, world):
    """A module that is sharded, or unsharded by hand, after its layout was built."""
    mesh, texts = init_device_mesh("cpu", (8,)), []
    model = nn.Linear(2, 9)
    layout = Layout.from_module(model)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        with pytest.raises(LayoutMismatch) as caught:
            layout.tensors()
        texts.append(str(caught.value))
    model.unshard()
    copies = dict(model.named_parameters())
    shards = [type(tensor).__name__ for tensor in Layout.from_module(model).tensors()]
    with pytest.raises(LayoutMismatch) as caught:
        Layout.from_tensors(copies)
    return [*texts, str(caught.value)], shards


def test_a_module_that_is_sharded_later_is_refused(ranks):
    for (first, second, freed), shards in ranks.run(sharded_later):
        assert "tensor 'bias'" in first == second
        assert "placement" in first
        assert "storage of the tensor has been freed [tensor 'bias']" in freed
        assert shards == ["Tensor", "Tensor"]


def refusals(rank, world):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    rows = (3, 2, 2, 2)[rank // 2]
    tensors = {
        "partial": DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Partial()]),
        "mislaid": DTensor.from_local(
            torch.ones(rows, 2), mesh, [Shard(0), Replicate()], shape=(9, 2), stride=(2, 1), run_check=False
        ),
        "strided": DTensor.from_local(
            torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2), Replicate()], run_check=False
        ),
        "meta": DTensor.from_local(
            torch.ones(2, 2, device="meta"), mesh, [Shard(0), Replicate()], run_check=False
        ),
    }
    texts = {}
    for name, tensor in tensors.items():
        try:
            Layout.from_tensors({name: tensor})
        except LayoutMismatch as error:
            texts[name] = str(error)
    return texts


def test_placements_without_a_layout_are_refused_by_name(ranks):
    results = ranks.run(refusals)
    for rank, texts in enumerate(results):
        assert "not reduced yet [tensor 'partial']" in texts["partial"]
        assert "redistribute" in texts["partial"]
        assert "tensor 'strided'" in texts["strided"]
        assert "tensor 'meta'" in texts["meta"]
        assert ("mislaid" in texts) == (rank >= 2), "chunks of nine rows are 3, 3, 3, 0"
    assert "tensor 'mislaid'; expected (3, 2); got (2, 2)" in results[3]["mislaid"]


def flattened(rank, world):
    """The older FSDP: as a module, and as a sharded state dict of either kind."""
    outcomes = {}
    for kind, mesh in (("ShardedTensor", None), ("DTensor", init_device_mesh("cpu", (8,)))):
        model = FullyShardedDataParallel(
            numbered(nn.Linear(3, 5)), device_id=torch.device("cpu"), device_mesh=mesh
        )
        outcomes["module", kind] = report(Layout.from_module(model)), set()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
        outcomes[kind] = (
            report(Layout.from_tensors(state)),
            {type(tensor).__name__ for tensor in state.values()},
        )
    return outcomes


def test_modules_and_state_dicts_of_the_older_fsdp(ranks):
    results = ranks.run(flattened)
    for kind in ("ShardedTensor", "DTensor", ("module", "ShardedTensor"), ("module", "DTensor")):
        assert {name for result in results for name in result[kind][1]} == (
            {kind} if isinstance(kind, str) else set()
        )
        assert check(members([result[kind][0] for result in results])) == {"weight": (5, 3), "bias": (5,)}


def loose_ends(rank, world):
    """Wrapped in DDP; tied only by storage; still on its way from a collective."""
    mesh = init_device_mesh("cpu", (8,))
    wrapped = DistributedDataParallel(nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)}).requires_grad_())
    state = fully_shard(Model(), mesh=mesh).state_dict()
    late = distribute_tensor(positions((9, 2)), mesh, [Shard(0)]).redistribute(
        mesh, [Replicate()], async_op=True
    )
    layout = Layout.from_tensors({"late": late})
    return (
        [entry.name for entry in Layout.from_module(wrapped).manifest.entries],
        Layout.from_tensors(state).manifest.ties,
        [type(tensor).__name__ for tensor in (late._local_tensor, *layout.tensors())],
        report(layout),
    )


def test_wrapped_tied_and_late_tensors(ranks):
    results = ranks.run(loose_ends)
    for names, ties, kinds, _ in results:
        assert names == ["module.weight"], "the segment of DDP goes, that of the module stays"
        assert ties == (("embed.weight", "head.weight"),), "also where the shard is empty"
        assert kinds == ["AsyncCollectiveTensor", "Tensor"], "what is on its way is waited for"
    check(members([late for *_, late in results]))
