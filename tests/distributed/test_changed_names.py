"""Distributed tier, four ranks over gloo: each rank learns which tensors a sync changed, and an engine that
computes from some of them runs its own code on those alone.

Ranks 0 and 1 are sources, each with half of the rows. Rank 2 holds all, with the same ties. Rank 3 is an
engine: it holds `head` alone of the two tied names, not `norm`, the interleaved rows of `gate_up` apart, and
`a_log` in memory of its own, from which it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dte_dist
from dte_dist import Layout
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT

SHAPES = {"embed": (60, 40), "gate_up": (64, 40), "a_log": (50, 2), "norm": (40, 3)}
TIED = {"head": "embed"}
SOURCES = [0, 1]
CALLS = {"broadcast": dte_dist.delta_broadcast, "p2p": dte_dist.delta_p2p}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


class Source:
    """Half of the rows of each tensor, one of them under two names."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        self.parts = {name: torch.randn(rows // 2, columns) for name, (rows, columns) in SHAPES.items()}
        names = {**{name: name for name in SHAPES}, **TIED}
        self.layout = Layout.from_views(
            [
                (name, self.parts[key], SHAPES[key], (rank * len(self.parts[key]), 0))
                for name, key in names.items()
            ]
        )

    def held(self) -> dict[str, Tensor]:
        return {**self.parts, "head": self.parts["embed"]}


class Copy:
    """A receiver with all tensors whole, tied as on the sources."""

    def __init__(self) -> None:
        self.whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.whole["head"] = self.whole["embed"]
        self.layout = Layout.from_tensors(self.whole)

    def held(self) -> dict[str, Tensor]:
        return self.whole


class Engine:
    """A receiver that computes `a` from a tensor that it receives into memory of its own."""

    def __init__(self) -> None:
        self.fused = torch.zeros(2, *SHAPES["embed"])
        self.gate, self.up = torch.zeros(2, 32, 40)
        self.a_log = torch.zeros(SHAPES["a_log"])
        self.a = torch.zeros(SHAPES["a_log"])
        self.computed = 0
        self.layout = Layout.from_views(
            [
                ("head", self.fused[1], SHAPES["embed"], (0, 0)),
                ("gate_up", self.gate, SHAPES["gate_up"], (0, 0), (2, 1)),
                ("gate_up", self.up, SHAPES["gate_up"], (1, 0), (2, 1)),
                ("a_log", self.a_log, SHAPES["a_log"], (0, 0)),
            ],
            partial=True,
        )

    def after(self, report: dte_dist.SyncReport) -> None:
        if "a_log" in report.changed_names:
            self.a.copy_(-torch.exp(self.a_log))
            self.computed += 1

    def held(self) -> dict[str, Tensor]:
        gate_up = torch.stack((self.gate, self.up), 1).flatten(0, 1)
        return {"head": self.fused[1], "gate_up": gate_up, "a_log": self.a_log}


def side_of(rank: int) -> Source | Copy | Engine:
    """Return what a rank is."""
    return Source(rank) if rank in SOURCES else (None, None, Copy, Engine)[rank]()


CHANGES = [
    {0: ["a_log"], 1: []},
    {0: [], 1: []},
    {0: ["embed"], 1: ["gate_up"]},
    {0: ["norm"], 1: ["norm"]},
    {0: ["norm"], 1: ["a_log", "embed"]},
]
"""Which tensors each source changes before each sync after the first."""


def syncs(rank: int, world: int, route: str) -> list[Any]:
    side = side_of(rank)
    seen = []
    for step in range(1 + len(CHANGES)):
        for name in CHANGES[step - 1].get(rank, []) if step else []:
            side.parts[name][step, 1] += 1
        before = {name: tensor.clone() for name, tensor in side.held().items()}
        report = CALLS[route](side.layout, src=SOURCES, timeout=TIMEOUT)
        if isinstance(side, Engine):
            side.after(report)
            assert same_bits(side.a, -torch.exp(side.a_log))
        changed = [name for name, tensor in side.held().items() if not same_bits(tensor, before[name])]
        seen.append((report.kind, report.changed_names, tuple(sorted(changed)), agree(side)))
    return [*seen, getattr(side, "computed", None)]


def agree(side: Source | Copy | Engine) -> bool:
    """Return whether a receiver holds what the sources do."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, side.held() if isinstance(side, Source) else None)
    whole = {name: torch.cat([gathered[rank][name] for rank in SOURCES]) for name in gathered[0]}
    return isinstance(side, Source) or all(
        same_bits(tensor, whole[name]) for name, tensor in side.held().items()
    )


def with_ties(names: list[str]) -> tuple[str, ...]:
    return tuple(sorted({*names, *(name for name, key in TIED.items() if key in names)}))


@pytest.mark.parametrize("route", CALLS)
def test_each_rank_learns_which_tensors_changed(ranks: Ranks, route: str) -> None:
    *sources, copy, engine = ranks.run(syncs, route)
    for rank, (first, *seen, _) in zip(SOURCES, sources, strict=True):
        assert first[:2] == ("full", with_ties(list(SHAPES)))
        expected = [with_ties(changes[rank]) for changes in CHANGES]
        assert [names for _, names, *_ in seen] == expected
    for *seen, _ in (copy, engine):
        assert [kind for kind, *_ in seen] == ["full"] + ["delta"] * len(CHANGES)
        assert [names for _, names, *_ in seen] == [changed for *_, changed, _ in seen]
        assert all(is_equal for *_, is_equal in seen)
    union = [with_ties(changes[0] + changes[1]) for changes in CHANGES]
    assert [names for _, names, *_ in copy[1:-1]] == union
    held = {"head", "gate_up", "a_log"}
    assert [set(names) for _, names, *_ in engine[1:-1]] == [set(names) & held for names in union]
    assert engine[-1] == 3, "at the first sync, and whenever a_log changed"


def seeded_beside_a_delta(rank: int, world: int) -> Any:
    side = side_of(rank)
    dte_dist.delta_broadcast(side.layout, src=SOURCES, timeout=TIMEOUT)
    if rank == 0:
        side.parts["a_log"][3, 0] += 1
    if rank == 2:
        with torch.no_grad():
            side.whole["norm"].zero_()
    report = dte_dist.delta_broadcast(side.layout, src=SOURCES, timeout=TIMEOUT, async_op=True).wait()
    return report.seeded, report.changed_names


def test_a_receiver_that_is_seeded_names_all_that_it_holds_and_no_other_rank_does(ranks: Ranks) -> None:
    *seen, engine = ranks.run(seeded_beside_a_delta)
    assert [seeded for seeded, _ in [*seen, engine]] == [(2,)] * 4
    assert [names for _, names in seen] == [("a_log",), (), with_ties(list(SHAPES))]
    assert engine[1] == ("a_log",)


def colocated(rank: int, world: int) -> Any:
    trained = {"a": torch.zeros(300), "b": torch.zeros(20, 20)}
    held = {"a": torch.zeros(300), "b": torch.zeros(20, 20)}
    layout, into = Layout.from_tensors(trained), Layout.from_tensors(held, select="b")
    seen = []
    for step in range(3):
        trained["ab"[step % 2]].view(-1)[0] += rank == 0
        report = dte_dist.delta_p2p(layout, into=into, src=[0], timeout=TIMEOUT) if rank == 0 else None
        report = report or dte_dist.delta_p2p(into, src=[0], timeout=TIMEOUT)
        seen.append(report.changed_names)
    return seen


def test_a_rank_that_is_both_names_what_it_received(ranks: Ranks) -> None:
    assert ranks.run(colocated) == [[("b",), ("b",), ()]] * 4
