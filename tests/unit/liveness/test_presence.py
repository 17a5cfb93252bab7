"""Processes, without ranks: which are certainly dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dte_dist.liveness.presence import Process
from tests.unit.liveness.test_watch import SOON

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
