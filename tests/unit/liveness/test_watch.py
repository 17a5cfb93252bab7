"""What waiting is made of, without ranks: deadlines, processes, places, verdicts, watches, compiling."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numba import njit
from numba.core import event

import dte_dist
from dte_dist import kernels
from dte_dist.errors import OrderMismatch, PeerLost
from dte_dist.kernels.cpu import jit
from dte_dist.liveness import lookout
from dte_dist.liveness import watch as watch_module
from dte_dist.liveness.board import Board, Verdict, late, names
from dte_dist.liveness.deadline import Deadline, within
from dte_dist.liveness.places import Place, Places, crossing, wait_for_each_other
from dte_dist.liveness.presence import Process
from dte_dist.liveness.rendezvous import Membership, PatientStore, _absent, call_roll
from dte_dist.liveness.watch import Watch

SOON = 20.0


def membership(rank: int, store: dist.Store, size: int = 3, seconds: float = 60.0) -> Membership:
    return Membership(rank, size, tuple(range(size)), store, "cpu:gloo", timedelta(seconds=seconds))


# Deadlines --------------------------------------------------------------------------------------------------


def test_what_never_answers_is_left_behind_at_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        within(Deadline(0.3), threading.Event().wait)
    assert 0.3 <= time.monotonic() - begin < SOON


def test_an_error_and_an_interrupt_of_what_is_called_are_raised_here() -> None:
    for error in (KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            within(Deadline(60), lambda error=error: raise_(error))


def raise_(error: BaseException) -> Any:
    raise error


def test_a_deadline_that_is_postponed_meanwhile_is_kept() -> None:
    deadline, go = Deadline(0.3), threading.Event()
    threading.Timer(1.0, go.set).start()
    deadline.postpone(60)
    assert within(deadline, go.wait) is True


def test_waiting_ends_when_it_has_become_pointless() -> None:
    over = threading.Event()
    threading.Timer(0.3, over.set).start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        within(Deadline(60), threading.Event().wait, stop=over.is_set)
    assert time.monotonic() - begin < SOON


# Processes --------------------------------------------------------------------------------------------------

SLEEPER = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def seen(pid: int) -> Process:
    """Return a process as it would describe itself."""
    from dte_dist.liveness import presence

    return Process(presence._machine(), pid, int(presence._stat(pid)[presence._STARTED]))


def test_a_process_is_dead_once_it_is_killed_even_if_nobody_has_asked(
    sleeper: subprocess.Popen[bytes],
) -> None:
    other = seen(sleeper.pid)
    assert not other.is_dead() and not Process.this().is_dead()
    sleeper.send_signal(signal.SIGSTOP)
    assert not other.is_dead(), "a process that is stopped lives"
    sleeper.kill()
    deadline = time.monotonic() + SOON
    while not other.is_dead():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sleeper.wait()
    assert other.is_dead()


def test_only_what_is_certain_counts(sleeper: subprocess.Popen[bytes]) -> None:
    mine, other = Process.this(), seen(sleeper.pid)
    assert Process(mine.machine, mine.pid, mine.started + 1).is_dead(), "its number went to another process"
    assert not Process(mine.machine, mine.pid, 0).is_dead()
    sleeper.kill()
    sleeper.wait()
    assert not Process("another machine", other.pid, other.started).is_dead()
    assert not Process("", other.pid, other.started).is_dead()
    assert not Process(mine.machine, 1, 0).is_dead()


# Places -----------------------------------------------------------------------------------------------------


def place(rank: int, channel: int, call: int, **changed: Any) -> Place:
    """Rank 0 waits in call 4 of channel 1, rank 1 in call 4 of channel 2, each behind the other."""
    calls = {1: 4, 2: 3} if rank == 0 else {1: 3, 2: 4}
    said = {"name": None, "calls": calls, "opened": 2, "is_foreground": True, "is_alone": True}
    return Place(**{**said, "rank": rank, "channel": channel, "call": call, **changed})


A, B = place(0, 1, 4), place(1, 2, 4)


def test_two_ranks_that_are_before_each_others_calls_wait_for_ever() -> None:
    assert wait_for_each_other(A, B) and wait_for_each_other(B, A)
    opening = place(1, 3, 0, opened=3)
    assert wait_for_each_other(A, opening) and wait_for_each_other(opening, A)


NOT: dict[str, Place] = {
    "the same channel": place(1, 1, 4),
    "it has made the call, and waits for something else": place(1, 2, 4, calls={1: 4, 2: 4}),
    "it is two calls behind": place(1, 2, 4, calls={1: 2, 2: 4}),
    "a call that this rank has made": place(1, 2, 3),
    "a call after the next": place(1, 2, 5),
    "the channel belongs to another thread there": place(1, 2, 4, calls={2: 4}),
    "in the background": place(1, 2, 4, is_foreground=False),
    "an opening that this rank has come to": place(1, 2, 0, opened=2),
}


@pytest.mark.parametrize("other", NOT.values(), ids=NOT)
def test_others_may_come(other: Place) -> None:
    assert not wait_for_each_other(A, other) and not wait_for_each_other(other, A)


def test_an_opening_is_waited_for_in_vain_only_if_no_other_thread_may_come_to_it() -> None:
    opening = place(1, 3, 0, opened=3)
    assert not wait_for_each_other(place(0, 1, 4, is_alone=False), opening)
    assert not wait_for_each_other(place(0, 3, 0, opened=3), place(1, 4, 0, opened=4))


def test_the_text_names_all_ranks_that_wait_in_either_call() -> None:
    others = [place(2, 1, 4), place(3, 2, 4), place(4, 5, 1), place(5, 1, 3)]
    named = place(1, 2, 4, name="reference")
    ranks, text = crossing(named, A, others)
    assert (ranks, text) == (
        (0, 1, 2, 3),
        "ranks 0 and 2 wait in channel 1, ranks 1 and 3 in channel 2 'reference'",
    )


def test_places_come_back_as_they_were_said() -> None:
    places = Places(dist.HashStore(), 3)
    assert places.read() == []
    places.say(1, [B, place(1, 3, 0)])
    places.say(0, [A])
    assert places.read() == [A, B, place(1, 3, 0)] and places.read([0]) == [A]
    places.say(1, [])
    assert places.read() == [A]


# Verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_all_ranks_read_one_verdict_whoever_comes_first(kind: str, tmp_path: Any) -> None:
    def store() -> dist.Store:
        if kind == "file":
            return dist.FileStore(str(tmp_path / "store"), 8)
        return shared

    shared: Any = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if kind == "tcp"
        else dist.HashStore()
    )
    boards = [Board(dist.PrefixStore("channel", store()), 8) for _ in range(8)]
    assert all(board.read() is None for board in boards)
    mine = [Verdict.of(late([rank], "answer", 3), 0) for rank in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda board, verdict: board.settle(verdict), boards, mine))
    assert len(set(found)) == 1 and found[0] in mine
    assert [board.read() for board in boards] == found


class Hanging(dist.Store):
    """The store of a host that is stopped."""

    def check(self, _: Any) -> bool:
        threading.Event().wait(60)
        return False


def test_a_store_that_hangs_costs_a_verdict_half_a_second_after_the_deadline() -> None:
    board = Board(dist.HashStore(), 2)
    board._store = Hanging()
    threading.Thread(target=board.read, daemon=True).start()
    time.sleep(1.5)
    board.until, begin = Deadline(0), time.monotonic()
    mine = Verdict.of(MemoryError(), 1)
    assert board.settle(mine) == mine
    assert 0.4 < time.monotonic() - begin < 2


def test_errors_of_verdicts() -> None:
    lost = Verdict.of(late([3, 1], "answer", 2.5), 0).error()
    assert isinstance(lost, PeerLost) and (lost.lost, lost.late) == ((1, 3), True)
    assert str(lost).startswith("ranks 1 and 3 did not answer within 2.5 s")
    failed = Verdict.of(KeyboardInterrupt(), 2).error()
    assert type(failed) is PeerLost and (str(failed), failed.lost) == ("rank 2 failed: KeyboardInterrupt", ())
    crossed = Verdict("order", (0, 1), "text", (1, 2))
    assert type(crossed.error()) is OrderMismatch and Verdict.parse(crossed.pack().encode()) == crossed
    assert names([2, 0, 1]) == "ranks 0, 1 and 2"


def test_whom_a_verdict_concerns_that_had_not_begun() -> None:
    watch = Watch(membership(1, dist.HashStore()))
    assert not watch.ends_here(Verdict.of(late([1, 2], "answer", 3), 0)), "the others gave it up"
    assert watch.ends_here(Verdict.of(late([2], "answer", 3), 0))
    assert not watch.ends_here(Verdict("left", (2,), "rank 2 closed the channel"))
    failed = Verdict.of(MemoryError(), 2)
    assert watch.ends_here(failed) and watch.ends_here(watch.raised(failed)) is False


# Coming together --------------------------------------------------------------------------------------------


def test_the_roll_tells_origins_and_processes() -> None:
    store = dist.HashStore()
    watches = [Watch(membership(rank, store)) for rank in range(3)]
    watches[1].origin = 7
    with ThreadPoolExecutor(3) as pool:
        rolls = list(pool.map(call_roll, watches))
    assert rolls == [{0: None, 1: 7, 2: None}] * 3
    assert all(watch.processes == dict.fromkeys(range(3), Process.this()) for watch in watches)


def test_a_roll_names_who_does_not_come_and_a_verdict_ends_it() -> None:
    store = dist.HashStore()
    watches = [Watch(membership(rank, store, seconds=1.0)) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda watch: caught(lambda: call_roll(watch)), watches))
    assert [(error.lost, error.late) for error in errors] == [((1,), True)] * 2
    assert all(str(error).startswith("rank 1 did not come within 1 s") for error in errors)
    verdict = watches[0].settle(errors[0])
    begin, third = time.monotonic(), Watch(membership(1, store))
    caught(lambda: call_roll(third))
    assert third.board.found == verdict and not third.ends_here(verdict) and time.monotonic() - begin < SOON


HOST = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_no_rank_is_named_where_the_store_dies_or_hangs_in_a_roll_call(how: signal.Signals) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
        watch = Watch(membership(0, store, seconds=4.0))
        threading.Timer(1.5, lambda: host.send_signal(how)).start()
        error = caught(lambda: call_roll(watch))
    finally:
        host.kill()
        host.wait()
    assert str(error).startswith("the store of the group cannot be reached") and not error.lost, error


def caught(call: Callable[[], Any]) -> PeerLost:
    with pytest.raises(PeerLost) as found:
        call()
    return found.value


def test_a_store_that_is_asked_patiently_can_be_stopped() -> None:
    watch = Watch(membership(0, dist.HashStore()))
    store = PatientStore(dist.HashStore(), watch)
    store.set("there", "x")
    assert store.get("there") == b"x" and store.add("count", 2) == 2 and store.check(["there"])
    threading.Timer(0.3, store.stop).start()
    with pytest.raises(RuntimeError):
        store.wait(["not there"])


# Watches ----------------------------------------------------------------------------------------------------


class Group:
    """A group whose connections somebody closes."""

    def __init__(self, members: Sequence[int] = range(3), dead: Sequence[int] = ()) -> None:
        self.is_killed = threading.Event()
        self.members, self.dead, self.asked = members, dead, list[int]()

    def kill(self) -> None:
        self.is_killed.set()

    def telling(self) -> Sequence[int]:
        return self.members

    def closed(self, ranks: Iterable[int]) -> set[int]:
        self.asked += ranks
        return {*ranks} & {*self.dead}


def watched(seconds: float) -> tuple[Watch, Group]:
    watch, group = Watch(membership(0, dist.HashStore(), seconds=seconds)), Group()
    watch.add(group)
    watch.open()
    return watch, group


def test_the_clock_ends_the_waits_of_an_opening_and_gives_time_to_ranks_that_compile() -> None:
    watch, group = watched(1.0)
    limit = watch.begin(timedelta(seconds=1))
    assert limit > timedelta(seconds=600), "the wait itself must not end before the clock ends it"
    assert group.is_killed.wait(SOON)
    watch.end()
    group.is_killed.clear()
    watch.board.say_busy(True)
    watch.begin(timedelta(seconds=2))
    assert not group.is_killed.wait(5), "rank 1 compiles"
    watch.board.say_busy(False)
    assert group.is_killed.wait(SOON)
    watch.close()


def test_a_verdict_ends_a_wait_and_no_clock_goes_on_without_channels() -> None:
    watch, group = watched(60.0)
    watch.is_opening = False
    assert watch.begin(timedelta(seconds=60)) == timedelta(seconds=60)
    other = Board(watch.membership.store, 3)
    other.settle(Verdict.of(MemoryError("no room"), 2))
    assert group.is_killed.wait(SOON) and watch.board.found == other.found
    watch.end()
    watch.close()
    deadline = time.monotonic() + SOON
    while any(thread.name == "dte_dist clock" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_forked_child_watches_nothing_of_its_parent() -> None:
    watch, _ = watched(60.0)
    child = os.fork()
    if child == 0:
        os._exit(len(watch.siblings()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and watch.siblings() == [watch]
    watch.close()


def test_one_connection_of_each_rank_is_asked_whether_it_has_closed() -> None:
    watch = Watch(membership(1, dist.HashStore(), size=5))
    groups = [Group(range(4), dead=[3]), Group(range(5), dead=[4])]
    for group in groups:
        watch.add(group)
    assert watch.broken() == {3, 4}
    assert [sorted(group.asked) for group in groups] == [[0, 2, 3], [4]]
    watch.members = [1, 2, 3]
    assert watch.broken() == {3}, "rank 4 has nothing to do with it"


class FakeTime:
    """A clock that only moves when its thread sleeps; others, of earlier tests, have the real one."""

    def __init__(self) -> None:
        self.now, self.thread = 0.0, threading.current_thread()

    def monotonic(self) -> float:
        return self.now if threading.current_thread() is self.thread else time.monotonic()

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is self.thread:
            self.now += seconds
        else:
            time.sleep(seconds)


def test_a_long_wait_asks_its_connections_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(lookout, "time", clock)
    watch, group = Watch(membership(0, dist.HashStore(), size=2)), Group(range(2))
    watch.add(group)
    assert list(lookout.looks(watch, lambda: clock.now < 10)) == [] and len(group.asked) == 10
    group.asked.clear()
    clock.now, end = 0.0, 600.0
    assert list(lookout.looks(watch, lambda: clock.now < end)) == [] and len(group.asked) < 100


class Counting(dist.Store):
    """A store that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.asked = dist.HashStore(), 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        self.asked += 1
        return self.store.get(key)

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.asked += 1
        return self.store.add(key, amount)


@pytest.mark.parametrize("is_opening", [False, True])
def test_a_look_asks_the_store_about_the_ranks_that_are_waited_for(is_opening: bool) -> None:
    store, size = Counting(), 200
    watch = Watch(membership(0, store, size=size))
    watch.is_opening = is_opening
    if is_opening:
        roll, late = dist.PrefixStore("roll", store), 7
        for rank in range(size):
            if rank != late:
                store.set(f"roll/{rank}", "")
                store.set(f"process/{rank}", json.dumps(asdict(Process.this())))
        watch.absent = partial(_absent, roll, [*range(size)])
    watch.begin(timedelta(seconds=60), None if is_opening else [7])
    lookout._look(watch, set)
    store.asked = 0
    for _ in range(10):
        assert lookout._look(watch, set) is None
    assert 0 < store.asked <= 10 * 8, store.asked
    lookout._places.clear()


def test_the_clock_goes_on_after_an_error_of_one_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = threading.Thread.start, []

    def no_room(thread: threading.Thread) -> None:
        if thread.name == "dte_dist lookout" and not calls:
            calls.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_room)
    watch, group = watched(60.0)
    watch.is_opening = False
    watch.begin(timedelta(seconds=60))
    Board(watch.membership.store, 3).settle(Verdict.of(MemoryError("no room"), 2))
    assert group.is_killed.wait(SOON) and calls
    watch.end()
    watch.close()


def test_a_forked_child_starts_a_clock_of_its_own_whoever_held_the_lock() -> None:
    first, _ = watched(60.0)
    with watch_module._starting:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends the child if it waits for the lock
            watched(60.0)
            clock = watch_module._clock
            os._exit(0 if clock is not None and clock.is_alive() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    first.close()


# Compiling --------------------------------------------------------------------------------------------------


def test_it_is_said_once_when_something_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    said: list[int] = []
    notice = jit._Notice({4, 2}, lambda: said.append(1))
    with caplog.at_level(logging.INFO, "dte_dist"), event.install_listener("numba:compile", notice):
        for number in (1, 2):
            njit(lambda x, number=number: x + number)(1.0)
    assert said == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "compiling kernels for elements of 2, 4 bytes, once per machine and version: this takes 10 to 45 s"
    ]


def test_what_is_compiled_already_says_nothing() -> None:
    kernels.precompile([4])
    said: list[int] = []
    kernels.precompile([4], lambda: said.append(1))
    assert said == []


@pytest.mark.parametrize(
    ("dtypes", "widths"),
    [((), {1, 2, 4, 8}), ((torch.bfloat16,), {2}), ((torch.float8_e4m3fn, torch.complex128), {1, 8})],
    ids=str,
)
def test_warm_takes_dtypes(monkeypatch: pytest.MonkeyPatch, dtypes: Any, widths: set[int]) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(kernels, "precompile", asked.append)
    dte_dist.warm(*dtypes)
    assert asked == [widths]
    with pytest.raises(ValueError, match="takes dtypes"):
        dte_dist.warm("bfloat16")  # type: ignore[arg-type]
