"""Unit tier, no ranks: the bytes that positions of the delta before save on recorded and made AdamW steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist.codec import CodecSelector
from dte_dist.report import Phases
from tests.unit.sync.pair import STREAM, Pair

DATA = Path(__file__).parents[2] / "data" / "adamw_steps.npz"


def each_change(codec: str, before: Tensor, steps: list[Tensor]) -> tuple[list[float], list[float]]:
    """Return bytes of frames for each change, and of index streams alone, step by step."""
    pair = Pair({"w": before.clone().view(torch.bfloat16)}, bucket_bytes=16 << 20)
    sizes, of_index = [], []
    for number, after in enumerate(steps):
        pair.trained["w"].view(torch.int16).copy_(after)
        pair.source.prepare(number + 2, False, Phases(), selector=CodecSelector(codec))
        frames = pair.source.frames()
        assert pair.deliver(frames) is None
        pair.receiver.apply()
        pair.receiver.commit(number + 2, STREAM)
        pair.source.commit(number + 2, STREAM, full=False, all_follow=True)
        assert torch.equal(pair.copy["w"].view(torch.int16), after)
        sizes.append(sum(map(len, frames)) / pair.source.changed)
        entries = [row for frame in frames if len(frame) for row in table_of(frame)]
        of_index.append(sum(entries) / pair.source.changed)
    return sizes, of_index


def table_of(frame: Tensor) -> list[int]:
    """Return the bytes of the index streams of a frame."""
    segments = int(frame[88:92].view(torch.int32))
    return (
        frame[96 : 96 + 40 * segments].view(-1, 40)[:, 16:20].contiguous().view(torch.int32).view(-1).tolist()
    )


def pure_bf16(rate: float, count: int = 2 << 20, steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Return weights and what they become: bf16 without masters, updates that go on for a while, as those of
    Adam do.
    """
    rng = torch.Generator().manual_seed(0)
    weights = (torch.randn(count, generator=rng) * 0.04).bfloat16()
    update = torch.randn(count, generator=rng)
    first, states = weights.clone().view(torch.int16), []
    for _ in range(steps):
        update = 0.9 * update + 0.19**0.5 * torch.randn(count, generator=rng)
        weights = (weights.float() + rate * 0.5 * update).bfloat16()
        states.append(weights.view(torch.int16))
    return first, states


def recorded_bf16(steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Return a recorded step of pure bf16, and steps after it that change 84 % of the same elements by its
    distances.
    """
    with np.load(DATA) as data:
        positions = np.cumsum(data["bf16_gaps"], dtype=np.int64)
        states = torch.zeros((2, int(data["total"])), dtype=torch.int16)
        states[:, torch.from_numpy(positions)] = torch.from_numpy(
            np.stack([data["bf16_before"], data["bf16_after"]])
        )
    rng, (first, state) = np.random.default_rng(0), states
    moves, after = (states[1] - states[0])[torch.from_numpy(positions)].numpy(), [state]
    for _ in range(steps - 1):
        kept = positions[rng.random(len(positions)) < 0.84]
        positions = np.union1d(kept, rng.integers(0, len(first), int(0.16 * len(positions))))
        state = state.clone()
        state[torch.from_numpy(positions)] += torch.from_numpy(rng.choice(moves, len(positions)))
        after.append(state)
    return first, after


@pytest.mark.parametrize(
    "make",
    [recorded_bf16, lambda: pure_bf16(3e-6), lambda: pure_bf16(1e-5)],
    ids=["recorded", "3e-6", "1e-5"],
)
def test_pure_bf16_takes_half_the_bytes(make) -> None:
    """The first delta is as it was; then positions take a third of what they take with Elias-Fano alone."""
    first, states = make()
    (small, index), (plain, index_plain) = (
        each_change(codec, first, states) for codec in ("small", "ef+planes")
    )
    print(f"\nbytes a change {small} against {plain}; positions {index} against {index_plain}")
    assert small[0] == plain[0]
    assert all(ours < 0.65 * theirs for ours, theirs in zip(small[1:], plain[1:], strict=True))
    assert all(ours < 0.45 * theirs for ours, theirs in zip(index[1:], index_plain[1:], strict=True))


def test_with_masters_there_is_little_to_gain_and_nothing_to_lose() -> None:
    """A fifth of the positions come again; a frame is never larger for it."""
    rng = torch.Generator().manual_seed(0)
    masters = torch.randn(2 << 20, generator=rng) * 0.04
    first, states = masters.bfloat16().view(torch.int16), []
    for _ in range(3):
        masters = masters + 2e-6 * 0.23 * torch.randn(len(masters), generator=rng)
        states.append(masters.bfloat16().view(torch.int16))
    small, plain = (each_change(codec, first, states)[0] for codec in ("small", "ef+planes"))
    assert all(ours <= theirs for ours, theirs in zip(small, plain, strict=True))
