"""Distributed tier, four ranks over gloo: what could be meant in two ways is refused when the channel opens.

Every rank raises the same text.

Programs return what each rank found; bits are compared through hashes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import dte_dist
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, model, nudge, prints, same, sync


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect the warnings of the package; modules of earlier programs, which may lie in cycles, go first."""
    gc.collect()
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dte_dist")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


# Names of channels ------------------------------------------------------------------------------------------


def twins(rank: int, world: int, named: bool) -> Any:
    """Two modules of one shape, which rank 2 syncs in the other order."""
    modules = {"actor": model(10 if rank == 0 else rank), "reference": model(20 if rank == 0 else rank)}
    order = ["reference", "actor"] if rank == 2 else ["actor", "reference"]
    errors = []
    with warnings() as told:
        for name in order:
            errors.append(caught(lambda name=name: sync(modules[name], name=name if named else None)))
        for name in ["actor", "reference"] if named else []:
            sync(modules[name], name=name)
    return errors, {name: prints(module) for name, module in modules.items()}, told


def test_twins_that_are_opened_in_another_order_on_one_rank_are_refused_by_their_names(ranks: Ranks) -> None:
    errors, bits, told = same(ranks.run(twins, True))
    for (kind, text), (most, one) in zip(
        errors, [("actor", "reference"), ("reference", "actor")], strict=True
    ):
        assert (
            kind == "LayoutMismatch"
            and f"'{most}' on rank 0, 1, 3; '{one}' on rank 2" in text
            and "name=" in text
        )
    assert bits == {"actor": prints(model(10)), "reference": prints(model(20))} and told == []


def test_twins_without_names_are_warned_of_once_on_every_rank(ranks: Ranks) -> None:
    found = ranks.run(twins, False)
    assert [told for _, _, told in found] == [[found[0][2][0]]] * 4 and "pass name=" in found[0][2][0]
    assert found[2][1]["actor"] == prints(model(20)), "they are swapped: that is why the warning is there"


def neighbours(rank: int, world: int, how: str) -> list[str]:
    """Open two channels over one group; return what is warned of."""
    group = dist.new_group(list(range(world)))
    one, other = model(rank), model(rank) if how != "other layouts" else nn.Linear(3, 3)
    names = {"one is named": ("actor", None), "both are named": ("actor", "reference")}.get(how, (None, None))
    with warnings() as told:
        sync(one, group, name=names[0])
        sync(one, group, name=names[0])
        if how == "closed":
            dte_dist.close(one, group)
        sync(other, None if how == "other groups" else group, name=names[1])
    dte_dist.close(one, group)
    dte_dist.close(other, group)
    dte_dist.close(other)
    return told


@pytest.mark.parametrize("how", ["one is named", "both are named", "other layouts", "other groups", "closed"])
def test_channels_that_cannot_be_swapped_are_not_warned_of(ranks: Ranks, how: str) -> None:
    assert same(ranks.run(neighbours, how)) == []


def names_that_differ(rank: int, world: int, is_open: bool) -> Any:
    module = model(rank)
    if is_open:
        sync(module, name="actor")
    error = caught(
        lambda: sync(module, name=(None if rank == 1 else "x" * 201 if rank == 3 and is_open else "actor"))
    )
    return error, sync(module, name="actor").version


def test_a_name_on_some_ranks_only_is_refused(ranks: Ranks) -> None:
    (kind, text), version = same(ranks.run(names_that_differ, False))
    assert kind == "LayoutMismatch" and "'actor' on rank 0, 2, 3; None on rank 1" in text and version == 1
    (kind, text), version = same(ranks.run(names_that_differ, True))
    assert (
        kind == "ValueError"
        and "name: not what the call that opened the channel passed" in text
        and version == 2
    )


def p2p_by_name(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module, name="actor")
    nudge(module, "0.weight", 3)
    report = dte_dist.delta_p2p(module, timeout=15, name="actor", src=None)
    return report.version, prints(module)


def test_delta_p2p_takes_the_name_and_finds_the_same_channel(ranks: Ranks) -> None:
    assert same(ranks.run(p2p_by_name))[0] == 2
