"""Unit tier, no ranks: what broken channels leave behind on a source, who takes it up, and when it goes."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from dte_dist.layout import Layout
from dte_dist.plan.chunks import ChunkPlan
from dte_dist.plan.model_map import ModelMap, RankLayout
from dte_dist.report import Phases
from dte_dist.sync import retained_state as kept
from dte_dist.sync.source import Source


def source(names: str = "wv", rows: int = 4, *, first: bool = True) -> tuple[Source, ModelMap]:
    """A source that holds the first rows of some tensors; another one holds the rest of their eight rows."""
    parts = [(0, rows), (rows, 8)] if rows < 8 else [(0, 8)]
    layouts = [
        Layout.from_views([(name, torch.ones(end - begin, 3), (8, 3), (begin, 0)) for name in names])
        for begin, end in parts
    ]
    whole = Layout.from_tensors({name: torch.zeros(8, 3) for name in names})
    holdings = {rank: RankLayout(layout.manifest, (), None) for rank, layout in enumerate(layouts)}
    model = ModelMap(holdings, {9: RankLayout(whole.manifest, ())})
    totals = {
        rank: {width: space.numel for width, space in spaces.items()}
        for rank, spaces in model.source_spaces.items()
    }
    state = Source(layouts[0], model, 0, ChunkPlan(totals, 4096), 7)
    if first:
        state.prepare(1, True, Phases())
        state.commit(1, 5, full=True)
    return state, model


def opened(module: nn.Module, ranks: list[int], **how: object) -> Source:
    """Open a channel as far as its source goes; return its state."""
    state, model = source(first=False, **how)  # type: ignore[arg-type]
    kept.restore_source(module, ranks, state, model)
    kept.release_source(module, state, model)
    return state


def left(module: nn.Module, ranks: list[int], **how: object) -> Source:
    """Leave the source of a broken channel behind."""
    state, model = source(**how)  # type: ignore[arg-type]
    kept.retain_source(module, ranks, state, model)
    return state


def test_each_selection_and_each_group_finds_its_own_in_any_order() -> None:
    module = nn.Module()
    how = [([0, 1], "w"), ([0, 1], "v"), ([0, 2], "w"), ([0, 2], "wv")]
    states = [left(module, ranks, names=names) for ranks, names in how]
    for place in (2, 0, 3, 1):
        ranks, names = how[place]
        assert opened(module, ranks, names=names).state is states[place].state, place
    assert opened(module, [0, 1], names="w").snapshot is None, "each is taken up once"


def test_survivors_take_up_what_the_larger_group_left() -> None:
    module = nn.Module()
    state = left(module, [0, 1, 2])
    assert opened(module, [0, 1]).snapshot is state.snapshot


def test_snapshots_of_tensors_that_are_cut_otherwise_do_not_pile_up() -> None:
    module, snapshots = nn.Module(), []
    for rows in (4, 3, 2):  # trainers come and go, and nobody closes the channels of the groups before
        state = left(module, list(range(rows)), rows=rows)
        snapshots.append(weakref.ref(state.snapshot))
        del state
        assert opened(module, list(range(rows + 10)), rows=rows - 1).snapshot is None
        gc.collect()
        assert [snapshot() for snapshot in snapshots] == [None] * len(snapshots)


def test_what_another_selection_left_outlasts_a_channel_that_takes_up_nothing() -> None:
    module = nn.Module()
    state = left(module, [0, 1], names="v")
    assert opened(module, [0, 1], names="w").snapshot is None
    assert opened(module, [0, 1], names="v").snapshot is state.snapshot
