"""When `again` is chosen: where it is smaller, and where the pass over the positions pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec import FAST, CodecSelector
from dte_dist.codec.index_codecs import AGAIN, EF, INDEX_CODECS, Again
from dte_dist.codec.value_codecs import VALUE_CODECS
from dte_dist.kernels import cpu
from tests.unit.codec.histories import after, ones, positions_of
from tests.unit.kernels.test_index_codecs import lengths


@pytest.mark.parametrize("codec", ["small", "again+planes"])
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    lengths,
    st.sampled_from([0.001, 0.01, 0.1, 0.5]),
    st.sampled_from([0.0, 0.2, 0.5, 0.84, 1.0]),
)
def test_again_is_taken_only_where_it_is_smaller(
    codec: str, seed: int, length: int, share: float, overlap: float
) -> None:
    rng = np.random.default_rng(seed)
    previous = positions_of(rng, length, share)
    positions = after(rng, previous, length, overlap)
    if not len(previous) or not 0 < len(positions) < length:
        return
    again, selector = Again(previous, positions), CodecSelector(codec)
    index, value, whole = selector.select(
        len(positions), length, ones(len(positions)), whole=False, again=again
    )
    without = selector.select(len(positions), length, ones(len(positions)), whole=False)
    sizes = again.size(len(positions), length), without[0].size(len(positions), length)
    assert not whole and value is without[1]
    most = 1 if codec == "again+planes" else 0.875
    # Of many positions some are asked first.
    if len(previous) <= 2000 or not 0.9 * most < sizes[0] / sizes[1] < most:
        assert index is (again if sizes[0] < most * sizes[1] else without[0])
    assert codec == "small" or without[0] is EF


def test_who_asks_for_positions_to_be_kept() -> None:
    assert CodecSelector("small").keeps and all(
        CodecSelector(f"again+{value.name}").keeps for value in VALUE_CODECS.values()
    )
    others = [
        FAST,
        CodecSelector("auto"),
        *(CodecSelector(f"{index.name}+planes") for index in INDEX_CODECS.values() if index is not AGAIN),
    ]
    assert not any(selector.keeps for selector in others)
    assert [CodecSelector("auto", speed).keeps for speed in (1e6, 1e8, 1e10)] == [True, True, False]


def test_auto_weighs_the_pass_over_the_positions() -> None:
    rng = np.random.default_rng(0)
    previous = positions_of(rng, 1 << 20, 0.01)
    positions = after(rng, previous, 1 << 20, 0.84)
    names = []
    for speed in (1e6, 5e7, 1e9):
        again = Again(previous, positions)
        names.append(
            CodecSelector("auto", speed)
            .select(len(positions), 1 << 20, ones(len(positions)), whole=True, again=again)[0]
            .name
        )
    assert names[:2] == ["again", "again"] and names[2] != "again"
    again = Again(previous, positions)
    assert FAST.select(len(positions), 1 << 20, ones(len(positions)), whole=True, again=again)[0] is not again


def test_no_pass_where_it_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "split_again", lambda *of: pytest.fail("a pass for nothing"))
    many, few = torch.arange(0, 1 << 16, 2, dtype=torch.int32), torch.tensor([5, 77], dtype=torch.int32)
    assert (
        CodecSelector("small").select(2, 1 << 16, ones(2), whole=True, again=Again(many, few))[0].name
        != "again"
    )
