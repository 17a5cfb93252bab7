"""Unit tier, no ranks: an interrupt at any line of a tracker loses no change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dte_dist import DeltaTracker, Payload, reconstruct_against_base
from dte_dist.detect import snapshot as module
from tests.unit.sync.broken_off import LATER, OLD, every_line
from tests.unit.sync.pair import same_bits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of a few changes and ranges of one segment, of a few hundred elements."""
    monkeypatch.setattr(module, "_BATCH_CHANGES", 2)


class Told:
    """A tracker at version 1, its weights a step further, and a copy that gets what arrives."""

    def __init__(self) -> None:
        self.tracker, self.weights = DeltaTracker(), {name: tensor.clone() for name, tensor in OLD.items()}
        self.copy = {name: torch.zeros_like(tensor) for name, tensor in OLD.items()}
        self.arrives(self.tracker.diff(self.weights, 1))
        self.tracker.commit()
        self.steps = 0
        self.step()

    def step(self) -> None:
        """As that of `Line`."""
        for name, places in LATER.items():
            self.weights[name][torch.tensor(places) + self.steps] += 1
        self.steps += 1

    def arrives(self, payload: Payload) -> None:
        self.copy = reconstruct_against_base(payload, self.copy)

    def is_right(self) -> bool:
        """Whether the copy comes to what the weights are, and a step more by a payload more."""
        for _ in range(2):
            self.step()
            self.arrives(self.tracker.diff(self.weights, max(self.tracker._state.newest, 2) + 1))
            self.tracker.commit()
            if not same_bits(self.weights, self.copy):
                return False
        return True


@pytest.mark.slow
def test_an_interrupted_diff_or_rollback_of_a_tracker_loses_no_change() -> None:
    """Nor is what was made in its place taken for it: it is of another run."""
    lineages: list[int] = []

    def diff() -> tuple[Told, Callable[[], object]]:
        told = Told()
        return told, lambda: told.tracker.diff(told.weights, 2)

    def rollback() -> tuple[Told, Callable[[], object]]:
        told = Told()
        told.tracker.diff(told.weights, 2)
        return told, told.tracker.rollback

    def arrived() -> tuple[Told, Callable[[], object]]:
        """As an engine whose transport failed after it had sent."""
        told, call = rollback()
        lineages[:] = [told.tracker._pending.lineage]  # type: ignore[union-attr]
        return told, call

    for where, told in every_line(arrived):
        told.step()
        assert told.tracker.diff(told.weights, 3).lineage != lineages[0], where
        told.tracker.rollback()

    def diff_in_full() -> tuple[Told, Callable[[], object]]:
        told = Told()
        return told, lambda: told.tracker.diff(told.weights, 2, full=True)

    for start in (diff, rollback, diff_in_full):
        for where, told in every_line(start):
            assert told.is_right(), (start.__name__, where)


@pytest.mark.parametrize("full", [False, True], ids=["delta", "full"])
@pytest.mark.parametrize("arrived", [False, True], ids=["lost", "arrived"])
def test_an_interrupted_commit_of_a_tracker_is_made_good_whether_or_not_the_payload_arrived(
    full: bool, arrived: bool
) -> None:
    """The next payload starts from what was committed, or holds everything; a receiver can tell by its
    version and lineage.
    """
    second: list[Payload] = []

    def start() -> tuple[Told, Callable[[], object]]:
        told = Told()
        second[:] = [told.tracker.diff(told.weights, 2, full=full)]
        if arrived:
            told.arrives(second[0])
        return told, told.tracker.commit

    for where, told in every_line(start):
        told.step()
        payload = told.tracker.diff(told.weights, 3)
        assert payload.full or payload.base_version == told.tracker.version, where
        # As a receiver notices: a gap, or another run.
        if not payload.full and payload.base_version != (2 if arrived else 1):
            assert payload.base_version == 2 or payload.lineage != second[0].lineage, where
            continue
        told.arrives(payload)
        assert same_bits(told.weights, told.copy), where
        told.tracker.commit()
        assert told.is_right(), where
