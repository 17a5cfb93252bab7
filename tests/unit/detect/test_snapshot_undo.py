"""A snapshot can go back until it is settled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dte_dist import kernels
from dte_dist.detect import snapshot as module
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from tests.unit.detect.snapshots import SIZES, Found, Model

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


@pytest.mark.parametrize(
    "pattern", ["nothing", "tiny", "some", "0.3", "most", "everything", "runs", "all but one"]
)
def test_many_widths_go_back_together(kernel: Any, small: None, pattern: str) -> None:
    model = Model(SIZES)
    before = model.everything()
    for number, width in enumerate(SIZES):
        model.change(width, pattern, number)
    model.take_over()
    assert model.everything() == model.lives()
    model.snapshot.roll_back()
    assert model.everything() == before
    model.snapshot.roll_back()  # there is nothing left to put back
    assert model.everything() == before and not model.snapshot.inconsistent


def test_after_undo_a_superset_is_found(kernel: Any, small: None) -> None:
    """Not what has changed back in the meantime; and what was there before is what it was before the first
    try.
    """
    model = Model(SIZES)
    before = {width: model.known(width) for width in SIZES}
    for attempt in range(3):
        for width in SIZES:
            model.change(width, "some", attempt)
        if attempt == 2:
            changed = model.bits(4)
            changed[:20] = before[4][:20]
            model.set(4, changed)
        for width in SIZES:
            found = [Found.of(changed) for batch in model.advance(width) for changed in batch]
            places = [at for each in found for at in each.places]
            assert places == np.flatnonzero(before[width] != model.bits(width)).tolist()
            assert [bit for each in found for bit in each.old] == before[width][places].tolist()
            assert attempt < 2 or width != 4 or places[0] >= 20
        model.snapshot.roll_back()
        assert model.everything() == {width: bits.tolist() for width, bits in before.items()}


def test_what_is_settled_is_not_undone(kernel: Any, small: None) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "0.3", 1)
    model.take_over()
    model.snapshot.commit()
    first = model.everything()
    model.snapshot.roll_back()
    assert model.everything() == first == model.lives()
    for width in SIZES:
        assert [*model.advance(width)] in ([], [[]])
        model.change(width, "some", 2)
    model.take_over()
    model.snapshot.roll_back()
    assert model.everything() == first


def test_batches_that_nobody_asked_for_are_not_taken_over(kernel: Any, small: None) -> None:
    """Whoever makes frames of a batch may fail: what is known then is the batches before it, and it, and all
    of them go back.
    """
    model = Model({4: [400]})
    before = model.known(4)
    model.change(4, "everything", 1)
    batches = model.advance(4)
    next(batches)
    taken = model.known(4) == model.bits(4)
    assert taken[:40].all() and not taken[80:].any() and not model.snapshot.inconsistent
    del batches
    model.snapshot.roll_back()
    assert np.array_equal(model.known(4), before) and not model.snapshot.inconsistent


def test_notes_take_memory_in_proportion_to_what_changed(kernel: Any) -> None:
    """Positions and bits of few changes; all bits of a range of which much changed."""
    model = Model({2: [40_000]}, 1000)
    for pattern, most in (
        ("nothing", 0),
        ("tiny", 20 * 6),
        ("some", 4200 * 6),
        ("most", 80_000),
        ("everything", 80_000),
    ):
        model.change(2, pattern, 3)
        model.take_over()
        notes = [
            part
            for note in model.snapshot.undo_log
            for part in (note.positions, note.bits)
            if part is not None
        ]
        assert (
            sum(
                {
                    part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in notes
                }.values()
            )
            <= most
        )
        model.snapshot.commit()
        assert not model.snapshot.undo_log


def test_a_range_that_changed_much_costs_the_others_nothing(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One range of a batch is kept whole, the others where they changed; all go back."""
    monkeypatch.setattr(module, "_RANGE_SEGMENTS", 1)
    model = Model({2: [40_000]}, 1000)
    before, bits = model.known(2), model.bits(2)
    bits[3000:4000] ^= 1
    bits[[5, 2999, 4000, 17_000, 39_999]] ^= 1
    model.set(2, bits)
    model.take_over()
    notes = [
        part for note in model.snapshot.undo_log for part in (note.positions, note.bits) if part is not None
    ]
    assert (
        sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in notes}.values())
        <= 2000 + 5 * 6
    )
    model.snapshot.roll_back()
    assert np.array_equal(model.known(2), before)
