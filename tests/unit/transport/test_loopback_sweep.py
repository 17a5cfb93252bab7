"""Random sweep, one process: sharded senders and receivers of any layouts over a transport in memory;
bit-exact.

Each case pushes and pulls several versions. `DTE_SWEEP=seed` repeats a sweep, `DTE_SWEEP=seed:case` one case.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from dte_dist import LoopbackTransport
from tests.distributed.cases import make_case
from tests.distributed.shares import VERSIONS, peers_and_plan

WORLD, CASES, BATCH = 10, 240, 60


def run_case(seed: str) -> list[str]:
    """Push from all senders and pull on all receivers, in random order; return what is wrong."""
    case, pick, rng = make_case(seed, WORLD), random.Random(seed), torch.Generator().manual_seed(7)
    peers, plan = peers_and_plan(case)
    transport, wrong = LoopbackTransport(history=VERSIONS), []
    for peer in peers:
        peer.start(transport, plan, pick)
    for version in range(VERSIONS):
        for peer in pick.sample(peers, len(peers)):
            peer.push(version)
        for peer in pick.sample(peers, len(peers)):
            wrong += peer.pull(version)
        case.change(rng)
    return wrong


_SEED, _, _ONE = os.environ.get("DTE_SWEEP", str(random.SystemRandom().getrandbits(32))).partition(":")
_RUNS = [[int(_ONE)]] if _ONE else [list(range(low, low + BATCH)) for low in range(0, CASES, BATCH)]


@pytest.mark.parametrize("numbers", _RUNS, ids=[f"{_SEED}:{numbers[0]}" for numbers in _RUNS])
def test_every_layout_reaches_every_other_over_a_transport(numbers, capsys):
    with capsys.disabled():
        print(f"\nsweep: LoopbackTransport, DTE_SWEEP={_SEED}, cases {numbers[0]} to {numbers[-1]}")
    assert [line for number in numbers for line in run_case(f"{_SEED}:{number}")] == []
