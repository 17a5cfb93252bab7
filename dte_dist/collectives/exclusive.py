"""One call at a time for each module: what two threads of a rank call at once on one module happens one after the other.

A channel's groups carry one sync at a time, so a second call must not begin before the first has ended, nor may a channel be closed or
verified in between. The n-th call on one rank meets the n-th call on the others, whichever threads they come from: where calls differ in
their arguments, it is for the caller to order them.

Locks are taken in one order, so two calls that share two modules do not wait for each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dte_dist.layout import Layout

__all__ = ["exclusive"]


class _Turn:
    """The lock of one module, which knows the thread that has it.

    Attributes:
        owner: number of that thread; None while it is free.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None

    def __enter__(self) -> None:
        if self.owner == threading.get_ident():
            raise ValueError(
                "a call on this module is running in this thread: a detector, an option function or a signal handler cannot make another"
            )
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.owner = None
        self._lock.release()


_turns: weakref.WeakKeyDictionary[Any, _Turn] = weakref.WeakKeyDictionary()
_register = threading.Lock()


@contextmanager
def exclusive(*modules: Any) -> Iterator[None]:
    """Wait until no other thread is in a call on any of these modules; None and what is no module are left out.

    Raises:
        ValueError: this thread is in such a call itself.

    Example:
        >>> with exclusive(torch.nn.Linear(2, 2), None):
        ...     pass
    """
    with _register:
        turns = {_turns.setdefault(each, _Turn()) for each in modules if isinstance(each, torch.nn.Module | Layout)}
    with ExitStack() as stack:
        for turn in sorted(turns, key=id):
            stack.enter_context(turn)
        yield
