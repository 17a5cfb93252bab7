"""The handle of a sync that runs in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dte_dist.liveness.threads import Latch, settle, start
from dte_dist.report import SyncReport
from dte_dist.sync.streams import Streams, synchronize, use_streams

__all__ = ["THREAD_NAME", "DeltaWork"]

THREAD_NAME: Final = "dte_dist sync"


class DeltaWork(dist.Work):
    """A sync on its way, like the `Work` of c10d.

    When the call that returned it has returned, the bits to send are safe: the optimizer may step. On
    receivers, the weights change at some moment before `wait` returns; then they may be used on any stream.

    Args:
        run: the sync, which `start` begins.
        streams: to run it on, see `sync.streams`; none on the CPU.

    Example:
        >>> work = dte_dist.delta_broadcast(model, async_op=True)
        >>> train()  # the bits to send are safe
        >>> report = work.wait()  # rollout ranks: before they generate
        >>> isinstance(work, dte_dist.DeltaWork), report.version
        (True, 1)
    """

    def __init__(self, run: Callable[[], SyncReport], streams: Streams = ()) -> None:
        super().__init__()
        self._report: SyncReport | None = None
        self._error: BaseException | None = None
        self._done = Latch()
        self._thread = threading.Thread(target=self._run, args=(run, streams), name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own; once only. An interrupt may leave it unclear whether it began:
        `ended` tells.

        Example:
            >>> work = dte_dist.DeltaWork(lambda: "done")  # `delta_broadcast` begins the work that it returns
            >>> work.start()
            >>> work.wait()
            'done'
        """
        start(self._thread)

    def ended(self, timeout: float | None = None) -> bool:
        """Return whether the sync has ended, well or not, or was never begun; wait for it at most so many
        seconds.

        Example:
            >>> work = dte_dist.delta_broadcast(model, async_op=True)
            >>> work.ended(timeout=60)
            True
        """
        if self._done.wait(timeout):
            return True
        settle()  # an interrupt may have left the thread about to begin
        return not self._thread.is_alive() or self._done.is_set()

    def _run(self, run: Callable[[], SyncReport], streams: Streams) -> None:
        try:
            with torch.no_grad(), use_streams(streams):
                try:
                    self._report = run()
                finally:
                    synchronize(streams)
        except BaseException as error:  # wait() raises it in the caller's thread
            self._error = error
        finally:
            self._done.set()

    def is_completed(self) -> bool:
        """Return whether the sync has ended, well or not.

        Example:
            >>> work = dte_dist.delta_broadcast(model, async_op=True)
            >>> report = work.wait()
            >>> work.is_completed()
            True
        """
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether the sync has ended well.

        Example:
            >>> work = dte_dist.delta_broadcast(model, async_op=True)
            >>> report = work.wait()
            >>> work.is_success()
            True
        """
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        """Return the error that ended the sync, None if there is none (yet).

        Example:
            >>> work = dte_dist.delta_broadcast(model, async_op=True)
            >>> report = work.wait()
            >>> print(work.exception())
            None
        """
        return self._error

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Wait for the end and return the `SyncReport`.

        Args:
            timeout: at most so long (timedelta, or seconds); None waits for the channel's own timeouts. The
                sync goes on after it.

        Raises:
            TimeoutError: it has not ended in this time.
            DeltaError: the sync failed; the same on every rank.

        Example:
            >>> work = dte_dist.delta_broadcast(model, async_op=True)
            >>> work.wait(timeout=60).kind
            'full'
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._done.wait(seconds):
            raise TimeoutError(f"the sync has not ended after {seconds} s; it goes on, wait again")
        if self._error is not None:
            raise self._error
        return self._report

    def result(self) -> Any:
        """Return the `SyncReport`; waits for it.

        Example:
            >>> work = dte_dist.delta_broadcast(model, async_op=True)
            >>> work.result().kind
            'full'
        """
        return self.wait()
