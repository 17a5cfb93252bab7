"""Distributed tier, four ranks over gloo: ranks of a `ProcessGroupTransport` that do not come, close it, are
outside the plan or die.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dte_dist import DeltaEngine, Layout, PeerLost, Plan, ProcessGroupTransport
from dte_dist.codec import payload_bytes as packing
from dte_dist.codec.payload_bytes import Arrival
from tests.distributed.launcher import Outcome, Ranks
from tests.distributed.meetings import PATIENCE, SHORT, WORLD, meet, payload
from tests.distributed.shares import warm
from tests.distributed.tools import caught, same

pytestmark = pytest.mark.slow

STATE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def not_there(rank: int, world: int, when: str) -> tuple[tuple[str, str], str, float]:
    """Rank 2 does not come, at opening or later; the others tell in time, and once more at once."""
    if when == "opening":
        begin = time.monotonic()
        error = caught(lambda: ProcessGroupTransport(timeout=SHORT)) if rank != 2 else ("PeerLost", "")
        took = time.monotonic() - begin
        dist.barrier()
        return error, "ChannelClosed", took
    transport = ProcessGroupTransport(timeout=PATIENCE)
    assert meet(transport, rank, 1) == 1
    dist.barrier()
    if rank == 2:
        dist.barrier()
    begin = time.monotonic()
    error = caught(lambda: meet(transport, rank, 2, timeout=SHORT))
    again = caught(lambda: meet(transport, rank, 3))[0]
    took = time.monotonic() - begin
    if rank != 2:
        dist.barrier()
    return error, again, took


@pytest.mark.parametrize("when", ["opening", "later"])
def test_a_rank_that_does_not_come_is_peer_lost_on_all_others_in_time(ranks: Ranks, when: str) -> None:
    outcomes = ranks.run(not_there, when, seconds=60)
    assert [(error[0], again) for error, again, _ in outcomes] == [("PeerLost", "ChannelClosed")] * WORLD
    assert all(took < SHORT + 12 for *_, took in outcomes)
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != 2]
    same([error for error, *_ in others])


def closing(rank: int, world: int) -> list[tuple[str, str]]:
    """Rank 3 closes while the others wait for it; an error that they keep holds no connection."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    assert meet(transport, rank, 1) == 1
    dist.barrier()
    errors: list[tuple[str, str]] = []
    held: list[Exception] = []
    begin = time.monotonic()
    if rank == 3:
        time.sleep(0.5)
        transport.close()
    for version in (2, 3):
        try:
            meet(transport, rank, version)
        except Exception as error:
            errors.append((type(error).__name__, str(error) if version == 2 and rank != 3 else ""))
            held.append(error)
    assert time.monotonic() - begin < PATIENCE / 2
    dist.barrier()
    return errors


def test_closing_wakes_the_others(ranks: Ranks) -> None:
    outcomes = ranks.run(closing, seconds=60)
    assert all([kind for kind, _ in errors] == ["ChannelClosed"] * 2 for errors in outcomes)
    assert "rank closed the transport [ranks 3]" in same([errors[0][1] for errors in outcomes[:3]])


def close_at_once(rank: int, world: int, rounds: int) -> None:
    """Every rank closes as soon as it has what it came for: the others must not lose the last version by
    that.
    """
    for version in range(1, rounds):
        transport = ProcessGroupTransport(timeout=PATIENCE)
        assert meet(transport, rank, version) == version
        transport.close()


def test_closing_at_once_takes_nothing_from_the_others(ranks: Ranks) -> None:
    ranks.run(close_at_once, 40)


def outside_the_plan(rank: int, world: int, how: str) -> Any:
    """Ranks 2 and 3 are not in the plan. They close, exit or stay; ranks 0 and 1 wait for long, and meet."""
    weights = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    layout = Layout.from_views([("w", weights, (4,), (0,))])
    plan = Plan.between({0: layout}, {1: layout})
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    if rank > 1:
        if how == "exits" and rank == 3:
            os._exit(0)
        if how != "stays":
            transport.close()
        return None
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    for version in (1, 2):
        if rank == 0:
            time.sleep(3)  # long enough for rank 1 to look around
            engine.push(layout, version)
        else:
            engine.pull(layout, version)
    transport.close()
    return weights.tolist()


@pytest.mark.parametrize("how", ["stays", "closes", "exits"])
def test_a_rank_outside_the_plan_may_go(how: str) -> None:
    with Ranks(WORLD) as ranks:
        outcomes = ranks.outcomes(outside_the_plan, how, seconds=60)
    assert [outcome.value for outcome in outcomes[:2]] == [[0.0, 1.0, 2.0, 3.0]] * 2, outcomes
    assert [outcome.died for outcome in outcomes[2:]] == [False, how == "exits"]


def begin(rank: int, world: int) -> int:
    STATE["transport"] = ProcessGroupTransport(timeout=PATIENCE)
    return meet(STATE["transport"], rank, 1)


def broken_meeting(rank: int, world: int, victim: int, flag: str) -> tuple[str, str, str, float]:
    """Meet again; the victim stops in the middle: a receiver at its second piece, the sender before its
    second one.

    Who waits for a dead rank to receive may learn of it only at the timeout: gloo does not wake it.
    """
    if rank == victim and flag:
        where = (packing, "_write", 3) if rank == 0 else (Arrival, "take", 2)  # the description is one piece
        _block(*where, flag)
    start = time.monotonic()
    sent = payload(2, 10 << 20) if rank == 0 else None
    error = caught(lambda: meet(STATE["transport"], rank, 2, sent=sent, timeout=SHORT))
    took = time.monotonic() - start
    return *error, caught(lambda: meet(STATE["transport"], rank, 3))[0], took


def _block(place: Any, name: str, call: int, flag: str) -> None:
    original, calls = getattr(place, name), []

    def stopping(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            Path(flag).touch()
            threading.Event().wait()
        return original(*args)

    setattr(place, name, stopping)  # for good: this rank will be killed


def _wait_for(flag: Path) -> None:
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline, "the victim never came to its place"
        time.sleep(0.01)


@pytest.mark.parametrize("idle", [False, True], ids=["in a meeting", "between meetings"])
@pytest.mark.parametrize("victim", [0, 2], ids=["sender", "receiver"])
def test_a_rank_that_dies_is_peer_lost_on_all_others(tmp_path: Path, victim: int, idle: bool) -> None:
    flag = tmp_path / "blocked"
    with Ranks(WORLD) as ranks:
        assert ranks.run(begin) == [1] * WORLD
        if not idle:
            ranks.start(broken_meeting, victim, str(flag))
            _wait_for(flag)
        ranks.kill(victim)
        if idle:
            ranks.start(broken_meeting, victim, "")
        outcomes: list[Outcome] = ranks.finish(60)
    told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [(kind, after) for kind, _, after, _ in told] == [(PeerLost.__name__, "ChannelClosed")] * (
        WORLD - 1
    ), outcomes
    assert len({text for _, text, *_ in told}) == 1
    assert all(took < SHORT + 12 for *_, took in told)
