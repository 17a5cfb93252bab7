"""Unit tier, no ranks: the parts of a sender, positions of many parts translated at once (against
`remap_delta_indices` for one), and changes that become named tensors and come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import FrameError, Layout, Plan, remap_delta_indices
from dte_dist.codec.named_tensors import Change
from dte_dist.detect.detector import Changed
from dte_dist.detect.snapshot import Snapshot
from dte_dist.layout import Block
from dte_dist.plan.model_map import Slot
from dte_dist.plan.sender_space import Part, PartSpace, SenderSpace
from dte_dist.sync.named_changes import NamedTensorBuilder, check_changes, segments_of, translate
from tests.unit.geometry import SHAPES, blocks

some = settings(max_examples=150, deadline=None)


def part(number: int, shape: tuple[int, ...], block: Block, dtype: str = "int16") -> Part:
    return Part(f"w{number}", Slot(f"w{number}", shape, dtype), number, number, block)


def drawn(data: Any) -> SenderSpace:
    """Some parts, some of them empty or of the whole slot."""
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
    return SenderSpace(part(number, shape, data.draw(blocks(shape))) for number, shape in enumerate(shapes))


def places(data: Any, numel: int) -> Tensor:
    marks = data.draw(st.lists(st.booleans(), min_size=numel, max_size=numel))
    return torch.from_numpy(np.flatnonzero(marks))


@pytest.mark.slow
@some
@given(st.data())
def test_all_at_once_is_one_by_one(data) -> None:
    """Positions of whole slots become positions in what is held, and the other way."""
    for space in drawn(data).widths.values():
        for tables, sides in (
            (space.inward, (space.whole, space.held)),
            (space.outward, (space.held, space.whole)),
        ):
            flat, expected = [], []
            for number, pair in enumerate(zip(*(side.pieces for side in sides), strict=True)):
                here = places(data, pair[0].block.numel)
                found, kept = remap_delta_indices(here, pair[0].block, pair[1].block)
                starts = [int(side.starts[number]) for side in sides]
                flat.append(here + starts[0])
                expected += zip((found + starts[1]).tolist(), (here[kept] + starts[0]).tolist(), strict=True)
            positions = torch.cat(flat)
            found, bits = translate(tables, positions, positions, sides[0].numel)
            assert list(zip(found.tolist(), bits.tolist(), strict=True)) == expected


def test_spaces_beyond_32_bits() -> None:
    """Slots of more elements than an int32 can count, of which a few changed, in windows far apart."""
    shape = (3, 1 << 20, 1 << 11)
    held = Block.rectangle((1, 0, 7), (2, 1 << 20, 100))
    parts = {0: part(0, shape, held), 1: part(1, (5,), Block.rectangle((2,), (3,)))}
    space = PartSpace.of(2, parts)
    whole, rng = Block.whole(shape), np.random.default_rng(3)
    positions = np.unique(rng.integers(0, whole.numel, 5000))
    positions = torch.from_numpy(np.unique(np.concatenate([positions, positions // shape[2] * shape[2] + 7])))
    flat = torch.cat([positions, torch.tensor([0, 4]) + whole.numel])
    found, bits = translate(space.inward, flat, torch.arange(len(flat), dtype=torch.int32), space.whole.numel)
    where, kept = remap_delta_indices(positions, whole, held)
    assert len(kept) > 1000
    assert found.tolist() == [*where.tolist(), held.numel + 2]
    assert bits.tolist() == [*kept.tolist(), len(positions) + 1]
    back, _ = translate(space.outward, found, bits, space.held.numel)
    assert back.tolist() == flat[bits.long()].tolist()


def built(space: SenderSpace, found: list[tuple[int, Tensor, Tensor]], ratio: float) -> list[Change]:
    """What a builder makes of positions of the space of width 2, and their bits, in ranges."""
    known = Snapshot({2: space.widths[2].held.numel}, torch.device("cpu"), 64)
    known.bits[2].zero_()
    builder = NamedTensorBuilder(space, known, ratio)
    for first, positions, bits in found:
        known.bits[2][first + positions.long()] = bits
        builder.add(2, Changed(first, 1 << 20, positions, torch.zeros_like(bits), bits))
    return builder.collect()


@some
@given(st.data())
def test_changes_become_named_tensors_and_come_back(data) -> None:
    space = drawn(data)
    if not space.widths:
        return
    held = space.widths[2].held
    positions = places(data, held.numel)
    bits = (positions % 999 + 1).to(torch.int16)
    cut = data.draw(st.integers(0, len(positions)))
    first = int(positions[cut]) if cut < len(positions) else 0
    ranges = [
        (0, positions[:cut].to(torch.int32), bits[:cut]),
        (first, (positions[cut:] - first).to(torch.int32), bits[cut:]),
    ]
    changes = built(space, ranges, data.draw(st.sampled_from([0.0, 0.5, 1.0, 9.0])))
    check_changes(changes, space, needed=(), what="the two")
    shown = torch.zeros(held.numel, dtype=torch.int16)
    for width, segment in segments_of(changes, space):
        assert width == 2
        here = slice(segment.first, segment.first + segment.length)
        if segment.positions is None:
            shown[here] = segment.values
        else:
            shown[here][segment.positions.long()] = segment.values
    expected = torch.zeros(held.numel, dtype=torch.int16)
    expected[positions] = bits
    assert torch.equal(shown, expected)
    for change in changes:
        slot, block = space.parts[change.name].slot, space.parts[change.name].block
        if change.positions is None:
            assert tuple(change.values.shape) == block.shape
        else:
            numbers = block.global_indices(slot.shape)
            assert np.isin(change.positions.numpy(), numbers).all()


def test_positions_that_the_sender_does_not_hold_are_refused() -> None:
    space = SenderSpace([part(0, (4, 4), Block.rectangle((1, 0), (2, 4))), part(1, (3,), Block.whole((3,)))])
    right = Change("w0", torch.tensor([4, 11], dtype=torch.int32), torch.ones(2, dtype=torch.int16))
    wrong = Change("w0", torch.tensor([3, 11], dtype=torch.int32), torch.ones(2, dtype=torch.int16))
    assert [segment.positions.tolist() for _, segment in segments_of([right], space)] == [[0, 7]]
    with pytest.raises(FrameError, match=r"does not send by the plan.*'w0'"):
        list(segments_of([wrong], space))


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
    receivers = {
        1: [("k", torch.zeros(2, 4), (4, 4), (1, 0)), ("q", torch.zeros(1, 4), (6, 4), (5, 0))],
        2: [("k", torch.zeros(1, 4), (4, 4), (0, 0))],
    }
    layouts = {rank: Layout.from_views(views, partial=True) for rank, views in receivers.items()}
    plan = Plan.between({0: sender}, layouts)
    space = SenderSpace.of_plan(plan, 0)
    assert [(each.name, each.entry, each.block.shape) for each in space.parts.values()] == [
        ("k[0]", 0, (2, 4)),
        ("k[1]", 1, (2, 4)),
        ("q", 2, (6, 4)),
    ]
    assert [space.needed_by(plan, 0, rank) for rank in (1, 2)] == [["k[0]", "k[1]", "q"], ["k[0]"]]
    assert SenderSpace.of_plan(plan, 1).parts == {}
