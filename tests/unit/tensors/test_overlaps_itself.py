"""Unit tier: tensors whose elements share memory with each other are found, and refused wherever given."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import DeltaEngine, DeltaTracker, Layout, LayoutMismatch, LoopbackTransport, ShardSpec
from dte_dist.tensors.overlaps import overlaps_itself

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(DIMS)
def test_an_overlap_is_found_exactly(dims: list[tuple[int, int]]) -> None:
    sizes = [size for size, _ in dims]
    strides = [stride for _, stride in dims]
    tensor = torch.zeros(200).as_strided(sizes, strides)
    places = [
        sum(i * stride for i, stride in zip(at, strides, strict=True)) for at in product(*map(range, sizes))
    ]
    assert overlaps_itself(tensor) == (len(set(places)) < len(places))


OVERLAPPING: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.zeros(3, 1).expand(3, 4),
    "sliding window": lambda: torch.zeros(9).as_strided((3, 4), (2, 1)),
    "unfold": lambda: torch.zeros(6).unfold(0, 4, 1),
    "strides that meet once": lambda: torch.zeros(30).as_strided((3, 4), (4, 2)),
}


def _pull(tensor: Tensor) -> None:
    engine = DeltaEngine(LoopbackTransport())
    engine.push({"w": torch.ones(3, 4)}, 1)
    engine.pull({"w": tensor}, 1)


USES: dict[str, Callable[[Tensor], Any]] = {
    "pull": _pull,
    "push": lambda tensor: DeltaEngine(LoopbackTransport()).push({"w": tensor}, 1),
    "diff": lambda tensor: DeltaTracker().diff({"w": tensor}, 1),
    "from_tensors": lambda tensor: Layout.from_tensors({"w": tensor}),
    "from_views": lambda tensor: Layout.from_views([("w", tensor, (6, 4), (0, 0))]),
    "from_shards": lambda tensor: Layout.from_shards([("w", tensor, ShardSpec((3, 4), None, ()))]),
    "from_module": lambda tensor: Layout.from_module(_module(tensor)),
}


def _module(tensor: Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("w", tensor)
    return module


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_overlaps_itself_is_refused_by_name(name: str, use: str) -> None:
    with pytest.raises(LayoutMismatch, match=r"share memory.*tensor 'w'.*contiguous"):
        USES[use](OVERLAPPING[name]())


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 3).t(), torch.zeros(3, 8)[:, ::2], torch.zeros(9).as_strided((3, 4), (1, 0))[:, :1]],
    ids=["transposed", "columns", "one column"],
)
def test_strides_alone_are_no_fault(tensor: Tensor) -> None:
    Layout.from_tensors({"w": tensor})
