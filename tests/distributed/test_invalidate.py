"""Distributed tier, four ranks over gloo: `dte_dist.invalidate` after writes that move no version counter,
and receivers that ask for everything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dte_dist
from dte_dist import Layout
from tests.distributed.launcher import Ranks
from tests.distributed.tools import Rows, caught, digest, model, nudge, parts_of, prints, same, sync, why

INVALIDATED = "dte_dist.invalidate was called for it"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


# Writes that move no counter --------------------------------------------------------------------------------


def unseen(rank: int, world: int, kind: str, group: str) -> Any:
    """Rank 2 writes through `.data`, which nobody notices; then it says so."""
    pg = None if group == "none" else dist.new_group(list(range(world)))
    said = {"none": None, "said": pg, "left out": None, "world": dist.group.WORLD}[group]
    copy: Any = None
    if kind == "layout":
        tensors = {name: tensor.clone() for name, tensor in model(rank).state_dict().items()}
        module: Any = Layout.from_tensors(tensors)
        target, weight = module, tensors["2.weight"]
    else:
        module, copy = model(1 if kind == "into" else rank), model(10 + rank) if kind == "into" else None
        target = module if copy is None else copy
        weight = target[2].weight
        tensors = target.state_dict()
    src = list(range(world)) if kind == "into" else 0
    seen = []
    for step in range(5):
        if kind == "layout" and rank == 0:
            tensors["0.weight"].view(-1)[: step + 1] += 1
        elif kind == "into" or rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank == 2 and step in (2, 3):
            weight.data[:2] = 42.0
            if step == 3:
                dte_dist.invalidate(target, said)
        report = sync(module, pg, src=src, **({"into": copy} if copy is not None else {}))
        held = tensors if kind == "layout" else target.state_dict()
        seen.append((why(report), {name: digest(tensor) for name, tensor in held.items()}))
    return seen


@pytest.mark.parametrize("group", ["none", "said", "left out"])
@pytest.mark.parametrize("kind", ["receiver", "layout", "into"])
def test_a_write_through_data_is_not_noticed_and_invalidate_seeds_that_rank_alone(
    ranks: Ranks, kind: str, group: str
) -> None:
    seen = ranks.run(unseen, kind, group)
    reports = same([[report for report, _ in each] for each in seen])
    assert reports[1:] == [
        (2, 1, "delta", "", ()),
        (3, 2, "delta", "", ()),
        (4, 3, "delta", f"rank 2 seeded: {INVALIDATED}", (2,)),
        (5, 4, "delta", "", ()),
    ]
    third = [each[2][1] for each in seen]
    assert third[2] != third[3] and third[1] == third[3], "it was noticed after all: the test shows nothing"
    same([[bits for _, bits in each[3:]] for each in seen])


def invalidated_otherwise(rank: int, world: int) -> Any:
    module, other, seen = model(rank), model(30 + rank), []
    dte_dist.invalidate(other)  # of which there is no channel
    dte_dist.invalidate(module)
    seen.append(why(sync(module))[:4])
    on_source = caught(lambda: dte_dist.invalidate(module)) if rank == 0 else ("ValueError", "only sends")
    for _ in range(2):
        if rank in (1, 3):
            dte_dist.invalidate(module)
            dte_dist.invalidate(module)
        seen.append(why(sync(module)))
    if rank == 1:
        dte_dist.invalidate(module)
        nudge(module, "0.weight", 1)  # the first reason stays
    seen.append(why(sync(module)))
    dte_dist.close(module)
    dte_dist.invalidate(module)
    seen.append(why(sync(module))[:4])
    return on_source[0], "only sends" in on_source[1], seen, prints(module)


def test_invalidate_before_the_first_sync_on_a_source_on_several_ranks_and_after_close(ranks: Ranks) -> None:
    kind, told, seen, _ = same(ranks.run(invalidated_otherwise))
    assert kind == "ValueError" and told
    both = f"rank 1 seeded: {INVALIDATED}; rank 3 seeded: {INVALIDATED}"
    assert seen == [
        (1, None, "full", "first sync"),
        (2, 1, "delta", both, (1, 3)),
        (3, 2, "delta", both, (1, 3)),
        (4, 3, "delta", f"rank 1 seeded: {INVALIDATED}", (1,)),
        (1, None, "full", "first sync"),
    ]


def invalidated_in_the_background(rank: int, world: int) -> Any:
    """It waits for the sync on its way, whose commit would otherwise make good what it said."""
    module = model(rank)
    sync(module)
    if rank == 0:
        nudge(module, "0.weight", 3)
        dist.recv(torch.empty(1), 2)
    work = sync(module, async_op=True)
    ended = True
    if rank == 2:
        module[2].weight.data[:] = 42.0  # the sync may be over, or be about to write: to another tensor
        timer = threading.Timer(0.3, lambda: dist.send(torch.ones(1), 0))
        timer.start()
        dte_dist.invalidate(module)
        ended = work.is_completed()
        timer.join()
    return why(work.wait()), ended, why(sync(module)), prints(module)


def test_invalidate_waits_for_a_sync_in_the_background_and_the_one_after_it_seeds(ranks: Ranks) -> None:
    first, ended, second, _ = same(ranks.run(invalidated_in_the_background))
    assert (
        first == (2, 1, "delta", "", ())
        and ended
        and second == (3, 2, "delta", f"rank 2 seeded: {INVALIDATED}", (2,))
    )


def invalidated_in_two_groups(rank: int, world: int) -> Any:
    """Rank 2 receives two parts over two groups; it distrusts both, or what came over one."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    module = nn.ModuleDict({letter: nn.Linear(4, 4) for letter in (("ab"[rank]) if rank < 2 else "ab")})
    seen: list[Any] = []
    for step in range(3 if rank < 3 else 0):
        if rank == 2 and step:
            dte_dist.invalidate(module, groups[1] if step == 1 else None)
        for part, group in enumerate(groups):
            if rank in (part, 2):
                seen.append(
                    why(
                        sync(
                            module,
                            group,
                            group_src=0,
                            **({"select": ["ab"[part] + ".*"]} if rank == 2 else {}),
                        )
                    )[3]
                )
    dist.barrier()
    return seen


def test_invalidate_for_one_group_or_for_all(ranks: Ranks) -> None:
    *_, both, _ = ranks.run(invalidated_in_two_groups)
    reason = f"rank 1 seeded: {INVALIDATED}"
    assert both == ["first sync", "first sync", "", reason, reason, reason]


# A receiver that asks ---------------------------------------------------------------------------------------


def asked(rank: int, world: int, background: bool, who: tuple[int, ...]) -> Any:
    module, seen = model(rank), []
    for step in range(4):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank in who and step == 2:
            module[2].weight.data[:] = 42.0
        mode = "full" if rank in who and step == 2 else "delta"
        seen.append(
            why(sync(module, mode=mode, async_op=True).wait() if background else sync(module, mode=mode))
        )
    return seen, prints(module)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("who", [(2,), (1, 2, 3)], ids=["one", "all"])
def test_a_receiver_that_asks_for_everything_gets_it_alone(
    ranks: Ranks, who: tuple[int, ...], background: bool
) -> None:
    seen, _ = same(ranks.run(asked, background, who))
    reason = "; ".join(f'rank {rank} seeded: it asked for mode="full"' for rank in who)
    assert seen[1:] == [
        (2, 1, "delta", "", ()),
        (3, 2, "delta" if who == (2,) else "full", reason, who),
        (4, 3, "delta", "", ()),
    ]


def asked_with_a_source(rank: int, world: int) -> Any:
    """Every rank trains a shard and receives: what a rank that is a source asks for is asked of all."""
    rows, copy = Rows(rank, world), Rows(rank, 0)
    seen = []
    for step in range(3):
        rows.parts[0][0, 0] += 1
        mode = "full" if rank == 2 and step == 1 else "delta"
        seen.append(why(sync(rows.layout, src=list(range(world)), into=copy.layout, mode=mode)))
    return seen, digest(copy.parts[0]), parts_of(rows.layout).source is not None


def test_a_colocated_rank_that_asks_for_everything_asks_for_all(ranks: Ranks) -> None:
    seen, _, is_source = same(ranks.run(asked_with_a_source))
    assert is_source and [report[2] for report in seen] == ["full", "full", "delta"]
    assert [report[4] for report in seen] == [(0, 1, 2, 3), (0, 1, 2, 3), ()]
