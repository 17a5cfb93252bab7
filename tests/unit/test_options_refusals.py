"""Unit tier: whatever is given for whichever option is taken, or refused by the name of the option; which
ranks a value is for makes no difference.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from dte_dist import DeltaEngine, DeltaTracker, LoopbackTransport
from dte_dist.options import SyncOptions, options_of
from dte_dist.transport.named_ranks import ranks_of


class Hostile:
    """Raises whatever is asked of it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparing")

    __hash__ = None  # type: ignore[assignment]


NASTY: dict[str, Any] = {
    "zero": 0,
    "minus one": -1,
    "true": True,
    "half": 0.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "huge": 1 << 80,
    "complex": 1j,
    "text": "no such thing",
    "empty text": "",
    "bytes": b"delta",
    "list": [],
    "list of none": [None],
    "dict": {},
    "dict of numbers": {3: 4},
    "dict of none": {"w": None},
    "object": object(),
    "hostile": Hostile(),
    "array": np.zeros(3),
    "tensor": torch.zeros(3),
    "quantised": torch.quint8,
    "integers": torch.int8,
    "time": timedelta(days=-1),
    "long time": timedelta.max,
    "class": int,
    "function": lambda *_: None,
}
TAKEN = {
    "anchor_interval": ("huge",),
    "verify_interval": ("huge",),
    "detector": ("class", "function"),
    "timeout": ("half",),
    "sparse_bytes_ratio": ("half",),
    "wire_dtype": ("dict", "class", "function"),
    "select": ("text", "empty text", "list", "dict", "dict of none", "class", "function"),
    "rename": ("class", "function"),
    "name": ("text",),
}


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("option", [name for name in SyncOptions.__annotations__ if name != "group_src"])
def test_every_option_takes_a_value_or_is_named(option: str, value: str) -> None:
    if value in TAKEN.get(option, ()):
        options_of(**{option: NASTY[value]})
        return
    with pytest.raises(ValueError, match=option) as caught:
        options_of(**{option: NASTY[value]})
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("value", [*NASTY.values(), [0, 0], [True], (5,), "01", np.int64(1)], ids=str)
@pytest.mark.parametrize("option", ["src", "group_src"])
def test_sources_are_ranks_or_are_refused_by_the_name_of_the_option(option: str, value: Any) -> None:
    if type(value) is int and value == 0:
        assert ranks_of(option, value, 4) == [0]
        return
    with pytest.raises(ValueError, match=option) as caught:
        ranks_of(option, value, 4)
    assert type(caught.value) is ValueError


ENGINE = ("mode", "anchor_interval", "sparse_bytes_ratio", "timeout", "header", "plan", "rank")
ENGINE_TAKES = {
    ("sparse_bytes_ratio", "zero"),
    ("sparse_bytes_ratio", "half"),
    ("sparse_bytes_ratio", "huge"),
    ("timeout", "half"),
    ("anchor_interval", "huge"),
    ("header", "true"),
}


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("option", ENGINE)
def test_every_option_of_an_engine_takes_a_value_or_is_named(option: str, value: str) -> None:
    if (option, value) in ENGINE_TAKES:
        DeltaEngine(LoopbackTransport(), **{option: NASTY[value]})
        return
    with pytest.raises(ValueError, match=option):
        DeltaEngine(LoopbackTransport(), **{option: NASTY[value]})


@pytest.mark.parametrize("value", [name for name in NASTY if name != "true"])
def test_a_push_is_full_or_not(value: str) -> None:
    weights = {"w": torch.zeros(3)}
    engine, tracker = DeltaEngine(LoopbackTransport()), DeltaTracker()
    for call in (engine.push, tracker.diff):
        with pytest.raises(ValueError, match="full"):
            call(weights, 1, full=NASTY[value])


@pytest.mark.parametrize("value", [name for name in NASTY if name != "dict"])
def test_the_dtypes_of_a_diff_are_a_mapping_by_name(value: str) -> None:
    with pytest.raises(ValueError, match="wire"):
        DeltaTracker().diff({"w": torch.zeros(3)}, 1, wire=NASTY[value])
