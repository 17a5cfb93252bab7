"""What tests of ranks that wait share: how long they do, and what they are told."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from dte_dist.sync import agreement
from dte_dist.sync.open import _ChannelOpening
from dte_dist.transport import opening
from dte_dist.transport.communicator import Communicator
from tests.distributed.tools import model, same, sync

LONG, SOON, SHORT, PATIENT = 60.0, 25.0, 3.0, 5.0
STATE: dict[str, Any] = {}


def told(call: Callable[[], Any]) -> tuple[str, str, tuple[int, ...], float]:
    """Class and text of what a call raises, the ranks that it names, and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        took = time.monotonic() - begin
        return type(error).__name__, str(error), getattr(error, "lost", ()), took
    return "", "", (), time.monotonic() - begin


def agreed_text(values: Sequence[Any], *, within: float = SOON) -> tuple[str, str, tuple[int, ...]]:
    """Return class, text and ranks that all were told; they were told in time, and in words of their own."""
    name, text, lost = same([tuple(each[:3]) for each in values])
    assert all(took < within for *_, took in values), values
    assert not re.search(r"gloo/|\.cc|\[/|Gloo|127\.0|[^\x00-\x7f]", text), text
    return name, text, lost


def begin(rank: int, world: int, timeout: float = LONG) -> int:
    STATE["module"] = model(rank)
    sync(STATE["module"], timeout=timeout)
    return os.getpid()


def go(rank: int, world: int, timeout: float = LONG) -> Any:
    return told(lambda: sync(STATE["module"], timeout=timeout))


def go_anew(rank: int, world: int, timeout: float = LONG) -> Any:
    return told(lambda: sync(model(rank), timeout=timeout))


PLACES = {
    "before the roll call": (_ChannelOpening, "_describe"),
    "at the roll call": (opening, "call_roll"),
    "in the middle of agreeing": (agreement, "_share"),
    "while it plans": (agreement, "_plan"),
    "while it connects": (Communicator, "_connect"),
    "while it makes groups for data": (_ChannelOpening, "_groups"),
    "while it builds": (_ChannelOpening, "_build"),
    "while plans are compared": (agreement, "_refuse_other_plan"),
    "at the end": (opening, "forget_meeting"),
}
