"""An interrupt at any line leaves the bits of a snapshot where it says they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dte_dist import kernels
from dte_dist.detect import snapshot as module
from dte_dist.detect.detector import Detector
from dte_dist.detect.snapshot import Snapshot
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from tests.unit.detect.snapshots import SEGMENT, Failing, Found, Model, exact, heals, too_many
from tests.unit.interrupts import at_every_line

KERNELS = [cpu, torch_kernels]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments at once and a batch of 40 changes: a few hundred elements make many of both."""
    monkeypatch.setattr(module, "_RANGE_SEGMENTS", 2)
    monkeypatch.setattr(module, "_BATCH_CHANGES", 40)


@pytest.fixture(params=KERNELS, ids=["cpu", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run a test with the kernels of both kinds of device, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield request.param


FILE = "detect/snapshot.py"


class Restart:
    """One model that is set up again for every interrupt: known bits, and live ones that differ from them."""

    def __init__(self, pattern: str, sizes: dict[int, list[int]]) -> None:
        self.model = model = Model(sizes)
        self.before = {width: model.known(width) for width in sizes}
        for width in sizes:
            model.change(width, pattern, 3)
        self.live = {width: model.bits(width) for width in sizes}
        self.differ = {
            width: np.flatnonzero(self.before[width] != self.live[width]).tolist() for width in sizes
        }
        assert all(self.differ.values())

    def __call__(self, taken: bool = False) -> Model:
        """Return the model as at first; or once all is taken over, and may be settled or undone."""
        for width, bits in self.before.items():
            self.model.set(width, bits)
        self.model.refresh()
        for width, bits in self.live.items():
            self.model.set(width, bits)
        if taken:
            self.model.take_over()
        return self.model

    def is_as_before(self) -> bool:
        return all(np.array_equal(self.model.known(width), bits) for width, bits in self.before.items())

    def finds_all(self) -> bool:
        """Find what differs, from where the snapshot stands."""
        return all(
            [at for batch in self.model.advance(width) for each in batch for at in Found.of(each).places]
            == places
            for width, places in self.differ.items()
        )


FEW = {2: [33, 50, 40], 8: [60]}
PATTERN = pytest.mark.parametrize("pattern", ["some", "0.3", "everything"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "detector"),
    [("some", None), ("everything", None), ("0.3", exact), ("everything", exact), ("some", too_many)],
)
def test_an_interrupt_at_any_line_of_advance(
    kernel: Any, small: None, pattern: str, detector: Detector | None
) -> None:
    """Over several ranges and batches: the snapshot is of no version, or goes back to what was known, and
    finds all that differs again.
    """
    restart, torn, places = Restart(pattern, FEW), 0, set()

    def start() -> Callable[[], None]:
        model = restart()
        return lambda: model.take_over(detector)

    for where in at_every_line(start, FILE):
        snapshot = restart.model.snapshot
        places.add(where.split(":")[1])
        if snapshot.inconsistent:
            torn += 1
            if torn % 10 == 1:
                heals(restart.model)
            continue
        snapshot.roll_back()
        assert not snapshot.inconsistent and restart.is_as_before(), where
        assert restart.finds_all(), where
    assert {"changes", "_cut", "_update_range", "_record"} <= places and ("_detected" in places) == (
        detector is not None
    )
    assert torn


@PATTERN
def test_an_interrupt_of_who_takes_the_waves_tears_nothing(kernel: Any, small: None, pattern: str) -> None:
    """Whatever it does between two batches, the snapshot is between two batches."""
    restart = Restart(pattern, FEW)
    for enough in range(8):
        model = restart()
        batches = [model.advance(width) for width in FEW]
        for _ in islice((batch for each in batches for batch in each), enough):
            assert not model.snapshot.inconsistent
        model.snapshot.roll_back()
        assert not model.snapshot.inconsistent and restart.is_as_before() and restart.finds_all()


@PATTERN
def test_an_interrupt_at_any_line_of_undo_settle_or_refresh(kernel: Any, small: None, pattern: str) -> None:
    restart = Restart(pattern, FEW)
    for where in at_every_line(lambda: restart(True).snapshot.roll_back, FILE):
        restart.model.snapshot.roll_back()
        assert restart.model.snapshot.inconsistent or (restart.is_as_before() and restart.finds_all()), where
    for where in at_every_line(lambda: restart(True).snapshot.commit, FILE):
        assert (
            not restart.model.snapshot.inconsistent and restart.model.everything() == restart.model.lives()
        ), where
        restart.model.snapshot.roll_back()
        assert restart.is_as_before(), where

    def start() -> Callable[[], None]:
        return restart().refresh

    for where in at_every_line(start, FILE):
        if not restart.model.snapshot.inconsistent:
            assert restart.is_as_before() or restart.model.everything() == restart.model.lives(), where
            restart.model.snapshot.roll_back()
            assert restart.is_as_before() or restart.model.everything() == restart.model.lives(), where


def test_an_interrupt_at_any_line_of_a_move_leaves_bits_where_the_snapshot_says(kernel: Any) -> None:
    """Else the next sync would not move them again, and no later one would find anything."""
    meta, model = torch.device("meta"), Model(FEW)

    def start() -> Callable[[], None]:
        model.snapshot = Snapshot(model.totals, torch.device("cpu"), SEGMENT)
        return lambda: model.snapshot.move(meta)

    for where in at_every_line(start, FILE):
        assert model.snapshot.device != meta or all(
            bits.device == meta for bits in model.snapshot.bits.values()
        ), where
        model.snapshot.move(meta)
        assert model.snapshot.device == meta and all(
            bits.device == meta for bits in model.snapshot.bits.values()
        )


@pytest.mark.parametrize("how", ["of undo", "of the next advance"])
def test_an_advance_that_was_left_and_ends_later_does_not_mend_what_broke_since(
    kernel: Any, small: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As one that an interrupt's traceback kept: its end comes at any time, in the middle of another one
    too.
    """
    monkeypatch.setattr(module, "_BATCH_CHANGES", 5)
    restart = Restart("some", FEW)
    model = restart()
    left = model.advance(2)
    next(left)
    if how == "of undo":
        name, at, call = "scatter_1d", 0, model.snapshot.roll_back
    else:
        model.snapshot.roll_back()
        name, at, call = "advance", 1, model.take_over
    model.snapshot._kernels = Failing(kernel, name, at, True)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        call()
    model.snapshot._kernels = kernel
    assert model.snapshot.inconsistent
    left.close()
    heals(model)
