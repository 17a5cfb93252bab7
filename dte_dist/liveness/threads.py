"""Start threads, and wait for others, such that an interrupt at any moment leaves nothing locked.

`threading.Event` and `threading.Thread.start` take a lock in Python code. A signal handler that raises
between the taking and the letting go leaves the lock taken for ever: whoever is to set the event, or the
thread that is to begin, waits for it. Handlers run in the main thread only, and never inside of a function of
C. So:

1. `Latch` is set once. Each that waits brings a lock of its own, for which nobody else waits.
2. `start` in the main thread hands a thread to another thread, the starter, which starts it.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

__all__ = ["Latch", "settle", "start"]

_LOOK: Final = 0.5
"""Seconds after which one that waits looks by itself, should whoever set the latch have been interrupted."""


class Latch:
    """Is set once, by any thread, and waited for by any.

    Example:
        >>> latch = Latch()
        >>> latch.wait(0.001)
        False
        >>> latch.set()
        >>> latch.wait(), latch.is_set()
        (True, True)
    """

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake whoever waits."""
        self._is_set = True  # first: one that begins to wait from here on sees it
        for lock in self._waiting.copy():
            with suppress(RuntimeError):  # it is free: somebody else set the latch, too
                lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most so many seconds; return whether it is."""
        end = None if timeout is None else time.monotonic() + timeout
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            while not self._is_set:
                left = _LOOK if end is None else min(_LOOK, end - time.monotonic())
                if left <= 0:
                    break
                mine.acquire(timeout=left)
        finally:
            self._waiting.remove(mine)
        return self._is_set


class _Job:
    """A thread that is to begin.

    Attributes:
        thread: None only asks when all jobs before have been done.
        done: set when the thread has begun, or failed to.
        error: why it could not begin.
    """

    __slots__ = ("done", "error", "thread")

    def __init__(self, thread: threading.Thread | None) -> None:
        self.thread = thread
        self.done = Latch()
        self.error: Exception | None = None

    def run(self) -> None:
        """Begin the thread, in the starter."""
        try:
            if self.thread is not None:
                self.thread.start()
        except Exception as error:  # `start` raises it in the caller's thread
            self.error = error
        finally:
            self.done.set()


_jobs: SimpleQueue[_Job] | None = None


def _forget_parent() -> None:
    """Begin anew in a forked child: the starter is the parent's."""
    global _jobs  # noqa: PLW0603
    _jobs = None


os.register_at_fork(after_in_child=_forget_parent)


def start(thread: threading.Thread) -> None:
    """Start a thread. An interrupt may leave it unclear whether it begins: after `settle` it has, or never
    will.

    Raises:
        RuntimeError: there is no room for a thread.

    Example:
        >>> said = []
        >>> thread = threading.Thread(target=said.append, args=("begun",), daemon=True)
        >>> start(thread)
        >>> thread.join()
        >>> said
        ['begun']
    """
    job = _do(thread)
    if job.error is not None:
        raise job.error


def settle() -> None:
    """Wait until every thread has begun that was handed to `start` before, or has failed to."""
    _do(None)


def _do(thread: threading.Thread | None) -> _Job:
    job = _Job(thread)
    if threading.get_ident() == threading.main_thread().ident:
        _queue().put(job)
        job.done.wait()
    else:  # perhaps in a finalizer, which the collector calls in any thread: one that the starter waits for
        job.run()
    return job


def _queue() -> SimpleQueue[_Job]:
    """Return the jobs of the starter, which begins with the first. Two threads that are the first at once
    have a starter each; there is no lock that an interrupt could leave taken.
    """
    global _jobs  # noqa: PLW0603
    jobs = _jobs
    if jobs is None:
        jobs = SimpleQueue()
        _thread.start_new_thread(_serve, (jobs,))  # begins without a lock of Python
        _jobs = jobs
    return jobs


def _serve(jobs: SimpleQueue[_Job]) -> None:
    """Do the jobs, for the life of the process."""
    while True:
        jobs.get().run()
