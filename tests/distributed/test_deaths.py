"""Distributed tier, four ranks over gloo: ranks that die are named soon, and modules that die are not missed.

Where the timeout is `LONG`, an end within `SOON` shows that nobody waited for it.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dte_dist
from dte_dist.sync import registry
from tests.distributed.launcher import Outcome, Ranks
from tests.distributed.patience import LONG, PLACES, SOON, STATE, agreed_text, begin, go, go_anew, told
from tests.distributed.tools import facts, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def lasting() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def survivors(outcomes: Sequence[Outcome], gone: Sequence[int]) -> list[Any]:
    assert all(outcomes[rank].died for rank in gone)
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank not in gone]


def wait_for(flag: Path) -> None:
    deadline = time.monotonic() + 90
    while not flag.exists():
        assert time.monotonic() < deadline, "the victim never came to its place"
        time.sleep(0.01)


def stops_in_opening(rank: int, world: int, where: str, flag: str) -> Any:
    def stop(*_: Any, **__: Any) -> Any:
        Path(flag).touch()
        threading.Event().wait()

    place, name = PLACES[where]
    if rank == 2:
        setattr(place, name, stop)  # for good: this rank will be killed
    return told(lambda: sync(model(rank), timeout=LONG))


@pytest.mark.parametrize("where", PLACES)
def test_a_rank_that_dies_while_a_channel_opens_is_named_soon(
    ranks: Ranks, tmp_path: Path, where: str
) -> None:
    ranks.run(begin)  # so that it is known which processes the ranks are
    ranks.start(stops_in_opening, where, str(tmp_path / "flag"))
    wait_for(tmp_path / "flag")
    begun = time.monotonic()
    ranks.kill(2)
    others = survivors(ranks.finish(), [2])
    assert time.monotonic() - begun < SOON
    name, text, lost = agreed_text(others, within=LONG)
    assert name == "PeerLost" and text.startswith("rank 2 died (its ") and lost == (2,)


@pytest.mark.parametrize("where", ["before the roll call", "at the roll call", "while it connects"])
def test_a_rank_that_dies_in_its_very_first_call_is_named_soon(
    ranks: Ranks, tmp_path: Path, where: str
) -> None:
    ranks.start(stops_in_opening, where, str(tmp_path / "flag"))
    wait_for(tmp_path / "flag")
    ranks.kill(2)
    begun = time.monotonic()
    others = survivors(ranks.finish(), [2])
    assert time.monotonic() - begun < SOON
    name, text, lost = agreed_text(others, within=LONG)
    assert name == "PeerLost" and text.startswith("rank 2 died (its process has ended)") and lost == (2,)


@pytest.mark.parametrize("program", [go, go_anew], ids=["a sync", "an opening"])
def test_two_dead_ranks_are_both_named_and_nobody_else_is(ranks: Ranks, program: Any) -> None:
    ranks.run(begin)
    ranks.kill(1)
    ranks.kill(3)
    ranks.start(program)
    name, text, lost = agreed_text(survivors(ranks.finish(), [1, 3]))
    assert name == "PeerLost" and text.startswith("ranks 1 and 3 died (their ") and lost == (1, 3)


def test_a_dead_rank_is_noticed_by_ranks_that_wait_for_a_late_one(ranks: Ranks) -> None:
    pids = ranks.run(begin)
    os.kill(pids[1], signal.SIGSTOP)
    ranks.start(go)
    time.sleep(2)
    ranks.kill(3)
    found = [outcome.value for outcome in ranks._collect([0, 2], LONG)]
    name, text, lost = agreed_text(found)
    assert name == "PeerLost" and text.startswith("rank 3 died") and lost == (3,)


def gloo_connects_late(rank: int, world: int) -> Any:
    """gloo connects at the first operation between two ranks, and asks the store for addresses until then."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    module = model(rank)
    reports = [facts(sync(module, timeout=LONG))]
    for number in range(3):
        if rank == 0:
            nudge(module, "0.weight", 3)
        dist.barrier()
        if rank == 1 and number == 1:
            time.sleep(4)  # the others look around
        how = {"route": "p2p"} if number == 2 else {}
        reports.append(facts(sync(module, timeout=LONG, **how)))
    STATE["module"] = module
    return [report[:3] for report in reports], prints(module)


def test_channels_open_where_gloo_connects_late_and_a_dead_rank_is_named(ranks: Ranks) -> None:
    reports, _ = same(ranks.run(gloo_connects_late))
    assert [report[0] for report in reports] == [1, 2, 3, 4]
    assert [report[2] for report in reports] == ["full", "delta", "delta", "delta"]
    ranks.kill(2)
    ranks.start(go)
    name, text, lost = agreed_text(survivors(ranks.finish(), [2]))
    assert name == "PeerLost" and text.startswith("rank 2 died (its ") and lost == (2,)


def exits_halfway(rank: int, world: int, flag: str) -> Any:
    """Rank 1 exits while its sync in the background waits for rank 2, and with it ranks 0 and 3."""
    module = model(rank)
    sync(module, timeout=LONG)
    if rank == 2:
        wait_for(Path(flag))
        return None
    if rank == 1:
        work = sync(module, timeout=LONG, async_op=True)
        time.sleep(2)
        assert not work.is_completed()
        registry._EXIT_PATIENCE = 0.5  # for good: the process ends
        registry._at_exit()
        os._exit(0)
    return told(lambda: sync(module, timeout=LONG))


def test_a_process_that_exits_in_the_middle_of_a_sync_says_so(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(exits_halfway, str(tmp_path / "flag"))
    outcomes = ranks._collect([0, 1, 3], LONG)
    (tmp_path / "flag").touch()
    name, text, lost = agreed_text([outcomes[0].value, outcomes[2].value])
    assert outcomes[1].died and (name, lost) == ("PeerLost", ())
    assert text == "rank 1 failed: RuntimeError: the process exits before the sync has ended"


def collected_meanwhile(rank: int, world: int) -> Any:
    """Rank 1 keeps neither module nor work of a sync in the background, for which rank 2 comes late."""
    module = model(rank)
    sync(module, timeout=LONG)
    if rank == 0:
        nudge(module, "0.weight", 3)
    dist.barrier()
    if rank == 2:
        time.sleep(2)
    work = sync(module, timeout=LONG, async_op=True)
    if rank == 1:
        gone, thread = weakref.ref(module), work._thread
        del module, work
        gc.collect()
        was_kept = gone() is not None
        thread.join(LONG)
        gc.collect()
        dist.barrier()
        return was_kept and gone() is None
    report = work.wait()
    dist.barrier()
    return facts(report)[:5]


def test_a_module_lives_until_its_sync_in_the_background_has_ended(lasting: Ranks) -> None:
    found = lasting.run(collected_meanwhile)
    assert found[1] is True and same([found[rank] for rank in (0, 2, 3)]) == (2, 1, "delta", "", 3)


def closed_by_one(rank: int, world: int) -> Any:
    """Rank 1 closes its channel; the next call of all is in the background."""
    module = model(rank)
    sync(module, timeout=LONG)
    dist.barrier()
    if rank == 1:
        dte_dist.close(module)
        error = told(lambda: None)
    else:
        error = told(lambda: sync(module, timeout=LONG, async_op=True).wait())
    return error, facts(sync(module, timeout=LONG))[:4]


def test_a_sync_in_the_background_is_told_that_a_rank_closed_the_channel(lasting: Ranks) -> None:
    found = lasting.run(closed_by_one)
    name, text, _ = agreed_text([found[rank][0] for rank in (0, 2, 3)])
    assert name == "ChannelClosed" and text.startswith("rank 1 closed the channel")
    assert same([report for _, report in found])[0] == 2
