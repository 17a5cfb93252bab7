"""One call at a time for each module: what two threads of a rank call at once on one module happens one after
the other.

A channel's groups carry one sync at a time, so a second call must not begin before the first has ended, nor
may a channel be closed or verified in between. The n-th call on one rank meets the n-th call on the others,
whichever threads they come from: where calls differ in their arguments, it is for the caller to order them.

1. A call joins the queue of each module that it uses, in one order for all: two calls that share two modules
   do not wait for each other.
2. It goes on when nobody is before it, and is over when it ends, well or not.
3. A queue keeps nobody alive. An interrupt, at any line, that takes a call away before it could say that it
   is over blocks nobody, even if the caller keeps the exception, which keeps the call: a call counts only
   while the function that made it is on the stack of its thread.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import torch

from dte_dist.layout import Layout
from dte_dist.liveness.threads import Latch

__all__ = ["exclusive"]

_LOOK: Final = 0.1
"""Seconds after which it is looked at whether whoever is before lives at all."""


class _Call:
    """Somebody who waits for a turn, or has it.

    Args:
        caller: the frame whose `with` statement this is.

    Attributes:
        thread: stands for the thread; numbers of threads are used again.
        over: whether the turn is given up.
        ended: set soon after, for who waits.
    """

    __slots__ = ("__weakref__", "_bottom", "_caller", "_number", "ended", "over", "thread")

    def __init__(self, caller: FrameType) -> None:
        self.thread = _here.__dict__.setdefault("thread", object())
        self.over = False
        self.ended = Latch()
        self._number = threading.get_ident()
        self._caller = id(caller)
        *_, bottom = _stack(caller)
        self._bottom = id(bottom)

    def is_abandoned(self) -> bool:
        """Return whether this call was taken away without a word: its caller is not on the stack any more.

        A frame that returns while another thread walks the stack cuts the walk short; only a walk that
        reached the bottom says anything.
        """
        top = sys._current_frames().get(self._number)
        if top is None:
            return True
        found = [id(frame) for frame in _stack(top)]
        return self._caller not in found and found[-1] == self._bottom


def _stack(top: FrameType) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    frame: FrameType | None = top
    while frame is not None:
        yield frame
        frame = frame.f_back


_here = threading.local()

Queue = list["weakref.ref[_Call]"]

_queues: weakref.WeakKeyDictionary[Any, Queue] = weakref.WeakKeyDictionary()


def _forget_parent() -> None:
    """Begin anew in a forked child: the threads whose calls it would wait for are the parent's."""
    global _queues  # noqa: PLW0603
    _queues = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_forget_parent)


@contextmanager
def exclusive(*modules: Any) -> Iterator[None]:
    """Wait until no other thread is in a call on any of these modules; None and what is no module are left
    out.

    Raises:
        ValueError: this thread is in such a call itself.

    Example:
        >>> with exclusive(torch.nn.Linear(2, 2), None):
        ...     pass
    """
    call = _Call(sys._getframe(2))  # above the one of contextlib
    queues = [_queues.setdefault(each, []) for each in modules if isinstance(each, torch.nn.Module | Layout)]
    try:
        for _, queue in sorted({id(queue): queue for queue in queues}.items()):
            _wait(queue, call)
        yield
    finally:
        call.over = True
        call.ended.set()


def _wait(queue: Queue, mine: _Call) -> None:
    """Join a queue and wait for the turn."""
    if any(
        call is not None and not call.over and call.thread is mine.thread and not call.is_abandoned()
        for call in [place() for place in queue]
    ):
        raise ValueError(
            "a call on this module is running in this thread: a detector, an option function or a "
            "signal handler cannot make another"
        )
    queue.append(weakref.ref(mine))  # one operation, as is what `_before` does: threads need no lock
    while (ended := _before(queue, mine)) is not None:
        ended.wait(_LOOK)


def _before(queue: Queue, mine: _Call) -> Latch | None:
    """Return what is set when the call that has the turn ends; None if it is this one. Whoever is gone is
    taken out.
    """
    while True:
        place = queue[0]
        call = place()
        if call is mine:
            return None
        if call is not None and not call.over and not call.is_abandoned():
            return call.ended
        with suppress(ValueError):  # another thread may have taken it out
            queue.remove(place)
