"""Distributed tier, four ranks over gloo: models, options and arguments that do not fit are refused on all
ranks when a channel opens, and a channel that closed opens anew.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dte_dist
from dte_dist import Layout
from dte_dist.sync import registry
from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    caught,
    channel_of,
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fsdp2", "layout", "into"])
def test_a_channel_does_not_keep_its_module_alive_and_goes_with_it(ranks: Ranks, kind: str) -> None:
    assert same(ranks.run(forgotten, kind)) == (True, "its module is gone", 1)
