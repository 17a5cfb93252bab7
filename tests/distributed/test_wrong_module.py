"""Distributed tier, three ranks over gloo: a rank that passes what is no module, while the others call a
channel that is open, or open one. All are told at once, and go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import dte_dist
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, facts, model, prints, same, sync

pytestmark = pytest.mark.slow

LONG, SOON = 60.0, 25.0
WRONG: dict[str, Any] = {"none": None, "a number": 3, "tensors": {}, "a list": [model]}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def call(module: Any, **options: Any) -> Any:
    return sync(module, timeout=LONG, **options)


def passes_no_module(rank: int, world: int, given: str, who: int, case: tuple[int, str]) -> Any:
    """One rank passes what is no module, while the others sync, sync in the background or verify."""
    channels, how = case
    modules = [model(rank + 10 * number) for number in range(channels)]
    for module in modules:
        call(module)
    mine = WRONG[given] if rank == who else modules[0]
    calls = {
        "sync": lambda: call(mine),
        "background": lambda: call(mine, async_op=True).wait(),
        "verify": lambda: dte_dist.verify(mine),
    }
    dist.barrier()
    begin = time.monotonic()
    error = caught(calls[how])
    is_soon = time.monotonic() - begin < SOON
    reports = [facts(call(module))[:4] for module in modules]
    return error, is_soon, reports, [prints(module) for module in modules]


@pytest.mark.parametrize("how", ["sync", "background", "verify"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("name", "who"), [*((name, 1) for name in WRONG), ("none", 0)])
def test_what_is_no_module_is_told_to_the_ranks_that_call_an_open_channel(
    ranks: Ranks, name: str, who: int, channels: int, how: str
) -> None:
    (kind, text), is_soon, reports, _ = same(ranks.run(passes_no_module, name, who, (channels, how)))
    assert (kind, is_soon) == ("ValueError", True), text
    assert "expected a torch.nn.Module or a dte_dist.Layout" in text and f"raised on rank {who}" in text
    assert reports == [(2, 1, "delta", "")] * channels


def passes_no_module_at_first(rank: int, world: int, has_other: bool) -> Any:
    """One rank passes what is no module, while the others open a channel."""
    if has_other:
        other = model(rank + 10)
        call(other)
    module = model(rank)
    dist.barrier()
    begin = time.monotonic()
    error = caught(lambda: call(None if rank == 1 else module))
    is_soon = time.monotonic() - begin < SOON
    return error, is_soon, facts(call(module))[:4], prints(module)


@pytest.mark.parametrize("has_other", [False, True])
def test_what_is_no_module_is_told_to_the_ranks_that_open_a_channel(ranks: Ranks, has_other: bool) -> None:
    (kind, text), is_soon, report, _ = same(ranks.run(passes_no_module_at_first, has_other))
    assert (kind, is_soon) == ("OrderMismatch" if has_other else "ValueError", True), text
    assert report == (1, None, "full", "first sync")


def verifies_another_module(rank: int, world: int) -> Any:
    """One rank verifies a module that has no channel."""
    module, other = model(rank), model(rank + 10)
    call(module)
    dist.barrier()
    begin = time.monotonic()
    error = caught(lambda: dte_dist.verify(other if rank == 1 else module))
    return error, time.monotonic() - begin < SOON, facts(call(module))[:4]


def test_a_module_without_a_channel_is_told_to_the_ranks_that_verify(ranks: Ranks) -> None:
    (kind, text), is_soon, report = same(ranks.run(verifies_another_module))
    assert (kind, is_soon) == ("ValueError", True) and "no open channel" in text
    assert report == (2, 1, "delta", "")
