"""Real ranks: what may be written in several ways means the same: groups, dtypes, patterns, timeouts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dte_dist
from dte_dist import DeltaEngine, ProcessGroupTransport
from dte_dist.sync import registry
from tests.distributed.launcher import Ranks
from tests.distributed.shares import warm
from tests.distributed.tools import TIMEOUT, caught, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow

WORLD = 4


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def keys_of(module: nn.Module) -> list[Any]:
    return list(registry._channels.get(module, {}))


def a_mesh_and_its_group(rank: int, world: int) -> Any:
    mesh, module = init_device_mesh("cpu", (world,)), model(rank)
    versions, prints_of = [], []
    calls: list[Callable[..., Any]] = [dte_dist.delta_broadcast, dte_dist.delta_p2p, dte_dist.delta_broadcast]
    for call, group in zip(calls, (mesh, None, mesh.get_group()), strict=True):
        if rank == 0:
            nudge(module, "0.weight", 3)
        report = call(module, group, timeout=TIMEOUT)
        versions.append((report.version, report.kind))
        prints_of.append(prints(module))
    key = keys_of(module)
    equal = dte_dist.verify(module, mesh).equal
    if rank == 1:
        dte_dist.invalidate(module, mesh)
    seeded = sync(module, mesh).seeded
    dte_dist.close(module, mesh)
    return (
        versions,
        prints_of,
        len(key),
        [each is dist.group.WORLD for each in key],
        equal,
        seeded,
        keys_of(module),
    )


def test_a_mesh_of_one_dimension_is_its_group(ranks: Ranks) -> None:
    versions, _, count, world, equal, seeded, left = same(ranks.run(a_mesh_and_its_group))
    assert versions == [(1, "full"), (2, "delta"), (3, "delta")]
    assert (count, world, equal, seeded, left) == (1, [True], True, (1,), [])


def part_of_a_mesh(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("role", "shard"))
    module = model(rank)
    sync(module, mesh["shard"])
    report = sync(module, mesh.get_group("shard"))
    (key,) = keys_of(module)
    transport, weights = (
        ProcessGroupTransport(mesh["role"], timeout=TIMEOUT),
        {"w": torch.full((5,), float(rank))},
    )
    engine = DeltaEngine(transport, timeout=TIMEOUT)
    if mesh["role"].get_local_rank() == 0:
        engine.push(weights, 1)
    else:
        engine.pull(weights, 1)
    dist.barrier()
    transport.close()
    dte_dist.close(module, mesh["shard"])
    return (
        report.version,
        report.changed,
        key is mesh.get_group("shard"),
        prints(module),
        weights["w"].tolist(),
    )


def test_a_dimension_of_a_mesh_is_its_group(ranks: Ranks) -> None:
    found = ranks.run(part_of_a_mesh)
    assert [each[:3] for each in found] == [(2, 0, True)] * WORLD
    assert found[0][3] == found[1][3] != found[2][3] == found[3][3]
    assert [each[4][0] for each in found] == [0.0, 1.0, 0.0, 1.0]


TAKE_GROUPS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "delta_broadcast": sync,
    "delta_p2p": lambda module, group: dte_dist.delta_p2p(module, group, timeout=TIMEOUT),
    "async_op": lambda module, group: sync(module, group, async_op=True),
    "verify": dte_dist.verify,
    "invalidate": dte_dist.invalidate,
    "close": dte_dist.close,
    "ProcessGroupTransport": lambda _, group: ProcessGroupTransport(group, timeout=TIMEOUT),
}


def no_group(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    named = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("role", "shard"))
    numbered = init_device_mesh("cpu", (2, world // 2))
    some = DeviceMesh("cpu", [1, 2, 3])
    groupless = DeviceMesh("cpu", list(range(world)), _init_backend=False)
    said = []
    for call in TAKE_GROUPS.values():
        said.append(
            [
                caught(lambda call=call, group=group: call(module, group))
                for group in (named, numbered, groupless)
            ]
        )
        if rank == 0:
            said[-1].append(caught(lambda call=call: call(module, some)))
    return (
        said,
        sync(module).version,
        sync(model(rank)).version,
    )  # neither a channel nor the counting of them has suffered


def test_a_mesh_that_is_no_group_is_refused_with_the_way_out(ranks: Ranks) -> None:
    found = ranks.run(no_group)
    for said, *versions in found:
        assert versions == [2, 1]
        for (named, numbered, groupless, *others), where in zip(said, TAKE_GROUPS, strict=True):
            assert {kind for kind, _ in (named, numbered, groupless, *others)} == {"ValueError"}, where
            assert "mesh.get_group('role') or mesh.get_group('shard')" in named[1]
            assert "mesh.get_group(0) or mesh.get_group(1)" in numbered[1]
            assert "no process group" in groupless[1] and "pass the group itself" in groupless[1]
            assert all("not in the mesh" in text for _, text in others)
    assert len(found[0][0][0]) == 4


def ways_to_say_the_same(rank: int, world: int) -> Any:
    module = model(0) if rank < 2 else model(rank, torch.bfloat16)
    wires = [torch.bfloat16, "bf16", "bfloat16", torch.bfloat16]
    patterns = [["*.weight"], "*.weight", ("*.weight",), {"*.weight"}]
    versions = []
    for turn in range(4):
        at = (turn + rank) % 4
        report = sync(
            module,
            src=[0, 1],
            wire_dtype=wires[at],
            select=patterns[at],
            timeout=[TIMEOUT, timedelta(seconds=15)][at % 2],
        )
        versions.append((report.version, report.kind))
    weights = {name: bits for name, bits in prints(module.bfloat16()).items() if name.endswith("weight")}
    return (
        versions,
        caught(lambda: sync(module, src=[0, 1], wire_dtype="fp16", select="*.weight")),
        len(keys_of(module)),
        weights,
    )


def test_a_dtype_and_its_name_one_pattern_and_a_list_agree(ranks: Ranks) -> None:
    versions, (kind, text), channels, _ = same(ranks.run(ways_to_say_the_same))
    assert versions == [(1, "full"), (2, "delta"), (3, "delta"), (4, "delta")] and channels == 1
    assert kind == "ValueError" and text.startswith(
        "wire_dtype: not what the call that opened the channel passed"
    )


def no_dtype(rank: int, world: int) -> Any:
    return caught(lambda: sync(model(rank), wire_dtype="bf-16" if rank == 1 else "bf16"))


def test_a_name_of_no_dtype_on_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    kind, text = same(ranks.run(no_dtype))
    assert kind == "ValueError" and "'bf16', 'bfloat16'" in text and "got 'bf-16'" in text
