"""Random sweep (gloo, 8 ranks): sharded senders and receivers of any layouts over a `ProcessGroupTransport`;
bit-exact.

Each case makes a group and a transport, pushes and pulls several versions, and closes. `DTE_SWEEP=seed`
repeats a sweep, `DTE_SWEEP=seed:case` one case.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

from dte_dist import ProcessGroupTransport
from tests.distributed.cases import Case, make_case
from tests.distributed.launcher import Ranks
from tests.distributed.shares import VERSIONS, peers_and_plan, warm

pytestmark = pytest.mark.slow

WORLD, CASES = 8, 40


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def run_case(case: Case, rank: int, group: dist.ProcessGroup) -> list[str]:
    """Push and pull on one rank; return what is wrong."""
    peers, plan = peers_and_plan(case)
    me, rng, wrong = peers[dist.get_rank(group)], torch.Generator().manual_seed(7), []
    transport = ProcessGroupTransport(group, plan=plan, timeout=60)
    me.start(transport, plan, random.Random(f"{case.seed} {rank}"))
    for version in range(VERSIONS):
        me.push(version)
        wrong += me.pull(version)
        case.change(rng)
    transport.close()
    return wrong


def sweep(rank: int, world: int, seeds: list[str]) -> list[str]:
    wrong = []
    for seed in seeds:
        case = make_case(seed, world)
        group = dist.new_group(case.group, sort_ranks=False)
        if rank in case.group:
            wrong += run_case(case, rank, group)
            dist.destroy_process_group(group)
    return wrong


_SEED, _, _ONE = os.environ.get("DTE_SWEEP", str(random.SystemRandom().getrandbits(32))).partition(":")
_NUMBERS = [int(_ONE)] if _ONE else list(range(CASES))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("numbers", [_NUMBERS], ids=[f"{_SEED}:{_NUMBERS[0]}"])
def test_every_layout_reaches_every_other_over_a_process_group(ranks, numbers, capsys):
    with capsys.disabled():
        print(f"\nsweep: ProcessGroupTransport, DTE_SWEEP={_SEED}, cases {numbers[0]} to {numbers[-1]}")
    wrong = ranks.run(sweep, [f"{_SEED}:{number}" for number in numbers], seconds=280)
    assert [line for lines in wrong for line in lines] == []
