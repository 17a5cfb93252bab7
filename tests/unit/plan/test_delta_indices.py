"""Positions of a delta between two blocks, against the elements that the blocks hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist import remap_delta_indices
from dte_dist.layout import Block, Cut, cut_block
from dte_dist.plan import delta_indices as module
from tests.unit.geometry import SHAPES, blocks, global_index, local_index

some = settings(max_examples=200, deadline=None)
dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


def expected(positions, shape, source, receiver):
    """Brute force: (positions in the receiver's block, places)."""
    home = {element: at for at, element in enumerate(receiver.global_indices(shape).tolist())}
    elements = source.global_indices(shape)[positions].tolist()
    found = [(home[element], place) for place, element in enumerate(elements) if element in home]
    return [at for at, _ in found], [place for _, place in found]


def remapped(positions, source, receiver, dtype=torch.int64):
    found, kept = remap_delta_indices(torch.tensor(positions, dtype=dtype), source, receiver)
    assert found.dtype == kept.dtype == torch.int64
    return found.tolist(), kept.tolist()


@some
@given(st.data())
def test_every_position_comes_to_its_element_both_ways(data) -> None:
    shape = data.draw(SHAPES)
    pair = data.draw(blocks(shape)), data.draw(blocks(shape))
    for source, receiver in (pair, pair[::-1]):
        positions = np.flatnonzero(
            data.draw(st.lists(st.booleans(), min_size=source.numel, max_size=source.numel))
        )
        wanted = expected(positions.astype(np.int64), shape, source, receiver)
        for dtype in (torch.int32, torch.int64):
            assert remapped(positions.tolist(), source, receiver, dtype) == wanted


@some
@given(st.data())
def test_there_and_back_is_the_same(data) -> None:
    shape = data.draw(SHAPES)
    source, receiver = data.draw(blocks(shape)), data.draw(blocks(shape))
    positions = torch.arange(source.numel)
    there, kept = remap_delta_indices(positions, source, receiver)
    ordered, order = there.sort()
    back, all_kept = remap_delta_indices(ordered, receiver, source)
    assert back.tolist() == positions[kept][order].tolist()
    assert all_kept.tolist() == list(range(len(there)))


@dtypes
def test_rows_that_are_contiguous_are_shifted(dtype) -> None:
    source, receiver = (cut_block((100, 8), (parts,), (at,), [Cut(0, 0)]) for parts, at in ((4, 1), (10, 3)))
    assert remapped([0, 39, 40, 41, 119, 120, 199], source, receiver, dtype) == ([0, 1, 79], [2, 3, 4])
    assert remapped([], source, receiver, dtype) == ([], [])


@pytest.mark.parametrize("window", [1, 3, 7])
def test_windows_join(window, monkeypatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", window)
    shape, source, receiver = (
        (6, 6),
        Block((((0, 2), (3, 3)), ((0, 5),))),
        Block((((1, 4),), ((1, 2), (4, 2)))),
    )
    for positions in ([], [0], [24], [3, 4, 9, 20, 21], list(range(25))):
        assert remapped(positions, source, receiver) == expected(
            np.array(positions, np.int64), shape, source, receiver
        )


def test_blocks_beyond_the_range_of_int32() -> None:
    shape = (1 << 17, 1 << 16)
    receivers = [
        Block.rectangle((1 << 16, 0), (1 << 15, 1 << 16)),
        Block.rectangle((5, 3), ((1 << 17) - 5, 17)),
    ]
    source, positions = Block.whole(shape), [5, (5 << 16) + 3, (1 << 31) + 4, (1 << 32) + 7, (1 << 33) - 1]
    for receiver in receivers:
        wanted = [local_index(receiver, shape, global_index(source, shape, each)) for each in positions]
        found, kept = remapped(positions, source, receiver)
        assert kept == [place for place, each in enumerate(wanted) if each is not None]
        assert found == [each for each in wanted if each is not None]
    last = (1 << 31) - 1
    for receiver in (
        Block.rectangle((1 << 15, 0), (9, 1 << 16)),
        Block.rectangle((0, 0), (1 << 15, 1 << 16)),
    ):
        wanted = local_index(receiver, shape, last)
        assert remapped([last], source, receiver, torch.int32) == (
            ([], []) if wanted is None else ([wanted], [0])
        )


def test_blocks_without_common_elements_keep_nothing() -> None:
    assert remapped([0, 1], Block.rectangle((0, 0), (2, 2)), Block.rectangle((0, 2), (2, 2))) == ([], [])
    assert remapped([0], Block(()), Block(())) == ([0], [0])
    assert remapped([], Block(((), ((0, 3),))), Block.whole((2, 3))) == ([], [])


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([1, 0]),
        torch.tensor([1, 1]),
        torch.tensor([-1]),
        torch.tensor([6]),
        torch.tensor([[0]]),
        torch.tensor(0),
        torch.tensor([0.0]),
        torch.tensor([0], dtype=torch.int16),
    ],
)
@pytest.mark.parametrize(
    "receiver", [Block.whole((2, 3)), Block.rectangle((0, 1), (2, 1)), Block.rectangle((0, 0), (0, 3))]
)
def test_wrong_indices_are_refused(wrong, receiver) -> None:
    with pytest.raises(ValueError, match="indices must"):
        remap_delta_indices(wrong, Block.whole((2, 3)), receiver)


def test_blocks_of_other_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="dimensions"):
        remap_delta_indices(torch.tensor([0]), Block.whole((6,)), Block.whole((2, 3)))


def test_indices_need_not_be_contiguous() -> None:
    spread = torch.arange(12)[::2]
    assert remap_delta_indices(spread, Block.whole((12,)), Block.rectangle((4,), (5,)))[0].tolist() == [
        0,
        2,
        4,
    ]
