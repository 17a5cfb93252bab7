"""Distributed tier, four ranks over gloo: whatever is wrong with the targets of one rank of a `DeltaEngine`,
all ranks are told in the pull and the push of that version, and go on with the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dte_dist import DeltaEngine, Layout, Plan, ProcessGroupTransport
from tests.distributed.launcher import Ranks
from tests.distributed.meetings import PATIENCE, WORLD, payload
from tests.distributed.shares import warm
from tests.distributed.tools import caught, same

SOON = PATIENCE / 2
SHAPE = (8, 6)

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def _overlapping(weights: Weights) -> Weights:
    memory = torch.zeros(60)
    return {"w": memory[:48].view(SHAPE), "b": memory[45:51]}


WRONG: dict[str, tuple[str, Callable[[Weights], Any]]] = {
    "missing": ("LayoutMismatch", lambda held: {"w": held["w"]}),
    "nothing": ("LayoutMismatch", lambda held: iter(())),
    "one more": ("LayoutMismatch", lambda held: held | {"x": torch.zeros(2)}),
    "another shape": ("LayoutMismatch", lambda held: held | {"w": torch.zeros(6, 8)}),
    "another dtype": ("LayoutMismatch", lambda held: held | {"w": held["w"].double()}),
    "sparse": ("LayoutMismatch", lambda held: held | {"w": held["w"].to_sparse()}),
    "meta": ("LayoutMismatch", lambda held: held | {"w": held["w"].to("meta")}),
    "expanded": ("LayoutMismatch", lambda held: held | {"b": torch.zeros(1).expand(6)}),
    "overlapping": ("LayoutMismatch", _overlapping),
    "twice": ("LayoutMismatch", lambda held: [*held.items(), *held.items()]),
    "no tensor": ("ValueError", lambda held: held | {"b": 3}),
    "no pairs": ("ValueError", lambda held: ["w"]),
    "a layout": ("ValueError", Layout.from_tensors),
    "not iterable": ("SyncFailed", lambda held: 3),
    "code that raises": ("SyncFailed", lambda held: (1 // 0 for _ in held)),
}


def wrong_targets(rank: int, world: int, name: str, first: bool) -> Any:
    """Rank 2 gives wrong targets, in the first pull or in one of a delta; then it gives the right ones."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    engine = DeltaEngine(transport, timeout=PATIENCE)
    weights = {"w": torch.arange(48.0).view(SHAPE), "b": torch.ones(6)}
    held = weights if rank == 0 else {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def both(version: int, targets: Any) -> None:
        engine.push(weights, version) if rank == 0 else engine.pull(targets, version)

    if not first:
        both(1, held)
        weights["w"][3, 3] += 1.0 if rank == 0 else 0.0
    before = {name: tensor.clone() for name, tensor in held.items()}
    begin = time.monotonic()
    error = caught(lambda: both(2, WRONG[name][1](held) if rank == 2 else held))
    is_soon = time.monotonic() - begin < SOON
    unmoved = all(torch.equal(before[name], held[name]) for name in held)
    both(3, held)
    transport.close()
    return error, is_soon, unmoved, [tensor.tolist() for tensor in held.values()]


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["first pull", "delta"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_targets_of_one_rank_are_told_to_all_which_then_go_on(
    ranks: Ranks, name: str, first: bool
) -> None:
    (kind, text), is_soon, unmoved, _ = same(ranks.run(wrong_targets, name, first, seconds=60))
    assert (kind, is_soon, unmoved) == (WRONG[name][0], True, True), text
    assert "raised on rank 2 of the group" in text


def planned(rank: int, world: int, colocated: bool) -> Any:
    """Ranks 0 and 1 send halves of the rows, ranks 2 and 3 hold all; rank 3 gives another layout once."""
    parts = {r: torch.full((4, 6), 1.0 + r) for r in (0, 1)}
    halves = {r: Layout.from_views([("w", part, SHAPE, (4 * r, 0))]) for r, part in parts.items()}
    held = {r: torch.zeros(SHAPE) for r in (range(4) if colocated else (2, 3))}
    wholes = {r: Layout.from_tensors({"w": tensor}) for r, tensor in held.items()}
    plan = Plan.between(halves, wholes)
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    wrong = Layout.from_tensors({"w": torch.zeros(4, 6)})

    def both(version: int, target: Any) -> None:
        if rank in halves:
            engine.push(halves[rank], version, full=True)
        if rank in wholes:
            engine.pull(target, version)

    mine = wholes.get(rank)
    error = caught(lambda: both(1, wrong if rank == 3 else mine))
    both(2, mine)
    transport.close()
    return error, mine is None or held[rank].sum().item() == 72.0


@pytest.mark.slow
def test_another_layout_than_that_of_the_plan_is_told_to_all(ranks: Ranks) -> None:
    (kind, text), is_right = same(ranks.run(planned, False, seconds=60))
    assert (kind, is_right) == ("LayoutMismatch", True)
    assert "raised on rank 3 of the group" in text


def colocated_pulls(rank: int, world: int) -> Any:
    """All ranks push their quarter and pull the whole; rank 2 pulls into wrong targets once."""
    part, held = torch.full((2, 6), 1.0 + rank), torch.zeros(SHAPE)
    quarters = {r: Layout.from_views([("w", torch.zeros(2, 6), SHAPE, (2 * r, 0))]) for r in range(world)}
    mine = Layout.from_views([("w", part, SHAPE, (2 * rank, 0))])
    whole = Layout.from_tensors({"w": held})
    plan = Plan.between(quarters | {rank: mine}, dict.fromkeys(range(world), whole))
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    engine.push(mine, 1)
    begin = time.monotonic()
    error = caught(lambda: engine.pull(mine if rank == 2 else whole, 1))
    is_soon = time.monotonic() - begin < SOON
    engine.push(mine, 2, full=True)
    engine.pull(whole, 2)
    transport.close()
    return error[0], is_soon, held.sum().item()


@pytest.mark.slow
def test_on_ranks_that_send_too_wrong_targets_concern_that_rank_alone_for_all_have_come(ranks: Ranks) -> None:
    found = ranks.run(colocated_pulls, seconds=60)
    assert found == [("LayoutMismatch" if rank == 2 else "", True, 120.0) for rank in range(WORLD)]


def again(rank: int, world: int) -> Any:
    """Ask for a version, or send it, a second time; then go on."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    engine = DeltaEngine(transport, timeout=PATIENCE)
    weights = {"w": torch.arange(4.0) + (rank == 0)}
    errors = []
    begin = time.monotonic()
    for version in (1, 2):
        if rank == 0:
            engine.push(weights, version)
            errors.append(caught(lambda version=version: engine.push(weights, version)))
            errors.append(caught(lambda version=version: transport.send(payload(version), timeout=PATIENCE)))
            other = DeltaEngine(transport)
            errors.append(caught(lambda version=version, other=other: other.push(weights, version)))
        else:
            arrived = engine.decode_for_live_apply(version)
            errors.append(caught(lambda version=version: engine.decode_for_live_apply(version)))
            engine.commit_live_apply(arrived, weights)
            errors.append(caught(lambda version=version: engine.pull(weights, version)))
            errors.append(caught(lambda version=version: transport.receive(version, timeout=PATIENCE)))
    is_soon = time.monotonic() - begin < SOON
    engine.push(weights, 3, full=True) if rank == 0 else engine.pull(weights, 3)
    transport.close()
    return errors, is_soon, weights["w"].tolist()


@pytest.mark.slow
def test_what_has_come_already_is_a_replay_at_once_and_all_goes_on(ranks: Ranks) -> None:
    errors, is_soon, weights = same(ranks.run(again, seconds=60))
    assert [kind for kind, _ in errors] == ["VersionReplay"] * 6
    assert is_soon and weights == [1.0, 2.0, 3.0, 4.0]


def _other_plan(size: int) -> Plan:
    """Ranks 0 and 1 send to rank 2 alone; the plan of the transport is for rank 3, too."""
    halves = {r: Layout.from_views([("w", torch.zeros(4, 6), SHAPE, (4 * r, 0))]) for r in (0, 1)}
    return Plan.between(halves, {r: Layout.from_tensors({"w": torch.zeros(SHAPE)}) for r in range(2, size)})


WRONG_ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "no plan": ("LayoutMismatch", {"plan": None, "rank": None}),
    "what is no plan": ("ValueError", {"plan": 3}),
    "a plan without this rank": ("LayoutMismatch", {"plan": _other_plan(3)}),
    "no rank": ("ValueError", {"rank": None}),
    "a negative rank": ("ValueError", {"rank": -1}),
    "another rank": ("LayoutMismatch", {"rank": 1}),
    "mode": ("ValueError", {"mode": "dense"}),
    "mode of a list": ("ValueError", {"mode": ["full"]}),
    "anchor_interval": ("ValueError", {"anchor_interval": 0}),
    "sparse_bytes_ratio": ("ValueError", {"sparse_bytes_ratio": -1}),
    "timeout": ("ValueError", {"timeout": "long"}),
    "header": ("ValueError", {"header": 1}),
}


def wrong_engine(rank: int, world: int, name: str, who: int) -> Any:
    """One rank makes its engine with a wrong option; the others are on their way to the first version."""
    parts = {r: torch.full((4, 6), 1.0 + r) for r in (0, 1)}
    halves = {r: Layout.from_views([("w", part, SHAPE, (4 * r, 0))]) for r, part in parts.items()}
    held = torch.zeros(SHAPE)
    whole = Layout.from_tensors({"w": held})
    plan = _other_plan(world)
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)

    def both(version: int, **options: Any) -> None:
        given = {"plan": plan, "rank": rank, "timeout": PATIENCE, **options}
        engine = DeltaEngine(transport, **given)
        engine.push(halves[rank], version) if rank in halves else engine.pull(whole, version)

    begin = time.monotonic()
    error = caught(lambda: both(1, **(WRONG_ENGINES[name][1] if rank == who else {})))
    is_soon = time.monotonic() - begin < SOON
    both(2)
    transport.close()
    return error, is_soon, rank in halves or held.sum().item() == 72.0


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 3], ids=["sender", "receiver"])
@pytest.mark.parametrize("name", WRONG_ENGINES)
def test_a_wrong_engine_on_one_rank_is_told_to_all(ranks: Ranks, name: str, who: int) -> None:
    (kind, text), is_soon, is_right = same(ranks.run(wrong_engine, name, who, seconds=60))
    assert (kind, is_soon, is_right) == (WRONG_ENGINES[name][0], True, True), text
    assert f"raised on rank {who} of the group" in text
