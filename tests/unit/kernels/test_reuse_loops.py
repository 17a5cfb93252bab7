"""The kernels of the index codec `again`, of both modules."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.sizes import bitmap_nbytes
from tests.unit import codec_reference as reference
from tests.unit.codec.histories import steps

both = pytest.mark.parametrize("kernel", [cpu, torch_kernels], ids=["cpu", "torch"])


@both
@settings(max_examples=80, deadline=None)
@given(steps())
def test_kernels(kernel: ModuleType, step: tuple[np.ndarray, np.ndarray, int]) -> None:
    previous, positions, _ = step
    known, now = torch.from_numpy(previous), torch.from_numpy(positions)
    plane, fresh = kernel.split_again(known, now)
    assert plane.numpy().tobytes() == reference.words(np.isin(previous, positions))
    assert fresh.dtype == torch.int32 and fresh.tolist() == np.setdiff1d(positions, previous).tolist()
    assert kernel.count_again(plane, len(known)) == len(now) - len(fresh)
    joined = kernel.join_again(known, plane, fresh, len(now))
    assert joined.dtype == torch.int32 and torch.equal(joined, now)


@both
@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 130])
def test_bits_beyond_the_previous_positions(kernel: ModuleType, size: int) -> None:
    plane = torch.zeros(bitmap_nbytes(size), dtype=torch.uint8)
    for bit in range(8 * len(plane)):
        plane.zero_()
        plane[bit // 8] = 1 << bit % 8
        assert kernel.count_again(plane, size) == (1 if bit < size else -1)
