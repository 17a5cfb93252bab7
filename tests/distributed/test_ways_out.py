"""Real ranks: the hint that an error names is one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import dte_dist
from dte_dist import Layout
from tests.distributed.launcher import Ranks
from tests.distributed.shares import warm
from tests.distributed.tools import caught, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def changed_module(rank: int, world: int, how: str) -> Any:
    module = model(rank)
    sync(module)
    if how == "dtype":
        module.bfloat16()
    elif how == "another tensor":
        module.append(nn.Linear(3, 3))
    else:
        module[1].bias = module[1].weight
    error = caught(lambda: sync(module))
    dte_dist.close(module)
    report = sync(module)
    return error, report.kind, report.reason, prints(module)


@pytest.mark.parametrize("how", ["dtype", "another tensor", "tied"])
def test_a_module_that_changed_opens_a_new_channel_once_the_old_one_is_closed(ranks: Ranks, how: str) -> None:
    (kind, text), report, _, _ = same(ranks.run(changed_module, how))
    assert kind == "LayoutMismatch" and report == "full"
    assert (
        "Hint: call dte_dist.close(module, group) on every rank, and sync again: a new channel opens" in text
    )


def changed_layout(rank: int, world: int) -> Any:
    weights = {"w": torch.full((4,), float(rank)), "v": torch.full((2,), float(rank))}
    layout = Layout.from_tensors(weights)
    sync(layout)
    weights["w"].data = torch.full((5,), float(rank))
    error = caught(lambda: sync(layout))
    dte_dist.close(layout)
    layout = Layout.from_tensors(weights)
    report = sync(layout)
    return error, report.kind, weights["w"].tolist()


def test_a_layout_of_tensors_that_changed_is_built_anew(ranks: Ranks) -> None:
    (kind, text), report, found = same(ranks.run(changed_layout))
    assert (
        kind == "LayoutMismatch"
        and "if you passed a Layout, build a new one of the changed tensors, and pass that" in text
    )
    assert report == "full" and found == [0.0] * 5


def reported(rank: int, world: int) -> Any:
    module, found = model(rank), []
    sync(module)
    for ranks in ([0], [0, 1, 2]):
        if rank in ranks:
            nudge(module, "0.weight", 5)
        report = sync(module, codec="ef+planes")
        assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
        found.append((str(report), report.as_dict()))
    return found


def test_the_codecs_are_in_the_line_of_a_rank_that_knows_them(ranks: Ranks) -> None:
    (source, all_seeded), *receivers = ranks.run(reported)
    assert (
        ", codec ef+planes, " in source[0]
        and source[1]["codecs"] == {"ef+planes": 1}
        and source[1]["changed"] == 5
    )
    for line, fields in (all_seeded, *(each for found in receivers for each in found)):
        assert "codec" not in line and fields["codecs"] == {}
    assert all_seeded[1]["seeded"] == [1, 2]  # what was prepared for them has not been sent
