"""Translation between flat spaces, by both modules of kernels, against the elements that the spaces hold."""

from __future__ import annotations

from math import prod
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec import Segment
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.layout import Block, Cut, cut_block
from dte_dist.plan.chunks import SEGMENT
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import build_index_maps
from dte_dist.sync.staging import StagedPatch, Target
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.geometry import global_index, homes, local_index, pairs_of_spaces, whole_space

KERNELS = [cpu, torch_kernels]
both = pytest.mark.parametrize("kernel", KERNELS, ids=["cpu", "torch"])
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
some = settings(max_examples=80, deadline=None)


def random_bits(count: int, width: int, seed: int = 0) -> torch.Tensor:
    data = np.random.default_rng(seed).integers(0, 256, (count + 1) * width, np.uint8)
    return torch.from_numpy(data).view(BITS[width])[:count]


def space_of(width: int, *pieces: tuple[int, Block]) -> FlatSpace:
    return FlatSpace.of(
        width, Pieces.of(Piece(slot, index, block) for index, (slot, block) in enumerate(pieces))
    )


def translated(kernel: ModuleType, index_maps, first: int, positions, bits) -> list[tuple[int, int]]:
    """Return (receiver position, bits) of all layers together."""
    found = []
    for index_map in index_maps:
        at, kept = kernel.translate(index_map, first, torch.tensor(positions, dtype=torch.int32), bits)
        assert at.dtype == torch.int64
        assert kept.dtype == bits.dtype
        found += zip(at.tolist(), kept.tolist(), strict=True)
    return found


def target_of(space: FlatSpace, seed: int, strided: bool = False, width: int | None = None) -> FlatTensors:
    """Return tensors of a receiver, filled with noise; every other one transposed or sliced if `strided`."""
    width = width or space.width
    tensors = []
    for index, piece in enumerate(space.pieces):
        tensor = random_bits(piece.block.numel, width, seed + index).view(piece.block.shape)
        if strided and index % 2 == 0:
            tensor = (
                tensor.mT.contiguous().mT if tensor.dim() > 1 else torch.stack([tensor, tensor], -1)[..., 0]
            )
        tensors.append(tensor)
    return FlatTensors(tensors, width, space.starts)


def content(flat: FlatTensors) -> list[int]:
    return [bit for tensor in flat.tensors for bit in tensor.contiguous().view(-1).tolist()]


@some
@given(st.data())
def test_translate_sends_every_position_to_all_its_homes(data) -> None:
    shapes, source, receiver = data.draw(pairs_of_spaces())
    index_maps, expected = build_index_maps(source, receiver), homes(source, receiver, shapes)
    begin = data.draw(st.integers(0, source.numel))
    kept = data.draw(st.lists(st.booleans(), min_size=source.numel - begin, max_size=source.numel - begin))
    positions = np.flatnonzero(kept).tolist()
    for width in BITS:
        bits = random_bits(len(positions), width)
        wanted = sorted(
            (home, bit)
            for position, bit in zip(positions, bits.tolist(), strict=True)
            for home in expected[begin + position]
        )
        for kernel in KERNELS:
            assert sorted(translated(kernel, index_maps, begin, positions, bits)) == wanted


@some
@given(pairs_of_spaces())
def test_tables_are_ascending_disjoint_and_no_more_than_needed(drawn) -> None:
    shapes, source, receiver = drawn
    index_maps = build_index_maps(source, receiver)
    most = max(map(len, homes(source, receiver, shapes)), default=0)
    assert (len(index_maps) == 0) == (most == 0)
    assert len(index_maps) >= most
    for index_map in index_maps:
        assert len(index_map.begin)
        assert (index_map.begin < index_map.end).all()
        assert (index_map.begin[1:] >= index_map.end[:-1]).all()
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in index_map.tables())


@some
@given(st.data())
def test_place_writes_every_home_and_nothing_else(data) -> None:
    shapes, source, receiver = data.draw(pairs_of_spaces())
    begin = data.draw(st.integers(0, source.numel))
    end, strided = data.draw(st.integers(begin, source.numel)), data.draw(st.booleans())
    index_maps, places = build_index_maps(source, receiver), homes(source, receiver, shapes)[begin:end]
    touched = {
        int(np.searchsorted(receiver.starts, home, side="right")) - 1
        for several in places
        for home in several
    }
    for width in BITS:
        flats, bits = (
            [target_of(receiver, 100, strided, width) for _ in KERNELS],
            random_bits(end - begin, width),
        )
        expected, before = content(flats[0]), [tensor._version for tensor in flats[0].tensors]
        for several, bit in zip(places, bits.tolist(), strict=True):
            for home in several:
                expected[home] = bit
        for kernel, flat in zip(KERNELS, flats, strict=True):
            for index_map in index_maps:
                kernel.scatter_dense(index_map, begin, bits, flat)
            assert content(flat) == expected
            assert {i for i, version in enumerate(before) if flat.tensors[i]._version != version} == touched


def test_ranks_that_are_placed_alike_need_one_entry() -> None:
    shapes = [(9, 4), (), (50, 3), (7,)]
    blocks = [cut_block(shape, (3, 2), (1, 1), [Cut(0, 1), Cut(0, 0)] if shape else []) for shape in shapes]
    source, receiver = (space_of(2, *enumerate(blocks)) for _ in range(2))
    (index_map,) = build_index_maps(source, receiver)
    assert (
        index_map.begin.tolist(),
        index_map.end.tolist(),
        index_map.shift.tolist(),
        len(index_map.extent),
    ) == ([0], [source.numel], [0], 0)


def test_neighbours_are_joined_only_where_both_sides_continue() -> None:
    source = whole_space(2, (4,), (5,), (6,), (7,))
    receiver = space_of(2, *((slot, Block.whole((4 + slot,))) for slot in (0, 1, 3)))
    (index_map,) = build_index_maps(source, receiver)
    assert list(
        zip(index_map.begin.tolist(), index_map.end.tolist(), index_map.shift.tolist(), strict=True)
    ) == [(0, 9, 0), (15, 22, -6)]


def test_entries_of_like_geometry_share_their_axes() -> None:
    source = whole_space(2, *[(40, 30)] * 50)
    receiver = space_of(2, *((slot, Block.rectangle((0, 10), (40, 10))) for slot in range(50)))
    (index_map,) = build_index_maps(source, receiver)
    assert (len(index_map.begin), len(index_map.extent), len(index_map.low)) == (50, 2, 2)


@both
def test_a_tied_source_feeds_untied_receivers(kernel: ModuleType) -> None:
    """One slot on the source, two tensors on the receiver: the second home is in a second table."""
    source = whole_space(2, (3,), (2, 4), (2,))
    receiver = space_of(
        2, (0, Block.whole((3,))), (1, Block.whole((2, 4))), (1, Block.whole((2, 4))), (2, Block.whole((2,)))
    )
    index_maps = build_index_maps(source, receiver)
    assert [len(index_map.begin) for index_map in index_maps] == [2, 1]
    bits = random_bits(13, 2)
    flat = target_of(receiver, 5)
    for index_map in index_maps:
        kernel.scatter_dense(index_map, 0, bits, flat)
    expected = bits.tolist()
    assert content(flat) == expected[:3] + expected[3:11] * 2 + expected[11:]


@both
def test_regions_of_one_slot_in_any_order(kernel: ModuleType) -> None:
    """A fused projection: rows in another order, columns interleaved in the source's space."""
    source = whole_space(4, (8, 6))
    rows = space_of(4, (0, Block.rectangle((6, 0), (2, 6))), (0, Block.rectangle((0, 0), (3, 6))))
    (index_map,) = build_index_maps(source, rows)
    assert index_map.begin.tolist() == [0, 36]
    columns = space_of(4, (0, Block.rectangle((0, 4), (8, 2))), (0, Block.rectangle((0, 0), (8, 4))))
    assert len(build_index_maps(source, columns)) == 2
    bits = random_bits(48, 4)
    for receiver in (rows, columns):
        flat = target_of(receiver, 7)
        for index_map in build_index_maps(source, receiver):
            kernel.scatter_dense(index_map, 0, bits, flat)
        whole = bits.view(8, 6)
        for piece, tensor in zip(receiver.pieces, flat.tensors, strict=True):
            assert torch.equal(tensor.reshape(-1), whole.reshape(-1)[piece.block.global_indices((8, 6))])


@both
@widths
def test_a_run_crosses_many_tensors(kernel: ModuleType, width: int) -> None:
    """Both sides hold 100 small tensors alike: one entry, and every tensor border is inside it."""
    shapes = [(1 + index % 3, 2) for index in range(100)]
    space = whole_space(width, *shapes)
    (index_map,) = build_index_maps(space, space)
    bits = random_bits(space.numel, width)
    for begin, end in [(0, space.numel), (3, 4), (5, space.numel - 3), (7, 7), (1, 12)]:
        flat = target_of(space, 11)
        expected = content(flat)
        expected[begin:end] = bits[begin:end].tolist()
        kernel.scatter_dense(index_map, begin, bits[begin:end], flat)
        assert content(flat) == expected


DEEP = (6, 5, 7, 8)


@both
@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_are_cut_along_every_dimension(kernel: ModuleType, seed: int) -> None:
    """Three and four axes, between two slots that need none."""
    rng = np.random.default_rng(seed)

    def strided(size: int) -> tuple[tuple[int, int], ...]:
        kept = np.append(rng.permutation([0, 1, 1, 1, 1, *rng.integers(0, 2, size - 5)]), 0)
        edges = np.flatnonzero(np.diff(kept, prepend=0)).reshape(-1, 2)
        return tuple((int(low), int(high - low)) for low, high in edges)

    shapes = [(7,), DEEP, (3,)]
    spaces = [
        space_of(2, (0, Block.whole((7,))), (1, Block(tuple(map(strided, DEEP)))), (2, Block.whole((3,))))
        for _ in range(2)
    ]
    (index_map,) = build_index_maps(*spaces)
    assert index_map.axes.max() >= 3
    bits, flat = random_bits(spaces[0].numel, 2), target_of(spaces[1], 9)
    wanted = [
        (home, bit)
        for several, bit in zip(homes(*spaces, shapes), bits.tolist(), strict=True)
        for home in several
    ]
    assert sorted(translated(kernel, [index_map], 0, range(spaces[0].numel), bits)) == sorted(wanted)
    expected = content(flat)
    for home, bit in wanted:
        expected[home] = bit
    for begin, end in [(0, 20), (20, 21), (21, spaces[0].numel)]:
        kernel.scatter_dense(index_map, begin, bits[begin:end], flat)
    assert content(flat) == expected


@st.composite
def rectangles(draw):
    """Draw the shape of a slot and two rectangles of it that overlap mostly; one to six dimensions, of length
    one too.
    """
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=1, max_size=6)))
    blocks = []
    for _ in range(2):
        low = [draw(st.integers(0, (size - 1) // 2)) for size in shape]
        length = [
            draw(st.integers((size - at + 1) // 2, size - at)) for size, at in zip(shape, low, strict=True)
        ]
        blocks.append(Block.rectangle(tuple(low), tuple(length)))
    return shape, *blocks


@settings(max_examples=200, deadline=None)
@given(rectangles(), st.sampled_from([1, 2, 4, 8]))
def test_rectangles_within_rectangles(drawn, width: int) -> None:
    """The common case: one run along each axis, between two other slots."""
    shape, own, theirs = drawn
    source, receiver = (
        space_of(width, (0, Block.whole((3,))), (1, block), (2, Block.whole((2,)))) for block in (own, theirs)
    )
    bits = random_bits(source.numel, width)
    several = homes(source, receiver, [(3,), shape, (2,)])
    wanted = sorted((home, bit) for home_, bit in zip(several, bits.tolist(), strict=True) for home in home_)
    for kernel in KERNELS:
        assert (
            sorted(translated(kernel, build_index_maps(source, receiver), 0, range(source.numel), bits))
            == wanted
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(65535, 65537), (65536, 65536), (3, 1431655765), (1431655765, 3), (1 << 10, 1 << 11, (1 << 11) - 1)],
)
def test_quotients_are_exact_up_to_the_last_position(shape: tuple[int, ...]) -> None:
    """About 2^32 elements, just below and just above: with products or with divisions, where rows end as
    well.
    """
    source = whole_space(2, shape)
    receiver = space_of(
        2, (0, Block.rectangle(tuple(min(1, size - 2) for size in shape), tuple(size - 2 for size in shape)))
    )
    (index_map,) = build_index_maps(source, receiver)
    rng = np.random.default_rng(0)
    for first in (0, 1 << 31, source.numel - (1 << 20)):
        size = min(shape[-1], 1 << 19)
        ends = np.arange(size - first % size, 1 << 20, size)
        near = np.concatenate([ends - 1, ends, ends + 1, rng.integers(0, 1 << 20, 3000), [(1 << 20) - 1]])
        positions = torch.from_numpy(np.unique(near[(near >= 0) & (near < 1 << 20)]).astype(np.int32))
        bits = random_bits(len(positions), 2)
        found, expected = (kernel.translate(index_map, first, positions, bits) for kernel in KERNELS)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@both
def test_entries_with_axes_that_touch_stay_apart(kernel: ModuleType) -> None:
    """Two parts of a slot end to end on the source, of which the receiver has the outer columns."""
    source = space_of(2, (0, Block.rectangle((0, 0), (10, 6))), (0, Block.rectangle((10, 0), (10, 6))))
    receiver = space_of(2, (0, Block((((0, 20),), ((0, 1), (5, 1))))))
    (index_map,) = build_index_maps(source, receiver)
    assert list(
        zip(index_map.begin.tolist(), index_map.end.tolist(), index_map.axes.tolist(), strict=True)
    ) == [(0, 60, 2), (60, 120, 2)]
    bits = random_bits(120, 2)
    wanted = sorted(
        (home, bit)
        for several, bit in zip(homes(source, receiver, [(20, 6)]), bits.tolist(), strict=True)
        for home in several
    )
    assert sorted(translated(kernel, [index_map], 0, range(120), bits)) == wanted


HUGE = (1 << 20, 5000)
"""More than 2^32 elements; nothing of this size is ever allocated."""


def huge_spaces() -> tuple[list[tuple[int, ...]], FlatSpace, FlatSpace]:
    """A source whose rows are strided, a receiver of some columns and a tail; the source's space passes 2^31
    more than once.
    """
    shapes = [(3 << 30,), HUGE, (1000, 7), (1 << 33,)]
    rows = cut_block(HUGE, (4, 2), (1, 1), [Cut(0, 1), Cut(0, 0, split_factor=64)])
    assert len(rows.runs[0]) > 1
    source = space_of(
        2,
        (0, Block.rectangle((0,), (3 << 30,))),
        (1, rows),
        (2, Block.whole((1000, 7))),
        (3, Block.whole((1 << 33,))),
    )
    tail = (1 << 33) - (1 << 20)
    columns = (1, Block((((0, 1 << 20),), ((17, 3), (4000, 900)))))
    receiver = space_of(
        2, columns, (2, Block.rectangle((0, 3), (1000, 2))), (3, Block.rectangle((5,), (tail,)))
    )
    return shapes, source, receiver


@both
def test_spaces_beyond_2_to_31(kernel: ModuleType) -> None:
    shapes, source, receiver = huge_spaces()
    index_maps = build_index_maps(source, receiver)
    pieces, rng = list(source.pieces), np.random.default_rng(0)
    starts = [
        0,
        1,
        (1 << 31) - 2,
        1 << 31,
        (1 << 32) - 3,
        *source.starts[:-1].tolist(),
        *rng.integers(0, source.numel, 50).tolist(),
    ]
    found = 0
    for first in starts:
        most = min(source.numel - first, (1 << 31) - 1)
        positions = sorted(
            {
                0,
                1,
                2,
                *rng.integers(0, most, 200).tolist(),
                *rng.integers(0, 5000, 200).tolist(),
                most - 2,
                most - 1,
            }
        )
        bits = random_bits(len(positions), 2)
        expected = []
        for position, bit in zip(positions, bits.tolist(), strict=True):
            index = int(np.searchsorted(source.starts, first + position, side="right")) - 1
            slot, block = pieces[index].slot, pieces[index].block
            element = global_index(block, shapes[slot], first + position - int(source.starts[index]))
            for start, piece in zip(receiver.starts.tolist(), receiver.pieces, strict=False):
                home = local_index(piece.block, shapes[slot], element) if piece.slot == slot else None
                if home is not None:
                    expected.append((start + home, bit))
        assert sorted(translated(kernel, index_maps, first, positions, bits)) == sorted(expected)
        found += len(expected)
    assert found > 1000


@both
@pytest.mark.parametrize("border", [SEGMENT, 1 << 16])
def test_positions_at_the_borders_of_segments(kernel: ModuleType, border: int) -> None:
    shape = (3 * border + 5,)
    source, receiver = space_of(1, (1, Block.rectangle((2,), (3 * border + 3,)))), whole_space(1, (9,), shape)
    index_maps = build_index_maps(source, receiver)
    for first in (0, border - 1, border, 2 * border, 3 * border):
        positions = sorted({0, 1, 2, *(p for p in (border - 1, border) if first + p < source.numel)})
        bits = random_bits(len(positions), 1)
        expected = [(9 + 2 + first + p, bit) for p, bit in zip(positions, bits.tolist(), strict=True)]
        assert translated(kernel, index_maps, first, positions, bits) == expected


def test_what_meets_no_entry_is_not_staged() -> None:
    source = whole_space(2, (10,), (20,), (30,))
    receiver = space_of(2, (0, Block.rectangle((4,), (6,))), (2, Block.rectangle((0,), (5,))))
    target = Target(target_of(receiver, 0), {0: build_index_maps(source, receiver)})
    held = [
        (begin, end)
        for begin in range(60)
        for end in range(begin + 1, 61)
        if target.holds(0, begin, end - begin)
    ]
    assert held == [
        (b, e)
        for b in range(60)
        for e in range(b + 1, 61)
        if {*range(b, e)} & {*range(4, 10), *range(30, 35)}
    ]
    assert not target.holds(1, 0, 60)
    staged = StagedPatch()
    frame = random_bits(60, 2).clone()
    staged.add(target, 0, Segment(10, 20, None, frame[10:30]))
    assert staged.nbytes == 0
    staged.add(target, 0, Segment(9, 20, None, frame[9:29]))
    assert staged.nbytes == 120
    staged.add(target, 0, Segment(29, 20, torch.zeros(1, dtype=torch.int32), frame[29:30], relative=True))
    assert staged.nbytes == 124  # a frame, of which these are views, counts once


@both
def test_nothing_in_nothing_out(kernel: ModuleType) -> None:
    space = whole_space(2, (6, 5), (4,))
    other = space_of(2, (7, Block.whole((6, 5))), (1, Block((((0, 2), (3, 1)),))))
    assert build_index_maps(space, space_of(2, (7, Block.whole((4,))))) == ()
    assert build_index_maps(space_of(2), space) == build_index_maps(space, space_of(2)) == ()
    (index_map,) = build_index_maps(space, other)
    assert translated(kernel, [index_map], 3, [], random_bits(0, 2)) == []
    assert translated(kernel, [index_map], 0, list(range(30)), random_bits(30, 2)) == []
    flat = target_of(other, 3)
    before = content(flat)
    kernel.scatter_dense(index_map, 0, random_bits(30, 2), flat)
    kernel.scatter_dense(index_map, 31, random_bits(0, 2), flat)
    assert content(flat) == before
    assert {tensor._version for tensor in flat.tensors} == {0}


@some
@given(st.data())
def test_a_staged_patch_is_applied_through_all_layers(data) -> None:
    """Sparse and dense segments, of bits and of distances, end up where a copy of the slot would have put
    them.
    """
    shapes, source, receiver = data.draw(pairs_of_spaces(4))
    flat, known = target_of(receiver, 100, data.draw(st.booleans())), random_bits(source.numel, 4, 1)
    target, staged = Target(flat, {3: build_index_maps(source, receiver)}), StagedPatch()
    target.place(3, 0, known)
    expected, before = content(flat), content(flat)
    middle, new = data.draw(st.integers(0, source.numel)), random_bits(source.numel, 4)
    kept = sorted(data.draw(st.sets(st.integers(middle, source.numel - 1)))) if middle < source.numel else []
    for position in [*range(middle), *kept]:
        for home in homes(source, receiver, shapes)[position]:
            expected[home] = int(new[position])
    where = torch.tensor(kept, dtype=torch.int64)
    for first, length, positions in (
        (0, middle, None),
        (middle, source.numel - middle, (where - middle).int()),
    ):
        here = slice(0, middle) if positions is None else where
        relative = data.draw(st.booleans())
        values = torch_kernels.subtract(new[here], known[here]) if relative else new[here]
        staged.add(target, 3, Segment(first, length, positions, values, relative))
    staged.add(target, 5, Segment(0, source.numel, None, new))  # a source that holds nothing of ours
    assert content(flat) == before
    staged.apply()
    assert content(flat) == expected
    staged.clear()
    assert staged.nbytes == 0


def test_what_is_staged_shares_the_memory_of_its_frame() -> None:
    """No copy of what arrived is made: a frame is to stay as it is until it is applied."""
    source = whole_space(2, (10,), (20,))
    target, staged = Target(target_of(source, 0), {0: build_index_maps(source, source)}), StagedPatch()
    positions, values, dense = torch.tensor([1, 3], dtype=torch.int32), random_bits(2, 2), random_bits(20, 2)
    staged.add(target, 0, Segment(0, 10, positions, values))
    staged.add(target, 0, Segment(0, 10, positions, values, relative=True))
    staged.add(target, 0, Segment(10, 20, None, dense))
    held = [segment.positions for *_, segment in staged.sparse] + [
        segment.values for *_, segment in staged.sparse
    ]
    assert [tensor.data_ptr() for tensor in held] == [positions.data_ptr()] * 2 + [values.data_ptr()] * 2
    assert [bits.data_ptr() for *_, bits in staged.dense] == [dense.data_ptr()]


def test_sparse_and_whole_segments_are_not_taken_for_each_other() -> None:
    source = whole_space(2, (10,))
    target = Target(target_of(source, 0), {0: build_index_maps(source, source)})
    with pytest.raises(ValueError, match="placed, not patched"):
        target.patch(0, Segment(0, 10, None, random_bits(10, 2)))
    with pytest.raises(ValueError, match="has no positions"):
        list(target.as_bits(0, Segment(0, 10, None, random_bits(10, 2), relative=True)))


def test_the_tables_of_a_device_are_made_once() -> None:
    space = whole_space(2, (6, 5))
    (index_map,) = build_index_maps(space, space_of(2, (0, Block.rectangle((0, 1), (6, 3)))))
    known = len(torch_kernels.index_map._known)
    for _ in range(2):
        torch_kernels.translate(index_map, 0, torch.zeros(1, dtype=torch.int32), random_bits(1, 2))
    assert len(torch_kernels.index_map._known) == known + 1
    del index_map
    assert len(torch_kernels.index_map._known) == known


def test_a_huge_space_is_huge() -> None:
    assert prod(HUGE) > 1 << 32
