"""Unit tier, no ranks: threads that begin and latches that are set, whatever line is interrupted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from dte_dist import DeltaWork, LoopbackTransport, Payload
from dte_dist.liveness import threads
from dte_dist.liveness.deadline import Deadline, within
from dte_dist.liveness.threads import Latch, settle, start
from tests.unit.interrupts import interrupted

SOON = 30.0
FILES = ("threading.py", "liveness/threads.py", "liveness/deadline.py", "sync/background.py")
LINES = 600
"""More than any call here has."""


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(SOON)
    return not thread.is_alive()


def test_all_that_wait_are_woken_at_once() -> None:
    latch, woken = Latch(), list[float]()
    waiting = [in_thread(lambda: (latch.wait(), woken.append(time.monotonic()))) for _ in range(8)]
    time.sleep(0.05)
    set_at = time.monotonic()
    latch.set()
    latch.set()
    assert all(map(ends, waiting)) and max(woken) - set_at < threads._LOOK / 2
    assert latch.is_set() and latch.wait(0) and latch._waiting == []


@pytest.mark.parametrize("seconds", [0, -1.0, 0.01])
def test_a_wait_ends_in_time(seconds: float) -> None:
    latch, begin = Latch(), time.monotonic()
    assert not latch.wait(seconds) and time.monotonic() - begin < threads._LOOK / 2


def test_a_thread_that_cannot_begin_is_told() -> None:
    class NoRoom(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match="can't start"):
        start(NoRoom())
    said = list[int]()
    start(threading.Thread(target=said.append, args=(1,)))
    settle()
    assert within(Deadline(SOON), lambda: 3) == 3 and said == [1]


def test_a_finalizer_may_start_threads_wherever_it_runs() -> None:
    """The collector runs finalizers in any thread: those of modules close channels, which ask the store."""
    answers = list[int]()

    class Collecting(threading.Thread):
        """One that collects in the starter, and again in itself before the starter knows that it began."""

        def start(self) -> None:
            answers.append(within(Deadline(SOON), lambda: 5))
            settle()
            super().start()

        def _set_tstate_lock(self) -> None:
            answers.append(within(Deadline(SOON), lambda: 6))
            super()._set_tstate_lock()  # type: ignore[misc]

    thread = Collecting(target=lambda: answers.append(7))
    start(thread)
    early = [6] if hasattr(threading.Thread, "_set_tstate_lock") else []
    assert ends(thread) and answers == [5, *early, 7]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_threads_begin_in_a_forked_child() -> None:
    settle()  # the starter of the parent lives
    child = os.fork()
    if child == 0:
        os._exit(within(Deadline(SOON), lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def waits(latch: Latch) -> Callable[[], object]:
    return lambda: latch.wait(0.001)


def test_an_interrupted_wait_locks_nobody_out() -> None:
    for number in range(1, LINES):
        latch = Latch()
        where = interrupted(waits(latch), number, *FILES)
        assert ends(in_thread(latch.set)) and latch.wait(SOON), where
        if where is None:
            return
    raise AssertionError("a wait has fewer lines")


def test_an_interrupted_start_leaves_a_thread_that_begins_or_never_does() -> None:
    for number in range(1, LINES):
        done = Latch()
        thread = threading.Thread(target=done.set, daemon=True)
        where = interrupted(lambda thread=thread: start(thread), number, *FILES)
        settle()
        assert thread.ident is None or (done.wait(SOON) and ends(thread)), where
        if where is None:
            return
    raise AssertionError("a start has fewer lines")


def test_an_interrupted_sync_in_the_background_ends_or_never_begins() -> None:
    for number in range(1, LINES):
        run = list[int]()
        work = DeltaWork(lambda run=run: run.append(1))  # type: ignore[arg-type,return-value]

        def call(work: DeltaWork = work) -> None:
            work.start()
            work.wait()

        where = interrupted(call, number, *FILES)
        assert work.ended(0.01) or work.ended(SOON), where
        assert work.is_completed() == bool(run), where
        if where is None:
            return
    raise AssertionError("a sync has fewer lines")


def test_an_interrupted_question_does_not_hold_up_the_next() -> None:
    for number in range(1, LINES):
        where = interrupted(lambda: within(Deadline(SOON), lambda: 3), number, *FILES)
        assert within(Deadline(SOON), lambda: 4) == 4, where
        if where is None:
            return
    raise AssertionError("a question has fewer lines")


def test_an_interrupted_receive_leaves_the_transport_as_it_was() -> None:
    transport = LoopbackTransport()
    payload = Payload(1, -1, True, {})
    transport.send(payload, timeout=1)
    for number in range(1, LINES):

        def call() -> None:
            with pytest.raises(Exception, match="did not come in time"):
                transport.receive(2, timeout=0.001)

        where = interrupted(call, number, *FILES)
        again = in_thread(lambda: transport.send(payload, timeout=1))
        assert ends(again) and transport.receive(1, timeout=1) is payload, where
        if where is None:
            return
    raise AssertionError("a receive has fewer lines")
