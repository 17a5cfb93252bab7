"""All backends of kernels against one reference in plain numpy."""

from __future__ import annotations

import inspect
import random
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.cpu import scan_loops
from dte_dist.kernels.table import addresses_of
from dte_dist.tensors.flat import BITS, FlatTensors

FLOATS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
STRIDED = {3, 5, 6}

both = pytest.mark.parametrize("kernel", [cpu, torch_kernels], ids=["cpu", "torch"])
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])


def random_bits(count: int, width: int, seed: int = 0) -> Tensor:
    """Return all kinds of bit patterns, NaNs among them."""
    data = np.random.default_rng(seed).integers(0, 256, (count + 1) * width, np.uint8)
    return torch.from_numpy(data).view(BITS[width])[:count]


def make_tensors(width: int, seed: int = 0) -> list[Tensor]:
    """Return tensors of odd sizes: misaligned, empty, of no dimension, transposed, sliced, permuted."""

    def make(*shape: int) -> Tensor:
        return random_bits(int(np.prod(shape)), width, seed + sum(shape)).view(FLOATS[width]).view(shape)

    return [
        make(3, 5),
        make(0, 4),
        make(200)[1:],
        make(7, 40).t(),
        make(),
        make(6, 9)[:, 2:5],
        make(2, 3, 4).permute(2, 0, 1),
        make(1),
        make(129),
        make(0),
        make(64)[3:],
    ]


def bits_of(tensors: list[Tensor], width: int) -> np.ndarray:
    return np.concatenate([t.detach().contiguous().view(-1).view(BITS[width]).numpy() for t in tensors])


def versions(tensors: list[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def some_ranges(total: int) -> list[tuple[int, int]]:
    borders = np.random.default_rng(1).integers(0, total + 1, (40, 2))
    return [
        (0, total),
        (0, 0),
        (total, total),
        (14, 16),
        *((int(min(pair)), int(max(pair))) for pair in borders),
    ]


@both
@widths
def test_read(kernel: ModuleType, width: int) -> None:
    tensors = make_tensors(width)
    flat, expected = FlatTensors(tensors, width), bits_of(tensors, width)
    assert set(np.flatnonzero(flat.table.kinds)) == STRIDED
    for begin, end in some_ranges(len(flat)):
        out = torch.zeros(end - begin, dtype=BITS[width])
        kernel.read(flat, begin, out)
        assert np.array_equal(out.numpy(), expected[begin:end])
    assert versions(tensors) == [0] * len(tensors)


@both
@widths
def test_write(kernel: ModuleType, width: int) -> None:
    tensors = make_tensors(width)
    expected = bits_of(tensors, width)
    for begin, end in some_ranges(len(expected)):
        flat, before = FlatTensors(tensors, width), versions(tensors)
        new = random_bits(end - begin, width, seed=begin)
        kernel.write(flat, begin, new)
        expected[begin:end] = new.numpy()
        assert np.array_equal(bits_of(tensors, width), expected)
        touched = set(flat.spans(begin, end)[0].tolist())
        assert {
            i for i, (a, b) in enumerate(zip(before, versions(tensors), strict=True)) if a != b
        } == touched


@both
@widths
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_advance(kernel: ModuleType, width: int, density: float) -> None:
    """Small ranges of tensors of all kinds; tests/unit/kernels/test_scan_advance.py has the rest."""
    tensors = make_tensors(width)
    flat, live = FlatTensors(tensors, width), bits_of(tensors, width)
    changed = np.random.default_rng(2).random(len(live)) < density
    before = np.where(changed, live ^ 1, live)
    for begin, end in some_ranges(len(flat)):
        known, positions = torch.from_numpy(before.copy()), torch.zeros(end - begin, dtype=torch.int32)
        old, new = torch.zeros(2, end - begin, dtype=BITS[width]).unbind()
        count = kernel.advance(flat, begin, end, known[begin:end], positions, old, new)
        expected = np.flatnonzero(changed[begin:end])
        assert count == len(expected)
        assert count == end - begin or positions[:count].tolist() == expected.tolist()
        assert np.array_equal(old[:count].numpy(), before[begin:end][expected])
        assert np.array_equal(new[:count].numpy(), live[begin:end][expected])
        assert np.array_equal(known.numpy(), np.concatenate([before[:begin], live[begin:end], before[end:]]))
    assert np.array_equal(bits_of(tensors, width), live) and versions(tensors) == [0] * len(tensors)


@both
def test_advance_looks_at_bits(kernel: ModuleType) -> None:
    """NaNs that stay are no change; a zero that only changes its sign is one, and so is a NaN that changes
    its payload.
    """
    live = torch.tensor([0x7FC0, 0x7F81, -1, -0x8000, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    known = torch.tensor([0x7FC0, 0x7F81, -1, 0, 0x7FC0], dtype=torch.int16)
    positions, (old, new) = torch.zeros(5, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int16).unbind()
    assert kernel.advance(FlatTensors([live], 2), 0, 5, known, positions, old, new) == 2
    assert positions[:2].tolist() == [3, 4]
    assert (old[:2].tolist(), new[:2].tolist()) == ([0, 0x7FC0], [-0x8000, 0x7FC1])
    assert torch.equal(known, live.view(torch.int16))


@both
@widths
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("counter", [torch.int32, torch.int64])
def test_scatter(kernel: ModuleType, width: int, order: str, counter: torch.dtype) -> None:
    tensors = make_tensors(width)
    flat, expected, rng = FlatTensors(tensors, width), bits_of(tensors, width), np.random.default_rng(3)
    for count in (0, 1, 2, 30, len(flat)):
        positions, before = rng.permutation(len(flat))[:count], versions(tensors)
        positions = np.sort(positions) if order == "sorted" else positions
        new = random_bits(count, width, seed=count)
        kernel.scatter(flat, torch.from_numpy(positions).to(counter), new)
        expected[positions] = new.numpy()
        assert np.array_equal(bits_of(tensors, width), expected)
        touched = set(np.searchsorted(flat.starts, positions, side="right") - 1)
        assert {
            i for i, (a, b) in enumerate(zip(before, versions(tensors), strict=True)) if a != b
        } == touched


@both
@pytest.mark.parametrize("small", [0, 20, 1 << 16])
@pytest.mark.parametrize("batch", [1, 64, 1 << 24])
def test_tensors_of_all_sizes_and_dtypes(
    kernel: ModuleType, small: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors are gathered and written many at a time: of several dtypes, some strided, some made in
    inference mode.
    """
    monkeypatch.setattr(torch_kernels.scan, "_SMALL", small)
    monkeypatch.setattr(torch_kernels.scan, "_BATCH", batch)
    rng, tensors = np.random.default_rng(4), []
    for number, size in enumerate(rng.integers(0, 50, 120).tolist()):
        dtype = (torch.bfloat16, torch.float16, torch.int16)[number // 3 % 3 if number % 2 else 0]
        with torch.inference_mode(number % 7 == 3):
            tensor = random_bits(2 * size, 2, number).clone().view(dtype)
            tensor = tensor.view(2, size).t() if number % 5 == 0 else tensor
        is_parameter = number % 9 == 1 and dtype.is_floating_point and not tensor.is_inference()
        tensors.append(torch.nn.Parameter(tensor) if is_parameter else tensor)
    flat, expected = FlatTensors(tensors, 2), bits_of(tensors, 2)
    counted = [number for number, tensor in enumerate(tensors) if not tensor.is_inference()]
    for begin, end in [(0, len(flat)), (11, len(flat) - 13), (1000, 1001)]:
        out = torch.zeros(end - begin, dtype=torch.int16)
        kernel.read(flat, begin, out)
        assert np.array_equal(out.numpy(), expected[begin:end])
        before, new = (
            {number: tensors[number]._version for number in counted},
            random_bits(end - begin, 2, seed=begin),
        )
        kernel.write(flat, begin, new)
        expected[begin:end] = new.numpy()
        assert np.array_equal(bits_of(tensors, 2), expected)
        assert {n for n in counted if tensors[n]._version != before[n]} == set(
            flat.spans(begin, end)[0].tolist()
        ) & {*counted}
    for count in (1, 40, len(flat)):
        positions, new = rng.permutation(len(flat))[:count], random_bits(count, 2, seed=count)
        before = {number: tensors[number]._version for number in counted}
        kernel.scatter(flat, torch.from_numpy(positions), new)
        expected[positions] = new.numpy()
        assert np.array_equal(bits_of(tensors, 2), expected)
        touched = set((np.searchsorted(flat.starts, positions, side="right") - 1).tolist())
        assert {n for n in counted if tensors[n]._version != before[n]} == touched & {*counted}


@both
def test_autocast_has_no_say(kernel: ModuleType) -> None:
    tensors = make_tensors(1) + [tensor.view(torch.uint8) for tensor in make_tensors(1, 5)]
    flat, out = (
        FlatTensors(tensors, 1),
        torch.zeros(sum(tensor.numel() for tensor in tensors), dtype=torch.uint8),
    )
    with torch.autocast("cpu"):
        kernel.read(flat, 0, out)
        kernel.write(flat, 0, out)
        kernel.scatter(flat, torch.arange(len(out)), out)
    assert np.array_equal(bits_of(tensors, 1), out.numpy())


def random_view(pick: random.Random) -> Tensor:
    """Return part of a tensor, seen in any order of dimensions, many of them of length one."""
    shape = [pick.choice((1, 1, 2, 3, 5)) for _ in range(pick.randint(1, 4))]
    whole = torch.zeros([size + pick.randint(0, 2) for size in shape], dtype=torch.int16)
    return whole[tuple(slice(0, size) for size in shape)].permute(pick.sample(range(len(shape)), len(shape)))


@both
def test_any_strides(kernel: ModuleType) -> None:
    pick = random.Random(5)
    for _ in range(300):
        tensors = [random_view(pick) for _ in range(3)]
        flat = FlatTensors(tensors, 2)
        bits = torch.arange(1, len(flat) + 1, dtype=torch.int16)
        kernel.write(flat, 0, bits)
        assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors]), bits), [
            (t.shape, t.stride()) for t in tensors
        ]
        found = torch.zeros_like(bits)
        kernel.read(flat, 0, found)
        assert torch.equal(found, bits)
        kernel.scatter(flat, torch.arange(len(flat)), -bits)
        assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors]), -bits)


@both
@pytest.mark.parametrize("inside", [False, True])
def test_inference_tensors(kernel: ModuleType, inside: bool) -> None:
    """Inference tensors have no version counter; normal ones next to them do, whatever mode the caller is
    in.
    """
    with torch.inference_mode():
        held = [torch.zeros(5), torch.zeros(4, 3).t()]
    normal = torch.zeros(3, 1), torch.zeros(1, 3).t()
    with torch.inference_mode(inside):
        flat = FlatTensors([held[0], *normal, held[1]], 4)
        kernel.write(flat, 1, torch.arange(16, dtype=torch.int32))
        kernel.scatter(
            flat,
            torch.tensor([0, 6, 10, 22], dtype=torch.int32),
            torch.tensor([7, 8, 9, 10], dtype=torch.int32),
        )
        out = torch.zeros(23, dtype=torch.int32)
        kernel.read(flat, 0, out)
        assert out.tolist() == [7, *range(4), 4, 8, 6, 7, 8, 9, *range(10, 16), *[0] * 5, 10]
    assert [tensor._version for tensor in normal] == [2, 2]


@both
def test_parameters(kernel: ModuleType) -> None:
    """Leaves that require grad can be written, and autograd notices that a tensor it saved has changed."""
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    kernel.scatter(
        FlatTensors([weight], 4), torch.tensor([1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    )
    assert weight.tolist() == [1, 0, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both
@widths
@pytest.mark.parametrize("counter", [torch.int32, torch.int64])
def test_put_and_gather(kernel: ModuleType, width: int, counter: torch.dtype) -> None:
    array, new = random_bits(100, width), random_bits(10, width, seed=5)
    positions = torch.randperm(100)[:10].to(counter)
    kernel.scatter_1d(array, positions, new)
    assert torch.equal(array[positions.long()], new)
    assert torch.equal(kernel.gather_1d(array, positions), new)
    assert kernel.gather_1d(array, positions[:0]).tolist() == []


@both
def test_positions_outside_are_refused(kernel: ModuleType) -> None:
    array, bits = torch.zeros(10, dtype=torch.int16), torch.ones(1, dtype=torch.int16)
    flat = FlatTensors([array[:4], array[4:8]], 2)
    for position in (-1, 8, 1 << 30):
        with pytest.raises(IndexError):
            kernel.scatter(flat, torch.tensor([position], dtype=torch.int32), bits)
    for position in (-1, 10, 1 << 30):
        with pytest.raises(IndexError):
            kernel.scatter_1d(array, torch.tensor([position], dtype=torch.int32), bits)
    assert not array.any()


def test_wrong_arrays_are_refused() -> None:
    flat = FlatTensors([torch.zeros(8)], 4)
    known = torch.ones(8, dtype=torch.int32)
    positions, old, new = torch.zeros(3, 8, dtype=torch.int32).unbind()
    right = [known, positions, old, new]
    wrong = [(place, array[:7]) for place, array in enumerate(right)]
    wrong += [(place, array.repeat(2)[::2]) for place, array in enumerate(right)]
    wrong += [(0, known.short()), (1, positions.long()), (2, old.short()), (3, new.short()), (2, old.float())]
    for place, array in wrong:
        with pytest.raises(ValueError, match="expected >="):
            cpu.advance(flat, 0, 8, *right[:place], array, *right[place + 1 :])
    with pytest.raises(IndexError):
        cpu.advance(flat, 0, 9, *right)
    with pytest.raises(IndexError):
        cpu.write(flat, 1, new)
    assert known.tolist() == [1] * 8 and not any(array.any() for array in (positions, old, new))


@both
@pytest.mark.parametrize("counter", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("positions", "length", "sound"),
    [
        ([], 0, True),
        ([0], 1, True),
        ([0], 0, False),
        ([0, 1, 5], 6, True),
        ([0, 1, 5], 5, False),
        ([-1, 1], 6, False),
        ([1, 1], 6, False),
        ([2, 1], 6, False),
        ([0, 2**31 - 1], 2**31, True),
        ([0, 3, 2, 4], 9, False),
        ([5], 2**40, True),
    ],
)
def test_strictly_increasing(
    kernel: ModuleType, positions: list[int], length: int, sound: bool, counter: torch.dtype
) -> None:
    assert bool(kernel.strictly_increasing(torch.tensor(positions, dtype=counter), length)) is sound


def encode_reference(positions: np.ndarray, length: int) -> bytes:
    counts = np.bincount(positions >> 16, minlength=-(-length // 65536))
    return counts.astype("<u4").tobytes() + (positions & 0xFFFF).astype("<u2").tobytes()


@both
@pytest.mark.parametrize(
    ("positions", "length"),
    [
        ([], 0),
        ([], 5),
        ([0], 1),
        ([65535], 65536),
        ([65535, 65536], 65537),
        ([65536], 70000),
        ([0, 1 << 20], (1 << 20) + 1),
        ([2**31 - 2], 2**31 - 1),
        (range(65536), 65536),
        (range(65537), 200000),
        (range(100_000, 300_000), 1 << 20),
    ],
)
def test_u16(kernel: ModuleType, positions: list[int], length: int) -> None:
    array = np.array(positions, np.int32)
    lineage = kernel.encode_u16(torch.from_numpy(array), length)
    assert lineage.numpy().tobytes() == encode_reference(array, length)
    out = torch.full((len(array),), -1, dtype=torch.int32)
    assert bool(kernel.check_u16(lineage, len(array), length))
    assert bool(kernel.decode_u16(lineage, len(array), length, out))
    assert np.array_equal(out.numpy(), array)


def damage(lineage: np.ndarray, **changes: int) -> np.ndarray:
    """Set uint32 `count<i>` or uint16 `offset<i>` of the stream of three blocks."""
    lineage = lineage.copy()
    for name, value in changes.items():
        part = lineage[:12].view("<u4") if name.startswith("count") else lineage[12:].view("<u2")
        part[int(name[-1])] = value
    return lineage


@both
def test_unsound_u16_streams(kernel: ModuleType) -> None:
    """Each is refused, and none makes a loop read or write beyond its arrays."""
    sound = np.frombuffer(encode_reference(np.array([3, 7, 65536, 131072, 131075]), 131080), np.uint8)
    unsound = [
        damage(sound, count0=3),
        damage(sound, count0=1),
        damage(sound, count0=0xFFFFFFFF),
        damage(sound, count2=0x80000000),
        damage(sound, count0=0, count1=5, count2=0),
        damage(sound, count2=65537),
        damage(sound, offset0=7),
        damage(sound, offset1=2),
        damage(sound, offset4=8),
        damage(sound, count0=0xFFFFFFFF, count1=2, count2=4),
        sound[:-2],
        np.concatenate([sound, sound[:2]]),
        sound[:0],
    ]
    for lineage in unsound:
        out = torch.zeros(6, dtype=torch.int32)
        assert not kernel.decode_u16(torch.from_numpy(lineage.copy()), 5, 131080, out[:5])
        assert not kernel.check_u16(torch.from_numpy(lineage.copy()), 5, 131080)
        assert out[5] == 0


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 20), st.integers(0, 300_000))
def test_any_bytes_as_u16(data: bytes, count: int, length: int) -> None:
    """Both modules agree about any bytes, read or only checked, and what they accept is what the encoder
    would have written.
    """
    lineage = torch.tensor(list(data), dtype=torch.uint8)
    first, second = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    sound = cpu.decode_u16(lineage, count, length, first)
    assert bool(torch_kernels.decode_u16(lineage, count, length, second)) == sound
    assert (
        cpu.check_u16(lineage, count, length)
        == bool(torch_kernels.check_u16(lineage, count, length))
        == sound
    )
    if sound:
        assert torch.equal(first, second)
        assert torch.equal(cpu.encode_u16(first, length), lineage)


def checksum_reference(frame: np.ndarray, skip: int) -> int:
    """Compute the formula of docs/protocol.md with Python ints."""
    total, most = 0, (1 << 64) - 1
    for i, word in enumerate(frame.view("<u8").tolist()):
        x = ((0 if i == skip else word) + (i + 1) * 0x9E3779B97F4A7C15) & most
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & most
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & most
        total += x ^ (x >> 33)
    total &= most
    return total - (1 << 64) if total >> 63 else total


@both
@pytest.mark.parametrize("words", [0, 1, 2, 7, 100])
def test_checksum(kernel: ModuleType, words: int) -> None:
    memory = random_bits(8 * words + 1, 1)
    for frame in (memory[: 8 * words], memory[1:]):
        for skip in (-1, 0, words - 1):
            expected = checksum_reference(frame.numpy().copy(), skip)
            assert int(kernel.checksum(frame, skip)) == expected


@both
def test_checksum_needs_words(kernel: ModuleType) -> None:
    with pytest.raises(ValueError, match="whole words"):
        kernel.checksum(torch.zeros(12, dtype=torch.uint8), 1)


@pytest.mark.parametrize("kernel", [cpu, torch_kernels], ids=["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_borders(kernel: ModuleType, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 4, 9], dtype=dtype)
    assert kernel.searchsorted(positions, [0, 1, 2, 4, 5, 9, 10, 100]) == [0, 1, 2, 2, 3, 3, 4, 4]
    assert kernel.searchsorted(positions[:0], [0, 7]) == [0, 0]


def test_tables_take_columns_of_int64_only() -> None:
    with pytest.raises(ValueError, match="int64"):
        addresses_of(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="contiguous"):
        addresses_of(np.zeros(6, np.int64)[::2])


@both
def test_a_backend_is_the_interface(kernel: ModuleType) -> None:
    """It has every kernel and no other name, and takes the same arguments by the same names."""
    kernels_of = {name: value for name, value in vars(kernels.Kernels).items() if inspect.isfunction(value)}
    names = {name for name in kernels_of if not name.startswith("_")}
    assert len(names) > 30 and names == {*kernel.__all__}
    for name in names:
        _, *expected = inspect.signature(kernels_of[name]).parameters.values()
        found = inspect.signature(getattr(kernel, name)).parameters.values()
        assert [(each.name, each.kind, each.default) for each in found] == [
            (each.name, each.kind, each.default) for each in expected
        ]


def test_on_and_precompile() -> None:
    assert kernels.on("cpu") is cpu
    assert kernels.on(torch.device("cuda", 1)) is torch_kernels
    kernels.precompile([2])
    assert any(signature[0].name == "uint16" for signature in scan_loops.advance.signatures)
