"""When a wait ends, and how to wait for what may never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from dte_dist.liveness.threads import Latch, start

__all__ = ["Deadline", "within"]

_SLICE: Final = 0.1
"""Seconds between two looks at a deadline that may have been postponed."""

_T = TypeVar("_T")


class Deadline:
    """The moment at which a wait ends.

    Args:
        seconds: from now.

    Example:
        >>> Deadline(60).passed, Deadline(0).left
        (False, 0.0)
    """

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self._end

    def postpone(self, seconds: float) -> None:
        """Move the end; whoever waits notices within a tenth of a second."""
        self._end += seconds


def within(deadline: Deadline, call: Callable[[], _T], *, stop: Callable[[], bool] = lambda: False) -> _T:
    """Call something that may block for ever, in a thread of its own.

    Args:
        deadline: until when.
        call: what to call.
        stop: asked ten times a second whether waiting has become pointless.

    Raises:
        TimeoutError: it has not returned in time, or `stop` said so; the thread is left behind.

    Example:
        >>> within(Deadline(5), lambda: 3)
        3
    """
    answers: list[_T] = []
    errors: list[BaseException] = []
    done = Latch()

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)
        finally:
            done.set()

    start(threading.Thread(target=ask, name="dte_dist store", daemon=True))
    while not done.wait(min(deadline.left, _SLICE)):
        if deadline.passed or stop():
            raise TimeoutError("no answer in time")
    if errors:
        raise errors[0]
    return answers[0]
