"""The CPU kernels write the same whatever the number of threads: all of them, on small data cut into many
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist.kernels import cpu
from dte_dist.kernels.cpu import arguments, threads
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import build_index_maps
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.kernels.test_scan import FLOATS, bits_of, make_tensors, random_bits, versions
from tests.unit.kernels.test_scan_advance import PATTERNS, changed_from, check, make, space_of

widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
THREADS = 7


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of a few elements are worth a thread, and there are seven."""
    monkeypatch.setattr(arguments, "STREAM", 16)
    monkeypatch.setattr(arguments, "RANDOM", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each call of `parallel_for` has had since."""
    counted: list[int] = []

    def parallel_for(work, total, **options):
        results = threads.parallel_for(work, total, **options)
        counted.append(len(results))
        return results

    for module in (cpu.scan, cpu.index_map, cpu.value_codecs):
        monkeypatch.setattr(module, "parallel_for", parallel_for)
    return counted


def alone(call: Callable[[], list]) -> list:
    """Call with one thread."""
    torch.set_num_threads(1)
    result = call()
    torch.set_num_threads(THREADS)
    return result


def numbers(*tensors: Tensor) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


@widths
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_reading(width: int, density: float, parts: list[int]) -> None:
    flat = FlatTensors(make_tensors(width), width)
    live, rng = bits_of(list(flat.tensors), width), np.random.default_rng(5)
    before = torch.from_numpy(np.where(rng.random(len(live)) < density, live ^ 1, live))

    def read(begin: int, end: int) -> list[list[int]]:
        known, positions = before.clone(), torch.zeros(end - begin, dtype=torch.int32)
        old, new, out = torch.zeros(3, end - begin, dtype=BITS[width]).unbind()
        count = cpu.advance(flat, begin, end, known[begin:end], positions, old, new)
        cpu.read(flat, begin, out)
        return numbers(positions[: count if count < end - begin else 0], old[:count], new[:count], known, out)

    for begin, end in [(0, len(flat)), (3, len(flat) - 7), (100, 350)]:
        assert read(begin, end) == alone(lambda begin=begin, end=end: read(begin, end))
    assert max(parts) == THREADS


@pytest.mark.parametrize(
    "own", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, None], ids=str
)
@pytest.mark.parametrize("rest", ["nothing", "some", "all but the first", "all but the last"])
def test_parts_that_are_wholly_changed_and_parts_that_are_not(
    own: torch.dtype | None, rest: str, parts: list[int]
) -> None:
    """Every choice of the parts in which all elements changed: these have no positions of their own. None:
    fp32 that is read as bf16.
    """
    tensors = [make(size, own or torch.float32, size) for size in (300, 1, 299, 101, 6)]
    width = own.itemsize if own else 2
    space, step = space_of(width, tensors, None if own else [torch.bfloat16] * 5), 100
    rng = np.random.default_rng(width)
    assert len(space.live) == THREADS * step + 7
    for choice in product([True, False], repeat=THREADS):
        changed = np.concatenate(
            [
                np.ones(3, bool),
                *(np.ones(step, bool) if whole else PATTERNS[rest](step, rng) for whole in choice),
            ]
        )
        before = changed_from(space.live, np.append(changed, [True] * 4), 1)
        check(cpu, space, before, 3, 3 + THREADS * step)
    assert parts == [THREADS] * 2**THREADS


@widths
@pytest.mark.parametrize("counter", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", [np.sort, np.array], ids=["sorted", "unsorted"])
def test_writing(width: int, counter: torch.dtype, order: Callable, parts: list[int]) -> None:
    total = sum(tensor.numel() for tensor in make_tensors(width))
    places = torch.from_numpy(order(np.random.default_rng(6).permutation(total)[:200]))
    new, whole = random_bits(200, width, 7), random_bits(total - 9, width, 8)

    def work() -> list[list[int]]:
        flat = FlatTensors(make_tensors(width), width)
        cpu.write(flat, 4, whole)
        cpu.scatter(flat, places.to(counter), new)
        cpu.scatter_add(flat, places, new)
        moved = cpu.add_ulps(flat, places, new)
        return [
            bits_of(list(flat.tensors), width).tolist(),
            moved.tolist(),
            [version > 0 for version in versions(list(flat.tensors))],
        ]

    assert work() == alone(work)
    assert parts == [THREADS] * 4 + [1] * 4


@widths
def test_arrays(width: int, parts: list[int]) -> None:
    known, new, frame = random_bits(500, width), random_bits(60, width, 1), random_bits(8 * 99, 1)
    places = torch.from_numpy(np.random.default_rng(1).permutation(500)[:60].astype(np.int32))

    def work() -> list[list[int]]:
        array = known.clone()
        cpu.scatter_1d(array, places, new)
        sums = [cpu.checksum(frame, skip) for skip in (-1, 0, 50, 98)]
        return [*numbers(array, cpu.gather_1d(array, places)), sums]

    assert work() == alone(work)
    assert parts == [THREADS] * 6 + [1] * 6
    if width < 8:
        old = known[:60]
        assert numbers(cpu.ulp_deltas(old, new)) == alone(lambda: numbers(cpu.ulp_deltas(old, new)))
        assert parts[12:] == [THREADS, 1]


@pytest.mark.parametrize("position", [-1, 500, 1 << 30])
@pytest.mark.parametrize("place", [0, 30, 59])
def test_a_position_outside_is_found_in_any_part(position: int, place: int) -> None:
    array, bits = torch.zeros(500, dtype=torch.int16), torch.ones(60, dtype=torch.int16)
    places, flat = torch.arange(60, dtype=torch.int64), FlatTensors([array], 2)
    places[place] = position
    for call in (
        lambda: cpu.scatter_1d(array, places, bits),
        lambda: cpu.gather_1d(array, places),
        lambda: cpu.scatter(flat, places, bits),
        lambda: cpu.scatter_add(flat, places, bits),
        lambda: cpu.add_ulps(flat, places, bits),
    ):
        with pytest.raises(IndexError):
            call()


SHAPE = (12, 6, 5)
RECEIVERS = {
    "same": [Block.whole(SHAPE)],
    "columns": [Block.rectangle((0, 0, 1), (12, 6, 3))],
    "every other row": [Block((tuple((row, 1) for row in range(0, 12, 2)), ((0, 6),), ((0, 5),)))],
    "three axes": [Block.rectangle((2, 1, 1), (7, 4, 3))],
    "reordered": [Block.rectangle((6, 0, 0), (6, 6, 5)), Block.rectangle((0, 0, 0), (5, 6, 5))],
}


@widths
@pytest.mark.parametrize("receiver", list(RECEIVERS))
def test_translation(width: int, receiver: str, parts: list[int]) -> None:
    blocks = RECEIVERS[receiver]
    source, target = (
        FlatSpace.of(width, Pieces.of(Piece(0, index, block) for index, block in enumerate(some)))
        for some in ([Block.whole(SHAPE)], blocks)
    )
    (index_map,) = build_index_maps(source, target)
    positions = torch.from_numpy(
        np.flatnonzero(np.random.default_rng(2).random(source.numel) < 0.6).astype(np.int32)
    )
    bits, dense = random_bits(len(positions), width, 3), random_bits(source.numel, width, 4)

    def work() -> list[list[int]]:
        tensors = [
            random_bits(block.numel, width, 9).view(FLOATS[width]).view(block.shape) for block in blocks
        ]
        tensors[0] = tensors[0].mT.contiguous().mT
        flat, fetched, collected = (
            FlatTensors(tensors, width, target.starts),
            torch.zeros_like(dense),
            torch.zeros_like(dense),
        )
        cpu.scatter_dense(index_map, 60, dense[:200], flat)
        cpu.gather_dense(index_map, 0, fetched, random_bits(target.numel, width, 5))
        cpu.gather_dense_flat(index_map, 0, collected, flat)
        translated = cpu.translate(index_map, 0, positions, bits)
        return [
            *numbers(*translated, fetched, collected),
            bits_of(tensors, width).tolist(),
            [version > 0 for version in versions(tensors)],
        ]

    assert work() == alone(work)
    assert parts == [THREADS] * 4 + [1] * 4
