"""Distributed tier, four ranks over gloo: one sync after another, over any sources and receivers.

Every program runs on all ranks. Rank 0 is the source unless the test says otherwise; bits are compared
through hashes.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dte_dist import Layout
from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    Rows,
    caught,
    digest,
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


# One sync after another -------------------------------------------------------------------------------------


def five_syncs(rank: int, world: int) -> list[Any]:
    module = model(rank)
    seen = []
    for step in range(5):
        if rank == 0:
            nudge(module, "0.weight", step)
        seen.append((facts(sync(module)), prints(module)))
    return seen


def test_five_syncs_in_a_row_move_versions_and_leave_all_ranks_bit_equal(ranks: Ranks) -> None:
    seen = same(ranks.run(five_syncs))
    assert seen[0][0][:5] == (1, None, "full", "first sync", 145)
    assert [facts[:5] for facts, _ in seen[1:]] == [
        (step + 1, step, "delta", "", step) for step in (1, 2, 3, 4)
    ]
    assert len({str(prints) for _, prints in seen}) == 5


def nothing_changed(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    before = prints(module)
    return facts(sync(module)), prints(module) == before


def test_nothing_changed_moves_the_version_on_both_sides_and_sends_no_byte(ranks: Ranks) -> None:
    (version, base, kind, _, changed, _, wire, gather, _, frames, seeded), unchanged = same(
        ranks.run(nothing_changed)
    )
    assert (version, base, kind, changed, wire, gather, frames, seeded) == (
        2,
        1,
        "delta",
        0,
        0,
        0,
        0,
        (),
    ) and unchanged


def one_rank_changed(rank: int, world: int) -> Any:
    rows = Rows(rank, 3, tensors=20)
    sync(rows.layout, src=[0, 1, 2])
    if rank == 1:
        rows.parts[7][2, 3] = 42.0
    report = sync(rows.layout, src=[0, 1, 2])
    return facts(report), rows.whole(3)


def test_exactly_one_source_has_one_change_in_one_tensor(ranks: Ranks) -> None:
    report, _ = same(ranks.run(one_rank_changed))
    assert report[2] == "delta" and report[4] == 1 and report[9] == 1


def uneven_changes(rank: int, world: int) -> Any:
    rows = Rows(rank, 3, (600, 40), tensors=30)
    sync(rows.layout, src=[0, 1, 2], bucket_bytes=1 << 16)
    if rank == 1:
        rows.parts[3][0, 0] += 1
    if rank == 2:
        for part in rows.parts:
            part.neg_()
    return facts(sync(rows.layout, src=[0, 1, 2], bucket_bytes=1 << 16)), rows.whole(3)


def test_sources_with_no_change_one_change_and_very_many_over_many_tensors(ranks: Ranks) -> None:
    report, _ = same(ranks.run(uneven_changes))
    assert report[2] == "delta" and report[4] == 1 + 200 * 40 * 30


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_any_number_of_sources_and_receivers(ranks: Ranks, sources: int) -> None:
    same(ranks.run(some_sources, sources))


def some_sources(rank: int, world: int, sources: int) -> Any:
    rows, src = Rows(rank, sources), list(range(sources))
    found = []
    for step in range(3):
        if rank < sources:
            rows.parts[0][0, step] += 1
        found.append((facts(sync(rows.layout, src=src)), rows.whole(sources)))
    return found


def pair_only(rank: int, world: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    module = model(rank)
    sync(module, group)
    if rank == 1:
        nudge(module, "2.weight", 5)
    return facts(sync(module, group)), prints(module)


def test_one_source_and_one_receiver_in_a_part_of_the_world(ranks: Ranks) -> None:
    _, one, _, three = ranks.run(pair_only)
    assert same([one, three])[0][:5] == (2, 1, "delta", "", 5)


def one_member(rank: int, world: int) -> Any:
    groups = [dist.new_group([r]) for r in range(world)]
    alone = caught(lambda: sync(model(rank), groups[rank]))
    outside = caught(lambda: sync(model(rank), groups[(rank + 1) % world]))
    return alone, outside


def test_a_group_without_receivers_and_a_group_one_is_not_in_are_refused(ranks: Ranks) -> None:
    alone, outside = same(ranks.run(one_member))
    assert alone[0] == "LayoutMismatch" and "none receives" in alone[1]
    assert outside[0] == "ValueError" and "not in the group" in outside[1]


def odd_order(rank: int, world: int, how: dict[str, Any]) -> Any:
    group = dist.new_group([2, 0, 1, 3], sort_ranks=False)
    module = model(rank)
    sync(module, group, **how)
    after_seed = prints(module)
    if rank == 2:
        nudge(module, "0.bias", 1)
        nudge(module, "2.weight", 3)
    report = sync(module, group, **how)
    return facts(report), prints(module), after_seed == prints(model(2))


@pytest.mark.parametrize(
    "how", [{}, {"src": 2}, {"src": [2]}, {"group_src": 0}, {"group_src": (0,)}], ids=str
)
def test_in_a_group_of_another_order_the_source_is_group_rank_0(ranks: Ranks, how: dict[str, Any]) -> None:
    report, after, from_rank_2 = same(ranks.run(odd_order, how))
    assert report[:5] == (2, 1, "delta", "", 4) and from_rank_2
    seeded = prints(model(2))
    assert sorted(name for name in after if after[name] != seeded[name]) == ["0.bias", "2.weight"]


def last_is_root(rank: int, world: int, how: dict[str, Any]) -> Any:
    module = model(min(rank, 2))
    sync(module, **how)
    if rank in (2, 3):
        nudge(module, "0.weight", 4)
    return facts(sync(module, **how))[:5], prints(module), parts_of(module).agreement.root


@pytest.mark.parametrize("how", [{"src": [3, 2]}, {"group_src": [3, 2]}], ids=str)
def test_the_first_source_named_is_the_root(ranks: Ranks, how: dict[str, Any]) -> None:
    report, _, root = same(ranks.run(last_is_root, how))
    assert root == 3 and report == (2, 1, "delta", "", 4)


def kept_apart(rank: int, world: int) -> Any:
    module = model(rank)
    module.register_buffer("cache", torch.full((3,), float(rank)), persistent=False)
    module[0].weight.requires_grad_(False)  # frozen, and different on every rank
    before = digest(module.cache)
    sync(module)
    sync(module)
    return digest(module.cache) == before, module[0].weight.requires_grad, prints(module)


def test_frozen_parameters_are_synced_and_buffers_that_do_not_persist_are_left_alone(ranks: Ranks) -> None:
    kept, requires_grad, bits = same(ranks.run(kept_apart))
    assert kept and not requires_grad and "0.weight" in bits and "cache" not in bits


def beside_nans(rank: int, world: int) -> Any:
    module, ended = model(rank), threading.Event()
    nans = torch.full((4096,), float("nan"))
    nans.view(torch.int32)[::2] = 0x7F800001  # signalling
    copy, wrong = torch.zeros_like(nans), []

    def work() -> None:
        while not ended.is_set():
            copy.zero_().copy_(nans)
            wrong.extend([1] if digest(copy) != digest(nans) else [])

    thread = threading.Thread(target=work)
    thread.start()
    for step in range(5):
        if rank == 0:
            nudge(module, "0.weight", step)
        sync(module)
    ended.set()
    thread.join()
    return wrong, prints(module)


def test_copies_of_nans_in_another_thread_are_what_they_were(ranks: Ranks) -> None:
    wrong, _ = same(ranks.run(beside_nans))
    assert not wrong


# A large tensor, and many syncs -----------------------------------------------------------------------------


def tiny_buckets(rank: int, world: int) -> Any:
    torch.manual_seed(rank)
    weight = torch.randn(1 << 18)
    layout = Layout.from_tensors({"w": weight, "small": torch.zeros(3)})
    sync(layout, bucket_bytes=1024)
    if rank == 0:
        weight.neg_()
    return facts(sync(layout, bucket_bytes=1024)), digest(weight)


@pytest.mark.slow
def test_a_tensor_of_1_mb_in_buckets_of_1_kb(ranks: Ranks) -> None:
    report, _ = same(ranks.run(tiny_buckets))
    assert report[4] == 1 << 18 and report[9] == 1025


def hundred_syncs(rank: int, world: int) -> Any:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    addresses = [p.data_ptr() for p in module.parameters()]
    held = []
    for step in range(140):
        if rank == 0:
            nudge(module, f"{step % 8}.weight", 50)
        sync(module)
        if step in (39, 139):
            gc.collect()
            with open("/proc/self/statm") as statm:
                held.append(
                    (int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects()))
                )
    same_addresses = [p.data_ptr() for p in module.parameters()] == addresses
    return same_addresses, held[1][0] - held[0][0], held[1][1] - held[0][1], prints(module)


@pytest.mark.slow
def test_a_hundred_syncs_keep_addresses_and_leave_memory_flat(ranks: Ranks) -> None:
    found = ranks.run(hundred_syncs)
    same([bits for *_, bits in found])
    for same_addresses, grown, objects, _ in found:
        assert same_addresses
        assert grown < 4 << 20 and objects < 200  # the model is 133 kB
