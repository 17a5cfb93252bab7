"""Syncs in the background, by the modules they read or write: one at a time for each, since the next starts
from where it ends.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from dte_dist.layout import Layout

__all__ = ["register", "wait_all", "wait_for"]

_LOOK: float = 0.5
"""Seconds after which it is looked at whether the thread of a sync lives at all."""


class Background(Protocol):
    """A sync in the background, as others see it."""

    def ended(self, timeout: float | None = None) -> bool:
        """Return whether it has ended, or never began, waiting at most so many seconds."""


_running: weakref.WeakKeyDictionary[Any, Background] = weakref.WeakKeyDictionary()


def _forget_parent() -> None:
    """Begin anew in a forked child: the syncs in the background are the parent's."""
    global _running  # noqa: PLW0603
    _running = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_forget_parent)


def register(work: Background, *modules: Any) -> None:
    """Remember a sync that uses these modules, before its thread starts; what is no module is left out."""
    for module in _models(modules):
        _running[module] = work


def wait_for(*modules: Any) -> None:
    """Wait for the syncs in the background that use these modules; how they went is for whoever waits on
    their work.
    """
    for module in _models(modules):
        if (work := _running.get(module)) is not None:
            while not work.ended(_LOOK):
                pass
            _running.pop(module, None)


def wait_all(seconds: float) -> bool:
    """Wait so long for all syncs in the background; return whether they have ended."""
    deadline = time.monotonic() + seconds
    return all(work.ended(max(0.0, deadline - time.monotonic())) for work in list(_running.values()))


def _models(things: Sequence[Any]) -> list[Any]:
    """Leave out None, and wrong arguments: all ranks are told of them later."""
    return [thing for thing in things if isinstance(thing, torch.nn.Module | Layout)]
