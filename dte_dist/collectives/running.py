"""Syncs in the background, by the modules they read or write: one at a time for each, since the next starts from where it ends."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dte_dist.layout import Layout

__all__ = ["finish", "join", "note"]

_running: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()


def note(done: threading.Event, *modules: Any) -> None:
    """Remember a sync that uses these modules and has ended once `done` is set; what is no module is left out."""
    for module in _models(modules):
        _running[module] = done


def join(*modules: Any) -> None:
    """Wait for the syncs in the background that use these modules; how they went is for whoever waits on their work."""
    for module in _models(modules):
        if (done := _running.pop(module, None)) is not None:
            done.wait()


def finish(seconds: float) -> bool:
    """Wait so long for all syncs in the background; return whether they have ended."""
    deadline = time.monotonic() + seconds
    return all(done.wait(max(0.0, deadline - time.monotonic())) for done in list(_running.values()))


def _models(things: Sequence[Any]) -> list[Any]:
    """Leave out None, and wrong arguments: all ranks are told of them later."""
    return [thing for thing in things if isinstance(thing, torch.nn.Module | Layout)]
