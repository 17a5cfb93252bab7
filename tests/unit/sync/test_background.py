"""Syncs in the background, without ranks: their handle, and who waits for them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch import nn

from dte_dist.errors import FrameError
from dte_dist.sync import in_flight as running
from dte_dist.sync.background import DeltaWork

REPORT: Any = object()


class Gate:
    """A sync that ends when it is told to, with a report or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open, self.error = threading.Event(), error
        self.work = DeltaWork(self.run)
        self.work.start()

    def run(self) -> Any:
        self.open.wait(60)
        if self.error is not None:
            raise self.error
        return REPORT


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()
    gate.work.ended(60)


@pytest.mark.parametrize("timeout", [0, 0.0, timedelta(0), 0.02, timedelta(milliseconds=20)], ids=str)
def test_a_wait_that_is_too_short_raises_in_its_time_and_the_sync_goes_on(gate: Gate, timeout: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="it goes on"):
        gate.work.wait(timeout)
    assert time.monotonic() - begin < 5
    assert not gate.work.is_completed() and not gate.work.is_success() and gate.work.exception() is None
    gate.open.set()
    assert gate.work.wait() is REPORT


def test_a_work_that_has_ended_needs_no_time() -> None:
    gate = Gate()
    gate.open.set()
    assert gate.work.wait(60) is gate.work.wait(0) is gate.work.result() is REPORT
    assert gate.work.is_completed() and gate.work.is_success()


def test_an_error_is_raised_at_every_wait_as_the_same_object() -> None:
    gate = Gate(FrameError("cut short"))
    gate.open.set()
    for wait in (gate.work.wait, gate.work.result, lambda: gate.work.wait(0)):
        with pytest.raises(FrameError) as caught:
            wait()
        assert caught.value is gate.error is gate.work.exception()
    assert gate.work.is_completed() and not gate.work.is_success()


def joining(*modules: Any) -> threading.Thread:
    thread = threading.Thread(target=running.wait_for, args=modules)
    thread.start()
    thread.join(0.1)
    return thread


@pytest.mark.parametrize("which", [0, 1], ids=["the module it reads", "the module it writes to"])
def test_who_uses_either_module_of_a_sync_waits_for_it(gate: Gate, which: int) -> None:
    modules = nn.Linear(1, 1), nn.Linear(1, 1)
    running.register(gate.work, *modules)
    thread = joining(modules[which], None)
    assert thread.is_alive()
    assert not joining(nn.Linear(1, 1), None).is_alive(), "another module has nothing to wait for"
    gate.open.set()
    thread.join(60)
    assert not thread.is_alive() and gate.work.is_completed()


def test_one_that_failed_is_waited_for_in_silence() -> None:
    module, gate = nn.Linear(1, 1), Gate(FrameError("cut short"))
    running.register(gate.work, module, None)
    gate.open.set()
    running.wait_for(module)
    running.wait_for(module)


def test_a_sync_keeps_no_module_alive(gate: Gate) -> None:
    module = nn.Linear(1, 1)
    running.register(gate.work, module)
    before = len(running._running)
    del module
    gc.collect()
    assert len(running._running) == before - 1


def test_all_are_waited_for_at_most_so_long(gate: Gate) -> None:
    modules = [nn.Linear(1, 1), nn.Linear(1, 1)]
    running.register(gate.work, *modules)
    assert not running.wait_all(0.0) and not running.wait_all(0.05)
    gate.open.set()
    assert running.wait_all(60)


@pytest.mark.parametrize("thing", ["copy", 3, [], None, {}], ids=str)
def test_what_is_no_module_has_no_sync(thing: Any) -> None:
    """A wrong argument is told to all ranks later, so that one rank alone must not fail here."""
    running.wait_for(thing)
    running.register(DeltaWork(lambda: REPORT), thing)
    running.wait_for(thing)


def test_a_sync_that_never_began_is_not_waited_for() -> None:
    """As an interrupt between its making and its start leaves it."""
    module, work = nn.Linear(1, 1), DeltaWork(lambda: REPORT)
    running.register(work, module)
    assert work.ended(0.0) and not work.is_completed()
    running.wait_for(module)
    assert running.wait_all(0.0)
