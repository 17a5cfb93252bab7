"""Distributed tier, four ranks over gloo: syncs in the background."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    caught,
    facts,
    model,
    nudge,
    prints,
    same,
    sync,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def background(rank: int, world: int) -> Any:
    torch.manual_seed(rank)
    module = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sent, reports = [], []
    for step in range(4):
        if rank == 0:
            module(torch.ones(2, 300)).sum().backward()
            sent.append(prints(module))
        work = sync(module, async_op=True, bucket_bytes=4096)
        optimizer.step()  # at once: steps on receivers change nothing, they have no gradients
        optimizer.zero_grad()
        total = torch.tensor([float(rank + step)])
        for _ in range(5):  # the user's own collectives, over the same group, while the sync runs
            dist.all_reduce(total)
            total /= world
        assert total.item() == sum(range(world)) / world + step
        reports.append(facts(work.wait()))
        assert (
            work.is_completed()
            and work.is_success()
            and work.exception() is None
            and work.wait() is work.result()
        )
        if rank:
            sent.append(prints(module))
    return reports, sent


def test_async_receivers_get_the_bits_from_before_the_optimizer_step_beside_collectives_of_the_user(
    ranks: Ranks,
) -> None:
    reports, sent = same(ranks.run(background))
    assert [report[2] for report in reports] == ["full", "delta", "delta", "delta"]
    assert len({str(bits) for bits in sent}) == 4


def queued(rank: int, world: int) -> Any:
    first, second = model(rank), model(50 + rank)
    works = []
    for step in range(3):
        for module in (first, second):
            if rank == 0:
                nudge(module, "0.weight", step + 1)
            works.append(sync(module, async_op=True))
    versions = [work.wait().version for work in reversed(works)]
    return versions, prints(first), prints(second)


def test_async_calls_queue_up_and_may_be_waited_for_in_any_order(ranks: Ranks) -> None:
    versions, *_ = same(ranks.run(queued))
    assert versions == [3, 3, 2, 2, 1, 1]


def background_failure(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    work = sync(module, async_op=True, version=1)
    error = caught(work.wait)
    again = caught(work.wait)
    return (
        error,
        again,
        work.is_success(),
        type(work.exception()).__name__,
        sync(module, async_op=True).wait().version,
    )


def test_an_async_sync_that_fails_raises_at_every_wait_and_the_next_one_works(ranks: Ranks) -> None:
    error, again, success, kind, version = same(ranks.run(background_failure))
    assert error == again and error[0] == kind == "VersionReplay" and not success and version == 2


def slow_peer(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # comes once rank 0 has seen its wait time out
    work = sync(module, async_op=True)
    early = ("", "")
    if rank == 0:
        early = caught(lambda: work.wait(timedelta(milliseconds=20)))
        dist.send(torch.ones(1), 1)
    return early, work.wait().version


def test_a_wait_that_times_out_leaves_the_sync_running(ranks: Ranks) -> None:
    found = ranks.run(slow_peer)
    assert found[0][0][0] == "TimeoutError" and same([version for _, version in found]) == 2
