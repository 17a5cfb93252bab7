"""Watches, without ranks: the clock that ends waits, and the questions that they ask meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from dte_dist.liveness import lookout
from dte_dist.liveness import watch as watch_module
from dte_dist.liveness.board import Board, Verdict
from dte_dist.liveness.presence import Process
from dte_dist.liveness.rendezvous import Membership, _absent
from dte_dist.liveness.watch import Watch

SOON = 20.0


def membership(rank: int, store: dist.Store, size: int = 3, seconds: float = 60.0) -> Membership:
    return Membership(rank, size, tuple(range(size)), store, "cpu:gloo", timedelta(seconds=seconds))


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


@pytest.mark.slow
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
