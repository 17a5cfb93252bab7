"""Every kernel on the device against that on the CPU: random geometry, all widths, hostile input; and how
often the host waits.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.sizes import best_low, choose_planes, ef_size
from dte_dist.plan.index_map import build_index_maps
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.gpu.device import (
    DEVICE,
    FLOATS,
    content,
    flats,
    only_gpu,
    random_bits,
    settle,
    tier,
    waits,
)
from tests.unit.geometry import pairs_of_spaces, whole_space

pytestmark = tier
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
seeds = pytest.mark.parametrize("seed", range(10))
counters = pytest.mark.parametrize("counter", [torch.int32, torch.int64])
some = settings(max_examples=40, deadline=None)


def ranges(total: int, seed: int) -> list[tuple[int, int]]:
    borders = np.sort(np.random.default_rng(seed).integers(0, total + 1, (6, 2)), axis=1)
    return [(0, total), (total, total), *map(tuple, borders.tolist())]


def versions(flat: FlatTensors) -> list[int]:
    return [tensor._version for tensor in flat.tensors]


# Flat arrays ------------------------------------------------------------------------------------------------
# -------------


@widths
@seeds
def test_read_and_write(width: int, seed: int) -> None:
    here, there = flats(seed, width)
    for begin, end in ranges(len(here), seed):
        expected, found = (random_bits(end - begin, width, 0, device) for device in ("cpu", DEVICE))
        cpu.read(here, begin, expected)
        torch_kernels.read(there, begin, found)
        assert torch.equal(found.cpu(), expected)
    assert versions(there) == [0] * len(there.tensors)
    for begin, end in ranges(len(here), seed + 1):
        cpu.write(here, begin, random_bits(end - begin, width, begin))
        torch_kernels.write(there, begin, random_bits(end - begin, width, begin, DEVICE))
        assert torch.equal(content(there.tensors, width), content(here.tensors, width))
    assert [version > 0 for version in versions(there)] == [version > 0 for version in versions(here)]


@widths
@seeds
def test_advance(width: int, seed: int) -> None:
    here, there = flats(seed, width)
    for density in (0.0, 0.01, 0.4, 1.0):
        noise = torch.from_numpy(
            (np.random.default_rng(seed).random(len(here)) < density).astype(np.int64)
        ).to(BITS[width])
        known = content(here.tensors, width) ^ noise
        for begin, end in ranges(len(here), seed):
            expected, found = [
                [known.clone().to(device), torch.zeros(end - begin, dtype=torch.int32, device=device)]
                + [torch.zeros(end - begin, dtype=BITS[width], device=device) for _ in range(2)]
                for device in ("cpu", DEVICE)
            ]
            count = cpu.advance(here, begin, end, expected[0][begin:end], *expected[1:])
            assert torch_kernels.advance(there, begin, end, found[0][begin:end], *found[1:]) == count
            assert torch.equal(found[0].cpu(), expected[0])
            # Positions are undefined where everything differs.
            for which in (1, 2, 3) if count < end - begin else (2, 3):
                assert torch.equal(found[which][:count].cpu(), expected[which][:count])
            assert torch.equal(
                expected[0], torch.cat([known[:begin], content(here.tensors, width)[begin:end], known[end:]])
            )


def test_advance_looks_at_bits() -> None:
    """NaNs that stay are no change; a zero that only changes its sign is one, and so is a NaN that changes
    its payload.
    """
    live = torch.tensor([0x7FC0, 0x7F81, -1, -0x8000, 0x7FC1], dtype=torch.int16, device=DEVICE).view(
        torch.bfloat16
    )
    known = torch.tensor([0x7FC0, 0x7F81, -1, 0, 0x7FC0], dtype=torch.int16, device=DEVICE)
    positions, (old, new) = (
        torch.zeros(5, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, 5, dtype=torch.int16, device=DEVICE).unbind(),
    )
    assert torch_kernels.advance(FlatTensors([live], 2), 0, 5, known, positions, old, new) == 2
    assert positions[:2].tolist() == [3, 4]
    assert (old[:2].tolist(), new[:2].tolist()) == ([0, 0x7FC0], [-0x8000, 0x7FC1])
    assert torch.equal(known, live.view(torch.int16))


@widths
@seeds
@counters
def test_scatter(width: int, seed: int, counter: torch.dtype) -> None:
    here, there = flats(seed, width)
    rng = np.random.default_rng(seed)
    for count in (0, 1, len(here) // 3, len(here)):
        for order in (np.sort, np.array):
            positions = torch.from_numpy(order(rng.permutation(len(here))[:count])).to(counter)
            bits = random_bits(count, width, count + seed)
            before = versions(here), versions(there)
            cpu.scatter(here, positions, bits)
            torch_kernels.scatter(there, positions.to(DEVICE), bits.to(DEVICE))
            assert torch.equal(content(there.tensors, width), content(here.tensors, width))
            touched = [
                [now != then for now, then in zip(versions(flat), known, strict=True)]
                for flat, known in zip((here, there), before, strict=True)
            ]
            assert touched[0] == touched[1]


@pytest.mark.parametrize("position", [-1, 8, 1 << 30])
def test_scatter_outside_is_refused_before_anything_is_written(position: int) -> None:
    array = torch.zeros(10, dtype=torch.int16, device=DEVICE)
    flat = FlatTensors([array[:4], array[4:8]], 2)
    positions = torch.tensor(
        [3, position] if position > 3 else [position, 3], dtype=torch.int32, device=DEVICE
    )
    with pytest.raises(IndexError):
        torch_kernels.scatter(flat, positions, torch.ones(2, dtype=torch.int16, device=DEVICE))
    assert not array.any()


@pytest.mark.parametrize("inside", [False, True])
def test_inference_tensors_and_parameters(inside: bool) -> None:
    with torch.inference_mode():
        held = [torch.zeros(5, device=DEVICE), torch.zeros(4, 3, device=DEVICE).t()]
    weight = torch.nn.Parameter(torch.zeros(3, 1, device=DEVICE))
    normal = weight, torch.zeros(1, 3, device=DEVICE).t()
    loss = (weight * weight).sum()
    with torch.inference_mode(inside):
        flat = FlatTensors([held[0], *normal, held[1]], 4)
        torch_kernels.write(flat, 1, torch.arange(16, dtype=torch.int32, device=DEVICE))
        positions = torch.tensor([0, 6, 10, 22], dtype=torch.int32, device=DEVICE)
        torch_kernels.scatter(flat, positions, torch.tensor([7, 8, 9, 10], dtype=torch.int32, device=DEVICE))
        out = torch.zeros(23, dtype=torch.int32, device=DEVICE)
        torch_kernels.read(flat, 0, out)
        assert out.tolist() == [7, *range(4), 4, 8, 6, 7, 8, 9, *range(10, 16), *[0] * 5, 10]
    assert [tensor._version for tensor in normal] == [2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Arrays of positions
# -----------------------------------------------------------------------------------------------------


@widths
@counters
@pytest.mark.parametrize("count", [0, 1, 777])
def test_put_and_gather(width: int, counter: torch.dtype, count: int) -> None:
    array, bits = random_bits(5000, width, 1), random_bits(count, width, 2)
    positions = torch.from_numpy(np.random.default_rng(3).permutation(4999)[:count]).to(counter)
    there = array.to(DEVICE)
    assert torch.equal(
        torch_kernels.gather_1d(there, positions.to(DEVICE)).cpu(), cpu.gather_1d(array, positions)
    )
    torch_kernels.scatter_1d(there[1:], positions.to(DEVICE), bits.to(DEVICE))
    cpu.scatter_1d(array[1:], positions, bits)
    assert torch.equal(there.cpu(), array)


@counters
def test_strictly_increasing(counter: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(-2, 40, rng.integers(0, 6)) for _ in range(150)] + [
        np.sort(rng.permutation(60)[:9]) for _ in range(50)
    ]
    answers = []
    for values in drawn:
        for length in (0, 1, 20, 40, 1 << 40):
            positions = torch.from_numpy(values).to(counter)
            answers.append(cpu.strictly_increasing(positions, length))
            assert bool(torch_kernels.strictly_increasing(positions.to(DEVICE), length)) == answers[-1]
    assert 50 < sum(answers) < len(answers) - 50


@pytest.mark.parametrize("length", [1, 65535, 65536, 65537, 200_000, 1 << 20])
@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.5, 1.0])
def test_u16(length: int, density: float) -> None:
    positions = torch.from_numpy(
        np.flatnonzero(np.random.default_rng(length).random(length) < density).astype(np.int32)
    )
    lineage = cpu.encode_u16(positions, length)
    assert torch.equal(torch_kernels.encode_u16(positions.to(DEVICE), length).cpu(), lineage)
    for seed in range(8):
        hostile = lineage.clone()
        if seed and len(hostile):
            rng = np.random.default_rng(seed)
            near = min(len(hostile), 64) if seed % 2 else len(hostile)
            hostile[torch.from_numpy(rng.integers(0, near, seed))] ^= int(rng.integers(1, 256))
        decoded = torch.empty_like(positions), torch.empty_like(positions, device=DEVICE)
        sound = cpu.decode_u16(hostile, len(positions), length, decoded[0])
        assert bool(torch_kernels.decode_u16(hostile.to(DEVICE), len(positions), length, decoded[1])) == sound
        assert bool(torch_kernels.check_u16(hostile.to(DEVICE), len(positions), length)) == sound
        assert sound or seed
        assert not sound or torch.equal(decoded[1].cpu(), decoded[0])


@some
@given(st.binary(max_size=64), st.integers(0, 20), st.integers(0, 300_000))
def test_any_bytes_as_u16(data: bytes, count: int, length: int) -> None:
    lineage = torch.tensor(list(data), dtype=torch.uint8)
    decoded = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32, device=DEVICE)
    sound = cpu.decode_u16(lineage, count, length, decoded[0])
    assert bool(torch_kernels.decode_u16(lineage.to(DEVICE), count, length, decoded[1])) == sound
    assert bool(torch_kernels.check_u16(lineage.to(DEVICE), count, length)) == sound
    assert not sound or torch.equal(decoded[1].cpu(), decoded[0])
    settle()


@pytest.mark.parametrize("words", [0, 1, 2, 7, 100, 250_000])
def test_checksum(words: int) -> None:
    memory = random_bits(8 * words + 1, 1, words)
    there = memory.to(DEVICE)
    for at in (0, 1):
        for skip in (-1, 0, words - 1):
            frame = slice(at, at + 8 * words)
            assert int(torch_kernels.checksum(there[frame], skip)) == cpu.checksum(
                memory[frame].clone(), skip
            )


# Codecs -----------------------------------------------------------------------------------------------------
# -------------


def distances_of(count: int, width: int, kind: str) -> Tensor:
    """Return distances as training makes them, or any, or the extremes."""
    rng, top = np.random.default_rng(count), 1 << (8 * width - 1)
    drawn = {
        "steps": rng.geometric(0.6, count) * rng.choice([-1, 1], count),
        "any": rng.integers(-top, top, count),
        "far": rng.choice(np.array([-top, top - 1, 127, 128, -128, 1, -1, 256, 257, -300], np.int64), count),
    }[kind]
    return torch.from_numpy(((drawn + top) % (2 * top) - top).astype("i4"))


@widths
@seeds
def test_distances_in_a_flat_array(width: int, seed: int) -> None:
    here, there = flats(seed, width)
    positions = torch.from_numpy(np.random.default_rng(seed).permutation(len(here))[: len(here) // 2]).to(
        torch.int64
    )
    far = random_bits(len(positions), width, seed)
    assert torch.equal(
        torch_kernels.add_ulps(there, positions.to(DEVICE), far.to(DEVICE)).cpu(),
        cpu.add_ulps(here, positions, far),
    )
    cpu.scatter_add(here, positions, far)
    torch_kernels.scatter_add(there, positions.to(DEVICE), far.to(DEVICE))
    assert torch.equal(content(there.tensors, width), content(here.tensors, width))
    old, new = content(here.tensors, width), random_bits(len(here), width, seed + 1)
    if width < 8:
        found = torch_kernels.ulp_deltas(old.to(DEVICE), new.to(DEVICE))
        assert torch.equal(found.cpu(), cpu.ulp_deltas(old, new))
        assert torch.equal(torch_kernels.narrow(found, new.dtype).cpu(), torch_kernels.subtract(new, old))


@pytest.mark.parametrize("length", [1, 64, 65537, 1 << 18])
@pytest.mark.parametrize("density", [0.0001, 0.01, 0.5, 1.0])
def test_positions_as_bits_and_as_elias_fano(length: int, density: float) -> None:
    positions = torch.from_numpy(
        np.flatnonzero(np.random.default_rng(length).random(length) < density).astype(np.int32)
    )
    count, there = len(positions), positions.to(DEVICE)
    for low in {0, 1, 7, 8, 9, best_low(count, length)[0]} if count else ():
        lineage = cpu.encode_ef(positions, length, low)
        assert len(lineage) == ef_size(count, length, low)
        assert torch.equal(torch_kernels.encode_ef(there, length, low).cpu(), lineage)
        agree(lambda codecs, bits, low=low: codecs.decode_ef(bits, count, length, low), lineage)
    lineage = cpu.encode_bitmap(positions, length)
    assert torch.equal(torch_kernels.encode_bitmap(there, length).cpu(), lineage)
    agree(lambda codecs, bits: codecs.decode_bitmap(bits, count, length), lineage)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("kind", ["steps", "any", "far"])
@pytest.mark.parametrize("count", [1, 63, 1000, 70_000])
def test_distances_as_planes(width: int, kind: str, count: int) -> None:
    values = distances_of(count, width, kind)
    there = values.clone().to(DEVICE)
    classes, counted = cpu.measure(values), torch_kernels.measure(there)
    assert classes.numbers[: len(counted.numbers)].tolist() == counted.numbers.tolist()
    plan = choose_planes(classes, width)
    lineage = cpu.encode_planes(classes, width, plan)  # overwrites the values
    assert torch.equal(torch_kernels.encode_planes(counted, width, plan).cpu(), lineage)
    agree(lambda codecs, bits: codecs.decode_planes(bits, count, BITS[width], plan), lineage)


def agree(decode, lineage: Tensor) -> None:
    """Decode a stream, and some that are not sound, with the kernels of both kinds of device."""
    for seed in range(6):
        hostile = lineage.clone()
        if seed:
            rng = np.random.default_rng(seed)
            hostile[torch.from_numpy(rng.integers(0, len(lineage), seed))] ^= int(rng.integers(1, 256))
        (expected, sound), (found, agreed) = (
            decode(cpu, hostile),
            decode(torch_kernels, hostile.to(DEVICE)),
        )
        assert bool(agreed) == sound
        assert sound or seed
        assert not sound or torch.equal(found.cpu(), expected)
    settle()


# Translation ------------------------------------------------------------------------------------------------
# -------------


def target(space, width: int, device: torch.device | str, strided: bool) -> FlatTensors:
    """Return tensors of a receiver, filled with noise; every other one transposed or sliced if `strided`."""
    tensors = []
    for index, piece in enumerate(space.pieces):
        tensor = random_bits(piece.block.numel, width, index, device).view(piece.block.shape)
        if strided and index % 2 == 0:
            tensor = (
                tensor.mT.contiguous().mT if tensor.dim() > 1 else torch.stack([tensor, tensor], -1)[..., 0]
            )
        tensors.append(tensor.view(FLOATS[width]))
    return FlatTensors(tensors, width, space.starts)


@some
@given(st.data())
def test_translate_place_and_fetch(data) -> None:
    _, source, receiver = data.draw(pairs_of_spaces())
    begin = data.draw(st.integers(0, source.numel))
    kept = data.draw(st.lists(st.booleans(), min_size=source.numel - begin, max_size=source.numel - begin))
    positions, strided = torch.from_numpy(np.flatnonzero(kept).astype(np.int32)), data.draw(st.booleans())
    for width in BITS:
        bits, dense = random_bits(len(positions), width, 5), random_bits(source.numel - begin, width, 6)
        here, there = target(receiver, width, "cpu", strided), target(receiver, width, DEVICE, strided)
        array, fetched = (
            content(here.tensors, width),
            [torch.zeros_like(dense, device=device) for device in ("cpu", DEVICE)],
        )
        for index_map in build_index_maps(source, receiver):
            expected = cpu.translate(index_map, begin, positions, bits)
            found = torch_kernels.translate(index_map, begin, positions.to(DEVICE), bits.to(DEVICE))
            assert [part.cpu().tolist() for part in found] == [part.tolist() for part in expected]
            cpu.scatter_dense(index_map, begin, dense, here)
            torch_kernels.scatter_dense(index_map, begin, dense.to(DEVICE), there)
            cpu.gather_dense(index_map, begin, fetched[0], array)
            torch_kernels.gather_dense(index_map, begin, fetched[1], array.to(DEVICE))
            collected = [torch.zeros_like(dense, device=device) for device in ("cpu", DEVICE)]
            cpu.gather_dense_flat(index_map, begin, collected[0], here)
            torch_kernels.gather_dense_flat(index_map, begin, collected[1], there)
            assert torch.equal(collected[1].cpu(), collected[0])
            length = source.numel - begin
            ways = (positions, None), (cpu.encode_u16(positions, length), length)
            for relative, (at, packed) in product([False, True], ways):
                cpu.patch(index_map, begin, at, bits, here, relative=relative, length=packed)
                torch_kernels.patch(
                    index_map, begin, at.to(DEVICE), bits.to(DEVICE), there, relative=relative, length=packed
                )
                assert torch.equal(content(there.tensors, width), content(here.tensors, width))
        assert torch.equal(content(there.tensors, width), content(here.tensors, width))
        assert torch.equal(fetched[1].cpu(), fetched[0])


def test_positions_far_beyond_32_bits() -> None:
    """A slot of 2^34 elements costs no memory here: only its tables are looked at."""
    from dte_dist.layout import Cut, cut_block
    from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces

    shape = (1 << 17, 1 << 17)
    source = FlatSpace.of(2, Pieces.of([Piece(0, 0, cut_block(shape, (4,), (3,), [Cut(0, 0)]))]))
    columns = FlatSpace.of(2, Pieces.of([Piece(0, 0, cut_block(shape, (3,), (1,), [Cut(1, 0)]))]))
    positions = torch.arange(0, 1 << 20, 37, dtype=torch.int32)
    for receiver in (whole_space(2, shape), columns):
        (index_map,) = build_index_maps(source, receiver)
        for first in (0, (1 << 31) - 1000, source.numel - (1 << 20)):
            expected = cpu.translate(index_map, first, positions, positions)
            found = torch_kernels.translate(index_map, first, positions.to(DEVICE), positions.to(DEVICE))
            assert len(expected[0])
            assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))


# Waits ------------------------------------------------------------------------------------------------------
# -------------


def arrays(strided: bool) -> tuple[FlatTensors, Tensor, Tensor, Tensor]:
    """Return a flat array of three tensors on the device, known bits, sorted positions and bits."""
    tensors = [
        torch.zeros(300, 7, device=DEVICE),
        torch.zeros(100, device=DEVICE),
        torch.zeros(33, 31, device=DEVICE),
    ]
    flat = FlatTensors([tensor.t() for tensor in tensors] if strided else tensors, 4)
    known = torch.ones(len(flat), dtype=torch.int32, device=DEVICE)
    positions = torch.arange(0, len(flat), 3, dtype=torch.int32, device=DEVICE)
    return flat, known, positions, torch.ones(len(positions), dtype=torch.int32, device=DEVICE)


@only_gpu
def test_a_wait_is_noticed() -> None:
    with waits() as found:
        torch.zeros(3, device=DEVICE).sum().item()
    assert len(found) == 1


@only_gpu
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_the_host_waits_no_more_often_than_documented(strided: bool) -> None:
    flat, known, positions, bits = arrays(strided)
    space = whole_space(4, *(tuple(tensor.shape) for tensor in flat.tensors))
    (index_map,) = build_index_maps(space, space)
    out, frame = torch.empty_like(known), torch.zeros(8000, dtype=torch.uint8, device=DEVICE)
    lineage = torch_kernels.encode_u16(positions, len(flat))
    far = torch.tensor([1, -1, 300, -2], dtype=torch.int32, device=DEVICE).repeat(len(positions) // 4 + 1)[
        : len(positions)
    ]
    classes = torch_kernels.measure(far)
    plan, low = (
        choose_planes(cpu.measure(far.cpu()), 4),
        best_low(len(positions), len(flat))[0],
    )
    planes = torch_kernels.encode_planes(classes, 4, plan)
    ef, bitmap = (
        torch_kernels.encode_ef(positions, len(flat), low),
        torch_kernels.encode_bitmap(positions, len(flat)),
    )
    count, wide = len(positions), positions.to(torch.int64)
    torch_kernels.translate(index_map, 0, positions, bits)  # copies the tables to the device, once
    backwards = positions.flip(0)
    calls = {
        "read": (0, lambda: torch_kernels.read(flat, 1, out[1:])),
        "write": (0, lambda: torch_kernels.write(flat, 1, out[1:])),
        "scatter_1d": (0, lambda: torch_kernels.scatter_1d(out, positions, bits)),
        "gather_1d": (0, lambda: torch_kernels.gather_1d(out, positions)),
        "encode_u16": (0, lambda: torch_kernels.encode_u16(positions, len(flat))),
        "decode_u16": (
            0,
            lambda: torch_kernels.decode_u16(lineage, len(positions), len(flat), torch.empty_like(positions)),
        ),
        "check_u16": (0, lambda: torch_kernels.check_u16(lineage, len(positions), len(flat))),
        "strictly_increasing": (0, lambda: torch_kernels.strictly_increasing(positions, len(flat))),
        "checksum": (0, lambda: torch_kernels.checksum(frame, 1)),
        "advance": (
            1,
            lambda: torch_kernels.advance(
                flat, 0, len(flat), known, torch.empty_like(out), out, torch.empty_like(out)
            ),
        ),
        "scatter": (1, lambda: torch_kernels.scatter(flat, positions, bits)),
        "scatter, not sorted": (2, lambda: torch_kernels.scatter(flat, backwards, bits)),
        "translate": (1, lambda: torch_kernels.translate(index_map, 0, positions, bits)),
        "scatter_dense": (2, lambda: torch_kernels.scatter_dense(index_map, 0, known, flat)),
        "gather_dense": (1, lambda: torch_kernels.gather_dense(index_map, 0, out, known)),
        "ulp_deltas": (0, lambda: torch_kernels.ulp_deltas(bits, bits)),
        "encode_ef": (0, lambda: torch_kernels.encode_ef(positions, len(flat), low)),
        "decode_ef": (0, lambda: torch_kernels.decode_ef(ef, count, len(flat), low)),
        "encode_bitmap": (0, lambda: torch_kernels.encode_bitmap(positions, len(flat))),
        "decode_bitmap": (0, lambda: torch_kernels.decode_bitmap(bitmap, count, len(flat))),
        "decode_planes": (0, lambda: torch_kernels.decode_planes(planes, count, torch.int32, plan)),
        "measure": (1, lambda: torch_kernels.measure(far)),
        "encode_planes": (1, lambda: torch_kernels.encode_planes(classes, 4, plan)),
        "add_ulps": (1, lambda: torch_kernels.add_ulps(flat, wide, far)),
        "scatter_add": (2, lambda: torch_kernels.scatter_add(flat, wide, far)),
        "gather_dense_flat": (2, lambda: torch_kernels.gather_dense_flat(index_map, 0, out, flat)),
        "patch": (2, lambda: torch_kernels.patch(index_map, 0, positions, bits, flat, relative=False)),
        "patch, relative": (
            3,
            lambda: torch_kernels.patch(index_map, 0, positions, far, flat, relative=True),
        ),
        "patch, packed": (
            2,
            lambda: torch_kernels.patch(index_map, 0, lineage, bits, flat, relative=False, length=len(flat)),
        ),
    }
    for _, call in calls.values():
        call()
    counted = {}
    for name, (_, call) in calls.items():
        with waits() as found:
            call()
        counted[name] = len(found)
    assert counted == {name: allowed for name, (allowed, _) in calls.items()}
