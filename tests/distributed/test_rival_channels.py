"""Distributed tier, four ranks over gloo: several channels into one module, onto different parts of it or
onto the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dte_dist
from tests.distributed.launcher import Ranks
from tests.distributed.tools import digest, nudge, prints, sync, why

pytestmark = pytest.mark.slow

OTHER_CHANNEL = "another channel wrote to its weights"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def two_trainers(rank: int, world: int, first: str, second: str, rename: bool) -> Any:
    """Ranks 0 and 1 train a part each, or parts that overlap; rank 2 receives both into one module. Rank 3
    looks on.
    """
    groups, renames = [dist.new_group([0, 2]), dist.new_group([1, 2])], ["of_0.{}".format, "of_1.{}".format]
    letters = (first, second)[rank] if rank < 2 else "".join(sorted({*first, *second}))
    torch.manual_seed(rank)
    module = nn.ModuleDict({letter: nn.Linear(8, 8, bias=False) for letter in letters})
    seen: list[Any] = []
    for step in range(4 if rank < 3 else 0):
        for part, group in enumerate(groups):
            if rank == part:
                with torch.no_grad():
                    for layer in module.values():
                        layer.weight[step] += 1.0
            if rank in (part, 2):
                options: dict[str, Any] = (
                    {"select": [f"{letter}.*" for letter in (first, second)[part]]} if rank == 2 else {}
                )
                if rename:
                    options["rename"] = renames[part]
                report = sync(module, group, group_src=0, **options)
                bits = {
                    name: print for name, print in prints(module).items() if name[0] in (first, second)[part]
                }
                seen.append((part, why(report), bits))
    dist.barrier()
    return seen


@pytest.mark.parametrize("rename", [False, True], ids=["names", "names of their own"])
def test_two_channels_onto_different_parts_of_a_module_go_on_by_delta(ranks: Ranks, rename: bool) -> None:
    one, two, both, _ = ranks.run(two_trainers, "a", "bc", rename)
    assert both == [each for pair in zip(one, two, strict=True) for each in pair]
    assert [report[2:] for _, report, _ in both] == [("full", "first sync", (1,))] * 2 + [
        ("delta", "", ())
    ] * 6


def test_two_channels_onto_parts_that_overlap_seed_each_time_and_say_which_it_was(ranks: Ranks) -> None:
    one, two, both, _ = ranks.run(two_trainers, "ab", "bc", False)
    assert both == [each for pair in zip(one, two, strict=True) for each in pair]
    assert [report[2:] for _, report, _ in both[2:]] == [
        ("full", f"rank 1 seeded: {OTHER_CHANNEL}", (1,))
    ] * 6


def test_two_channels_onto_one_tensor_under_different_names_are_rivals_too(ranks: Ranks) -> None:
    one, two, both, _ = ranks.run(two_trainers, "ab", "bc", True)
    assert both == [each for pair in zip(one, two, strict=True) for each in pair]
    assert {report[2:4] for _, report, _ in both[2:]} == {("full", f"rank 1 seeded: {OTHER_CHANNEL}")}


def same_name_elsewhere(rank: int, world: int) -> Any:
    """Two trainers call their weight alike; the rollout has two of them, and renames each in turn."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    torch.manual_seed(rank)
    module = nn.ModuleDict({letter: nn.Linear(8, 8, bias=False) for letter in ("ab" if rank == 2 else "w")})
    seen: list[Any] = []
    for step in range(4 if rank < 3 else 0):
        for part, (group, letter) in enumerate(zip(groups, "ab", strict=True)):
            if rank == part:
                nudge(module, "w.weight", step + 1)
            if rank in (part, 2):
                options: dict[str, Any] = (
                    {"select": [f"{letter}.*"], "rename": lambda name: f"w.{name[2:]}"} if rank == 2 else {}
                )
                report = sync(module, group, group_src=0, **options)
                seen.append((part, why(report), digest(module[letter if rank == 2 else "w"].weight)))
    dist.barrier()
    return seen


def test_two_tensors_that_channels_call_alike_are_two(ranks: Ranks) -> None:
    one, two, both, _ = ranks.run(same_name_elsewhere)
    assert both == [each for pair in zip(one, two, strict=True) for each in pair]
    assert [report[2:] for _, report, _ in both] == [("full", "first sync", (1,))] * 2 + [
        ("delta", "", ())
    ] * 6


def closed_among_several(rank: int, world: int) -> Any:
    """Rank 2 closes the channel of one part; that of the other goes on."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    module = nn.ModuleDict({letter: nn.Linear(4, 4) for letter in (("ab"[rank]) if rank < 2 else "ab")})
    seen: list[Any] = []
    for step in range(3 if rank < 3 else 0):
        for part, group in enumerate(groups):
            if rank in (part, 2):
                if rank == 2 and part == 0 and step == 1:
                    dte_dist.close(module, group)
                seen.append(
                    (
                        part,
                        why(
                            sync(
                                module,
                                group,
                                group_src=0,
                                **({"select": ["ab"[part] + ".*"]} if rank == 2 else {}),
                            )
                        )[2:4],
                    )
                )
    dist.barrier()
    return seen


def test_closing_the_channel_of_one_part_does_not_forget_the_other(ranks: Ranks) -> None:
    *_, both, _ = ranks.run(closed_among_several)
    assert [report for part, report in both if part == 1] == [
        ("full", "first sync"),
        ("delta", ""),
        ("delta", ""),
    ]
    again = ("full", "rank 1 seeded: it had no version")
    assert [report for part, report in both if part == 0] == [("full", "first sync"), again, ("delta", "")]
