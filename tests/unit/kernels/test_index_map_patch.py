"""`patch` of both modules: what translating and then writing would do, and what plain Python does with the
elements themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist.codec import Segment
from dte_dist.kernels import Kernels, cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.cpu import arguments, threads
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.index_map import IndexMap, build_index_maps
from dte_dist.sync.staging import StagedPatch, Target
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.geometry import homes, pairs_of_spaces, whole_space
from tests.unit.kernels.test_index_map import content, random_bits, space_of, target_of

THREADS = 7


CPU, TORCH = cpu, torch_kernels
both = pytest.mark.parametrize("kernel", [CPU, TORCH], ids=["cpu", "torch"])
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
either = pytest.mark.parametrize("relative", [False, True], ids=["bits", "distances"])
packings = pytest.mark.parametrize("packed", [False, True], ids=["int32", "u16"])


def packing(positions: Tensor, length: int, packed: bool) -> tuple[Tensor, int | None]:
    """Return positions as `patch` takes them, and the `length` that says how."""
    return (cpu.encode_u16(positions, length), length) if packed else (positions, None)


def moved(flat: FlatTensors, versions: list[int]) -> list[int]:
    return [index for index, tensor in enumerate(flat.tensors) if tensor._version != versions[index]]


def check(
    kernel: Kernels,
    index_map: IndexMap,
    first: int,
    positions: Tensor,
    make: Callable[[], FlatTensors],
    **how: bool,
) -> FlatTensors:
    """Patch, compare with the two steps, and return what was patched; `how` is relative, packed."""
    mine, theirs, length = make(), make(), int(positions[-1]) + 2 if len(positions) else 1
    values = random_bits(len(positions), mine.width, len(positions))
    before, given = values.clone(), packing(positions, length, how["packed"])
    kept = given[0].clone()
    kernel.patch(index_map, first, given[0], values, mine, relative=how["relative"], length=given[1])
    where = kernel.translate(index_map, first, positions, values)
    (kernel.scatter_add if how["relative"] else kernel.scatter)(theirs, *where)
    assert content(mine) == content(theirs)
    assert moved(mine, [0] * len(mine.tensors)) == moved(theirs, [0] * len(theirs.tensors))
    assert torch.equal(values, before) and torch.equal(given[0], kept)
    return mine


# Any geometry
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@both
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_geometry(kernel: Kernels, data: st.DataObject) -> None:
    """Against the elements that both spaces hold; positions that the receiver does not hold are passed
    over.
    """
    shapes, source, receiver = data.draw(pairs_of_spaces())
    index_maps, places = build_index_maps(source, receiver), homes(source, receiver, shapes)
    begin, strided = data.draw(st.integers(0, source.numel)), data.draw(st.booleans())
    size = source.numel - begin
    positions = torch.from_numpy(
        np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).astype(np.int32)
    )
    relative, packed = data.draw(st.booleans()), data.draw(st.booleans())
    at, length = packing(positions, size, packed)
    for width in BITS:
        flat, values = target_of(receiver, 3, strided, width), random_bits(len(positions), width, 4)
        expected, versions = (
            torch.tensor(content(flat), dtype=BITS[width]),
            [tensor._version for tensor in flat.tensors],
        )
        for position, value in zip(positions.tolist(), values, strict=True):
            for home in places[begin + position]:
                now = expected[home : home + 1]
                now.copy_(torch_kernels.add(now, value.view(1)) if relative else value)
        for index_map in index_maps:
            kernel.patch(index_map, begin, at, values, flat, relative=relative, length=length)
        assert content(flat) == expected.tolist()
        touched = {
            int(np.searchsorted(receiver.starts, home, side="right")) - 1
            for p in positions.tolist()
            for home in places[begin + p]
        }
        assert {*moved(flat, versions)} == touched


# Many positions
# ----------------------------------------------------------------------------------------------------------


SHAPE = (90, 60, 7)


def runs(*pairs: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return pairs


RECEIVERS: dict[str, list[tuple[int, Block]]] = {
    "the same": [(0, Block.whole((999,))), (1, Block.whole(SHAPE)), (2, Block.whole((4000,)))],
    "the last two": [(1, Block.whole(SHAPE)), (2, Block.whole((4000,)))],
    "another order of rows": [
        (1, Block.rectangle((50, 0, 0), (40, 60, 7))),
        (1, Block.rectangle((0, 0, 0), (49, 60, 7))),
    ],
    "columns": [(1, Block.rectangle((0, 5, 0), (90, 31, 7))), (0, Block.whole((999,)))],
    "three axes": [(1, Block.rectangle((3, 5, 1), (70, 31, 3))), (2, Block.rectangle((1000,), (2500,)))],
    "rows of several runs": [
        (1, Block((runs((0, 90)), runs((0, 2), (7, 20), (58, 2)), runs((0, 1), (3, 2)))))
    ],
    "every third": [(2, Block((tuple((at, 1) for at in range(0, 4000, 3)),))), (0, Block.whole((999,)))],
    "one row": [(1, Block.rectangle((44, 0, 0), (1, 60, 7)))],
    "nothing": [(3, Block.whole((5,)))],
}
SOURCE = whole_space(2, (999,), SHAPE, (4000,))
DENSITIES = {"all": 1.0, "most": 0.9, "some": 0.1, "few": 0.01}


def spots(density: float, first: int, seed: int = 0) -> Tensor:
    size = SOURCE.numel - first
    return torch.from_numpy(
        np.flatnonzero(np.random.default_rng(seed).random(size) < density).astype(np.int32)
    )


def tensors_of(receiver: FlatSpace, width: int, kind: str) -> Callable[[], FlatTensors]:
    """Return what makes the tensors of a receiver: contiguous ones, some strided, or some that are the
    neighbours in one memory.
    """

    def make() -> FlatTensors:
        if kind != "in one memory":
            return target_of(receiver, 9, kind == "strided", width)
        whole, starts = random_bits(receiver.numel + 2, width, 9).clone(), receiver.starts.tolist()
        parts = [whole[1 + low : 1 + high] for low, high in pairwise(starts)]
        return FlatTensors(
            [part.view(piece.block.shape) for part, piece in zip(parts, receiver.pieces, strict=True)],
            width,
            receiver.starts,
        )

    return make


@pytest.mark.slow
@both
@either
@packings
@pytest.mark.parametrize("receiver", list(RECEIVERS))
@pytest.mark.parametrize("kind", ["contiguous", "strided", "in one memory"])
def test_more_positions_than_are_worked_on_together(
    kernel: Kernels, receiver: str, kind: str, relative: bool, packed: bool
) -> None:
    """In parts that begin and end anywhere in an entry, in several entries, in none, and in several
    tensors.
    """
    space = space_of(2, *RECEIVERS[receiver])
    for index_map in build_index_maps(SOURCE, space):
        for width in (2, 1) if relative else (2, 8, 4):
            everywhere = ((0, "all"), (998, "some"), (0, "few"), (1000, "most"), (SOURCE.numel - 4000, "all"))
            for first, density in everywhere[
                : 2 if kernel is torch_kernels else 5
            ]:  # plain torch ops work on all of them together
                positions = spots(DENSITIES[density], first)
                check(
                    kernel,
                    index_map,
                    first,
                    positions,
                    tensors_of(space, width, kind),
                    relative=relative,
                    packed=packed,
                )


@pytest.mark.slow
@both
@widths
@either
@packings
def test_counts_around_what_is_worked_on_together(
    kernel: Kernels, width: int, relative: bool, packed: bool
) -> None:
    space = space_of(2, *RECEIVERS["another order of rows"])
    (index_map,) = build_index_maps(SOURCE, space)
    for count in (0, 1, 2, 511, 512, 513, 1023, 1024, 1025, 5000):
        positions = spots(0.5, 0)[:count]
        check(
            kernel,
            index_map,
            0,
            positions,
            tensors_of(space, width, "contiguous"),
            relative=relative,
            packed=packed,
        )


@both
@either
@packings
def test_a_space_of_small_tensors(kernel: Kernels, relative: bool, packed: bool) -> None:
    """One entry for all, and every part of the positions meets many tensors, or ends where one does."""
    shapes = [(1 + index % 9,) for index in range(400)] + [(512,), (512,), (0,), (1024,), (3,)]
    space = whole_space(2, *shapes)
    (index_map,) = build_index_maps(space, space)
    for step in (1, 2, 13):
        positions = torch.arange(0, space.numel, step, dtype=torch.int32)
        check(
            kernel,
            index_map,
            0,
            positions,
            tensors_of(space, 2, "contiguous"),
            relative=relative,
            packed=packed,
        )


@both
@either
@packings
def test_blocks_of_offsets(kernel: Kernels, relative: bool, packed: bool) -> None:
    """Positions in several blocks of 65536: none in some, and parts that begin in one and end in another."""
    length = 6 * 65536
    receiver = space_of(1, (1, Block.rectangle((50,), (length - 99,))))
    (index_map,) = build_index_maps(whole_space(1, (100,), (length,)), receiver)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        some = [
            65536 * block + rng.choice(65536, n, False)
            for block, n in enumerate(rng.permutation([0, 1, 511, 513, 3000, 40]))
        ]
        positions = torch.from_numpy(np.sort(np.concatenate(some)).astype(np.int32))
        check(
            kernel,
            index_map,
            100,
            positions,
            tensors_of(receiver, 1, "contiguous"),
            relative=relative,
            packed=packed,
        )


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let seven threads share few positions, and return how many parts each call has had."""
    counted: list[int] = []

    def parallel_for(work: Callable[[int, int], bool], total: int, **options: int) -> list[bool]:
        results = threads.parallel_for(work, total, **options)
        counted.append(len(results))
        return results

    monkeypatch.setattr(arguments, "RANDOM", 3)
    monkeypatch.setattr(cpu.index_map, "parallel_for", parallel_for)
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield counted
    torch.set_num_threads(before)


@pytest.mark.slow
@widths
@either
@packings
@pytest.mark.parametrize("receiver", list(RECEIVERS))
def test_several_threads(width: int, relative: bool, packed: bool, receiver: str, parts: list[int]) -> None:
    space = space_of(2, *RECEIVERS[receiver])
    for index_map in build_index_maps(SOURCE, space):
        for first, density in ((0, "few"), (500, "some"), (3, "all")):
            positions, make = spots(DENSITIES[density], first, 1), tensors_of(space, width, "strided")
            parts.clear()
            mine = check(CPU, index_map, first, positions, make, relative=relative, packed=packed)
            assert parts[0] == THREADS
            torch.set_num_threads(1)
            alone = check(CPU, index_map, first, positions, make, relative=relative, packed=packed)
            torch.set_num_threads(THREADS)
            assert content(mine) == content(alone)


# Beyond 32 bits, and what is refused
# --------------------------------------------------------------------------------------


@both
@either
@packings
def test_a_source_beyond_32_bits(kernel: Kernels, relative: bool, packed: bool) -> None:
    """Positions count from far out in a space that is never allocated."""
    far = (1 << 33) + 5
    source = whole_space(2, (far,), (3000,))
    receiver = space_of(2, (0, Block.rectangle((far - 1000,), (1000,))), (1, Block.whole((3000,))))
    for first in (far - 1500, far - 1000, far - 3, far, far + 2000):
        for index_map in build_index_maps(source, receiver):
            positions = torch.arange(0, source.numel - first, 2, dtype=torch.int32)
            check(
                kernel,
                index_map,
                first,
                positions,
                tensors_of(receiver, 2, "contiguous"),
                relative=relative,
                packed=packed,
            )


@both
@either
@packings
def test_tables_that_lead_out_of_the_tensors_are_refused(
    kernel: Kernels, relative: bool, packed: bool
) -> None:
    """Such as those of another model: nothing is written beyond the tensors."""
    space = whole_space(2, (2000,), (50,))
    (index_map,) = build_index_maps(space, space)
    (away,) = build_index_maps(space_of(2, (1, Block.whole((50,)))), space)
    memory = torch.zeros(3000, dtype=torch.int16)
    flat = FlatTensors([memory[1000:1700], memory[1700:1999]], 2)
    for tables, length in ((index_map, 2050), (away, 50)):
        positions = torch.arange(length, dtype=torch.int32)
        at, packed_length = packing(positions, length, packed)
        with pytest.raises(IndexError):
            kernel.patch(
                tables,
                0,
                at,
                torch.ones(length, dtype=torch.int16),
                flat,
                relative=relative,
                length=packed_length,
            )
        assert not memory[:1000].any() and not memory[1999:].any()


def test_wrong_arrays_are_refused() -> None:
    space = whole_space(2, (10,))
    (index_map,) = build_index_maps(space, space)
    flat = target_of(space, 1)
    before, positions, values = (
        content(flat),
        torch.arange(4, dtype=torch.int32),
        torch.ones(4, dtype=torch.int16),
    )
    for at, new, length in (
        (positions.long(), values, None),
        (positions[:3], values, None),
        (positions, values.int(), None),
        (positions[::2], values[:2], None),
        (positions, values.repeat(2)[::2], None),
        (positions, values, 10),
        (cpu.encode_u16(positions, 10), values, None),
        (positions, values[:3], None),
        (cpu.encode_u16(positions, 10), values[:3], 10),
        (cpu.encode_u16(positions, 10), values, 70_000),
    ):
        with pytest.raises(ValueError, match=r"expected >=|do not fit"):
            cpu.patch(index_map, 0, at, new, flat, relative=False, length=length)
    assert content(flat) == before
    masters = FlatTensors([torch.zeros(10)], 2).read_as([torch.bfloat16])
    with pytest.raises(ValueError, match="can only be read"):
        cpu.patch(index_map, 0, positions, values, masters, relative=False)


# Segments ---------------------------------------------------------------------------------------------------
# -------------


@either
def test_a_packed_segment_is_staged_as_it_is_and_applied_as_any_other(relative: bool) -> None:
    """Into one home, and into two, where distances are turned into bits when they come."""
    source = whole_space(2, (3000,), (500,))
    twice = space_of(
        2, (0, Block.whole((3000,))), (0, Block.rectangle((100,), (900,))), (1, Block.whole((500,)))
    )
    positions = torch.arange(1, 3400, 3, dtype=torch.int32)
    values, lineage = random_bits(len(positions), 2, 1), cpu.encode_u16(positions, 3500)
    for receiver in (source, twice):
        known, applied = random_bits(3500, 2, 2), []
        for packed in (False, True):
            target = Target(target_of(receiver, 5), {0: build_index_maps(source, receiver)})
            target.place(0, 0, known)
            before, staged = content(target.flat), StagedPatch()
            segment = Segment(0, 3500, lineage if packed else positions, values, relative, packed)
            assert torch.equal(segment.unpacked(), positions)
            staged.add(target, 0, segment)
            assert content(target.flat) == before and (
                not packed or len(staged.sparse) != 1 or staged.sparse[0][2].positions is lineage
            )
            staged.apply()
            applied.append(content(target.flat))
        assert applied[0] == applied[1] != before


def test_a_whole_segment_has_no_positions() -> None:
    with pytest.raises(ValueError, match="has no positions"):
        Segment(0, 10, None, random_bits(10, 2)).unpacked()
