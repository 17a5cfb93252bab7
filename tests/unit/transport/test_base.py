"""Unit tier, no ranks: what may be said for a timeout, and that it means the same wherever it is said."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dte_dist import DeltaEngine, LoopbackTransport, Payload, PeerLost, ProcessGroupTransport
from dte_dist.options import options_of
from dte_dist.transport.base import TIMEOUT, check_timeout

GOOD = {3: 3.0, 0.001: 0.001, 1e9: 1e9, timedelta(minutes=2): 120.0, timedelta(milliseconds=1): 0.001}
WRONG = [
    0,
    -1.0,
    0.0009,
    1.1e9,
    float("nan"),
    float("inf"),
    True,
    "1",
    None,
    timedelta(0),
    timedelta(seconds=-1),
    timedelta(microseconds=999),
    timedelta.max,
]


@pytest.mark.parametrize(("said", "seconds"), GOOD.items(), ids=map(str, GOOD))
def test_a_timeout_is_seconds_or_a_timedelta(said: Any, seconds: float) -> None:
    assert check_timeout(said) == seconds and type(check_timeout(said)) is float
    assert options_of(timeout=said)["timeout"] == timedelta(seconds=seconds)
    assert DeltaEngine(LoopbackTransport(), timeout=said)._timeout == seconds


TAKES: dict[str, Callable[[Any], Any]] = {
    "check_timeout": check_timeout,
    "the collectives": lambda wrong: options_of(timeout=wrong),
    "an engine": lambda wrong: DeltaEngine(LoopbackTransport(), timeout=wrong),
    "a send": lambda wrong: LoopbackTransport().send(Payload(1, -1, True, {}), timeout=wrong),
    "a receive": lambda wrong: LoopbackTransport().receive(1, timeout=wrong),
}


@pytest.mark.parametrize("where", TAKES)
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_torch_would_take_for_no_timeout_at_all_is_refused(where: str, wrong: Any) -> None:
    """Less than a millisecond is none at all to torch, and what does not fit its clock never comes."""
    with pytest.raises(
        ValueError, match=r"timeout is a timedelta or a number of seconds, from 0.001 to 10\^9, not "
    ):
        TAKES[where](wrong)


def test_one_default_for_all() -> None:
    assert timedelta(minutes=10) == TIMEOUT == options_of()["timeout"]
    for takes in (DeltaEngine, ProcessGroupTransport):
        assert inspect.signature(takes).parameters["timeout"].default is TIMEOUT


def test_a_transport_waits_for_a_timedelta() -> None:
    transport = LoopbackTransport()
    transport.send(Payload(1, -1, True, {}), timeout=timedelta(seconds=1))
    assert transport.receive(1, timeout=timedelta(minutes=1)).version == 1
    with pytest.raises(PeerLost, match=r"v2 in 0\.02 s"):
        transport.receive(2, timeout=timedelta(milliseconds=20))
