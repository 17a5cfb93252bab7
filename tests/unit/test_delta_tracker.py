"""Unit tier, no ranks: what a tracker finds, and that nothing advances before it commits."""

from __future__ import annotations

import pytest
import torch

from dte_dist import DeltaTracker


def test_the_rule_of_bytes() -> None:
    tracker, weights = DeltaTracker(), {"w": torch.zeros(100)}
    tracker.diff(weights, 0)
    tracker.commit()
    weights["w"][:50] = 1
    assert "w@delta_idx" in tracker.diff(weights, 1).tensors
    weights["w"][50] = 1
    assert "w" in tracker.diff(weights, 1).tensors
    assert not tracker.diff(weights, 1).full and tracker.version == 0


def test_only_bits_count_and_changes_cross_segments() -> None:
    zeros = {"nan": torch.full((4,), float("nan")), "big": torch.zeros((1 << 20) + 100), "zero": torch.zeros(1000), "end": torch.zeros(7)}
    tracker = DeltaTracker()
    tracker.diff(zeros, 1)
    tracker.commit()
    assert len(tracker.diff(zeros, 2).tensors) == 1
    tracker.commit()
    zeros["zero"][5] = -0.0
    zeros["big"][[0, (1 << 20) - 5, (1 << 20) - 4, (1 << 20) + 99]] = 1.0
    tensors = tracker.diff(zeros, 3).tensors
    assert tensors["zero@delta_idx"].tolist() == [5] and "nan@delta_idx" not in tensors and "end@delta_idx" not in tensors
    assert tensors["big@delta_idx"].tolist() == [0, (1 << 20) - 5, (1 << 20) - 4, (1 << 20) + 99]


def test_tracker_commit_and_rollback() -> None:
    tracker, weights = DeltaTracker(), {"w": torch.zeros(1000)}
    with pytest.raises(RuntimeError, match="nothing to commit"):
        tracker.commit()
    assert tracker.diff(weights, 1).full
    tracker.rollback()
    assert tracker.diff(weights, 1).full and tracker.version == -1
    tracker.commit()
    weights["w"][1] = 1
    assert tracker.diff(weights, 2).tensors["w@delta_idx"].tolist() == [1]
    tracker.rollback()
    weights["w"][2] = 1
    assert tracker.diff(weights, 2).tensors["w@delta_idx"].tolist() == [1, 2]
