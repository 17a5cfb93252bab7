"""Distributed tier, four ranks over gloo: `dte_dist.verify` says equal where bits are equal, and names what
is not, in every layout.

A verification reads; a bit that is flipped behind the back of everything, through `.data`, is found, and the
next sync seeds that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dte_dist
from dte_dist import Layout
from dte_dist.layout import DTYPES
from tests.distributed.launcher import Ranks
from tests.distributed.tools import Rows, model, nudge, parts_of, prints, same, sync
from tests.distributed.verifying import (
    DIFFERENT,
    Side,
    call,
    flip,
    found,
    fsdp2,
    locals_of,
    sharded_model,
    why,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def plain(rank: int, world: int) -> Side:
    module = model(rank)
    return Side(module, locals_of(module), locals_of(module))


def fsdp2_casts(rank: int, world: int) -> Side:
    side = fsdp2(rank, world)
    if rank > 1:
        side.target.bfloat16()
        side.held = locals_of(side.target)
    side.options = {"wire_dtype": "receiver"}
    return side


def hsdp(rank: int, world: int) -> Side:
    """All ranks train, replicas of each other in pairs, and hold a whole copy each."""
    module, copy = (
        sharded_model(1, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
        model(10 + rank),
    )
    return Side(module, locals_of(module), locals_of(copy), {"into": copy}, (0, 1, 2, 3))


def fsdp2_receivers(rank: int, world: int) -> Side:
    mesh = DeviceMesh("cpu", [2, 3])
    module = sharded_model(1, mesh) if rank > 1 else model(rank)
    return Side(module, locals_of(module), locals_of(module), {"src": 0})


def sharded_receivers(dim: int) -> Callable[[int, int], Side]:
    def side(rank: int, world: int) -> Side:
        module, mesh = model(rank), DeviceMesh("cpu", [2, 3])
        for layer in (module[0], module[2]) if rank > 1 else ():
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(dim)]))
        return Side(module, locals_of(module), locals_of(module), {"src": 0})

    return side


def partial(rank: int, world: int) -> Side:
    module, select = model(rank), {2: ["0.*"], 3: ["2.weight", "steps"]}.get(rank)
    held = {
        name: t
        for name, t in locals_of(module).items()
        if select is None or name in select or name[:2] + "*" in select
    }
    return Side(module, locals_of(module), held, {} if select is None else {"select": select})


def colocated(rank: int, world: int) -> Side:
    module, copy = sharded_model(1, DeviceMesh("cpu", list(range(world)))), model(10 + rank)
    return Side(module, locals_of(module), locals_of(copy), {"into": copy}, (0, 1, 2, 3))


def by_rows(rank: int, world: int) -> Side:
    rows = Rows(rank, 3, (12, 5), tensors=3)
    held = {f"w{index:04}": part for index, part in enumerate(rows.parts)}
    return Side(rows.layout, held, held, {"src": [0, 1, 2]}, (3,))


def fused(rank: int, world: int) -> Side:
    """Receivers cut a fused tensor into views, each in another order, and leave its padding alone."""
    torch.manual_seed(rank)
    if rank == 0:
        trained = {"q": torch.randn(6, 4), "k": torch.randn(4, 4), "v": torch.randn(4, 4)}
        return Side(Layout.from_tensors(trained), trained, {})
    whole, held, first = torch.zeros(16, 4), {}, 0
    for name in ("qkv", "vkq", "kqv")[rank - 1]:
        held[name] = whole[first : first + (6 if name == "q" else 4)]
        first += len(held[name])
    return Side(
        Layout.from_views([(name, view, tuple(view.shape), (0, 0)) for name, view in held.items()]), {}, held
    )


def tied(rank: int, world: int) -> Side:
    """The trainer ties two tensors; of the receivers one does, too."""
    torch.manual_seed(rank)
    module = nn.ModuleDict(
        {"embed": nn.Embedding(9, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 9, bias=False)}
    )
    if rank in (0, 2):
        module["head"].weight = module["embed"].weight
    held = locals_of(module)
    if rank == 2:
        del held["head.weight"]  # it is the other one
    return Side(module, {name: t for name, t in held.items() if name != "head.weight"}, held)


def all_dtypes(rank: int, world: int) -> Side:
    """Every dtype that can be sent, each with elements, without, of no dimension, and turned around."""
    generator, tensors = torch.Generator().manual_seed(rank), {}
    for name, dtype in sorted(DTYPES.items()):
        for shape, shown in (((7, 3), "some"), ((0, 4), "none"), ((), "one")):
            noise = torch.randint(
                0,
                2 if dtype == torch.bool else 256,
                (*shape, dtype.itemsize),
                dtype=torch.uint8,
                generator=generator,
            )
            tensors[f"{name}.{shown}"] = noise.view(dtype).view(shape)
        tensors[f"{name}.turned"] = tensors[f"{name}.some"].clone().t()
    return Side(Layout.from_tensors(tensors), tensors, tensors)


LAYOUTS: dict[str, Callable[[int, int], Side]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "fsdp2, cast": fsdp2_casts,
    "hsdp, colocated": hsdp,
    "fsdp2 receivers": fsdp2_receivers,
    "receivers by rows": sharded_receivers(0),
    "receivers by columns": sharded_receivers(1),
    "part": partial,
    "colocated": colocated,
    "sources by rows": by_rows,
    "fused": fused,
    "tied": tied,
    "dtypes": all_dtypes,
}

SHARED = {"fsdp2", "fsdp2, cast", "hsdp, colocated", "colocated"}
"""Those of which several sources hold the same."""

layouts = pytest.mark.parametrize("kind", LAYOUTS)
CALLS: dict[str, dict[str, Any]] = {
    "seed": {},
    "delta": {},
    "p2p": {"route": "p2p"},
    "background": {"async_op": True},
    "background p2p": {"async_op": True, "route": "p2p"},
    "full": {"mode": "full"},
    "small": {"codec": "small"},
}


def after_every_kind(rank: int, world: int, kind: str) -> Any:
    side = LAYOUTS[kind](rank, world)
    is_source, seen = rank not in side.receivers or "into" in side.options, []
    for step, how in enumerate(CALLS.values()):
        moved = side.train(step) if is_source and step else 0
        before = dte_dist.verify(side.target) if step else None
        report = call(side, **how)
        after = dte_dist.verify(side.target)
        seen.append(
            (why(report), before and found(before), found(after), after.equal, str(after).split(",")[0])
        )
        total = torch.tensor(moved)
        dist.all_reduce(total)
        if before is not None:
            assert 0 < before.moved <= total.item(), "of what several sources hold, one sends it"
            assert before.moved == total.item() or kind in SHARED
    return seen, side.receivers, len(parts_of(side.target).agreement.model.slots), after.tensors


@layouts
def test_equal_after_every_kind_of_sync(ranks: Ranks, kind: str) -> None:
    """Before a sync what moved since the last one is counted; after it nothing has, and all receivers are
    equal.
    """
    seen, receivers, slots, tensors = same(ranks.run(after_every_kind, kind))
    assert tensors == slots
    for step, (report, before, after, equal, text) in enumerate(seen):
        version = step + 1
        assert report[0] == version and (report[1:] == ("delta", "", ()) or step in (0, 5)), (step, report)
        assert equal and after == (version, 0, None, (), receivers, 0), (step, after)
        assert text.startswith(f"v{version}: 0 of {slots} tensors differ (ranks {receivers[0]}")
        if before is not None:
            assert before[:5] == (step, 0, None, (), receivers) and before[5] > 0, (step, before)


def flipped(rank: int, world: int, kind: str) -> Any:
    """Flip a bit of each tensor of each receiver in turn; of a few of them where there are many."""
    side = LAYOUTS[kind](rank, world)
    call(side)
    held: list[Any] = [None] * world
    mine = [name for name, tensor in side.held.items() if tensor.numel()] if rank in side.receivers else []
    dist.all_gather_object(held, mine)
    seen = []
    victims = [
        (who, name)
        for who in side.receivers
        for name in (held[who] if len(held[who]) < 20 else held[who][who::11])
    ]
    for number, (who, name) in enumerate(victims):
        if rank == who:
            tensor = side.held[name]
            flip(
                tensor, 7 * number, number % (1 if tensor.dtype == torch.bool else 8 * tensor.element_size())
            )
        report = dte_dist.verify(side.target)
        again = (
            why(call(side, route=("broadcast", "p2p")[number % 2]))
            if number % 3 == 0 or number == len(victims) - 1
            else None
        )
        # Flip it back, and let the rank be what it was: most of the time goes into seeds.
        if again is None and rank == who:
            flip(
                tensor, 7 * number, number % (1 if tensor.dtype == torch.bool else 8 * tensor.element_size())
            )
        seen.append((who, name, found(report), report.equal, str(report), again))
        if again is None:
            seen[-1] = (*seen[-1][:-1], why(call(side)))
        seen[-1] = (*seen[-1], dte_dist.verify(side.target).equal)
    return [(*each[:4], each[4].partition(", on rank")[0], *each[5:]) for each in seen], side.receivers


@layouts
def test_a_single_flipped_bit_is_found_and_named_and_the_next_sync_seeds_exactly_that_rank(
    ranks: Ranks, kind: str
) -> None:
    seen, receivers = same(ranks.run(flipped, kind))
    assert seen and {who for who, *_ in seen} == {*receivers}
    for who, name, report, equal, text, again, mended in seen:
        others = tuple(rank for rank in receivers if rank != who)
        assert not equal and report[1:] == (
            1,
            name.replace("head.weight", "embed.weight"),
            (who,),
            receivers,
            0,
        ), (who, name, report)
        assert (
            f"1 of {text.split(' of ')[1].split(' ')[0]} tensors differ" in text and repr(report[2]) in text
        )
        assert again[1:] == ("delta" if others else "full", f"rank {who} seeded: {DIFFERENT}", (who,)), again
        assert mended


def two_at_once(rank: int, world: int) -> Any:
    module, seen = model(rank), []
    sync(module)
    if rank in (1, 3):
        flip(module[2].weight, 3)
    if rank == 3:
        flip(module[0].bias, 0)
        flip(module[2].weight, 4)
    report = dte_dist.verify(module)
    seen.append((found(report), str(report).rpartition(",")[0]))
    nudge(module, "0.weight") if rank == 0 else None
    seen.append(why(sync(module)))
    seen.append(found(dte_dist.verify(module)))
    return seen, prints(module)


def test_several_tensors_on_several_receivers(ranks: Ranks) -> None:
    (first, text), again, second = same(ranks.run(two_at_once))[0]
    assert first == (1, 2, "0.bias", (1, 3), (1, 2, 3), 0)
    assert (
        text == "v1: 2 of 6 tensors differ, first '0.bias', on rank 1, 3 (of 1, 2, 3); "
        "sources: 0 shards moved since"
    )
    reason = f"rank 1 seeded: {DIFFERENT}; rank 3 seeded: {DIFFERENT}"
    assert again == (2, "delta", reason, (1, 3)) and second == (2, 0, None, (), (1, 2, 3), 0)


def zeros_moved(rank: int, world: int) -> Any:
    """What a sum of elements, or of words without their places, would not see."""
    weights = {"w": torch.arange(60.0, dtype=torch.float64).view(6, 10), "v": torch.ones(8)}
    layout, seen = Layout.from_tensors(weights), []
    sync(layout)
    for change in ("rows", "signs", "swap", "nan"):
        if rank == 2:
            w = weights["w"].data
            if change == "rows":
                w[:] = w.roll(1, 0)
            elif change == "signs":
                w[1, :2] *= -1
            elif change == "swap":
                w.view(-1)[[3, 40]] = w.view(-1)[[40, 3]]
            else:
                weights["v"].data[:] = float("nan")
        seen.append(found(dte_dist.verify(layout))[1:4])
        sync(layout)
    return seen


def test_what_sums_do_not_see_is_found(ranks: Ranks) -> None:
    assert same(ranks.run(zeros_moved)) == [(1, "w", (2,))] * 3 + [(1, "v", (2,))]
