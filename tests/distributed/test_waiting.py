"""Distributed tier, four ranks over gloo: who waits for whom, for how long, and what they are told.

Ranks stop, come late, fork, fail while a channel opens, or compile. Where the timeout is `LONG`, an end
within `SOON` shows that nobody waited for it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dte_dist
from dte_dist import kernels
from dte_dist.codec.named_tensors import Change, write_payload
from dte_dist.errors import PeerLost
from dte_dist.sync.exclusive import exclusive
from dte_dist.transport.broadcast import BucketedBroadcast
from tests.distributed.launcher import Ranks
from tests.distributed.patience import LONG, PATIENT, PLACES, SHORT, agreed_text, begin, go, go_anew, told
from tests.distributed.tools import caught, facts, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def lasting() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@contextmanager
def patched(place: Any, name: str, replacement: Any, here: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(place, name, replacement)
        yield


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# Errors while a channel opens -------------------------------------------------------------------------------


def fails_in_opening(rank: int, world: int, where: str, error: BaseException) -> Any:
    place, name = PLACES[where]
    module = model(rank)
    with patched(place, name, raising(error), rank == 2):
        first = told(lambda: sync(module, timeout=LONG))
    return first, facts(sync(module, timeout=LONG))[:4], prints(module)


@pytest.mark.parametrize("where", PLACES)
def test_an_exception_of_one_rank_while_a_channel_opens_is_one_error_of_the_family_on_all(
    lasting: Ranks, where: str
) -> None:
    found = lasting.run(fails_in_opening, where, MemoryError("no room"))
    name, text, _ = agreed_text([first for first, *_ in found])
    assert issubclass(getattr(dte_dist, name), dte_dist.DeltaError)
    assert "MemoryError: no room" in text and "rank 2" in text
    assert same([rest for _, *rest in found])[0] == (1, None, "full", "first sync")


@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_of_one_rank_while_a_channel_opens_is_told_to_the_others_at_once(
    lasting: Ranks, where: str
) -> None:
    found = lasting.run(fails_in_opening, where, KeyboardInterrupt())
    interrupted, others = found[2][0], [found[rank][0] for rank in (0, 1, 3)]
    assert interrupted[0] == "KeyboardInterrupt"
    assert agreed_text(others)[:2] == ("PeerLost", "rank 2 failed: KeyboardInterrupt")
    assert same([rest for _, *rest in found])[0] == (1, None, "full", "first sync")


def interrupted_in_a_sync(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module, timeout=LONG)
    if rank == 0:
        nudge(module, "0.weight", 3)
    with patched(BucketedBroadcast, "move", raising(KeyboardInterrupt()), rank == 1):
        first = told(lambda: sync(module, timeout=LONG))
    return first, facts(sync(module, timeout=LONG))[:5], prints(module)


def test_an_interrupt_in_the_middle_of_a_sync_is_told_to_the_others_at_once(lasting: Ranks) -> None:
    found = lasting.run(interrupted_in_a_sync)
    assert found[1][0][0] == "KeyboardInterrupt"
    name, text, _ = agreed_text([found[rank][0] for rank in (0, 2, 3)])
    assert (name, text) == ("PeerLost", "rank 1 failed: KeyboardInterrupt")
    assert same([rest for _, *rest in found])[0] == (2, 1, "delta", "", 3)


# Forks ------------------------------------------------------------------------------------------------------


def in_a_child(call: Callable[[], Any]) -> tuple[str, str]:
    """Return class and text of what a call raises in a forked child; the signal that ended it, if one did."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it waits for what no thread of it will give back
        os.write(theirs, json.dumps(told(call)[:2]).encode())
        os._exit(0)
    os.close(theirs)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(ours, 1 << 16)
    os.close(ours)
    return tuple(json.loads(said)) if status == 0 else ("killed", str(status))  # type: ignore[return-value]


def forks(rank: int, world: int) -> Any:
    """Fork while another thread is in a call on the module, and a sync in the background waits for rank 3."""
    gc.collect()  # or a child frees groups of the tests before, whose threads it does not have
    module = model(rank)
    sync(module, timeout=LONG)
    transport = dte_dist.ProcessGroupTransport(timeout=LONG)
    found = []
    if rank == 3:
        dist.barrier()
    work = sync(module, timeout=LONG, async_op=True)
    if rank != 3:
        holds, goes = threading.Event(), threading.Event()

        def hold() -> None:
            with exclusive(module):
                holds.set()
                goes.wait(LONG)

        threading.Thread(target=hold).start()
        holds.wait(LONG)
        calls: list[Callable[[], Any]] = [
            lambda: sync(module, timeout=5),
            lambda: sync(model(rank), timeout=5),
            lambda: dte_dist.verify(module),
            lambda: transport.receive(1, timeout=5),
            lambda: dte_dist.ProcessGroupTransport(timeout=5),
        ]
        found = [in_a_child(call) for call in calls]
        goes.set()
        dist.barrier()
    return found, facts(work.wait())[0], facts(sync(module, timeout=LONG))[0]


def test_a_forked_child_is_refused_whatever_its_parent_was_doing(lasting: Ranks) -> None:
    found = lasting.run(forks)
    told = [each for each, *_ in found[:3]]
    assert {name for each in told for name, _ in each} == {"ChannelClosed"}, told
    assert all("forked" in text for each in told for _, text in each)
    assert same([rest for _, *rest in found]) == [2, 3]


# What stays in the store ------------------------------------------------------------------------------------


def opens_often(rank: int, world: int, how: str) -> int:
    """Return by how many keys the store has grown over 20 channels or transports, from the third on."""
    store = dist.group.WORLD.get_group_store()
    gc.collect()  # or channels of the tests before take their keys along while these are counted
    mine, counts = model(rank), []
    for number in range(23):
        if how == "transports":
            transport = dte_dist.ProcessGroupTransport(timeout=LONG)
            payload = write_payload(1, -1, [Change("w", None, torch.ones(3))], lineage=1)
            transport.send(payload, timeout=LONG) if rank == 0 else transport.receive(1, timeout=LONG)
            transport.close()
        else:
            sync(mine, timeout=LONG)
            if how == "all close" or rank == 1:
                dte_dist.close(mine)
        if number in (2, 22):
            if how == "one closes":  # the others notice when they call
                sync(mine, timeout=LONG)
            counts.append(settled(store.num_keys))
            dist.barrier()
    return counts[1] - counts[0]


def settled(count: Callable[[], int]) -> int:
    """Return a number once it has not changed for a second: keys are deleted in the background."""
    dist.barrier()
    last, since = count(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.05)
        if (now := count()) != last:
            last, since = now, time.monotonic()
    return last


@pytest.mark.parametrize("how", ["all close", "one closes", "transports"])
def test_channels_that_are_closed_leave_nothing_in_the_store(lasting: Ranks, how: str) -> None:
    assert same(lasting.run(opens_often, how)) == 0


# Patience ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [[1], [1, 3]], ids=str)
def test_ranks_that_do_not_answer_are_named_after_the_timeout(ranks: Ranks, late: list[int]) -> None:
    pids = ranks.run(begin, SHORT)
    for rank in late:
        os.kill(pids[rank], signal.SIGSTOP)
    ranks.start(go, SHORT)
    awake = [rank for rank in range(4) if rank not in late]
    name, text, lost = agreed_text([outcome.value for outcome in ranks._collect(awake, LONG)])
    who = "rank 1" if late == [1] else "ranks 1 and 3"
    assert name == "PeerLost" and text.startswith(f"{who} did not answer within 3 s") and lost == tuple(late)


def stay_away(rank: int, world: int, who: Sequence[int]) -> Any:
    if rank in who:
        dist.barrier()
        return None
    found = told(lambda: sync(model(rank), timeout=SHORT))
    dist.barrier()
    return found


@pytest.mark.parametrize("away", [[2], [0, 2]], ids=str)
def test_ranks_that_do_not_come_to_an_opening_are_named(lasting: Ranks, away: list[int]) -> None:
    found = lasting.run(stay_away, away)
    name, text, lost = agreed_text([each for each in found if each is not None])
    who = "rank 2" if away == [2] else "ranks 0 and 2"
    assert name == "PeerLost" and text.startswith(f"{who} did not come within 3 s") and lost == tuple(away)


def store_on_rank_0(rank: int, world: int) -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return begin(rank, world, 4.0)


@pytest.mark.parametrize("program", [go, go_anew], ids=["a sync", "an opening"])
def test_the_timeout_bounds_the_questions_to_a_store_that_hangs(ranks: Ranks, program: Any) -> None:
    pids = ranks.run(store_on_rank_0)
    os.kill(pids[0], signal.SIGSTOP)
    ranks.start(program, 4.0)
    found = [outcome.value for outcome in ranks._collect([1, 2, 3], LONG)]
    os.kill(pids[0], signal.SIGCONT)
    assert {name for name, *_ in found} == {"PeerLost"}
    assert all(took < 4 + 4 for *_, took in found), found


def compiles_for_long(rank: int, world: int, where: int, says: bool) -> Any:
    """Rank 1 takes longer to compile than the others have patience, at its first or second occasion."""
    warm, calls = kernels.precompile, []

    def slowly(widths: Any, say: Any) -> None:
        calls.append(widths)
        if len(calls) == where:
            if says:
                say()
            time.sleep(3 * SHORT)
        warm(widths, say)

    module = model(rank)
    with patched(kernels, "precompile", slowly, rank == 1):
        return told(lambda: sync(module, timeout=SHORT))


@pytest.mark.parametrize("where", [1, 2], ids=["before it comes", "when it is there"])
def test_a_rank_that_compiles_is_waited_for(lasting: Ranks, where: int) -> None:
    found = lasting.run(compiles_for_long, where, True)
    assert [name for name, *_ in found] == [""] * 4, found
    found = lasting.run(compiles_for_long, where, False)
    assert {name for rank, (name, *_) in enumerate(found) if rank != 1} == {"PeerLost"}


# Late ranks -------------------------------------------------------------------------------------------------


def comes_late(rank: int, world: int, lateness: float, is_open: bool, background: bool) -> Any:
    """All try until it works, rank 1 late."""
    module = model(rank)
    if is_open:
        sync(module, timeout=PATIENT)
    if rank == 0:
        nudge(module, "0.weight", 3)
    dist.barrier()
    if rank == 1:
        time.sleep(lateness)
    errors, report = [], None
    while report is None and len(errors) < 10:
        try:
            call = sync(module, timeout=PATIENT, async_op=background)
            report = call.wait() if background else call
        except PeerLost as lost:
            errors.append((str(lost), lost.lost, lost.late))
    return errors, facts(report)[:5], prints(module)


@pytest.mark.parametrize("lateness", [0.8, 1.2, 2.5], ids=lambda lateness: f"{lateness} timeouts late")
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opening"])
def test_the_call_of_a_late_rank_meets_the_next_try_of_the_others(
    lasting: Ranks, lateness: float, is_open: bool
) -> None:
    found = lasting.run(comes_late, lateness * PATIENT, is_open, False)
    tries = [len(found[rank][0]) for rank in (0, 2, 3)]
    assert found[1][0] == [] and min(tries) >= int(lateness) and max(tries) <= int(lateness) + 2
    told = [error for rank in (0, 2, 3) for error in found[rank][0]]
    assert all(1 in lost and late and "did not" in text for text, lost, late in told)
    report, _ = same([rest for _, *rest in found])
    assert report == ((2, 1, "delta", "", 3) if is_open else (1, None, "full", "first sync", report[4]))


def test_a_late_rank_in_the_background_is_told_so_and_meets_the_others_at_its_next_call(
    lasting: Ranks,
) -> None:
    found = lasting.run(comes_late, PATIENT + 1, True, True)
    assert "rank 1 did not answer" in found[1][0][0][0]
    assert same([rest for _, *rest in found])[0] == (2, 1, "delta", "", 3)


def two_groups_of_one_source_are_given_up(rank: int, world: int) -> Any:
    """Rank 0 sends to rank 1 over one group and to rank 2 over another; both come too late, and then in
    time.
    """
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    mine = [group for number, group in enumerate(groups) if rank in (0, number + 1)]
    module = model(rank)
    for _ in range(2):
        for group in mine:
            sync(module, group, timeout=1.0)
    if rank == 0:
        for group in mine:
            assert caught(lambda group=group: sync(module, group, timeout=1.0))[0] == "PeerLost"
    dist.barrier()
    return [facts(sync(module, group, timeout=1.0))[1:4] for group in mine]


def test_each_group_of_a_source_goes_on_from_what_its_own_receivers_hold(lasting: Ranks) -> None:
    first, *others = lasting.run(two_groups_of_one_source_are_given_up)
    assert first == [(2, "delta", ""), (2, "delta", "")] and others[:2] == [first[:1], first[1:]]
