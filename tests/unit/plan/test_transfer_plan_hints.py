"""Unit tier: the hints of `Plan.between` name what it and its layouts have, not options of a collective."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dte_dist import Layout, LayoutMismatch, Plan, RankLayout

ZEROS = torch.zeros(4, 3)
WHOLE = Layout.from_tensors({"w": ZEROS})
TWO = Layout.from_tensors({"w": ZEROS, "x": torch.zeros(2)})
TIED = Layout.from_tensors({"a": ZEROS, "b": ZEROS})
APART = Layout.from_tensors({"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)})
OTHER_SHAPE = Layout.from_tensors({"w": torch.zeros(4, 4)})
BF16 = Layout.from_tensors({"w": ZEROS.bfloat16()})
INTS = Layout.from_tensors({"w": ZEROS.int()})
WRONG: Mapping[str, tuple[Mapping[int, Any], Mapping[int, Any]]] = {
    "missing": ({0: TWO}, {1: WHOLE}),
    "one more": ({0: WHOLE}, {1: TWO}),
    "shape": ({0: WHOLE}, {1: OTHER_SHAPE}),
    "dtype": ({0: WHOLE}, {1: BF16}),
    "sources differ": ({0: WHOLE, 1: OTHER_SHAPE}, {2: WHOLE}),
    "receiver ties": ({0: APART}, {1: TIED}),
    "one source ties": ({0: TIED, 1: APART}, {2: APART}),
    "no cast": ({0: RankLayout(INTS.manifest, (), {"w": "float32"})}, {1: WHOLE}),
    "wire dtypes of tied names": (
        {0: RankLayout(TIED.manifest, (), {"a": "bfloat16", "b": "float16"})},
        {1: TIED},
    ),
    "gap": ({0: Layout.from_views([("w", ZEROS[:2], (4, 3), (0, 0))])}, {1: WHOLE}),
    "overlap": (
        {r: Layout.from_views([("w", ZEROS[:3], (4, 3), (r, 0))]) for r in (0, 1)},
        {2: WHOLE},
    ),
}


def _known() -> set[str]:
    """Names of arguments that a caller of `Plan.between` can give."""
    calls: list[Any] = [Plan.between, RankLayout]
    calls += [Layout.from_module, Layout.from_tensors, Layout.from_views, Layout.from_shards]
    return {name for call in calls for name in inspect.signature(call).parameters}


@pytest.mark.parametrize("name", WRONG)
def test_a_hint_names_what_there_is(name: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        Plan.between(*WRONG[name])
    _, _, hint = str(caught.value).partition("Hint: ")
    assert hint
    named = set(re.findall(r"(\w+)=", hint))
    assert named <= _known(), hint
