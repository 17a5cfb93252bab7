"""Distributed tier, four ranks over gloo: what `delta_broadcast` promises between ranks, and what happens
when one rank fails.

Every program runs on all ranks. Rank 0 is the source unless the test says otherwise; bits are compared
through hashes.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dte_dist
from dte_dist import Layout
from dte_dist.errors import PeerLost
from dte_dist.plan.chunks import SEGMENT
from dte_dist.sync import registry
from dte_dist.sync.protocol import Sync
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.staging import StagedPatch
from dte_dist.transport.broadcast import BucketedBroadcast
from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    TIMEOUT,
    Rows,
    caught,
    channel_of,
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


# One sync after another
# --------------------------------------------------------------------------------------------------


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


# FSDP2 ------------------------------------------------------------------------------------------------------
# -------------


def trainers(rank: int, world: int, how: str) -> Any:
    mesh = DeviceMesh("cpu", [0, 1])
    module = model(1 if rank < 2 else rank)
    if rank < 2:
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh)
    options: dict[str, Any] = {"mesh": {"src": mesh}, "ranks": {"src": [0, 1]}, "default": {}}[how]
    found = []
    for step in range(3):
        report = sync(module, **options)
        if rank < 2:
            whole = {
                n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.state_dict().items()
            }
            found.append((facts(report)[:5], {name: digest(tensor) for name, tensor in whole.items()}))
            module(torch.ones(2, 12)).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.5 / (step + 1)).step()
        else:
            found.append((facts(report)[:5], prints(module)))
    return found


@pytest.mark.parametrize("how", ["default", "mesh", "ranks"])
def test_fsdp2_trainers_are_the_sources_by_default_by_mesh_and_by_ranks(ranks: Ranks, how: str) -> None:
    found = same(ranks.run(trainers, how))
    assert [report[2] for report, _ in found] == ["full", "delta", "delta"] and len(
        {str(bits) for _, bits in found}
    ) == 3


def colocated(rank: int, world: int) -> Any:
    mesh = DeviceMesh("cpu", list(range(world)))
    trained, copy = model(1), model(10 + rank)
    fully_shard(trained, mesh=mesh)
    sync(trained, into=copy)
    trained(torch.ones(2, 12)).sum().backward()
    torch.optim.SGD(trained.parameters(), lr=0.5).step()
    addresses = [p.data_ptr() for p in copy.parameters()]
    report = sync(trained, into=copy)
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in trained.state_dict().items()}
    assert [p.data_ptr() for p in copy.parameters()] == addresses
    return (
        facts(report)[:4],
        {name: digest(tensor) for name, tensor in whole.items()} == prints(copy),
        prints(copy),
    )


def test_every_rank_trains_a_shard_and_receives_a_whole_copy_into_another_module(ranks: Ranks) -> None:
    report, equal, _ = same(ranks.run(colocated))
    assert report == (2, 1, "delta", "") and equal


def into_on_some(rank: int, world: int) -> Any:
    module, copy = model(rank), model(20 + rank)
    before = prints(module)
    for _ in range(2):
        sync(module, src=0, into=copy if rank in (0, 2) else None)
    return prints(copy if rank in (0, 2) else module), prints(module) == before


def test_into_on_the_root_and_on_a_mere_receiver_beside_plain_receivers(ranks: Ranks) -> None:
    found = ranks.run(into_on_some)
    same([bits for bits, _ in found])
    assert [untouched for _, untouched in found] == [True, False, True, False]


# Options ----------------------------------------------------------------------------------------------------
# -------------


def select_part(rank: int, world: int) -> Any:
    module = model(rank)
    before = prints(module)
    select = ["0.*"] if rank == 2 else (lambda name: name != "2.weight") if rank == 3 else None
    sync(module, select=select)
    if rank == 0:
        nudge(module, "0.weight", 3)
        nudge(module, "2.weight", 2)
    report = sync(module, select=select)
    after = prints(module)
    return facts(report)[:5], after, sorted(name for name in after if after[name] != before[name])


def test_receivers_may_select_a_part_and_the_rest_stays_bit_for_bit(ranks: Ranks) -> None:
    (report, bits, _), *others = ranks.run(select_part)
    assert report == (2, 1, "delta", "", 5)
    assert others[0][1] == bits
    assert (
        others[1][2] == ["0.bias", "0.weight"] and "2.weight" not in others[2][2] and "steps" in others[2][2]
    )
    assert all(bits[name] == after[name] for _, after, changed in others for name in changed)


def part_of_views(rank: int, world: int) -> Any:
    """The last receiver holds one tensor of two, as views."""
    tensors = {"a": torch.zeros(4, 3), "b": torch.zeros(5)}
    if rank == 0:
        tensors["a"] += 1
    views = [(name, tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in tensors.items()]
    last = rank == world - 1
    layout = dte_dist.Layout.from_views(views[: 1 if last else 2], partial=last)
    sync(layout)
    tensors["a" if rank == 0 else "b"].add_(rank == 0)
    sync(layout)
    return tensors["a"].flatten().tolist()


def test_a_layout_of_views_may_be_part_of_the_model(ranks: Ranks) -> None:
    assert same(ranks.run(part_of_views)) == [2.0] * 12


WRONG = [
    {"codec": "x"},
    {"codec": 3},
    {"route": "y"},
    {"sparse_bytes_ratio": -1},
    {"sparse_bytes_ratio": "1"},
    {"sparse_bytes_ratio": True},
    {"timeout": "soon"},
    {"nope": 1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_option_that_makes_no_sense_on_one_rank_is_told_to_all(
    ranks: Ranks, wrong: dict[str, Any]
) -> None:
    kind, text = same(ranks.run(wrong_option, wrong))
    assert kind == "ValueError" and (next(iter(wrong)) in text)


def wrong_option(rank: int, world: int, wrong: dict[str, Any]) -> Any:
    module = model(rank)
    said = caught(lambda: dte_dist.delta_p2p(module, **{"timeout": TIMEOUT, **(wrong if rank == 1 else {})}))
    dte_dist.delta_p2p(module, timeout=TIMEOUT)
    return said


def selected_away(rank: int, world: int) -> Any:
    module = model(rank)
    before = prints(module)
    report = sync(module, select=["*.weight"])
    return report.total, prints(module)["steps"] == before["steps"], prints(module)["0.weight"]


def test_what_all_ranks_leave_out_is_not_part_of_the_model(ranks: Ranks) -> None:
    found = ranks.run(selected_away)
    assert same([total for total, _, _ in found]) == 12 * 8 + 8 + 24 and all(kept for _, kept, _ in found)
    same([weight for _, _, weight in found])


def renamed(rank: int, world: int) -> Any:
    module = model(rank)
    if rank == 1:
        module = nn.ModuleDict({"inner": module})
    rename = (lambda name: name.removeprefix("inner.")) if rank == 1 else None
    for _ in range(2):
        sync(module, rename=rename)
    return {name.removeprefix("inner."): value for name, value in prints(module).items()}


def test_rename_brings_the_names_of_two_sides_together(ranks: Ranks) -> None:
    same(ranks.run(renamed))


def wrapped(rank: int, world: int) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    group = [dist.new_group([r]) for r in range(world)][rank]
    module = inner = model(rank)
    if rank == 1:
        module = torch.compile(inner)
    elif rank == 2:
        module = nn.parallel.DistributedDataParallel(inner, process_group=group)
    elif rank == 3:
        inner[0] = checkpoint_wrapper(inner[0])
    for step in range(2):
        if rank == 0:
            nudge(module, "0.weight", step)
        sync(module)
    return {
        name.replace("_checkpoint_wrapped_module.", ""): digest(tensor)
        for name, tensor in inner.state_dict().items()
    }


def test_prefixes_of_wrappers_on_one_side_do_not_matter(ranks: Ranks) -> None:
    same(ranks.run(wrapped))


WIRES = {
    "one dtype": torch.bfloat16,
    "by name": {
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "1.weight": torch.bfloat16,
        "1.bias": torch.bfloat16,
        "2.weight": torch.bfloat16,
    },
    "function": lambda name, dtype: torch.bfloat16 if dtype.is_floating_point else dtype,
    "receiver": "receiver",
}


def cast_on_the_wire(rank: int, world: int, kind: str) -> Any:
    module = model(rank, torch.float32 if rank == 0 else torch.bfloat16)
    options = {"wire_dtype": WIRES[kind]} if rank == 0 or kind == "receiver" else {}
    first = sync(module, **options)
    if rank == 0:
        nudge(module, "1.weight", 8, by=1e-5)  # far below half an ulp of bf16 at 1
    second = sync(module, **options)
    if rank == 0:
        nudge(module, "1.weight", 8, by=1.0)
    third = sync(module, **options)
    bits = {
        name: digest(t.bfloat16() if t.is_floating_point() else t) for name, t in module.state_dict().items()
    }
    return first.dense_bytes, second.changed, second.wire_bytes, third.changed, bits


@pytest.mark.parametrize("kind", WIRES)
def test_fp32_masters_reach_bf16_copies_and_what_the_cast_hides_is_not_sent(ranks: Ranks, kind: str) -> None:
    dense, *sent, _ = same(ranks.run(cast_on_the_wire, kind))
    assert dense == 2 * (96 + 8 + 8 + 8 + 24) + 8
    assert sent == [0, 0, 8]


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


def tiny_buckets(rank: int, world: int) -> Any:
    torch.manual_seed(rank)
    weight = torch.randn(1 << 18)
    layout = Layout.from_tensors({"w": weight, "small": torch.zeros(3)})
    sync(layout, bucket_bytes=1024)
    if rank == 0:
        weight.neg_()
    return facts(sync(layout, bucket_bytes=1024)), digest(weight)


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


def test_a_hundred_syncs_keep_addresses_and_leave_memory_flat(ranks: Ranks) -> None:
    found = ranks.run(hundred_syncs)
    same([bits for *_, bits in found])
    for same_addresses, grown, objects, _ in found:
        assert same_addresses
        assert grown < 4 << 20 and objects < 200  # the model is 133 kB


def differing(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    return (live != known).nonzero().flatten()


class Asked:
    """A detector that counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return differing(live, known)


def detectors(rank: int, world: int) -> Any:
    module, one, two = model(rank), Asked(), Asked()
    seen = []
    for step, detector in enumerate((None, one, None, two, differing, one)):
        if rank == 0:
            nudge(module, "0.weight", step)
        report = sync(module, detector=detector if rank == 0 else None)
        seen.append((facts(report)[:5], prints(module)))
    return (one.times, two.times) if rank == 0 else None, seen


def test_each_call_may_bring_another_detector(ranks: Ranks) -> None:
    asked, seen = zip(*ranks.run(detectors), strict=True)
    assert asked == ((4, 2), None, None, None)  # by each of the two widths: fp32 weights and an int64 buffer
    assert [report[4] for report, _ in same(list(seen))] == [145, 1, 2, 3, 4, 5]


def detector_in_the_next_group(rank: int, world: int) -> Any:
    module, seen = model(rank), []
    for step, detector in enumerate((Asked(), Asked(), None)):
        group = dist.new_group(list(range(world)))
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        report = sync(module, group, detector=detector if rank == 0 else None)
        asked = rank > 0 or detector is None or detector.times == 2 * (step > 0)
        seen.append((facts(report)[:5], asked, prints(module)))
        dist.destroy_process_group(group)
    return seen


def test_what_is_kept_for_a_new_group_goes_on_with_the_detector_of_the_call(ranks: Ranks) -> None:
    found = same(ranks.run(detector_in_the_next_group))
    assert [report for report, *_ in found[1:]] == [(2, 1, "delta", "", 2), (3, 2, "delta", "", 3)]
    assert all(asked for _, asked, _ in found)


def codecs(rank: int, world: int) -> Any:
    length = 2 * SEGMENT + 999
    weight = torch.full((length if rank < 2 else 2 * length,), rank, dtype=torch.uint8)
    layout = Layout.from_views([("w", weight, (2 * length,), (rank * length if rank < 2 else 0,))])
    before, seen = weight.clone(), []
    for step in range(4):
        if rank < 2 and step == 1:
            weight[::29_000] = weight[-40:] = 200 + rank
        if rank == 1 and step == 1:
            weight[SEGMENT : 2 * SEGMENT] = torch.arange(SEGMENT) % 251 + 2
            weight[SEGMENT + 17] = 1  # as before, but sent with the rest of its segment
        report = sync(
            layout, src=[0, 1], bucket_bytes=4 * SEGMENT, mode="full" if step == 3 else "delta", codec="fast"
        )
        seen.append(((report.kind, report.changed, report.frames), dict(report.codecs)))
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, weight)
    bits = digest(torch.cat(parts[:2]) if rank < 2 else weight)
    return seen, int((weight != before).sum()), bits


def test_a_report_counts_the_segments_this_rank_sent_by_codec_and_a_dense_one_between_sparse_ones_arrives(
    ranks: Ranks,
) -> None:
    seen, changed, bits = zip(*ranks.run(codecs), strict=True)
    same(list(bits))
    assert [[sent for _, sent in syncs] for syncs in seen] == [
        [{}, {"u16+raw": 1}, {}, {}],  # three segments of like density, written as one
        [{}, {"u16+raw": 2, "dense+raw": 1}, {}, {}],
        [{}] * 4,
        [{}] * 4,
    ]
    total = 2 * (2 * SEGMENT + 999)
    assert same([[figures for figures, _ in syncs] for syncs in seen]) == [
        ("full", total, 2),
        ("delta", changed[0] + changed[1], 2),
        ("delta", 0, 0),
        ("full", total, 2),
    ]


# Several modules and groups
# ----------------------------------------------------------------------------------------------


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


# In the background
# -------------------------------------------------------------------------------------------------------


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


# Opening and closing
# -----------------------------------------------------------------------------------------------------


def extra(module: nn.Module) -> nn.Module:
    module.add_module("3", nn.Linear(2, 2))
    return module


def missing(module: nn.Module) -> nn.Module:
    del module[2]
    return module


def reshaped(module: nn.Module) -> nn.Module:
    module[2] = nn.Linear(8, 4, bias=False)
    return module


def recast(module: nn.Module) -> nn.Module:
    module[2].half()
    return module


MISFITS = {
    "extra": (extra, "3."),
    "missing": (missing, "2.weight"),
    "shape": (reshaped, "2.weight"),
    "dtype": (recast, "2.weight"),
}


def misfit(rank: int, world: int, kind: str, who: int) -> Any:
    module = MISFITS[kind][0](model(rank)) if rank == who else model(rank)
    before = prints(module)
    error = caught(lambda: sync(module))
    untouched = prints(module) == before
    good = model(rank)
    return error, untouched, sync(good).version, prints(good)


@pytest.mark.parametrize("who", [0, 2], ids=["on the source", "on one receiver"])
@pytest.mark.parametrize("kind", MISFITS)
def test_models_that_do_not_fit_are_named_on_every_rank_when_the_channel_opens(
    ranks: Ranks, kind: str, who: int
) -> None:
    (name, text), untouched, version, _ = same(ranks.run(misfit, kind, who))
    assert (
        name == "LayoutMismatch"
        and f"tensor '{MISFITS[kind][1]}" in text
        and "ranks" in text
        and untouched
        and version == 1
    )


def two_of_a_name(rank: int, world: int) -> Any:
    module = model(rank)
    error = caught(lambda: sync(module, rename=(lambda name: "w") if rank == 1 else None))
    return error, sync(module).version


def test_two_tensors_of_one_name_are_named_on_every_rank(ranks: Ranks) -> None:
    (name, text), version = same(ranks.run(two_of_a_name))
    assert name == "LayoutMismatch" and "'w'" in text and "rank 1" in text and version == 1


DISAGREEMENTS = {
    "bucket_bytes": 4096,
    "anchor_interval": 5,
    "verify_interval": 5,
    "timeout": 14.0,
    "src": 1,
    "group_src": [0, 1],
    "name": "x",
}


def disagree(rank: int, world: int, option: str, is_open: bool) -> Any:
    module = model(rank)
    if is_open:
        sync(module)
    error = caught(lambda: sync(module, **({option: DISAGREEMENTS[option]} if rank == 3 else {})))
    return error, sync(module).version


@pytest.mark.parametrize("is_open", [False, True], ids=["opening", "open"])
@pytest.mark.parametrize("option", DISAGREEMENTS)
def test_options_that_differ_on_one_rank_are_named_on_every_rank(
    ranks: Ranks, option: str, is_open: bool
) -> None:
    (name, text), version = same(ranks.run(disagree, option, is_open))
    assert name == ("ValueError" if is_open else "LayoutMismatch")
    assert ("src" if "src" in option else option) in text or (is_open and "sources" in text)
    assert version == 1 + is_open


WRONG: dict[str, dict[str, Any]] = {
    "version 0": {"version": 0},
    "version True": {"version": True},
    "version text": {"version": "3"},
    "version huge": {"version": 1 << 63},
    "mode": {"mode": "half"},
    "bucket of 1 byte": {"bucket_bytes": 1},
    "bucket text": {"bucket_bytes": "16M"},
    "anchor 0": {"anchor_interval": 0},
    "verify 0": {"verify_interval": 0},
    "verify text": {"verify_interval": "2"},
    "no time": {"timeout": 0},
    "time text": {"timeout": "soon"},
    "endless time": {"timeout": float("inf")},
    "src outside": {"src": 99},
    "group_src outside": {"group_src": 4},
    "negative src": {"group_src": -1},
    "src twice": {"src": [0, 0]},
    "no src": {"src": []},
    "both": {"src": 0, "group_src": 0},
    "src text": {"src": "root"},
    "wire text": {"wire_dtype": "bf17"},
    "wires text": {"wire_dtype": {"w": "bloat16"}},
    "less than a millisecond": {"timeout": 1e-4},
    "more than the clock has": {"timeout": 1e10},
    "select number": {"select": 3},
    "select nothing": {"select": ["lyers.*"]},
    "select none": {"select": lambda name: False},
    "rename text": {"rename": "w"},
    "half a character": {"rename": "{}\udcff".format},
    "into text": {"into": "copy"},
    "into number": {"into": 3},
    "no name": {"name": ""},
    "name number": {"name": 3},
}
TEXTS = {
    "select nothing": "'lyers.*', and the names are 'steps', '0.weight', '0.bias', '1.weight' and 2 more",
    "select none": "it is a function, and",
    "half a character": r"'steps\udcff' for 'steps': it has a lone surrogate",
}
"""What errors must say where a channel opens."""
NO_MODULE: dict[str, dict[str, Any]] = {
    "none": {"module": None},
    "a dict": {"module": {}},
    "a tensor": {"module": torch.zeros(3)},
}


def wrong_on_one_rank(rank: int, world: int, is_open: bool, who: int) -> Any:
    module, group = model(rank), dist.new_group(list(range(world)))
    errors = {}
    if is_open:
        sync(module, group)
    for name, wrong in (WRONG if is_open else WRONG | NO_MODULE).items():
        call = {"module": module, "group": group, **(wrong if rank == who else {})}
        errors[name] = caught(lambda call=call: sync(**call))
    report = sync(module, group)
    return errors, (report.version, report.kind), prints(module)


@pytest.mark.parametrize(("is_open", "who"), [(False, 0), (False, 2), (True, 0), (True, 2)], ids=str)
def test_a_wrong_argument_on_one_rank_is_the_same_error_on_all_and_the_next_call_works(
    ranks: Ranks, is_open: bool, who: int
) -> None:
    errors, report, _ = same(ranks.run(wrong_on_one_rank, is_open, who))
    for name, (kind, text) in errors.items():
        assert kind == "ValueError", (name, kind, text)
        assert f"rank {who} " in text, (name, text)
        if not is_open and name in TEXTS:
            assert TEXTS[name] in text, (name, text)
    assert report == ((2, "delta") if is_open else (1, "full"))


def no_module_while_open(rank: int, world: int) -> Any:
    module, group = model(rank), dist.new_group(list(range(world)))
    sync(module, group, timeout=3)
    error = caught(lambda: sync(module if rank != 2 else None, group, timeout=3))
    dist.barrier()
    while caught(lambda: sync(module, group, timeout=3))[0] == "PeerLost":
        pass
    return error[0], prints(module)


def test_no_module_on_one_rank_of_an_open_channel_is_said_there_at_once_and_the_others_do_not_hang(
    ranks: Ranks,
) -> None:
    found = ranks.run(no_module_while_open)
    same([bits for _, bits in found])
    assert [error for error, _ in found] == ["PeerLost", "PeerLost", "ValueError", "PeerLost"]


def closing(rank: int, world: int) -> Any:
    module = model(rank)
    dte_dist.close(module)
    sync(module, bucket_bytes=4096)
    channel = channel_of(module)
    dte_dist.close(module)
    dte_dist.close(module)
    gone = channel.broken is not None and not registry._channels.get(module)
    again = sync(module, bucket_bytes=8192)
    return gone, facts(again)[:4], prints(module)


def test_after_close_a_channel_with_other_options_opens_and_seeds(ranks: Ranks) -> None:
    gone, again, _ = same(ranks.run(closing))
    assert gone and again == (1, None, "full", "first sync")


def closed_by_one(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 2:
        dte_dist.close(module)
    if rank == 0:
        nudge(module, "0.weight", 7)
    return facts(sync(module))[2:4], prints(module)


def test_a_channel_closed_on_one_rank_only_opens_again_on_all_and_seeds_that_rank(ranks: Ranks) -> None:
    report, _ = same(ranks.run(closed_by_one))
    assert report == ("delta", "rank 2 seeded: it had no version")


def forgotten(rank: int, world: int, kind: str) -> Any:
    trainers = DeviceMesh("cpu", [0, 1])
    held = torch.zeros(3)
    target: Any = Layout.from_tensors({"w": held}) if kind == "layout" else model(0)
    if kind == "fsdp2" and rank < 2:
        fully_shard(target[0], mesh=trainers)
        fully_shard(target, mesh=trainers)
    copy = model(3) if kind == "into" and rank == 0 else None
    for _ in range(2):
        sync(target, into=copy)
    sync(target, into=copy, async_op=True).wait()
    channel, alive = (
        channel_of(target),
        [weakref.ref(target)] + ([weakref.ref(copy)] if copy is not None else []),
    )
    gc.collect()
    before = len(registry._channels)
    dist.barrier()
    del target, copy
    gc.collect()
    return all(reference() is None for reference in alive), channel.broken, before - len(registry._channels)


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "layout", "into"])
def test_a_channel_does_not_keep_its_module_alive_and_goes_with_it(ranks: Ranks, kind: str) -> None:
    assert same(ranks.run(forgotten, kind)) == (True, "its module is gone", 1)


# Failures ---------------------------------------------------------------------------------------------------
# -------------


def detector_raises(rank: int, world: int) -> Any:
    rows = Rows(rank, 2)
    bad = []

    def detector(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        if bad:
            raise KeyError("no such mask")
        return (live != known).nonzero().flatten()

    def call() -> Any:
        return sync(rows.layout, src=[0, 1], detector=detector if rank < 2 else None)

    call()
    before = rows.whole(2)
    if rank < 2:
        rows.parts[0][1] += 1
    bad += [1] if rank == 1 else []
    error = caught(call)
    after = rows.whole(2)
    untouched = rank < 2 or after == before
    bad.clear()
    report = call()
    return error, untouched, facts(report)[:5], rows.whole(2)


def test_a_detector_that_raises_on_one_source_is_an_error_on_all_and_nothing_moved(ranks: Ranks) -> None:
    (name, text), untouched, report, _ = same(ranks.run(detector_raises))
    assert name == "SyncFailed" and "KeyError" in text and "rank 1 of the group" in text and untouched
    assert report == (2, 1, "delta", "", 10)


def apply_raises(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    seen: list[Any] = []

    def failing(*_: Any) -> None:
        nudge(module, "0.weight", 2, by=100.0)  # some of it was written
        raise OSError("a write failed")

    for step in (2, 3, 4, 5):
        if rank == 0:
            nudge(module, "0.weight", 10 * step)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2 and step == 3:
                patch.setattr(StagedPatch, "apply", failing)
            reports: list[Any] = []
            error = caught(lambda found=reports: found.append(facts(sync(module))))
        seen += reports or [error]
    return seen, prints(module)


def test_a_receiver_that_raises_inside_its_third_apply_is_seeded_by_the_fourth_and_only_it(
    ranks: Ranks,
) -> None:
    (second, third, fourth, fifth), _ = same(ranks.run(apply_raises))
    assert second[:4] == (2, 1, "delta", "")
    assert third[0] == "ApplyFailed" and "rank 2 of the group" in third[1] and "OSError" in third[1]
    assert fourth[:4] == (4, 3, "delta", "rank 2 seeded: it had no version") and fourth[10] == (2,)
    assert fifth[:4] == (5, 4, "delta", "") and fifth[10] == ()


def test_bytes_to_each_receiver_of_a_delta_do_not_count_the_seed_of_another(ranks: Ranks) -> None:
    (_, _, fourth, fifth), _ = same(ranks.run(apply_raises))
    assert 0 < fourth[6] < fifth[6]  # 40 changes against 50


def damaged_in_transit(rank: int, world: int, where: str) -> Any:
    rows = Rows(rank, 1, (48, 4))
    sync(rows.layout, bucket_bytes=256)
    before = rows.whole(1)
    if rank == 0:
        rows.parts[0].neg_()
    place, name, who = (BucketedBroadcast, "_send_bucket", 0) if where == "sent" else (Receiver, "take", 2)
    original, calls = getattr(place, name), []

    def damaging(self: Any, buffer: torch.Tensor, other: Any) -> Any:
        calls.append(buffer)
        if len(calls) == 2:
            buffer[-8] ^= 1
        return original(self, buffer, other)

    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(place, name, damaging)
        error = caught(lambda: sync(rows.layout, bucket_bytes=256))
    after = rows.whole(1)
    untouched = rank == 0 or after == before
    return error, untouched, facts(sync(rows.layout, bucket_bytes=256))[:5], rows.whole(1)


@pytest.mark.parametrize(("where", "who"), [("received", "rank 2 of"), ("sent", "rank 1, 2, 3 of")])
def test_frame_two_of_three_damaged_in_transit_fails_all_and_the_next_delta_is_a_superset(
    ranks: Ranks, where: str, who: str
) -> None:
    (name, text), untouched, report, _ = same(ranks.run(damaged_in_transit, where))
    assert name == "FrameError" and who in text and untouched
    assert report == (2, 1, "delta", "", 192)


def source_fails_after_the_gather(rank: int, world: int) -> Any:
    rows = Rows(rank, 2)
    sync(rows.layout, src=[0, 1])
    snapshot = parts_of(rows.layout).source.snapshot.bits[4] if rank < 2 else torch.zeros(1)
    before = digest(rows.parts[0]), digest(snapshot)
    if rank < 2:
        rows.parts[0].neg_()
    move = BucketedBroadcast.move

    def failing(*args: Any, **kept: Any) -> None:
        move(*args, **kept)
        raise MemoryError("no room")

    cause, begin = None, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(BucketedBroadcast, "move", failing)
        try:
            error = ("", "")
            sync(rows.layout, src=[0, 1])
        except PeerLost as lost:
            error, cause = (type(lost).__name__, str(lost)), type(lost.__cause__).__name__
    took = time.monotonic() - begin
    unmoved = digest(snapshot) == before[1] and (rank < 2 or digest(rows.parts[0]) == before[0])
    return cause, (error, took < TIMEOUT, unmoved, facts(sync(rows.layout, src=[0, 1]))[:5], rows.whole(2))


def test_a_source_that_fails_after_the_gather_lets_no_rank_commit_and_the_next_call_goes_on_without_a_seed(
    ranks: Ranks,
) -> None:
    causes, found = zip(*ranks.run(source_fails_after_the_gather), strict=True)
    (name, text), prompt, unmoved, report, _ = same(list(found))
    assert name == "PeerLost" and "rank 1 failed: MemoryError: no room" in text
    assert causes == ("PeerLost", "MemoryError", "PeerLost", "PeerLost")
    assert prompt and unmoved and report == (2, 1, "delta", "", 60)


def vote_known_to_one(rank: int, world: int) -> Any:
    """Ranks 0 and 1 lose the vote in which rank 2 learns that all agreed; rank 2 is away for one version and
    comes back.
    """
    module = model(rank)
    vote, reports = Sync._vote, []

    def lost(sync: Sync) -> None:
        vote(sync)
        raise PeerLost("the connection broke")

    for value, members in ((0.0, [0, 1, 2]), (5.0, [0, 1, 2]), (0.0, [0, 1]), (0.0, [0, 1, 2])):
        group = dist.new_group(members)
        if rank == 0:
            module[0].bias.data[0] = value
        if rank in members:
            with pytest.MonkeyPatch.context() as patch:
                if value and rank < 2:
                    patch.setattr(Sync, "_vote", lost)
                error = caught(lambda group=group: reports.append(facts(sync(module, group))))
            assert error[0] == ("PeerLost" if value else "")
            dist.destroy_process_group(group)
        dist.barrier()
    return (reports or [None])[-1], prints(module)


def test_a_version_that_only_some_committed_is_never_taken_for_the_one_made_in_its_place(
    ranks: Ranks,
) -> None:
    *members, _ = ranks.run(vote_known_to_one)
    report, _ = same(members)
    assert report[2:4] == ("delta", "rank 2 seeded: it followed another run") and report[10] == (2,)


def absent(rank: int, world: int) -> Any:
    module = model(rank)
    begin = time.monotonic()
    error = ("PeerLost", "") if rank == 1 else caught(lambda: sync(module, timeout=1.5))
    took = time.monotonic() - begin
    dist.barrier()
    return error[0], took < 15, facts(sync(module))[:4], prints(module)


def test_a_rank_that_does_not_come_is_peer_lost_on_the_others_and_may_come_to_the_next_call(
    ranks: Ranks,
) -> None:
    error, prompt, report, _ = same(ranks.run(absent))
    assert error == "PeerLost" and prompt and report == (1, None, "full", "first sync")


def module_changes_shape(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 1:
        module[2] = nn.Linear(8, 5, bias=False)
    error = caught(lambda: sync(module))
    if rank == 1:
        module[2] = nn.Linear(8, 3, bias=False)
    dte_dist.close(module)
    return error, sync(module).version, prints(module)


def test_a_module_that_changed_between_syncs_is_named_on_every_rank(ranks: Ranks) -> None:
    (name, text), version, _ = same(ranks.run(module_changes_shape))
    assert name == "LayoutMismatch" and "'2.weight'" in text and "rank 1" in text and version == 1
