"""What a sync costs (gloo, real ranks): memory beyond the weights, and exchanges per sync; never seconds."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

import dte_dist
from dte_dist.transport.communicator import Communicator
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Ranks

pytestmark = pytest.mark.slow

MIB = 1 << 20
SHARD = 256 * MIB
BUCKET = 16 * MIB


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def _memory(field: str) -> int:
    """Return VmRSS or VmHWM (peak) of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _change(weights: torch.Tensor, step: int) -> None:
    """Change about 1 % of the bits, here and there, without large temporaries."""
    rng = torch.Generator().manual_seed(step)
    for part in weights.view(torch.int16).split(1 << 20):
        part[torch.randint(0, len(part), (len(part) // 100,), generator=rng)] ^= 1 + step % 3


def _grow(rank: int, world: int) -> dict[str, int]:
    small = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    for _ in range(2):
        dte_dist.delta_broadcast(small)  # compiles the kernels
    model = torch.nn.Module()
    model.weights = torch.nn.Parameter(torch.zeros(SHARD // 2, dtype=torch.bfloat16), requires_grad=False)
    model.weights.fill_(0.5 + rank)
    _change(model.weights, 0)
    gc.collect()
    before = _memory("VmRSS")
    _reset_peak()
    dte_dist.delta_broadcast(model, bucket_bytes=BUCKET)
    figures = {"peak of the seed": _memory("VmHWM") - before, "seeded": _memory("VmRSS") - before}
    for step in range(60):
        if rank == 0:
            _change(model.weights, step)
        _reset_peak()
        report = dte_dist.delta_broadcast(model, bucket_bytes=BUCKET)
        if step in (0, 9):
            figures[f"peak {step}"] = _memory("VmHWM") - before
            figures[f"after {step}"] = _memory("VmRSS") - before
    figures["peak 59"], figures["after 59"] = _memory("VmHWM") - before, _memory("VmRSS") - before
    figures["changed"], figures["wire"] = report.changed, report.wire_bytes
    dte_dist.close(model)
    return figures


@pytest.mark.timeout(240)
def test_memory_is_snapshot_patch_and_two_buckets_and_does_not_grow(ranks, capsys):
    source, receiver = ranks.run(_grow, seconds=230)
    with capsys.disabled():
        for name, figures in (("source", source), ("receiver", receiver)):
            print(
                f"\n{name}: "
                + ", ".join(
                    f"{key} {value / MIB:.1f} MiB" for key, value in figures.items() if key != "changed"
                ),
                end="",
            )
    for name in ("peak of the seed", "seeded"):
        assert source[name] <= SHARD + 2 * BUCKET + 16 * MIB
        assert receiver[name] <= 2 * BUCKET + 16 * MIB
    assert 0.009 < source["changed"] / (SHARD // 2) < 0.011
    staged = source["changed"] * (8 + 2)  # int64 position and bf16 bits
    assert source["peak 9"] <= SHARD + 2 * BUCKET + 64 * MIB
    assert receiver["peak 9"] <= staged + 2 * BUCKET + 64 * MIB
    # 16 MiB for the arenas of malloc, which level off after 60 syncs; 50 syncs that kept their frames would
    # take 250
    for figures in (source, receiver):
        assert figures["peak 59"] <= figures["peak 9"] + 16 * MIB
        assert figures["after 59"] <= figures["after 9"] + 16 * MIB


def _count(rank: int, world: int, tensors: int, changes: int) -> tuple[list[dict[str, int]], int]:
    """Count the operations of each of some syncs by kind, with `tensors` tensors of the same total size."""
    counted: Counter[str] = Counter()
    begin = Communicator._start

    def counting(self, what, *args):
        counted[f"{self.name}: {what}"] += 1
        return begin(self, what, *args)

    each = 400_000 // tensors
    model = torch.nn.Module()
    for index in range(tensors):
        model.register_parameter(
            f"p{index:05}", torch.nn.Parameter(torch.full((each,), 1.0 + rank), requires_grad=False)
        )
    Communicator._start = counting
    try:
        rows = []
        for step in range(3):
            if rank == 0:
                for parameter, part in zip(
                    model.parameters(), _truth(step, changes).split(each), strict=True
                ):
                    parameter.copy_(part)
            counted.clear()
            dte_dist.delta_broadcast(model)
            rows.append(dict(counted))
    finally:
        Communicator._start = begin
    wrong = sum(
        not same_bits(mine, part)
        for mine, part in zip(model.parameters(), _truth(2, changes).split(each), strict=True)
    )
    dte_dist.close(model)
    return rows, wrong


def _truth(step: int, changes: int) -> torch.Tensor:
    """Return all elements; `changes` of them, evenly spread, differ from those of the step before."""
    truth = torch.full((400_000,), 1.0)
    truth[:: 400_000 // changes] += step
    return truth


def test_a_sync_makes_the_same_exchanges_for_20_and_for_20000_tensors(ranks):
    few, many = (ranks.run(_count, tensors, 40_000) for tensors in (20, 20_000))
    assert few == many
    for rows, wrong in few:
        assert wrong == 0
        assert rows[1] and rows[1] == rows[2]


def test_a_small_sync_is_three_round_trips(ranks):
    for rows, wrong in ranks.run(_count, 20, 1000):
        assert wrong == 0
        assert rows[1] != rows[2] == {"control: send": 3, "control: receive": 3}
