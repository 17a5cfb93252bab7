"""Unit tier: the pieces noted are those that the changes lie in, whatever the ranges that they come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.detect.detector import Changed
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.sync.changed_pieces import ChangedPieces

CPU = torch.device("cpu")


def space_of(sizes: list[int]) -> FlatSpace:
    """Return a space of pieces of these sizes; entries count backwards."""
    pieces = [Piece(slot, len(sizes) - slot, Block.whole((size,))) for slot, size in enumerate(sizes)]
    return FlatSpace.of(2, Pieces.of(pieces))


def noted(pieces: ChangedPieces) -> dict[int, bool]:
    """Return by entry whether it has changes."""
    return {
        entry: bool(is_changed)
        for entries, mask in pieces.marks()
        for entry, is_changed in zip(entries.tolist(), mask.tolist(), strict=True)
    }


def in_range(first: int, length: int, positions: list[int]) -> Changed:
    """Return changes at these positions of the space as those of a range."""
    bits = torch.zeros(len(positions), dtype=torch.int16)
    where = torch.tensor([position - first for position in positions], dtype=torch.int32)
    return Changed(first, length, None if len(positions) == length else where, bits, bits)


@given(st.data())
def test_pieces_are_those_that_changes_lie_in(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    total = sum(sizes)
    changed = sorted(data.draw(st.sets(st.integers(0, total - 1))))
    step = data.draw(st.integers(1, total))
    pieces = ChangedPieces({2: space_of(sizes)}, CPU)
    for first in range(0, total, step):
        length = min(step, total - first)
        here = [position for position in changed if first <= position < first + length]
        if here:
            pieces.note(2, in_range(first, length, here))
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends]
    expected = {
        len(sizes) - slot: any(starts[slot] <= position < ends[slot] for position in changed)
        for slot in range(len(sizes))
    }
    assert noted(pieces) == expected


def test_positions_far_away_do_not_overflow() -> None:
    far = 1 << 40
    pieces = ChangedPieces({2: space_of([far, 3, far])}, CPU)
    pieces.note(2, in_range(far - 1, 8, [far, far + 2]))
    assert noted(pieces) == {3: False, 2: True, 1: False}


@pytest.mark.parametrize("is_full", [False, True])
def test_all_is_noted_or_nothing(is_full: bool) -> None:
    pieces = ChangedPieces({2: space_of([2, 3]), 4: space_of([])}, CPU)
    if is_full:
        pieces.note_all()
    assert noted(pieces) == {2: is_full, 1: is_full}
