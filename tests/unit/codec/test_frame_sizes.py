"""How small frames are: real AdamW steps and made ones, against the entropy of positions that are independent
and of signed distances.

tests/data/adamw_steps.npz holds two single steps on 3.7 million weights of all-MiniLM-L6-v2: bf16 with fp32
masters at a learning rate of 1e-6, and pure bf16 at 3e-6; the gaps between the elements that changed, and
their bits before and after.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist.codec import CodecSelector
from dte_dist.detect.snapshot import Snapshot
from dte_dist.kernels import torch as torch_kernels
from dte_dist.plan.chunks import SEGMENT, ChunkPlan
from dte_dist.sync.frame_builder import Lane, Lanes
from dte_dist.sync.version import SyncStep
from dte_dist.tensors.flat import FlatTensors

DATA = Path(__file__).parents[2] / "data" / "adamw_steps.npz"


def recorded(name: str) -> tuple[Tensor, Tensor]:
    """Return bits before and after; elements that did not change are 0 in both."""
    with np.load(DATA) as data:
        positions = np.cumsum(data[f"{name}_gaps"], dtype=np.int64)
        states = torch.zeros((2, int(data["total"])), dtype=torch.int16)
        states[:, torch.from_numpy(positions)] = torch.from_numpy(
            np.stack([data[f"{name}_before"], data[f"{name}_after"]])
        )
    return states[0], states[1]


def made(rate: float, count: int = 4 << 20) -> tuple[Tensor, Tensor]:
    """Return bits before and after a step of AdamW with fp32 masters: a uniform residual, and an update of
    0.23 rates.
    """
    rng = torch.Generator().manual_seed(0)
    weights = (torch.randn(count, generator=rng) * 0.04).bfloat16().float()
    ulp = torch.ldexp(torch.ones(count), torch.frexp(weights)[1] - 8)
    masters = weights + (torch.rand(count, generator=rng) - 0.5) * ulp
    after = masters + rate * 0.23 * torch.randn(count, generator=rng)
    return masters.bfloat16().view(torch.int16), after.bfloat16().view(torch.int16)


def entropy(before: Tensor, after: Tensor) -> float:
    """Return the bytes that are needed at least, segment by segment."""
    bits = 0.0
    for known, new in zip(before.split(SEGMENT), after.split(SEGMENT), strict=True):
        share = float((known != new).sum()) / len(known)
        if 0 < share < 1:
            bits -= len(known) * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
        counts = torch.unique(torch_kernels.subtract(new, known)[known != new], return_counts=True)[
            1
        ].double()
        bits -= float((counts * (counts / counts.sum()).log2()).sum())
    return bits / 8


def written(before: Tensor, after: Tensor, codec: str) -> tuple[int, dict[str, int]]:
    """Return the bytes of all frames, and what they were written with."""
    chunks = ChunkPlan({0: {2: len(before)}}, 16 << 20).chunks(0)
    known = Snapshot({2: len(before)}, torch.device("cpu"), SEGMENT)
    known.bits[2].copy_(before)
    builder = Lanes(0, [Lane(None, chunks)]).builder(SyncStep(1, 2, 3, 4), known, CodecSelector(codec))
    live = FlatTensors([after], 2).read_as([torch.int16])
    for batch in known.changes(live, 2, [(chunk.first, chunk.length) for chunk in chunks]):
        for changed in batch:
            builder.add(2, changed)
    return sum(map(len, builder.collect())), dict(builder.codecs)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_recorded_steps(name: str) -> None:
    before, after = recorded(name)
    size, codecs = written(before, after, "small")
    assert set(codecs) == {"ef+planes"}
    assert size <= 1.15 * entropy(before, after)
    assert written(before, after, "fast")[0] > 2.2 * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "share", "factor", "each"),
    [
        (1e-6, 0.0053, 1.08, 1.45),
        (2.4e-6, 0.0112, 1.08, 1.35),
        (1e-5, 0.037, 1.1, 1.15),
        (1e-4, 0.218, 1.145, 0.9),
        (2e-4, 0.344, 1.12, 0.8),
    ],
)
def test_made_steps(rate: float, share: float, factor: float, each: float) -> None:
    """The more elements change, the further from the limit, and the fewer bytes for each."""
    before, after = made(rate)
    changed = int((before != after).sum())
    assert changed == pytest.approx(share * len(before), rel=0.1)
    size, _ = written(before, after, "small")
    assert size <= factor * entropy(before, after)
    assert size <= each * changed


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 0.97, 1.0])
@pytest.mark.parametrize("scale", [1, 3, 12])
def test_no_density_costs_more_than_0_6_of_all_elements(share: float, scale: int) -> None:
    """For distances of any scale that training has; with `fast` anything above a half does."""
    rng = torch.Generator().manual_seed(1)
    before = torch.randint(-(1 << 15), 1 << 15, (SEGMENT,), generator=rng).to(torch.int16)
    distances = (torch.randn(SEGMENT, generator=rng) * scale).round()
    distances = torch.where(distances == 0, 1, distances).to(torch.int16)
    after = torch.where(
        torch.rand(SEGMENT, generator=rng) < share, torch_kernels.add(before, distances), before
    )
    assert written(before, after, "small")[0] <= 0.6 * 2 * SEGMENT
