"""Distributed tier, four ranks over gloo: several modules over one group, one module over several groups, and
a group in place of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    caught,
    facts,
    model,
    nudge,
    parts_of,
    prints,
    same,
    sync,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def two_modules(rank: int, world: int) -> Any:
    first, second = model(rank), model(50 + rank)
    versions = []
    for module in (first, second, first, first, second):
        if rank == 0:
            nudge(module, "0.weight")
        versions.append(facts(sync(module))[:4])
    return versions, prints(first), prints(second)


def test_two_modules_over_one_group_have_versions_of_their_own(ranks: Ranks) -> None:
    versions, first, second = same(ranks.run(two_modules))
    assert [version[0] for version in versions] == [1, 1, 2, 3, 2] and first != second


def two_groups(rank: int, world: int) -> Any:
    near, far = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    module = model(rank)
    seen = []
    for step, group in enumerate((near, far, near, near, far)):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank in dist.get_process_group_ranks(group):
            seen.append(facts(sync(module, group))[:5])
    dist.barrier()
    return seen, prints(module)


def test_one_module_over_two_groups_has_a_version_in_each_and_both_are_right(ranks: Ranks) -> None:
    found = ranks.run(two_groups)
    assert found[1][0] == [
        (1, None, "full", "first sync", 145),
        (2, 1, "delta", "", 3),
        (3, 2, "delta", "", 4),
    ]
    assert found[2][0] == found[3][0] == [(1, None, "full", "first sync", 145), (2, 1, "delta", "", 5)]
    assert found[0][1] == found[2][1] == found[3][1]  # the far group came last
    assert found[0][1] != found[1][1]


def both_groups_fail_apart(rank: int, world: int) -> Any:
    near, far = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    module = model(rank)
    for group in (near, far):
        if rank in dist.get_process_group_ranks(group):
            sync(module, group)
    if rank == 3:
        receiver = parts_of(module, far).receiver
        receiver.take = lambda frame, head: setattr(receiver, "error", OSError("lost"))
    if rank == 0:
        nudge(module, "0.weight")
    seen = []
    for group in (near, far):
        if rank in dist.get_process_group_ranks(group):
            error = caught(lambda g=group: sync(module, g))
            state = (parts_of(module, group).source or parts_of(module, group).receiver).state
            seen.append((error[0], state.version))
    return seen


def test_of_two_receiver_groups_one_fails_and_their_versions_differ_visibly(ranks: Ranks) -> None:
    found = ranks.run(both_groups_fail_apart)
    assert found[0] == [("", 2), ("SyncFailed", 1)]
    assert found[1] == [("", 2)] and found[2] == found[3] == [("SyncFailed", 1)]


def overlapping_groups(rank: int, world: int) -> Any:
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    module = model(rank)
    for value, group in ((None, one), (None, two), (5.0, two), (0.0, one)):
        if rank == 0 and value is not None:
            module[0].bias.data[0] = value
        if rank == 0 and value is None:
            module[0].bias.data[0] = 0.0
        if rank in dist.get_process_group_ranks(group):
            sync(module, group)
    return prints(module)


def test_a_receiver_in_two_groups_of_one_module_is_right_after_each_sync(ranks: Ranks) -> None:
    source, receiver, *_ = ranks.run(overlapping_groups)
    assert receiver == source


def reopened(rank: int, world: int, change: str) -> Any:
    module, first, second = model(rank), model(60), model(61)
    before = dist.new_group(list(range(world)))
    options: dict[str, Any] = {"src": 0}
    if rank == 2:
        options |= {"select": ["0.*"]} if change == "select" else {"into": first}
    sync(module, before, **options)
    dist.destroy_process_group(before)
    after = dist.new_group(list(range(world)))
    if rank == 2:
        options |= {"select": None} if change == "select" else {"into": second}
    if rank == 0:
        nudge(module, "0.weight")
    report = sync(module, after, **options)
    return prints(second if rank == 2 and change == "into" else module), report.seeded


@pytest.mark.parametrize("change", ["select", "into"])
def test_a_receiver_that_receives_more_or_elsewhere_than_in_the_group_before_is_seeded_and_only_it(
    ranks: Ranks, change: str
) -> None:
    assert same(ranks.run(reopened, change))[1] == (2,)


def moved_groups(rank: int, world: int) -> Any:
    module = model(rank)
    seen = []
    for step in range(3):
        group = dist.new_group(list(range(world)))
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        seen.append(facts(sync(module, group))[:5])
        dist.destroy_process_group(group)
    return seen, prints(module)


def test_when_a_group_is_replaced_by_another_receivers_go_on_without_a_seed(ranks: Ranks) -> None:
    assert same(ranks.run(moved_groups))[0][1:] == [(2, 1, "delta", "", 2), (3, 2, "delta", "", 3)]
