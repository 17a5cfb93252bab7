"""Distributed tier, four ranks over gloo: ranks that train shards under FSDP2 are the sources,
and may receive into another module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    digest,
    facts,
    model,
    prints,
    same,
    sync,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def trainers(rank: int, world: int, how: str) -> Any:
    mesh = DeviceMesh("cpu", [0, 1])
    module = model(1 if rank < 2 else rank)
    if rank < 2:
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh)
    options: dict[str, Any] = {"mesh": {"src": mesh}, "ranks": {"src": [0, 1]}, "default": {}}[how]
    found = []
    for step in range(3):
        report = sync(module, **options)
        if rank < 2:
            whole = {
                n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.state_dict().items()
            }
            found.append((facts(report)[:5], {name: digest(tensor) for name, tensor in whole.items()}))
            module(torch.ones(2, 12)).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.5 / (step + 1)).step()
        else:
            found.append((facts(report)[:5], prints(module)))
    return found


@pytest.mark.parametrize("how", ["default", "mesh", "ranks"])
def test_fsdp2_trainers_are_the_sources_by_default_by_mesh_and_by_ranks(ranks: Ranks, how: str) -> None:
    found = same(ranks.run(trainers, how))
    assert [report[2] for report, _ in found] == ["full", "delta", "delta"] and len(
        {str(bits) for _, bits in found}
    ) == 3


def colocated(rank: int, world: int) -> Any:
    mesh = DeviceMesh("cpu", list(range(world)))
    trained, copy = model(1), model(10 + rank)
    fully_shard(trained, mesh=mesh)
    sync(trained, into=copy)
    trained(torch.ones(2, 12)).sum().backward()
    torch.optim.SGD(trained.parameters(), lr=0.5).step()
    addresses = [p.data_ptr() for p in copy.parameters()]
    report = sync(trained, into=copy)
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in trained.state_dict().items()}
    assert [p.data_ptr() for p in copy.parameters()] == addresses
    return (
        facts(report)[:4],
        {name: digest(tensor) for name, tensor in whole.items()} == prints(copy),
        prints(copy),
    )


def test_every_rank_trains_a_shard_and_receives_a_whole_copy_into_another_module(ranks: Ranks) -> None:
    report, equal, _ = same(ranks.run(colocated))
    assert report == (2, 1, "delta", "") and equal


def into_on_some(rank: int, world: int) -> Any:
    module, copy = model(rank), model(20 + rank)
    before = prints(module)
    for _ in range(2):
        sync(module, src=0, into=copy if rank in (0, 2) else None)
    return prints(copy if rank in (0, 2) else module), prints(module) == before


def test_into_on_the_root_and_on_a_mere_receiver_beside_plain_receivers(ranks: Ranks) -> None:
    found = ranks.run(into_on_some)
    same([bits for bits, _ in found])
    assert [untouched for _, untouched in found] == [True, False, True, False]
