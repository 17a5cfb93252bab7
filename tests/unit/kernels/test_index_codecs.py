"""The kernels of the codecs, for CPU memory and for any device, against one reference: equal bytes, and
nothing unsound is believed.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.sizes import Planes, best_low, bitmap_nbytes, choose_planes, ef_size
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit import codec_reference as reference
from tests.unit.kernels.test_scan import bits_of, make_tensors, random_bits, versions

both = pytest.mark.parametrize("kernel", [cpu, torch_kernels], ids=["cpu", "torch"])
all_widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
coded_widths = pytest.mark.parametrize("width", [1, 2, 4])
lengths = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 4096, 65537]) | st.integers(1, 100_000)


@st.composite
def segments(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Sorted positions and the length of their segment: single ones, first and last, runs, all of them, any
    density.
    """
    length = draw(lengths)
    kind = draw(st.sampled_from(["none", "one", "ends", "all", "run", "every", "random", "mixed"]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    flags = np.zeros(length, bool)
    if kind == "one":
        flags[draw(st.integers(0, length - 1))] = True
    elif kind == "ends":
        flags[[0, -1]] = True
    elif kind == "run":
        low = draw(st.integers(0, length - 1))
        flags[low : draw(st.integers(low, length))] = True
    elif kind == "every":
        flags[:: draw(st.integers(1, 70))] = True
    elif kind == "random":
        flags = rng.random(length) < draw(st.sampled_from([0.001, 0.02, 0.3, 0.97]))
    elif kind == "mixed":  # alternating densities
        flags = rng.random(length) < np.where(np.arange(length) // 700 % 2, 0.9, 0.002)
    elif kind == "all":
        flags[:] = True
    return np.flatnonzero(flags).astype(np.int32), length


@st.composite
def some_distances(draw: st.DrawFn, width: int) -> np.ndarray:
    """Distances of all sizes: small ones, zeros, the extremes, random bits, those of one scale."""
    count = draw(st.sampled_from([1, 2, 63, 64, 65, 130, 1000]) | st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    top = 1 << (8 * width - 1)
    scale = 1 << draw(st.integers(0, 8 * width - 1))
    kinds = {
        "ones": rng.choice([-1, 1], count),
        "small": rng.geometric(0.6, count) * rng.choice([-1, 1], count),
        "random": rng.integers(-top, top, count),
        "scale": rng.integers(-scale, scale, count),
        "edges": rng.choice(
            [
                -top,
                -top + 1,
                -256,
                -128,
                -127,
                -3,
                -1,
                0,
                1,
                2,
                3,
                127,
                128,
                255,
                256,
                257,
                258,
                259,
                top - 1,
            ],
            count,
        ),
        "rare": np.where(rng.random(count) < 0.95, 1, rng.integers(-top, top, count)),
        "zeros": np.where(rng.random(count) < 0.9, 0, rng.integers(-3, 4, count)),
        "runs": np.repeat(rng.integers(-top, top, count), 9)[:count],
    }
    return ((kinds[draw(st.sampled_from(sorted(kinds)))] + top) % (2 * top) - top).astype(np.int64)


def as_bits(distances: np.ndarray, width: int) -> Tensor:
    return torch.from_numpy(distances.astype(reference.ORDERS[width])).view(BITS[width])


def wide(distances: np.ndarray) -> Tensor:
    return torch.from_numpy(distances.astype(np.int32))


# Positions --------------------------------------------------------------------------------------------------
# ---------------


@both
@settings(max_examples=60, deadline=None)
@given(segments(), st.integers(0, 24))
def test_positions(kernel: ModuleType, segment: tuple[np.ndarray, int], low: int) -> None:
    positions, length = segment
    stream = kernel.encode_ef(torch.from_numpy(positions), length, low)
    assert stream.numpy().tobytes() == reference.ef(positions, length, low)
    assert len(stream) == ef_size(len(positions), length, low)
    decoded, sound = kernel.decode_ef(stream, len(positions), length, low)
    assert bool(sound) and decoded.dtype == torch.int32 and np.array_equal(decoded.numpy(), positions)
    stream = kernel.encode_bitmap(torch.from_numpy(positions), length)
    assert stream.numpy().tobytes() == reference.bitmap(positions, length)
    decoded, sound = kernel.decode_bitmap(stream, len(positions), length)
    assert bool(sound) and decoded.dtype == torch.int32 and np.array_equal(decoded.numpy(), positions)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1 << 28), st.floats(0, 1))
def test_the_best_number_of_low_bits(length: int, density: float) -> None:
    count = max(1, int(length * density))
    low, size = best_low(count, length)
    sizes = [ef_size(count, length, each) for each in range(25)]
    assert (low, size) == (sizes.index(min(sizes)), min(sizes))


def test_positions_at_the_end_of_the_longest_segment() -> None:
    length = 1 << 28
    positions = torch.tensor([0, length - 2, length - 1], dtype=torch.int32)
    for kernel in (cpu, torch_kernels):
        for low in (20, 24):
            decoded, sound = kernel.decode_ef(kernel.encode_ef(positions, length, low), 3, length, low)
            assert bool(sound) and torch.equal(decoded, positions)
            assert not bool(kernel.decode_ef(kernel.encode_ef(positions, length, low), 3, length - 1, low)[1])


@settings(max_examples=150, deadline=None)
@given(segments(), st.integers(0, 12), st.data())
def test_damaged_positions(segment: tuple[np.ndarray, int], low: int, data: st.DataObject) -> None:
    """Both modules agree about damage; what they believe is in order and in range, and would be written as
    just these bytes.
    """
    positions, length = segment
    for name, more in (("ef", (low,)), ("bitmap", ())):
        stream = getattr(torch_kernels, f"encode_{name}")(torch.from_numpy(positions), length, *more).clone()
        for place, value in data.draw(
            st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)
        ):
            if len(stream):
                stream[place % len(stream)] = value
        count = max(0, len(positions) + data.draw(st.sampled_from([0, 0, 0, 1, -1])))
        if name == "ef" and ef_size(count, length, low) != len(stream):
            continue
        first, second = (
            getattr(kernel, f"decode_{name}")(stream, count, length, *more) for kernel in (cpu, torch_kernels)
        )
        assert bool(first[1]) == bool(second[1])
        if bool(first[1]):
            assert torch.equal(first[0], second[0]) and bool(
                torch_kernels.strictly_increasing(first[0], length)
            )


@pytest.mark.parametrize("name", ["ef", "bitmap"])
def test_encoders_write_within_their_stream(name: str) -> None:
    """Positions that break the rules are refused where they would lie outside."""
    for wrong in ([-1, 5], [5, 2000], [900, 3], [2**31 - 1], [-(2**31)]):
        positions = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="ascend"):
            cpu.encode_bitmap(positions, 1000) if name == "bitmap" else cpu.encode_ef(positions, 1000, 2)


# Distances --------------------------------------------------------------------------------------------------
# ---------------


def special_bits(width: int) -> Tensor:
    """Zeros of both signs, infinities, quiet and signalling NaNs, subnormals, the extremes of integers, and
    their neighbours.
    """
    top, most = 1 << (8 * width - 1), (1 << (8 * width)) - 1
    values = {0, 1, 2, top - 2, top - 1, top, top + 1, most - 1, most}
    if width == 2:
        values |= {0x7F80, 0x7F81, 0x7FC0, 0xFF80, 0xFF81, 0xFFC1, 0x0080, 0x007F, 0x3F80}
    if width == 4:
        values |= {0x7F800000, 0x7F800001, 0xFFC00000, 0x00800000, 0x3F800000}
    return torch.from_numpy(np.array(sorted(values), f"<u{width}").view(np.uint8)).view(BITS[width])


@both
@all_widths
def test_every_pair_of_bits_has_a_distance_and_back(kernel: ModuleType, width: int) -> None:
    special = torch.cat([special_bits(width), random_bits(20, width)])
    known, new = (
        each.contiguous() for each in (special.repeat(len(special)), special.repeat_interleave(len(special)))
    )
    expected = reference.distances(new.numpy(), known.numpy())
    assert kernel.subtract(new, known).view(torch.uint8).numpy().tobytes() == reference.as_bytes(
        expected, width
    )
    assert torch.equal(kernel.add(known, kernel.subtract(new, known)), new)
    if width < 8:
        before = known.clone(), new.clone()
        away = kernel.ulp_deltas(known, new)
        assert torch.equal(known, before[0]) and torch.equal(new, before[1])
        assert away.dtype == torch.int32 and away.tolist() == expected.tolist()
        assert torch.equal(kernel.narrow(away, new.dtype), kernel.subtract(new, known))
        assert torch.equal(kernel.widen(kernel.narrow(away, new.dtype)), away)


@all_widths
def test_the_order_is_that_of_the_numbers(width: int) -> None:
    """Neighbouring floats are one apart; -0.0 and +0.0 are too, and an integer is as far from its successor
    but where the sign turns.
    """
    if width == 1:
        return
    floats = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[width]
    values = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, float("inf")], dtype=floats)
    up = torch.cat(
        [
            torch.nextafter(
                values[:-1].double() if width == 8 else values[:-1],
                torch.full((6,), float("inf"), dtype=floats),
            )
        ]
    )
    away = torch_kernels.subtract(up.view(BITS[width]), values[:-1].contiguous().view(BITS[width])).tolist()
    assert away[0] == away[1] == away[3] == away[4] == away[5] == 1
    assert torch_kernels.subtract(values[3:4].view(BITS[width]), values[2:3].view(BITS[width])).tolist() == [
        1
    ]


@both
@coded_widths
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_planes(kernel: ModuleType, width: int, data: st.DataObject) -> None:
    """For the best plan and for any other; every size is exact."""
    distances = data.draw(some_distances(width))
    classes = kernel.measure(wide(distances))
    best = choose_planes(classes, width)
    shift, spread = data.draw(
        st.sampled_from(
            [(best.shift, best.spread - 1), (0, -1), (1, 2), (7, -1), (8 * width - 1, 24), (5, 0)]
        )
    )
    expected, far, unary = reference.planes(distances, width, shift, spread)
    plan = Planes(shift, spread + 1, far, unary, len(expected))
    if (shift, spread) == (best.shift, best.spread - 1):
        assert plan == best
    assert len(expected) >= best.size
    stream = kernel.encode_planes(kernel.measure(wide(distances)), width, plan)
    assert stream.numpy().tobytes() == expected
    decoded, sound = kernel.decode_planes(stream, len(distances), BITS[width], plan)
    assert bool(sound) and torch.equal(decoded, as_bits(distances, width))


@pytest.mark.slow
@coded_widths
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_the_plan_is_the_best(width: int, data: st.DataObject) -> None:
    distances, zeros = data.draw(some_distances(width)), data.draw(st.sampled_from([0, 1, 500]))
    whole = np.concatenate([distances, np.zeros(zeros, np.int64)])
    plans = [
        (len(reference.planes(whole, width, shift, spread)[0]), shift)
        for shift in range(8 * width)
        for spread in (-1, *range(0, 25, 1))
    ]
    plan = choose_planes(cpu.measure(wide(distances)), width, zeros)
    assert (plan.size, plan.shift) == min(plans)


@pytest.mark.slow
@coded_widths
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_distances(width: int, data: st.DataObject) -> None:
    """Both modules agree about damage to a stream, and about plans that are not the stream's own."""
    distances = data.draw(some_distances(width))
    count = len(distances)
    shift, spread = data.draw(st.sampled_from([(0, -1), (1, 2), (3, 0), (2, 24)]))
    stream, far, unary = reference.planes(distances, width, shift, spread)
    damaged = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)
    ):
        damaged[place % len(damaged)] = value
    plan = Planes(shift, spread + 1, far, unary, len(stream))
    first, second = (
        kernel.decode_planes(damaged, count, BITS[width], plan) for kernel in (cpu, torch_kernels)
    )
    assert bool(first[1]) == bool(second[1])
    if bool(first[1]):
        assert torch.equal(first[0], second[0])


@coded_widths
def test_random_bytes_as_planes(width: int) -> None:
    """Any bytes, any plan of their size: no crash, and both modules agree."""
    rng, agreed = np.random.default_rng(width), 0
    for _ in range(400):
        count = int(rng.integers(1, 200))
        shift, spread = int(rng.integers(0, 8 * width)), int(rng.integers(-1, 25))
        far = int(rng.integers(0, count + 1))
        unary = int(rng.integers(far, far * rng.integers(1, 8 * width - shift + 1) + 1))
        places = bitmap_nbytes(count) if spread < 0 else ef_size(far, count, spread)
        lows = (count + 7 & -8) * (shift // 8) + bitmap_nbytes(count) * (shift % 8)
        size = bitmap_nbytes(count) + lows + places + bitmap_nbytes(unary) + bitmap_nbytes(unary - far)
        data = torch.from_numpy(rng.integers(0, 256, size, np.uint8) * rng.integers(0, 2, size, np.uint8))
        plan = Planes(shift, spread + 1, far, unary, size)
        first, second = (
            kernel.decode_planes(data, count, BITS[width], plan) for kernel in (cpu, torch_kernels)
        )
        assert bool(first[1]) == bool(second[1])
        agreed += bool(first[1])
        if bool(first[1]):
            assert torch.equal(first[0], second[0])


# Into place -------------------------------------------------------------------------------------------------
# -----------------


@both
@all_widths
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
def test_scatter_add(kernel: ModuleType, width: int, order: str) -> None:
    """In tensors of all kinds: the bits move, version counters of what was touched move, and nothing else."""
    tensors = make_tensors(width)
    flat, expected, rng = FlatTensors(tensors, width), bits_of(tensors, width), np.random.default_rng(3)
    for count in (0, 1, 2, 30, len(flat)):
        positions, before = rng.permutation(len(flat))[:count], versions(tensors)
        positions = np.sort(positions) if order == "sorted" else positions
        new = random_bits(count, width, seed=count)
        away = torch_kernels.subtract(new, torch.from_numpy(expected[positions]))
        assert torch.equal(kernel.add_ulps(flat, torch.from_numpy(positions), away), new)
        assert versions(tensors) == before and np.array_equal(bits_of(tensors, width), expected)
        kernel.scatter_add(flat, torch.from_numpy(positions), away)
        expected[positions] = new.numpy()
        assert np.array_equal(bits_of(tensors, width), expected)
        touched = set(np.searchsorted(flat.starts, positions, side="right") - 1)
        assert {
            i for i, (a, b) in enumerate(zip(before, versions(tensors), strict=True)) if a != b
        } == touched


@both
@pytest.mark.parametrize("inside", [False, True])
def test_inference_tensors(kernel: ModuleType, inside: bool) -> None:
    with torch.inference_mode():
        held = [torch.zeros(5), torch.zeros(4, 3).t()]
    normal = torch.zeros(3, 1), torch.zeros(1, 3).t()
    with torch.inference_mode(inside):
        flat = FlatTensors([held[0], *normal, held[1]], 4)
        kernel.scatter_add(flat, torch.tensor([0, 6, 10, 22]), torch.tensor([7, 8, 9, 10], dtype=torch.int32))
        out = torch.cat([t.contiguous().view(-1) for t in flat.tensors]).view(torch.int32)
        assert out.nonzero().view(-1).tolist() == [0, 6, 10, 22] and out[[0, 6, 10, 22]].tolist() == [
            7,
            8,
            9,
            10,
        ]
    assert [tensor._version for tensor in normal] == [1, 1]


@both
def test_positions_outside_are_refused(kernel: ModuleType) -> None:
    array, one = torch.zeros(10, dtype=torch.int16), torch.ones(1, dtype=torch.int16)
    flat = FlatTensors([array[:4], array[4:8]], 2)
    for position in (-1, 8, 1 << 40):
        for use in (kernel.scatter_add, kernel.add_ulps):
            with pytest.raises(IndexError):
                use(flat, torch.tensor([position]), one)
    assert not array.any()


def test_distances_are_those_of_equal_arrays() -> None:
    bits = torch.zeros(8, dtype=torch.int16)
    for old in (bits[:7], bits.int(), bits.repeat(2)[::2]):
        with pytest.raises(ValueError, match="expected >="):
            cpu.ulp_deltas(old, bits)
    assert (
        cpu.ulp_deltas(bits[:0], bits[:0]).tolist()
        == torch_kernels.ulp_deltas(bits[:0], bits[:0]).tolist()
        == []
    )


GUARDED = """
import ctypes, mmap
import numpy as np
import torch
from dte_dist.kernels import cpu
from dte_dist.kernels.sizes import choose_planes

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
array = np.frombuffer(memory, np.uint8)
assert libc.mprotect(ctypes.c_void_p(array.ctypes.data + page), page, 0) == 0
for distances in ([2] * 64, [3] * 64, [1] * 10 + [3] * 63 + [5, 2], [5] * 32 + [2]):
    classes = cpu.measure(torch.tensor(distances, dtype=torch.int32))
    plan = choose_planes(classes, 2)._replace(shift=0, spread=0)
    high = [abs(d) - 1 for d in distances if abs(d) > 1]
    unary = sum(h.bit_length() for h in high)
    words = lambda bits: 8 * -(-bits // 64)
    size = 2 * words(len(distances)) + words(unary) + words(unary - len(high))
    plan = plan._replace(far=len(high), unary=unary, size=size)
    stream = cpu.encode_planes(classes, 2, plan)
    array[page - size : page] = stream.numpy()
    last = torch.from_numpy(array[page - size : page])
    decoded, sound = cpu.decode_planes(last, len(distances), torch.int16, plan)
    assert sound and decoded.tolist() == distances
"""


@pytest.mark.slow
def test_nothing_is_read_behind_a_stream() -> None:
    """A stream that ends where memory does, its last part of no bits beginning there; a read behind it ends
    the process.
    """
    ended = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr or ended.returncode
