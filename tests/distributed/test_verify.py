"""Distributed tier, four ranks over gloo: `dte_dist.verify` says equal where bits are equal, and names what
is not, in every layout.

A verification reads; a bit that is flipped behind the back of everything, through `.data`, is found, and the
next sync seeds that rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dte_dist
from dte_dist import Layout
from dte_dist.layout import DTYPES
from dte_dist.sync import verification
from dte_dist.sync.channel import Channel
from dte_dist.sync.verification import Verifier
from tests.distributed.cases import BITS
from tests.distributed.launcher import Ranks
from tests.distributed.tools import Rows, caught, model, nudge, parts_of, prints, same, sync

LONG = 60.0
DIFFERENT = "a verification found other bits"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def found(report: dte_dist.VerifyReport) -> tuple[Any, ...]:
    """The part of a report that is the same on every rank."""
    return report.version, report.different, report.first, report.ranks, report.compared, report.moved


def why(report: dte_dist.SyncReport) -> tuple[Any, ...]:
    return report.version, report.kind, report.reason, report.seeded


# Layouts ----------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """What one rank has of a case.

    Attributes:
        target: what it passes.
        trained: what a source trains, by name, as local tensors.
        held: what a receiver holds, likewise.
        options: of each call.
        receivers: ranks.
    """

    target: Any
    trained: dict[str, Tensor]
    held: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    receivers: tuple[int, ...] = (1, 2, 3)

    def train(self, step: int) -> int:
        """Change a bit of some tensors; return how many of this rank's shards changed."""
        some = [tensor for tensor in self.trained.values() if tensor.numel()][step % 2 :: 2]
        for tensor in some:
            flip(tensor, step)
        return len(some)


def flip(tensor: Tensor, place: int, bit: int = -1) -> None:
    """Flip one bit behind everybody's back: no counter moves. By default one that a cast to half the width
    keeps.
    """
    width = 8 * tensor.element_size()
    bits = tensor.data.view(BITS[tensor.element_size()])  # as it lies: of any strides
    at = (
        tuple(int(index) for index in torch.unravel_index(torch.tensor(place % bits.numel()), bits.shape))
        if bits.dim()
        else ()
    )
    mask = 1 << ((0 if tensor.dtype == torch.bool else width - 8) if bit < 0 else bit)
    bits[at] ^= torch.tensor(mask, dtype=torch.uint64).view(torch.int64).to(bits.dtype)


def locals_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: t._local_tensor if isinstance(t, DTensor) else t
        for name, t in module.state_dict(keep_vars=True).items()
    }


def plain(rank: int, world: int) -> Side:
    module = model(rank)
    return Side(module, locals_of(module), locals_of(module))


def sharded_model(rank: int, mesh: DeviceMesh) -> nn.Module:
    module = model(rank)
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module


def fsdp2(rank: int, world: int) -> Side:
    mesh = DeviceMesh("cpu", [0, 1])
    module = sharded_model(1, mesh) if rank < 2 else model(rank)
    return Side(module, locals_of(module), locals_of(module), receivers=(2, 3))


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


def call(side: Side, **how: Any) -> dte_dist.SyncReport:
    report = sync(side.target, **{**side.options, **how})
    return report.wait() if how.get("async_op") else report


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


# Sources ----------------------------------------------------------------------------------------------------


def moved(rank: int, world: int) -> Any:
    side = fsdp2(rank, world)
    module, seen = side.target, []
    call(side)
    seen.append(dte_dist.verify(module).moved)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    if rank < 2:
        module(torch.ones(2, 12)).sum().backward()
        optimizer.step()
    seen.append(dte_dist.verify(module).moved)
    call(side)
    seen.append(dte_dist.verify(module).moved)
    forgetful = (lambda live, known: torch.zeros(0, dtype=torch.int64)) if rank < 2 else None
    if rank == 0:
        flip(side.trained["2.weight"], 0)
    report = call(side, detector=forgetful)
    seen += [report.changed, dte_dist.verify(module).moved, dte_dist.verify(module).equal]
    report = call(side)
    seen += [report.changed, dte_dist.verify(module).moved]
    return seen


def test_moved_counts_what_was_trained_since_and_what_a_detector_forgot(ranks: Ranks) -> None:
    first, trained, second, changed, forgotten, equal, later, last = same(ranks.run(moved))
    assert (first, second) == (0, 0) and trained > 5
    assert (changed, forgotten, equal) == (0, 1, True) and (later, last) == (1, 0)


def no_version(rank: int, world: int) -> Any:
    """A receiver that distrusts its copy, and sources whose last sync failed, have nothing to be compared
    with.
    """
    module, seen = model(rank), []
    sync(module)
    if rank == 2:
        dte_dist.invalidate(module)
        flip(module[2].weight, 0)
    seen.append(found(dte_dist.verify(module)))
    error = caught(lambda: sync(module, mode="full", version=1))
    if rank == 0:
        nudge(module, "0.weight", 1)  # from no version nothing can have moved
    report = dte_dist.verify(module)
    seen += [error[0], found(report), report.equal, str(report).rpartition(",")[0]]
    seen += [why(sync(module))[1:], found(dte_dist.verify(module))]
    return seen


def test_receivers_without_a_version_are_not_compared(ranks: Ranks) -> None:
    partly, error, nothing, equal, text, again, after = same(ranks.run(no_version))
    assert partly == (1, 0, None, (), (1, 3), 0) and error == "VersionReplay"
    assert nothing == (None, 0, None, (), (), 0) and equal
    assert text == "no version: 0 of 6 tensors differ (ranks none); sources: 0 shards moved since"
    assert again == ("full", "no version since a sync broke off", (1, 2, 3)) and after == (
        2,
        0,
        None,
        (),
        (1, 2, 3),
        0,
    )


# On all ranks or on none ------------------------------------------------------------------------------------


def not_open(rank: int, world: int) -> Any:
    module, group = model(rank), dist.new_group(list(range(world)))
    errors = [caught(lambda: dte_dist.verify(module)), caught(lambda: dte_dist.verify(module, group))]
    sync(module, group)
    errors += [caught(lambda: dte_dist.verify(module)), caught(lambda: dte_dist.verify(model(rank), group))]
    good = dte_dist.verify(module, group).equal
    dte_dist.close(module, group)
    errors += [
        caught(lambda: dte_dist.verify(module, group)),
        *(caught(lambda no=no: dte_dist.verify(no)) for no in (None, 3, {}, "w")),
    ]
    return good, errors


def test_without_a_channel_it_is_a_value_error(ranks: Ranks) -> None:
    good, errors = same(ranks.run(not_open))
    assert (
        good
        and {name for name, _ in errors} == {"ValueError"}
        and all("no open channel" in text for _, text in errors)
    )


def crossed(rank: int, world: int, who: int, background: bool) -> Any:
    module = model(rank)
    sync(module)
    if rank == 0:
        nudge(module, "0.weight", 4)

    def other() -> Any:
        return sync(module, async_op=True).wait() if background else sync(module)

    error = caught((lambda: dte_dist.verify(module)) if rank == who else other)
    broken = parts_of(module) is None
    report, verified = why(sync(module)), found(dte_dist.verify(module))
    return error, broken, report, verified, prints(module)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("who", [0, 2], ids=["the source verifies", "a receiver verifies"])
def test_a_verification_that_meets_a_sync_is_one_error_on_all_and_the_channel_goes_on(
    ranks: Ranks, who: int, background: bool
) -> None:
    (name, text), broken, report, verified, _ = same(ranks.run(crossed, who, background))
    assert (
        name == "LayoutMismatch"
        and "ranks make different calls" in text
        and f"dte_dist.verify on rank {who}" in text
    )
    assert not broken and report == (2, "delta", "", ()) and verified == (2, 0, None, (), (1, 2, 3), 0)


def crossed_on_p2p(rank: int, world: int) -> Any:
    """A sync on the other route, with more frames than a control row has room for."""
    weights = {f"w{index:03}": torch.full((64,), float(rank)) for index in range(200)}
    layout = Layout.from_tensors(weights)
    sync(layout, bucket_bytes=64, route="p2p")
    error = caught(
        (lambda: dte_dist.verify(layout))
        if rank == 2
        else (lambda: sync(layout, bucket_bytes=64, route="p2p"))
    )
    return error, why(sync(layout, bucket_bytes=64, route="p2p")), dte_dist.verify(layout).equal


def test_a_verification_that_meets_a_sync_of_many_frames(ranks: Ranks) -> None:
    (name, text), report, equal = same(ranks.run(crossed_on_p2p))
    assert (
        name == "LayoutMismatch"
        and "ranks make different calls" in text
        and report == (2, "delta", "", ())
        and equal
    )


def failing(rank: int, world: int, who: int, interval: int | None) -> Any:
    module = model(rank)
    sync(module, verify_interval=interval)
    if rank == 0:
        nudge(module, "0.weight", 2)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(verification, "digests", fail)
        error = caught(
            (lambda: dte_dist.verify(module))
            if interval is None
            else (lambda: sync(module, verify_interval=interval))
        )
    report = sync(module, verify_interval=interval)
    return error, why(report), dte_dist.verify(module).equal, prints(module)


@pytest.mark.parametrize("interval", [None, 2], ids=["verify", "verify_interval"])
@pytest.mark.parametrize("who", [0, 2], ids=["on the source", "on a receiver"])
def test_an_error_while_one_rank_digests_is_raised_on_all(
    ranks: Ranks, who: int, interval: int | None
) -> None:
    (name, text), report, equal, _ = same(ranks.run(failing, who, interval))
    assert name == "SyncFailed" and "MemoryError: no room" in text and f"rank {who} of the group" in text
    assert report[0] == (2 if interval is None else 3) and report[1:] == ("delta", "", ()) and equal


def interrupted(rank: int, world: int, place: str) -> Any:
    module = model(rank)
    sync(module, timeout=LONG)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    error, begin = ("", ""), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(*((Verifier, "verify") if place == "digesting" else (Channel, "_row")), interrupt)
        try:
            dte_dist.verify(module)
        except BaseException as caught_error:
            error = type(caught_error).__name__, str(caught_error)
    prompt = time.monotonic() - begin < 0.8 * LONG
    closed = caught(lambda: dte_dist.verify(module))
    if rank == 0:
        nudge(module, "0.weight", 3)
    return error, (
        prompt,
        closed[0],
        why(sync(module, timeout=LONG)),
        dte_dist.verify(module).equal,
        prints(module),
    )


@pytest.mark.parametrize("place", ["before the ranks meet", "digesting"])
def test_an_interrupt_of_a_verification_is_known_to_the_others_and_the_next_sync_opens_a_channel(
    ranks: Ranks, place: str
) -> None:
    errors, found_by_all = zip(*ranks.run(interrupted, place), strict=True)
    assert errors[2] == ("KeyboardInterrupt", "")
    name, text = same([error for rank, error in enumerate(errors) if rank != 2])
    assert name == "PeerLost" and "rank 2" in text and "KeyboardInterrupt" in text
    prompt, closed, report, equal, _ = same(list(found_by_all))
    assert prompt and closed == "ChannelClosed" and report == (2, "delta", "", ()) and equal


def closed_by_one(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 2:
        dte_dist.close(module)
    dist.barrier()
    error = caught(lambda: dte_dist.verify(module))
    return error, why(sync(module))[1:], dte_dist.verify(module).equal, prints(module)


def test_a_channel_that_another_rank_closed(ranks: Ranks) -> None:
    errors, reports, equal, _ = zip(*ranks.run(closed_by_one), strict=True)
    assert [name for name, _ in errors] == ["ChannelClosed", "ChannelClosed", "ValueError", "ChannelClosed"]
    assert same(list(reports)) == ("delta", "rank 2 seeded: it had no version", (2,)) and all(equal)


# With syncs -------------------------------------------------------------------------------------------------


def at_intervals(rank: int, world: int, every: int, how: str) -> Any:
    module, seen = model(rank), []
    for step in range(6):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank == 3 and step == 3:
            flip(module[2].weight, 5)
        options: dict[str, Any] = {"verify_interval": every, "route": "p2p" if "p2p" in how else "broadcast"}
        if step == 4:
            options["version"] = 10
        report = sync(module, **options, async_op=True).wait() if "async" in how else sync(module, **options)
        seen.append((why(report), report.verified and found(report.verified), "verify" in report.phases))
    return seen, prints(module)


@pytest.mark.parametrize("how", ["broadcast", "p2p", "async", "async p2p"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_syncs_verify_at_versions_that_the_interval_divides(ranks: Ranks, every: int, how: str) -> None:
    seen, _ = same(ranks.run(at_intervals, every, how))
    assert [report[0] for report, *_ in seen] == [1, 2, 3, 4, 10, 11]
    broken = False
    for (version, kind, reason, seeded), verified, phase in seen:
        if broken:
            assert (kind, reason, seeded) == ("delta", f"rank 3 seeded: {DIFFERENT}", (3,))
        else:
            assert seeded == ((1, 2, 3) if version == 1 else ())
        assert (verified is not None) == phase == (version % every == 0), version
        flipped_now = version in (4, 10) and not broken and every != 3
        broken = verified is not None and verified[3] == (3,)
        if verified is not None:
            assert verified[0] == version and verified[4] == (1, 2, 3) and verified[5] == 0
            assert verified[1:4] == ((1, "2.weight", (3,)) if flipped_now else (0, None, ())), version


def trained_meanwhile(rank: int, world: int) -> Any:
    """The optimizer steps as soon as the call has returned, while the sync, and its verification, are on
    their way.
    """
    module = model(rank)
    sync(module, verify_interval=1)
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    work = sync(module, verify_interval=1, async_op=True)
    if rank == 0:
        nudge(module, "0.weight", 5)
        dist.send(torch.ones(1), 1)
    return found(work.wait().verified), found(dte_dist.verify(module))


def test_a_verification_in_the_background_does_not_look_at_what_is_trained_meanwhile(ranks: Ranks) -> None:
    behind, after = same(ranks.run(trained_meanwhile))
    assert behind == (2, 0, None, (), (1, 2, 3), 0) and after == (2, 0, None, (), (1, 2, 3), 1)


def unlike(rank: int, world: int, is_open: bool) -> Any:
    module = model(rank)
    if is_open:
        sync(module, verify_interval=2)
    error = caught(lambda: sync(module, verify_interval=2 if rank else 3))
    return error, sync(module, verify_interval=2).version


@pytest.mark.parametrize("is_open", [False, True], ids=["opening", "open"])
def test_intervals_that_differ_are_refused(ranks: Ranks, is_open: bool) -> None:
    (name, text), version = same(ranks.run(unlike, is_open))
    assert (
        name == ("ValueError" if is_open else "LayoutMismatch")
        and "verify_interval" in text
        and version == 1 + is_open
    )


def in_the_background(rank: int, world: int) -> Any:
    """A sync on its way, to the module or into it, ends before a verification begins."""
    module, copy = model(rank), model(20 + rank)
    into = {"into": copy} if rank == 2 else {}
    sync(module, **into)
    if rank == 0:
        nudge(module, "0.weight", 3)
        dist.recv(torch.empty(1), 2)
    work = sync(module, async_op=True, **into)
    if rank == 2:
        threading.Timer(0.3, lambda: dist.send(torch.ones(1), 0)).start()
    report = dte_dist.verify(module)
    return work.is_completed(), found(report), why(work.wait())


def test_it_waits_for_a_sync_in_the_background(ranks: Ranks) -> None:
    assert same(ranks.run(in_the_background)) == (True, (2, 0, None, (), (1, 2, 3), 0), (2, "delta", "", ()))


def into_one_copy(rank: int, world: int) -> Any:
    """Ranks 0 and 1 train a model each, rank 2 receives both into one; a verification of one waits for a sync
    of the other.
    """
    near, far = dist.new_group([0, 2]), dist.new_group([1, 2])
    if rank == 3:
        dist.barrier()
        return None
    if rank < 2:
        module, group = model(rank), (near, far)[rank]
        sync(module, group, group_src=0)
        if rank == 1:
            nudge(module, "0.weight", 5)
            dist.recv(torch.empty(1), 2)
            sync(module, group, group_src=0)
        else:
            dte_dist.verify(module, group)
        dist.barrier()
        return None
    copy, one, other = model(9), model(10), model(11)
    sync(one, near, group_src=0, into=copy)
    sync(other, far, group_src=0, into=copy)
    work = sync(other, far, group_src=0, into=copy, async_op=True)
    threading.Timer(0.3, lambda: dist.send(torch.ones(1), 1)).start()
    report = dte_dist.verify(one, near)
    ended = work.is_completed()
    work.wait()
    dist.barrier()
    return ended, found(report)


def test_it_waits_for_a_sync_in_the_background_of_another_channel_into_the_same_copy(ranks: Ranks) -> None:
    *_, (ended, report), _ = ranks.run(into_one_copy)
    assert ended and report == (1, 0, None, (), (), 0), "what another channel wrote to is of no version"


def unmoved(rank: int, world: int) -> Any:
    """It writes nothing: no counter moves, and nothing is sent anew."""
    side = fsdp2(rank, world)
    call(side)
    versions = [tensor._version for tensor in (side.held if rank > 1 else side.trained).values()]
    with torch.inference_mode(rank == 2):
        reports = [dte_dist.verify(side.target) for _ in range(3)]
    after = [tensor._version for tensor in (side.held if rank > 1 else side.trained).values()]
    return versions == after, [found(report) for report in reports], why(call(side))


def test_it_writes_nothing(ranks: Ranks) -> None:
    same_versions, reports, again = same(ranks.run(unmoved))
    assert same_versions and reports == [(1, 0, None, (), (2, 3), 0)] * 3 and again == (2, "delta", "", ())
