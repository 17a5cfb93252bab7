"""The older FullyShardedDataParallel as trainer and as receiver: every mode, real steps, every bit compared.

What a module holds is read in full with `summon_full_params`, which knows nothing of this package's geometry.
"""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dte_dist
from dte_dist import DeltaEngine, Layout, Plan, ProcessGroupTransport, RankLayout
from tests.distributed.flat_models import CPU, Model, Trainer, evaluated, half, prints, synced, whole, wrapped
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT

MODES = list(product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (True, False), (False, True)))
HYBRIDS = [("HYBRID_SHARD", True, True), ("_HYBRID_SHARD_ZERO2", False, True), ("HYBRID_SHARD", False, False)]
RECEIVERS = [
    ("FULL_SHARD", True, False),
    ("FULL_SHARD", False, True),
    ("SHARD_GRAD_OP", False, False),
    ("SHARD_GRAD_OP", True, True),
    ("NO_SHARD", True, False),
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def checked(results, steps):
    """Every rank holds the same bits after every sync, which change, and all but the first are deltas."""
    seen = set()
    for step in range(steps):
        reports, held = zip(*(result[step] for result in results), strict=True)
        assert all(each == held[0] for each in held), f"step {step}"
        assert len(set(reports)) == 1
        kind, changed, seeded = reports[0]
        assert kind == ("delta" if step else "full")
        assert changed > 0
        assert not step or seeded == ()
        seen.add(tuple(sorted(held[0].items())))
    assert len(seen) == steps, "training changes something in every step"


def facts(report):
    return report.kind, report.changed, report.seeded


def training(rank, world, strategy, orig, mixed):
    """Ranks 0 and 1 train, the others receive into whole copies; the last sync is in the background."""
    group = half(rank, 2, world)
    model = wrapped(Model(), strategy=strategy, orig=orig, mixed=mixed, group=group) if rank < 2 else Model(7)
    trainer, results = Trainer(model) if rank < 2 else None, []
    for step in range(4):
        if step < 3:
            report, held = synced(model, p2p=step % 2 == 1), prints(model)
        else:
            work = synced(model, p2p=True, async_op=True)
            held = prints(model) if trainer is not None else {}
        if trainer is not None:
            trainer.step()
        if step == 3:
            report = work.wait()
        results.append((facts(report), held or prints(model)))
    assert dte_dist.verify(model).equal
    dte_dist.close(model)
    return results


@pytest.mark.parametrize(("strategy", "orig", "mixed"), MODES)
def test_receivers_follow_every_mode(ranks, strategy, orig, mixed):
    results = ranks.run(training, strategy, orig, mixed)
    checked(results, 4)
    assert set(results[0][0][1]) == set(results[2][0][1]), "names are those of the model"


def hybrid(rank, world, strategy, orig, by_mesh):
    """Two shards, each on two ranks; all four train, and receive into a copy."""
    if by_mesh:
        model = wrapped(Model(), strategy=strategy, orig=orig, mesh=init_device_mesh("cpu", (2, 2)))
    else:
        pairs = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
        rows, columns = ([dist.new_group(list(pair)) for pair in each] for each in pairs)
        model = wrapped(Model(), strategy=strategy, orig=orig, group=(rows[rank // 2], columns[rank % 2]))
    trainer, into, results = Trainer(model), Model(7), []
    for step in range(3):
        report = synced(model, p2p=step % 2 == 0, into=into)
        assert prints(into) == prints(model)
        results.append((facts(report), prints(into)))
        trainer.step()
    placements = [entry.placement for entry in Layout.from_module(model).manifest.entries]
    dte_dist.close(model)
    held = [each for each in placements if each.block is not None and each.block.numel]
    return results, [each.mesh is not None for each in held]


@pytest.mark.parametrize(("strategy", "orig", "by_mesh"), HYBRIDS)
def test_replicas_of_hybrid_shards_take_turns(ranks, strategy, orig, by_mesh):
    results = ranks.run(hybrid, strategy, orig, by_mesh)
    checked([result for result, _ in results], 3)
    assert all(on_mesh and all(on_mesh) for _, on_mesh in results), "replicas are known to be some"


def receiving(rank, world, mode, trains_flat):
    """Ranks 0 and 1 train; 2 and 3 share an FSDP1 module that receives and is used after every sync."""
    group, (strategy, orig, mixed) = half(rank, 2, world), mode
    if rank >= 2:
        model = wrapped(Model(7), strategy=strategy, orig=orig, mixed=mixed, group=group)
    else:
        model = wrapped(Model(), group=group) if trains_flat else Model()
    trainer, results = Trainer(model) if rank < 2 else None, []
    for step in range(4):
        report = synced(model, p2p=step % 2 == 1, src=[0, 1])
        results.append((facts(report), prints(model)))
        if trainer is not None:
            trainer.step()
            continue
        used, alone = evaluated(model), Model(9)
        alone.load_state_dict(whole(model))
        bits = (output.view(torch.int32) for output in (used, evaluated(alone)))
        assert mixed or torch.equal(*bits), "what was received is used"
        evaluated(model)  # and again, from what may still be gathered
    assert dte_dist.verify(model).equal
    dte_dist.close(model)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("mode", RECEIVERS, ids=str)
@pytest.mark.parametrize("trains_flat", [True, False])
def test_a_receiver_uses_what_it_received(ranks, mode, trains_flat):
    checked(ranks.run(receiving, mode, trains_flat), 4)


def over_tensor_parallel(rank, world):
    """FSDP1 over tensor parallelism on four ranks: a range of a part of a tensor is a part of the tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.LayerNorm(5))
    into = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=CPU)
    optimizer, results = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    data = torch.Generator().manual_seed(1)
    for step in range(3):
        report = synced(model, p2p=step % 2 == 1, into=into)
        assert prints(into) == prints(model)
        results.append((facts(report), prints(into)))
        model(torch.randn(4, 6, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dte_dist.close(model)
    return results


def test_flattened_over_tensor_parallel(ranks):
    checked(ranks.run(over_tensor_parallel), 3)


def along_a_plan(rank, world):
    """A `DeltaEngine` and a `Plan` over Layouts of FSDP1 modules."""
    group = half(rank, 2, world)
    model = wrapped(Model() if rank < 2 else Model(7), group=group)
    layout = Layout.from_module(model)
    held = [None] * world
    dist.all_gather_object(held, RankLayout(layout.manifest, layout.coordinates))
    plan = Plan.between({0: held[0], 1: held[1]}, {2: held[2], 3: held[3]})
    transport = ProcessGroupTransport(dist.group.WORLD, plan=plan)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=TIMEOUT)
    trainer, results = Trainer(model), []
    for version in range(1, 4):
        if rank < 2:
            trainer.step()
            engine.push(layout, version)
        else:
            engine.pull(layout, version)
        results.append(prints(model))
    return results


def test_an_engine_follows_along_a_plan(ranks):
    results = ranks.run(along_a_plan)
    assert all(result == results[0] for result in results)
    assert len({tuple(step.items()) for step in results[0]}) == 3


def living(rank, world):
    """What a layout keeps alive: neither the module, nor memory that the module has given up."""
    model = wrapped(Model())
    layout, trainer = Layout.from_module(model), Trainer(model)
    view = next(found for found in layout._objects if not isinstance(found, torch.Tensor))
    for _ in range(2):
        layout.tensors()
        trainer.step()
    layout.tensors()
    assert view in layout._objects, "what training registers anew is no other module"
    flat = model._handle.flat_param
    memory = weakref.ref(flat.untyped_storage())
    flat.data = flat.data.clone()  # as frameworks do that offload a trainer between steps
    flat._local_shard = flat.data
    if model._handle._use_orig_params:
        model._handle._use_sharded_views()
    gc.collect()
    offloaded = memory() is None
    addresses = {tensor.untyped_storage().data_ptr() for tensor in layout.tensors()}
    found = flat.untyped_storage().data_ptr() in addresses
    alive = weakref.ref(model)
    del model, trainer, flat
    gc.collect()
    return offloaded, found, alive() is None


def test_a_layout_keeps_nothing_alive(ranks):
    assert ranks.run(living) == [(True, True, True)] * 4
