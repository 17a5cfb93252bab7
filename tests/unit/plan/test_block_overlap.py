"""Unit tier: receivers that hold nothing, or tensors of fewer dimensions than the sources have."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from dte_dist import Layout, Plan, RankLayout

SHAPES = [(), (3,), (2, 3), (2, 2, 3), (1, 2, 1, 3)]
EMPTY = [[(0, 3)], [(4, 0)], [(0, 3), (4, 0)], [(0, 0), (0, 0)]]


@pytest.mark.parametrize("shapes", EMPTY, ids=str)
def test_receivers_may_hold_nothing_at_all(shapes: list[tuple[int, int]]) -> None:
    source = Layout.from_tensors({"w": torch.zeros(4, 3)})
    held = [Layout.from_views([("w", torch.zeros(shape), (4, 3), (0, 0))]) for shape in shapes]
    plan = Plan.between({0: source}, dict(enumerate(held, 1)))
    plan.validate()
    assert not list(plan.ops) and all(plan.bytes_between(0, rank) == 0 for rank in (1, 2))


@pytest.mark.parametrize(
    "kept", [kept for count in (1, 2) for kept in combinations(range(5), count)], ids=str
)
def test_a_receiver_may_hold_tensors_of_some_dimensions_only(kept: tuple[int, ...]) -> None:
    tensors = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(SHAPES)}
    part = Layout.from_tensors({f"w{number}": tensors[f"w{number}"] for number in kept})
    receiver = RankLayout(part.manifest, part.coordinates, partial=True)
    plan = Plan.between({0: Layout.from_tensors(tensors)}, {1: receiver})
    plan.validate()
    assert [op.slot for op in plan.ops] == [f"w{number}" for number in kept]
