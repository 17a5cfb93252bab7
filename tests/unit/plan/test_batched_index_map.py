"""Positions of many tensors translated at once, against `remap_delta_indices` for one; parts of a plan and
what slices of them hold.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist import Layout, Plan, remap_delta_indices
from dte_dist.layout import Block
from dte_dist.plan.batched_index_map import BatchedIndexMap
from dte_dist.plan.parts import elements, landings_of, parts_of
from tests.unit.geometry import SHAPES, blocks

some = settings(max_examples=150, deadline=None)


@some
@given(st.data())
def test_all_at_once_is_one_by_one(data) -> None:
    """Some source blocks, each with no, one or several blocks of its slot on the other side, which may hold
    the same elements.
    """
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
    source = [data.draw(blocks(shape)) for shape in shapes]
    target = [
        (slot, data.draw(blocks(shape)))
        for slot, shape in enumerate(shapes)
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    crossing = BatchedIndexMap(2, source, target)
    chosen = [number for number, block in enumerate(source) if block.numel and data.draw(st.booleans())]
    if not chosen:
        return
    marks = [
        data.draw(st.lists(st.booleans(), min_size=source[n].numel, max_size=source[n].numel)) for n in chosen
    ]
    kinds = [data.draw(st.sampled_from([torch.int32, torch.int64])) for _ in chosen]
    positions = [
        torch.from_numpy(np.flatnonzero(each)).to(kind) for each, kind in zip(marks, kinds, strict=True)
    ]
    bits = torch.arange(sum(map(len, positions)), dtype=torch.int16)
    expected, passed = [], 0
    for number, here in zip(chosen, positions, strict=True):
        for place, (slot, block) in enumerate(target):
            if slot == number:
                found, kept = remap_delta_indices(here, source[number], block)
                expected += zip(
                    (found + int(crossing.starts[place])).tolist(), (kept + passed).tolist(), strict=True
                )
        passed += len(here)
    got = [
        pair
        for found, its in crossing.translate(chosen, positions, bits)
        for pair in zip(found.tolist(), its.tolist(), strict=True)
    ]
    assert sorted(got) == sorted(expected)


def test_spaces_beyond_32_bits() -> None:
    """Blocks of more elements than an int32 can count, of which a few changed, in windows far apart."""
    shape = (3, 1 << 20, 1 << 11)
    source = [Block.whole(shape), Block.whole((5,))]
    target = [(0, Block.rectangle((1, 0, 7), (2, 1 << 20, 100))), (1, Block.rectangle((2,), (3,)))]
    rng = np.random.default_rng(3)
    positions = np.unique(rng.integers(0, source[0].numel, 5000))
    positions = np.unique(np.concatenate([positions, positions // shape[2] * shape[2] + 7]))
    flat = [torch.from_numpy(positions), torch.tensor([0, 4])]
    crossing = BatchedIndexMap(4, source, target)
    found = list(crossing.translate([0, 1], flat, torch.arange(len(positions) + 2, dtype=torch.int32)))
    where, kept = remap_delta_indices(flat[0], source[0], target[0][1])
    assert len(found) > 3
    assert len(kept) > 1000
    assert torch.cat([at for at, _ in found]).tolist() == [*where.tolist(), target[0][1].numel + 2]
    assert torch.cat([its for _, its in found]).tolist() == [*kept.tolist(), len(positions) + 1]


@some
@given(st.data())
def test_elements_of_slices(data) -> None:
    shape = data.draw(SHAPES)
    block = data.draw(blocks(shape))
    part = []
    for size in block.shape:
        low = data.draw(st.integers(0, size + 1))
        part.append(slice(low, data.draw(st.integers(low, size + 2))))
    found = elements(block, tuple(part))
    inside = all(along.start < along.stop <= size for along, size in zip(part, block.shape, strict=True))
    assert (found is not None) == inside
    if found is not None:
        numbers = block.global_indices(shape).reshape(block.shape)[tuple(part)]
        assert found.global_indices(shape).tolist() == numbers.reshape(-1).tolist()
    assert elements(block, (slice(0, 1), *part)) is None


def test_parts_are_named_by_slot_and_regions_by_entry() -> None:
    """A sender with two regions of one slot, and a receiver that needs a bit of each, in two tensors of its
    own.
    """
    fused = torch.zeros(10, 4)
    sender = Layout.from_views(
        [
            ("k", fused[6:8], (4, 4), (0, 0)),
            ("k", fused[8:], (4, 4), (2, 0)),
            ("q", fused[:6], (6, 4), (0, 0)),
        ]
    )
    receiver = Layout.from_views(
        [
            ("k", torch.zeros(2, 4), (4, 4), (1, 0)),
            ("q", torch.zeros(1, 4), (6, 4), (5, 0)),
            ("k", torch.zeros(1, 4), (4, 4), (0, 0)),
        ]
    )
    plan = Plan.between({0: sender}, {1: receiver})
    parts = parts_of(plan, 0)
    assert {key: part.name for key, part in parts.items()} == {
        ("k", 0): "k[0]",
        ("k", 1): "k[1]",
        ("q", 2): "q",
    }
    landings = {(landing.part.name, landing.entry): landing for landing in landings_of(plan, 0, 1, parts)}
    assert {key: landing.is_whole for key, landing in landings.items()} == {
        ("k[0]", 0): True,
        ("k[0]", 1): False,
        ("k[1]", 1): False,
        ("q", 2): True,
    }
