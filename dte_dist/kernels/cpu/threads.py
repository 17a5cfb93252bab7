"""One pool of threads for the loops of `kernels`, which run without the GIL.

`parallel_for` cuts a range into parts and runs a function on each. The calling thread takes parts like any
other, so a call never waits for a thread that is busy elsewhere: in the worst case it does everything itself.
How many threads take part is what `torch.get_num_threads()` says at the call; they are started when they are
first needed, and anew in a forked child. A call from within a part runs in one part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

import torch

__all__ = ["parallel_for"]

Result = TypeVar("Result")


def parallel_for(
    work: Callable[[int, int], Result], total: int, *, least: int, align: int = 1
) -> list[Result]:
    """Run `work(low, high)` on consecutive parts of [0, total), side by side, and return the results in
    order.

    Args:
        work: called from several threads at once; it should spend its time without the GIL.
        total: elements to go through; with none, `work(0, 0)` is called.
        least: elements worth a thread of its own: about 30 microseconds of work.
        align: parts begin at multiples of this.

    Raises:
        Exception: what `work` raised on the first part that failed, after all parts have ended.

    Example:
        >>> sum(parallel_for(lambda low, high: sum(range(low, high)), 10, least=3))
        45
    """
    parts = (
        1
        if total < 2 * least or getattr(_local, "inside", False)
        else min(torch.get_num_threads(), total // least)
    )
    step = -(-total // (parts * align)) * align if parts > 1 else total
    if step >= total:
        return [work(0, total)]
    job = _Job(work, [(low, min(low + step, total)) for low in range(0, total, step)])
    _pool.help(job, len(job.parts) - 1)
    job.run()
    return job.results()


class _Job(Generic[Result]):
    """The parts of one call; whoever is free takes the next."""

    def __init__(self, work: Callable[[int, int], Result], parts: list[tuple[int, int]]) -> None:
        self.parts = parts
        self._work: Callable[[int, int], Result] | None = work
        self._taken = iter(range(len(parts)))
        self._lock = threading.Lock()
        self._ended: SimpleQueue[tuple[int, Result | None, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        """Run parts until none is left to take."""
        _local.inside = True
        try:
            while (part := self._take()) is not None:
                number, work = part
                result, error = None, None
                try:
                    result = work(*self.parts[number])
                except BaseException as raised:  # raised again by the thread that called `parallel_for`
                    error = raised
                self._ended.put((number, result, error))
        finally:
            _local.inside = False

    def _take(self) -> tuple[int, Callable[[int, int], Result]] | None:
        with self._lock:
            number = next(self._taken, None)
            if number is None or self._work is None:
                return None
            return number, self._work

    def results(self) -> list[Result]:
        """Wait for the parts that others have taken. Nothing that `work` refers to is kept afterwards."""
        ended: list[tuple[int, Result | None, BaseException | None]] = []
        interrupt: KeyboardInterrupt | None = None
        while len(ended) < len(self.parts):
            try:
                ended.append(self._ended.get())
            except (
                KeyboardInterrupt
            ) as raised:  # others still write to the caller's memory: it must not go away now
                interrupt = raised
        with self._lock:
            self._work = None
        ended.sort(key=lambda part: part[0])
        for error in (interrupt, *(error for _, _, error in ended)):
            if error is not None:
                raise error
        return [result for _, result, _ in ended]  # type: ignore[misc]


class _Pool:
    """Threads that wait for jobs; as many as were ever asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._count = 0

    def help(self, job: _Job, helpers: int) -> None:
        """Let some threads take parts of a job; fewer where no more can be started, which is no error."""
        with self._lock:
            while self._count < helpers:
                thread = threading.Thread(
                    target=_help, args=(self._jobs,), name=f"dte_dist-loops-{self._count}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    break
                self._count += 1
        for _ in range(min(helpers, self._count)):
            self._jobs.put(job)


def _help(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().run()


_local: Final = threading.local()
_pool = _Pool()


def _renew() -> None:
    """In a forked child there are no threads, and a lock may have been held when it was forked."""
    global _pool  # noqa: PLW0603
    _pool = _Pool()
    _local.inside = False


os.register_at_fork(after_in_child=_renew)
