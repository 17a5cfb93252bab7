"""Tensors that are read as another dtype than theirs: cast on the way, to the bits that torch casts to in one
dimension.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect.snapshot import Snapshot
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.cpu import arguments, scan_loops
from dte_dist.tensors.flat import BITS, FlatTensors

both = pytest.mark.parametrize("kernel", [cpu, torch_kernels], ids=["cpu", "torch"])

OWN = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int16,
    torch.int64,
    torch.bool,
]
WIRE = {
    1: [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8],
    2: [torch.bfloat16, torch.float16, torch.int16],
    4: [torch.float32],
    8: [torch.float64],
}


def singles(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(bits, np.uint32).view(np.int32).copy()).view(torch.float32)


def as_torch_casts(tensors: list[Tensor], dtypes: list[torch.dtype], width: int) -> Tensor:
    """Return the bits of tensors, each cast in one dimension."""
    flat = [tensor.detach().clone(memory_format=torch.contiguous_format).view(-1) for tensor in tensors]
    return torch.cat([tensor.to(dtype).view(BITS[width]) for tensor, dtype in zip(flat, dtypes, strict=True)])


def test_rounding_of_all_exponents_and_all_kinds_of_halves() -> None:
    """All upper halves (signs, exponents, NaNs, infinities, subnormals) with lower halves below, at and above
    a tie.
    """
    assert kernels.rounds_as_torch(), "on this processor the loops are to do it themselves"
    low = np.array(
        [0, 1, 2, 0x1234, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF], np.uint32
    )
    live = singles(((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low).ravel())
    flat, bits = FlatTensors([live], 2).read_as([torch.bfloat16]), torch.zeros(len(live), dtype=torch.int16)
    assert flat.table.kinds.tolist() == [-1]
    assert not flat.cast.any()
    cpu.read(flat, 0, bits)
    assert torch.equal(bits, live.to(torch.bfloat16).view(torch.int16))


def test_what_the_loops_cannot_round_as_torch_does_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "rounds_as_torch", lambda: False)
    live = singles(np.array([0x7FC00000, 0x3F808000, 0x3F818000]))
    flat, bits = FlatTensors([live], 2).read_as([torch.bfloat16]), torch.zeros(3, dtype=torch.int16)
    assert flat.cast.all() and not flat.table.kinds.any()
    cpu.read(flat, 0, bits)
    assert torch.equal(bits, live.to(torch.bfloat16).view(torch.int16))


def test_a_processor_that_casts_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments.rounds_as_torch.__wrapped__()
    monkeypatch.setattr(scan_loops, "to_bf16", lambda _, count, to: ctypes.memset(to, 0, 2 * count))
    assert not arguments.rounds_as_torch.__wrapped__()


def is_sound(own: torch.dtype, wire: torch.dtype) -> bool:
    """Return whether torch casts a pair to the same bits wherever the element stands; what becomes of a large
    float is not settled.
    """
    return wire.is_floating_point or not own.is_floating_point


@st.composite
def spaces(draw):
    """Draw tensors of several dtypes, some strided, and what they are read as.

    NaNs are left out where torch casts them to one pattern in its vectors and to another one after them (fp64
    to bf16, fp16 to fp32).
    """
    width = draw(st.sampled_from([1, 2, 4, 8]))
    pair = st.tuples(st.sampled_from(OWN), st.sampled_from(WIRE[width])).filter(lambda pair: is_sound(*pair))
    pairs = draw(st.lists(pair, min_size=1, max_size=3))
    tensors, dtypes = [], []
    for number in range(draw(st.integers(1, 8))):
        own, wire = draw(st.sampled_from(pairs))
        shape = draw(st.sampled_from([(), (0,), (1,), (7,), (70,), (3, 50), (2, 3, 4), (5, 0, 2), (300,)]))
        data = np.random.default_rng(number).integers(
            0, 256, (int(np.prod(shape)) + 1) * own.itemsize, np.uint8
        )
        tensor = torch.from_numpy(data % 2 if own == torch.bool else data).view(own)[:-1].view(shape)
        if own.is_floating_point and own != wire and (own, wire) != (torch.float32, torch.bfloat16):
            tensor = torch.where(tensor.float().isnan(), 1.5, tensor.double()).to(own)
        if len(shape) > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        tensors.append(torch.nn.Parameter(tensor) if own == torch.float32 and draw(st.booleans()) else tensor)
        dtypes.append(wire)
    return width, tensors, dtypes


@both
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mixture_is_read_as_torch_casts_it(kernel: ModuleType, data: st.DataObject) -> None:
    width, tensors, dtypes = data.draw(spaces())
    expected = as_torch_casts(tensors, dtypes, width)
    starts = np.cumsum([0, *(tensor.numel() for tensor in tensors)])
    flat = FlatTensors([*tensors], width, starts).read_as(dtypes)
    begin = data.draw(st.integers(0, len(flat)))
    end = data.draw(st.integers(begin, len(flat)))
    out = torch.zeros(end - begin, dtype=BITS[width])
    kernel.read(flat, begin, out)
    assert torch.equal(out, expected[begin:end])
    noise = np.random.default_rng(0).random(end - begin) < data.draw(st.sampled_from([0.0, 0.05, 1.0]))
    before = expected[begin:end] ^ torch.from_numpy(noise).to(expected.dtype)
    known, positions = before.clone(), torch.zeros(end - begin, dtype=torch.int32)
    old, new = torch.zeros(2, end - begin, dtype=BITS[width]).unbind()
    count = kernel.advance(flat, begin, end, known, positions, old, new)
    assert count == noise.sum()
    assert count == end - begin or positions[:count].tolist() == np.flatnonzero(noise).tolist()
    assert torch.equal(old[:count], before[torch.from_numpy(noise)])
    assert torch.equal(new[:count], expected[begin:end][torch.from_numpy(noise)])
    assert torch.equal(known, expected[begin:end])


def test_nothing_is_cast_where_all_is_as_on_the_wire() -> None:
    flat = FlatTensors([torch.zeros(3), torch.zeros(2, dtype=torch.int32)], 4)
    assert flat.read_as([torch.float32, torch.int32]) is flat


def test_what_is_cast_cannot_be_written() -> None:
    live = torch.zeros(5)
    flat = FlatTensors([live], 2).read_as([torch.bfloat16])
    place, bits = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int16)
    for call in (lambda: cpu.write(flat, 0, bits), lambda: cpu.scatter(flat, place, bits)):
        with pytest.raises(ValueError, match="can only be read"):
            call()
    assert not live.any()


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_a_snapshot_of_many_cast_tensors(own: torch.dtype) -> None:
    """Segments cut through tensors; changes below half a unit of the wire dtype are none, and NaNs stay what
    they are.
    """
    rng = np.random.default_rng(3)
    tensors = [torch.from_numpy(rng.standard_normal(size)).to(own) for size in rng.integers(1, 60, 300)]
    tensors[7].fill_(float("nan" if own == torch.float32 else "inf"))
    starts = np.cumsum([0, *map(len, tensors)])
    total = int(starts[-1])
    segments = [(first, min(1000, total - first)) for first in range(0, total, 1000)]
    snapshot = Snapshot({2: total}, torch.device("cpu"), 1000)

    def live() -> FlatTensors:
        return FlatTensors([*tensors], 2, starts).read_as([torch.bfloat16] * len(tensors))

    snapshot.refresh({2: live()}, [(2, *segment) for segment in segments])
    before = as_torch_casts(tensors, [torch.bfloat16] * len(tensors), 2)
    assert torch.equal(snapshot.bits[2], before)
    for tensor in tensors:
        tensor.add_(torch.from_numpy(rng.standard_normal(len(tensor)) * 1e-3))
    after = as_torch_casts(tensors, [torch.bfloat16] * len(tensors), 2)
    found = [
        (changed.first + changed.positions).tolist()
        for batch in snapshot.changes(live(), 2, segments)
        for changed in batch
    ]
    assert [place for places in found for place in places] == (before != after).nonzero().view(-1).tolist()
    assert 0 < sum(map(len, found)) < total // 2
    assert torch.equal(snapshot.bits[2], after)
    snapshot.roll_back()
    assert torch.equal(snapshot.bits[2], before)
