"""Distributed tier, four ranks over gloo: what moves on the wires of a `ProcessGroupTransport`, and where."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dte_dist
from dte_dist import DeltaEngine, Layout, Plan, ProcessGroupTransport
from dte_dist.transport.communicator import Communicator
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Ranks
from tests.distributed.meetings import PATIENCE, WORLD, meet, payload
from tests.distributed.shares import warm
from tests.distributed.tools import caught, digest, same


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def over_a_subgroup(rank: int, world: int) -> int:
    """A group in another order, whose ranks are not those of the world; it and a second transport over it, in
    turns.
    """
    group = dist.new_group([3, 1, 2], sort_ranks=False)
    if rank == 0:
        return 5
    first, second = (ProcessGroupTransport(group, src=src, timeout=PATIENCE) for src in (0, 2))
    mine = dist.get_rank(group)
    for version in range(1, 6):
        assert meet(first, mine, version) == meet(second, mine, version, src=2) == version
    for transport in (first, second):
        transport.close()
    dist.destroy_process_group(group)
    return version


def test_groups_of_any_members_and_several_transports(ranks: Ranks) -> None:
    assert same(ranks.run(over_a_subgroup)) == 5


def beside_the_user(rank: int, world: int) -> None:
    """The user's collectives on the same group and a `delta_broadcast`, while payloads travel."""
    transport, stop = ProcessGroupTransport(timeout=PATIENCE), threading.Event()
    module = torch.nn.Linear(20, 20)
    wrong: list[Any] = []

    def talk() -> None:
        for number in range(60):
            values = torch.full((50,), rank + number)
            dist.all_reduce(values)
            if values.tolist() != [6 + 4 * number] * 50:
                wrong.append(values)
        stop.set()

    thread = threading.Thread(target=talk)
    thread.start()
    for version in range(1, 20):
        got = payload(version, 1000)
        if rank == 0:
            transport.send(got, timeout=PATIENCE)
        else:
            assert same_bits(transport.receive(version, timeout=PATIENCE).tensors["w"], got.tensors["w"])
    thread.join()
    assert stop.is_set() and not wrong
    for version in range(20, 23):
        dte_dist.delta_broadcast(module, timeout=PATIENCE)
        meet(transport, rank, version)
    dte_dist.close(module)
    transport.close()


def test_its_traffic_never_meets_the_users(ranks: Ranks) -> None:
    ranks.run(beside_the_user)


def large(rank: int, world: int, numel: int) -> None:
    transport = ProcessGroupTransport(timeout=60.0)
    expected = payload(3, numel)
    if rank == 0:
        transport.send(expected, timeout=60.0)
    else:
        came = transport.receive(3, timeout=60.0)
        assert (came.lineage, came.base_lineage, came.base_version, came.full) == (4, 0, -1, True)
        assert all(same_bits(came.tensors[name], tensor) for name, tensor in expected.tensors.items())
    transport.close()


@pytest.mark.parametrize("numel", [0, 1, (1 << 22) - 2, (1 << 22) + 1, 9 << 20], ids=str)
def test_payloads_of_any_size_arrive_bit_for_bit(ranks: Ranks, numel: int) -> None:
    ranks.run(large, numel)


class Counted:
    """Bytes of descriptions and data that a rank sends to each other rank, point to point; rows of numbers
    are left out.
    """

    def __enter__(self) -> Counted:
        self.sent: dict[int, int] = {}
        self._patch = pytest.MonkeyPatch()
        send = Communicator.send

        def counted(wire: Communicator, tensor: torch.Tensor, to: int) -> Any:
            if tensor.dtype == torch.uint8:
                self.sent[to] = self.sent.get(to, 0) + tensor.numel()
            return send(wire, tensor, to)

        self._patch.setattr(Communicator, "send", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def shards(rank: int, world: int, colocated: bool) -> dict[int, int]:
    """Rows of 4 senders, or of 2, to receivers that hold the same rows on other ranks; return the bytes that
    this one sent.
    """
    full, rows = torch.arange(4 * 1000, dtype=torch.float32).view(4, 1000), 1 if colocated else 2

    def view(tensor: torch.Tensor, low: int) -> Layout:
        return Layout.from_views([("w", tensor, (4, 1000), (low, 0))])

    homes = [1, 0, 2, 3] if colocated else [0, 1]  # ranks 0 and 1 hold each other's rows
    parts = [full[rows * sender : rows * (sender + 1)].clone() for sender in range(len(homes))]
    senders = {sender: view(part, rows * sender) for sender, part in enumerate(parts)}
    first = 0 if colocated else 2
    copies = {first + place: torch.zeros(rows, 1000) for place in range(len(homes))}
    targets = {receiver: view(tensor, rows * homes[receiver - first]) for receiver, tensor in copies.items()}
    plan = Plan.between(senders, targets)
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    with Counted() as counted:
        for version in (1, 2):
            if rank in senders:
                engine.push(senders[rank], version)
            if rank in targets:
                engine.pull(targets[rank], version)
    if rank in copies:
        low = rows * homes[rank - first]
        assert torch.equal(copies[rank], full[low : low + rows])
    transport.close()
    return counted.sent


def test_payloads_go_only_to_the_ranks_that_need_them(ranks: Ranks) -> None:
    sent = ranks.run(shards, False)
    assert [set(each) for each in sent] == [{2}, {3}, set(), set()]
    assert all(8000 < sent[rank][rank + 2] < 8000 + 1500 for rank in (0, 1))


def test_what_a_rank_sends_itself_does_not_travel(ranks: Ranks) -> None:
    """Ranks 0 and 1 swap their rows; 2 and 3 are their own receivers, and meet nobody."""
    sent = ranks.run(shards, True)
    assert [set(each) for each in sent] == [{1}, {0}, set(), set()]


def one_sided(rank: int, world: int) -> list[float]:
    """Rank 0 holds all rows and sends only to itself; its first payload to come is that of rank 1, the root
    of the plan.
    """
    full = torch.arange(32.0).view(8, 4)
    sources = {1: [("w", full[4:].clone(), (8, 4), (4, 0))], 0: [("w", full[:4].clone(), (8, 4), (0, 0))]}
    copies = {0: torch.zeros(8, 4), 2: torch.zeros(2, 4)}
    senders = {each: Layout.from_views(views) for each, views in sources.items()}
    targets = {
        each: Layout.from_views([("w", copies[each], (8, 4), (low, 0))]) for each, low in ((0, 0), (2, 5))
    }
    plan = Plan.between(senders, targets)
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    for version in range(3):
        if rank in senders:
            engine.push(senders[rank], version)
            sources[rank][0][1][version] += 1
        if rank in targets:
            engine.pull(targets[rank], version)
    transport.close()
    return copies[rank].view(-1).tolist() if rank in copies else []


def test_a_receiver_that_sends_only_to_itself(ranks: Ranks) -> None:
    expected = torch.arange(32.0).view(8, 4)
    for version in range(2):
        expected[[version, 4 + version]] += 1
    assert ranks.run(one_sided) == [expected.view(-1).tolist(), [], expected[5:7].reshape(-1).tolist(), []]


def as_a_user_would(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Two trainers with DTensors on a mesh, two rollout ranks cut the other way; every rank knows only what
    it holds itself.
    """
    trainers, rollouts = [0, 1], [2, 3]
    mine, dim = (trainers, 0) if rank in trainers else (rollouts, 1)
    mesh = DeviceMesh("cpu", mine, _init_backend=False, _rank=rank)
    full = {"w": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)), "b": torch.arange(3.0)}
    parts = {
        name: tensor.chunk(2, min(dim, tensor.dim() - 1))[mine.index(rank)].clone()
        for name, tensor in full.items()
    }
    cut = {name: [Shard(min(dim, full[name].dim() - 1))] for name in full}
    if rank in rollouts:
        parts = {name: torch.zeros_like(part) for name, part in parts.items()}
    module = torch.nn.Module()
    for name, part in parts.items():
        tensor = DTensor.from_local(
            part, mesh, cut[name], run_check=False, shape=full[name].shape, stride=full[name].stride()
        )
        module.register_parameter(name, torch.nn.Parameter(tensor))
    layout = Layout.from_module(module)
    held: list[Any] = [None] * world
    dist.all_gather_object(held, dte_dist.RankLayout(layout.manifest, layout.coordinates))
    plan = Plan.between({each: held[each] for each in trainers}, {each: held[each] for each in rollouts})
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    for version in range(3):
        if rank in trainers:
            engine.push(layout, version)
            parts["w"][version, version] += 1
        else:
            engine.pull(layout, version)
        if version < 2:
            full["w"][version, version] += 1
            full["w"][4 + version, version] += 1
    transport.close()
    expected = [
        digest(tensor.chunk(2, min(dim, tensor.dim() - 1))[mine.index(rank)].contiguous())
        for tensor in full.values()
    ]
    return [digest(part) for part in parts.values()], expected


def test_as_a_user_would(ranks: Ranks) -> None:
    for got, expected in ranks.run(as_a_user_would)[2:]:
        assert got == expected


def lonely(rank: int, world: int) -> None:
    """A group of one rank, whose sender receives from itself; and a rank that pulls before it pushes."""
    groups = [dist.new_group([each]) for each in range(world)]
    transport = ProcessGroupTransport(groups[rank], timeout=PATIENCE)
    model, copy = {"w": torch.randn(30)}, {"w": torch.zeros(30)}
    engine = DeltaEngine(transport)
    for version in range(3):
        model["w"][version] += 1
        engine.push(model, version)
        engine.pull(copy, version)
        assert same_bits(model["w"], copy["w"])
    assert caught(lambda: engine.pull(copy, 3))[0] == "VersionGap"
    transport.close()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_group_of_one(ranks: Ranks) -> None:
    ranks.run(lonely)
