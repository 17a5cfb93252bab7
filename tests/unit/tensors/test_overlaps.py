"""Unit tier, no ranks: memory that two elements of one tensor share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist import DeltaEngine, LayoutMismatch, LoopbackTransport
from dte_dist.tensors.overlaps import refuse_overlaps

DIMENSIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(DIMENSIONS)
def test_a_tensor_is_refused_exactly_if_two_elements_are_one(dimensions: list[tuple[int, int]]) -> None:
    shape, strides = zip(*dimensions, strict=True)
    memory = torch.arange(1 + sum((size - 1) * stride for size, stride in dimensions))
    tensor = torch.as_strided(memory, shape, strides)
    if len(tensor.unique()) == tensor.numel():
        refuse_overlaps(["w"], [tensor])
    else:
        with pytest.raises(LayoutMismatch, match=r"one element of memory.*'w'"):
            refuse_overlaps(["w"], [tensor])


@pytest.mark.parametrize(
    "target", [torch.zeros(1).expand(12), torch.zeros(8).unfold(0, 4, 2), torch.zeros(4).expand(3, 4)]
)
def test_an_engine_does_not_write_to_it(target: torch.Tensor) -> None:
    engine = DeltaEngine(LoopbackTransport())
    engine.push({"w": torch.ones(target.shape)}, 1)
    with pytest.raises(LayoutMismatch, match=r"one element of memory|elements of an expanded tensor share"):
        engine.pull({"w": target}, 1)
    assert not target.any()
