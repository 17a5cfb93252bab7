"""Distributed tier, four ranks over gloo: when everything is sent, and versions that the caller chooses.

Every program runs on all ranks. Rank 0 is the source unless the test says otherwise; bits are compared
through hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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


def full_on_demand(rank: int, world: int) -> Any:
    module = model(rank)
    reports = [sync(module), sync(module), sync(module, mode="full"), sync(module)]
    return [facts(report) for report in reports], prints(module)


def test_mode_full_sends_everything_and_deltas_go_on_after_it(ranks: Ranks) -> None:
    reports, _ = same(ranks.run(full_on_demand))
    assert [report[2:4] for report in reports] == [
        ("full", "first sync"),
        ("delta", ""),
        ("full", "mode"),
        ("delta", ""),
    ]
    assert [report[0] for report in reports] == [1, 2, 3, 4]
    assert reports[2][10] == (1, 2, 3) and reports[2][4] == reports[2][5]


def test_a_full_sync_on_demand_says_which_version_was_held_before(ranks: Ranks) -> None:
    reports, _ = same(ranks.run(full_on_demand))
    assert [report[1] for report in reports] == [None, 1, 2, 3]


def full_of_one_source(rank: int, world: int) -> Any:
    module = model(0 if rank < 2 else rank)
    sources = {"src": [0, 1]}
    reports = [sync(module, **sources), sync(module, **sources)]
    if rank < 2:
        nudge(module, "0.weight", 3)
    reports.append(sync(module, **sources, mode="full" if rank == 1 else "delta"))
    reports.append(sync(module, **sources))
    return [facts(report)[:4] for report in reports], prints(module)


def test_one_source_that_is_asked_for_everything_is_enough(ranks: Ranks) -> None:
    reports, _ = same(ranks.run(full_of_one_source))
    assert [report[2:4] for report in reports] == [
        ("full", "first sync"),
        ("delta", ""),
        ("full", "mode"),
        ("delta", ""),
    ]
    assert [report[1] for report in reports] == [None, 1, 2, 3]


def full_that_fails(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    sync(module)
    before = prints(module)
    if rank == 0:
        nudge(module, "0.weight", 5)
    error = caught(lambda: sync(module, mode="full", version=1))
    return (
        error[0],
        rank == 0 or prints(module) == before,
        facts(sync(module))[:4],
        facts(sync(module))[:4],
        prints(module),
    )


def test_a_full_sync_that_fails_moves_no_receiver_and_the_next_one_is_full_and_says_why(ranks: Ranks) -> None:
    error, untouched, third, fourth, _ = same(ranks.run(full_that_fails))
    assert error == "VersionReplay" and untouched
    assert third == (3, 2, "full", "no version since a sync broke off") and fourth == (4, 3, "delta", "")


def anchored(rank: int, world: int) -> Any:
    module = model(rank)
    return [facts(sync(module, anchor_interval=2))[2:4] for _ in range(7)]


def test_after_so_many_deltas_everything_is_sent(ranks: Ranks) -> None:
    delta, anchor = ("delta", ""), ("full", "anchor")
    assert same(ranks.run(anchored)) == [("full", "first sync"), delta, delta, anchor, delta, delta, anchor]


def own_versions(rank: int, world: int) -> Any:
    module = model(rank)
    first = sync(module, version=10)
    said = sync(module, version=20 if rank in (0, 2) else None)
    failures = [caught(lambda v=v: sync(module, version=v)) for v in (20, 7)]
    failures.append(caught(lambda: sync(module, version=30 if rank else None)))
    last = sync(module)
    return first.version, (said.version, said.base_version), failures, (last.version, last.kind)


def test_versions_of_the_caller_must_be_newer_and_agree(ranks: Ranks) -> None:
    first, said, (equal, lower, differ), last = same(ranks.run(own_versions))
    assert (first, said, last) == (10, (20, 10), (21, "delta"))
    assert equal[0] == lower[0] == "VersionReplay" and "expected > 20; got 7" in lower[1]
    assert differ[0] == "VersionError" and "version= differs" in differ[1]
