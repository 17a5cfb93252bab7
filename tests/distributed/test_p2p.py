"""delta_p2p on real ranks (gloo): what moves, and that it is what delta_broadcast would have left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dte_dist
from dte_dist.report import format_bytes
from dte_dist.transport.communicator import Communicator
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Ranks

ROWS, COLUMNS = 16384, 96


@pytest.fixture(scope="module")
def ranks():
    with Ranks(6) as ranks:
        yield ranks


def _truth(step: int) -> torch.Tensor:
    """Return the weights of one step: about 2 % of them change at each."""
    rng = torch.Generator().manual_seed(5)
    weights = torch.randn(ROWS, COLUMNS, generator=rng).to(torch.bfloat16)
    for number in range(step):
        chosen = torch.Generator().manual_seed(100 + number)
        where = torch.rand(ROWS, COLUMNS, generator=chosen) < 0.02
        weights.view(torch.int16)[where] ^= 1 + number % 5
    return weights


def _shard(full: torch.Tensor, ranks: list[int], rank: int, dim: int) -> torch.nn.Parameter:
    part = full.chunk(len(ranks), dim)[ranks.index(rank)].contiguous().clone()
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    tensor = DTensor.from_local(
        part, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return torch.nn.Parameter(tensor, requires_grad=False)


def _module(parameter: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weights = parameter
    return module


def _local(module: torch.nn.Module) -> torch.Tensor:
    return module.weights.to_local() if isinstance(module.weights, DTensor) else module.weights


class _Counted:
    """Bytes of frames that a rank really sends and receives on the channel's wires, point to point or by
    broadcast; rows are left out.
    """

    def __enter__(self) -> _Counted:
        self.sent = self.received = 0
        self._kept = Communicator.send, Communicator.receive, Communicator.broadcast, Communicator.all_gather
        rows = []

        def all_gather(wire, parts):
            rows.append(parts)
            self._kept[3](wire, parts)
            rows.clear()

        def send(wire, tensor, to):
            self.sent += 0 if rows else tensor.numel()
            return self._kept[0](wire, tensor, to)

        def receive(wire, tensor, source):
            self.received += 0 if rows else tensor.numel()
            return self._kept[1](wire, tensor, source)

        def broadcast(wire, tensor, root):
            self.received += tensor.numel() if wire.rank != root else 0
            return self._kept[2](wire, tensor, root)

        Communicator.send, Communicator.receive, Communicator.broadcast, Communicator.all_gather = (
            send,
            receive,
            broadcast,
            all_gather,
        )
        return self

    def __exit__(self, *_: object) -> None:
        Communicator.send, Communicator.receive, Communicator.broadcast, Communicator.all_gather = self._kept


def four_to_two(rank: int, world: int) -> dict[str, tuple[int, int, int]]:
    """4 sources sharded by rows, 2 receivers by columns: what a receiver gets on each route, and whether it
    is right.
    """
    sources, receivers = [0, 1, 2, 3], [4, 5]
    module = _module(
        _shard(_truth(0), sources, rank, 0)
        if rank < 4
        else _shard(torch.zeros_like(_truth(0)), receivers, rank, 1)
    )
    figures = {}
    calls = (
        ("seed", dte_dist.delta_p2p),
        ("broadcast", dte_dist.delta_broadcast),
        ("p2p", dte_dist.delta_p2p),
    )
    for step, (name, collective) in enumerate(calls):
        with _Counted() as counted:
            report = collective(module, src=sources, codec="fast")
        expected = _truth(step)
        wrong = (
            0
            if rank < 4
            else int(not same_bits(_local(module), expected.chunk(2, 1)[receivers.index(rank)].contiguous()))
        )
        figures[name] = (report.wire_bytes, counted.received, wrong)
        if rank < 4:
            _local(module).copy_(_truth(step + 1).chunk(4, 0)[rank])
    dte_dist.close(module)
    return figures


def test_a_receiver_of_half_the_columns_gets_half_the_bytes_and_as_many_as_the_report_says(ranks) -> None:
    results = ranks.run(four_to_two)
    assert [figures[name][2] for figures in results for name in figures] == [0] * 18
    for figures in results[4:]:
        assert figures["p2p"][1] <= 0.55 * figures["broadcast"][1]
        assert figures["broadcast"][0] == figures["broadcast"][1]
    assert max(figures["p2p"][1] for figures in results[4:]) == results[0]["p2p"][0]


def auto(
    rank: int, world: int, sources: list[int], receivers: list[int] | None
) -> list[tuple[str, str, bool]]:
    """Sync with route="auto": sources sharded by rows; receivers by columns, or whole if None."""
    dim = 0 if rank in sources else 1
    holders = sources if rank in sources else receivers
    start = _truth(0) if rank in sources else torch.zeros_like(_truth(0))
    module = _module(
        torch.nn.Parameter(start, requires_grad=False)
        if holders is None
        else _shard(start, holders, rank, dim)
    )
    found = []
    for step, collective in enumerate(
        (dte_dist.delta_broadcast, dte_dist.delta_p2p, dte_dist.delta_broadcast)
    ):
        report = collective(module, src=sources, route="auto")
        expected = (
            _truth(step)
            if holders is None
            else _truth(step).chunk(len(holders), dim)[holders.index(rank)].contiguous()
        )
        found.append((report.route, report.route_reason, same_bits(_local(module), expected)))
        if rank in sources:
            _local(module).copy_(_truth(step + 1).chunk(len(sources), 0)[rank])
    dte_dist.close(module)
    return found


def test_auto_takes_the_route_whose_busiest_rank_moves_least(ranks) -> None:
    everything = ROWS * COLUMNS * 2
    for found in ranks.run(auto, [0, 1, 2, 3], [4, 5]):
        assert (
            found
            == [
                (
                    "p2p",
                    f"busiest rank {format_bytes(everything / 2)}, {format_bytes(everything)} over broadcast",
                    True,
                )
            ]
            * 3
        )
    for found in ranks.run(auto, [0], None):
        assert (
            found
            == [
                (
                    "broadcast",
                    f"busiest rank {format_bytes(everything)}, {format_bytes(5 * everything)} over p2p",
                    True,
                )
            ]
            * 3
        )


def colocated(rank: int, world: int) -> tuple[list[bool], list[str], list[bool]]:
    """Each of two ranks trains rows and infers columns."""
    both = [0, 1]
    group = dist.new_group(both)
    if rank > 1:
        return [], [], []
    trained = _module(_shard(_truth(0), both, rank, 0))
    rollout = _module(_shard(torch.zeros_like(_truth(0)), both, rank, 1))
    right, kinds, told = [], [], []
    for step in range(4):
        with _Counted() as counted:
            report = dte_dist.delta_p2p(trained, group, into=rollout, mode="full" if step == 2 else "delta")
        right.append(same_bits(_local(rollout), _truth(step).chunk(2, 1)[rank].contiguous()))
        kinds.append(report.kind)
        told.append(step == 0 or max(counted.sent, counted.received) <= report.busiest_bytes)
        _local(trained).copy_(_truth(step + 1).chunk(2, 0)[rank])
    dte_dist.close(trained, group)
    return right, kinds, told


def test_colocated_ranks_reshard_without_sending_themselves_anything(ranks) -> None:
    for right, kinds, told in ranks.run(colocated)[:2]:
        assert right == told == [True] * 4
        assert kinds == ["full", "delta", "full", "delta"]


def self_traffic(rank: int, world: int) -> tuple[int, int]:
    """One rank alone is source and receiver: nothing may travel."""
    groups = [dist.new_group([each]) for each in range(world)]
    if rank:
        return 0, 0
    trained, rollout = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with _Counted() as counted:
        dte_dist.delta_p2p(trained, groups[0], into=rollout)
        with torch.no_grad():
            trained.weight[3] += 1
        dte_dist.delta_p2p(trained, groups[0], into=rollout)
    return counted.sent + counted.received, int(not same_bits(trained.weight, rollout.weight))


def test_a_rank_alone_sends_nothing(ranks) -> None:
    assert ranks.run(self_traffic)[0] == (0, 0)


def mixed_up(rank: int, world: int) -> list[str]:
    """One rank calls the other collective; then all call the same."""
    module = torch.nn.Linear(4, 4)
    dte_dist.delta_broadcast(module)
    try:
        (dte_dist.delta_p2p if rank == 2 else dte_dist.delta_broadcast)(module)
        said = "nothing"
    except dte_dist.LayoutMismatch as error:
        said = str(error)
    report = dte_dist.delta_p2p(module)
    dte_dist.close(module)
    return [said, report.kind, report.route]


def test_ranks_that_call_different_collectives_are_told_so_and_go_on(ranks) -> None:
    results = ranks.run(mixed_up)
    assert all(result == results[0] for result in results)
    said, kind, route = results[0]
    assert "different routes" in said and "p2p on rank 2" in said
    assert (kind, route) == ("delta", "p2p")


def in_background(rank: int, world: int) -> list[bool]:
    """The optimizer steps at once after the call: receivers get the bits from before."""
    sources, receivers = [0, 1], [2, 3, 4, 5]
    module = _module(
        _shard(_truth(0), sources, rank, 0)
        if rank < 2
        else _shard(torch.zeros_like(_truth(0)), receivers, rank, 1)
    )
    right = []
    for step in range(3):
        work = dte_dist.delta_p2p(module, src=sources, async_op=True)
        if rank < 2:
            _local(module).copy_(_truth(step + 1).chunk(2, 0)[rank])
        work.wait()
        right.append(
            rank < 2
            or same_bits(_local(module), _truth(step).chunk(4, 1)[receivers.index(rank)].contiguous())
        )
    dte_dist.close(module)
    return right


def test_async_p2p_sends_the_bits_of_the_call(ranks) -> None:
    assert ranks.run(in_background) == [[True] * 3] * 6
