"""Steps whose positions partly come again, and the kernels that work on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import FrameHead
from dte_dist.codec.value_codecs import Values
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from tests.unit.kernels.test_index_codecs import segments

KERNELS = {"cpu": cpu, "torch": torch_kernels}


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on", lambda device: KERNELS[kind])


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions of two deltas in one segment, and its length: nothing, some or all of the first comes again
    in the second.
    """
    previous, length = draw(segments())
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    again = previous[rng.random(len(previous)) < draw(st.sampled_from([0.0, 0.3, 0.84, 0.99, 1.0]))]
    fresh = np.flatnonzero(rng.random(length) < draw(st.sampled_from([0.0, 0.0005, 0.01, 0.3])))
    return previous, np.union1d(again, fresh).astype(np.int32), length


def head_at(version: int, **fields: int) -> FrameHead:
    shape = {
        "schema": 1,
        "lineage": 9,
        "source": 0,
        "number": 0,
        "count": 1,
        "width": 2,
        "first": 0,
        "length": 1 << 20,
    }
    return FrameHead(**{**shape, "base": version - 1, "version": version, **fields})


def positions_of(rng: np.random.Generator, length: int, share: float) -> Tensor:
    return torch.from_numpy(np.flatnonzero(rng.random(length) < share).astype(np.int32))


def after(rng: np.random.Generator, previous: Tensor, length: int, overlap: float) -> Tensor:
    """Return as many positions, of which so many were there before."""
    kept = previous.numpy()[rng.random(len(previous)) < overlap]
    fresh = np.flatnonzero(rng.random(length) < (1 - overlap) * len(previous) / length)
    return torch.from_numpy(np.union1d(kept, fresh).astype(np.int32))


def ones(count: int) -> Values:
    return Values(torch.ones(count, dtype=torch.int32), True, 2)
