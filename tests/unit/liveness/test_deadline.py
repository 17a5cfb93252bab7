"""Deadlines, without ranks: a call that never answers is left behind, and errors come through."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dte_dist.liveness.deadline import Deadline, within
from tests.unit.liveness.test_watch import SOON


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
