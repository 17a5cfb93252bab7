"""Distributed tier, four ranks over gloo: options of a call that say which tensors are synced, and how.

Every program runs on all ranks. Rank 0 is the source unless the test says otherwise; bits are compared
through hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dte_dist
from dte_dist import Layout
from dte_dist.plan.chunks import SEGMENT
from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    TIMEOUT,
    caught,
    digest,
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


SENSELESS = [
    {"codec": "x"},
    {"codec": 3},
    {"route": "y"},
    {"sparse_bytes_ratio": -1},
    {"sparse_bytes_ratio": "1"},
    {"sparse_bytes_ratio": True},
    {"timeout": "soon"},
    {"nope": 1},
    {"detector": 3},
]
MORE_SENSELESS = [
    {"rename": 3},
    {"select": 3},
    {"into": 3},
    {"mode": ["full"]},
    {"version": "1"},
    {"wire_dtype": {3: "bf16"}},
    {"wire_dtype": torch.int8},
    {"bucket_bytes": True},
    {"name": 3},
    {"async_op": "no"},
    {"src": 0.5},
    {"src": "0"},
    {"src": [True]},
    {"group_src": 9},
]


@pytest.mark.parametrize(
    "wrong", [*SENSELESS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_SENSELESS)], ids=str
)
def test_an_option_that_makes_no_sense_on_one_rank_is_told_to_all(
    ranks: Ranks, wrong: dict[str, Any]
) -> None:
    """Whether that rank sends or only receives, and whether the channel is open or not."""
    for kind, text in same(ranks.run(wrong_option, wrong)):
        assert kind == "ValueError" and next(iter(wrong)) in text


def wrong_option(rank: int, world: int, wrong: dict[str, Any]) -> Any:
    said = []
    for who in (0, 1):
        module = model(rank)
        for _ in range(2):
            options = {"timeout": TIMEOUT, **(wrong if rank == who else {})}
            said.append(caught(lambda module=module, options=options: dte_dist.delta_p2p(module, **options)))
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


def misspelt(rank: int, world: int, collective: str, opened: bool) -> Any:
    """Rank 2 misspells an option, at the first call or at a later one."""
    call, module = getattr(dte_dist, collective), model(rank)
    if opened:
        call(module, timeout=TIMEOUT)
    wrong = {"anchor_intervall": 3} if rank == 2 else {}
    error = caught(lambda: call(module, timeout=TIMEOUT, **wrong))
    return error, facts(call(module, timeout=TIMEOUT))[2]


@pytest.mark.parametrize("opened", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("collective", ["delta_broadcast", "delta_p2p"])
def test_an_option_that_is_none_is_one_error_on_all_ranks(
    ranks: Ranks, collective: str, opened: bool
) -> None:
    (kind, text), after = same(ranks.run(misspelt, collective, opened))
    assert (kind, after) == ("ValueError", "delta" if opened else "full")
    assert "there is no option 'anchor_intervall', did you mean 'anchor_interval'?" in text
