"""A snapshot finds changes and takes them over, in ranges and batches; detectors of the caller that fail
leave it as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect import snapshot as module
from dte_dist.detect.detector import Detector
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from tests.unit.detect.snapshots import SIZES, Found, Model, Spans, exact, too_many
from tests.unit.kernels.test_scan_advance import PATTERNS

KERNELS = [cpu, torch_kernels]
both = pytest.mark.parametrize("kernel", KERNELS, ids=["cpu", "torch"])


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


# Finding ----------------------------------------------------------------------------------------------------


def check_batches(batches: list[list[Found]], spans: Spans, segment: int, most: int) -> None:
    """Waves end once they have enough; ranges ascend, are whole segments of a span, and have changes."""
    for batch in batches[:-1]:
        assert sum(len(found.new) for found in batch) >= most
    for batch in batches:
        assert sum(len(found.new) for found in batch[:-1]) < most
    border, left = 0, iter(spans)
    begin, length = next(left, (0, 0))
    for found in (found for batch in batches for found in batch):
        assert found.first >= border
        while found.first >= begin + length:
            begin, length = next(left)
        border = found.first + found.length
        assert begin <= found.first and border <= begin + length
        assert (found.first - begin) % segment == 0 and (
            (border - begin) % segment == 0 or border == begin + length
        )
        assert len(found.new) == len(found.old) > 0
        assert found.positions is None or len(found.positions) == len(found.new) < found.length


@both
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_changes_are_found_taken_over_and_undone(kernel: Any, data: st.DataObject) -> None:
    width, detector = (
        data.draw(st.sampled_from([1, 2, 4, 8])),
        data.draw(st.sampled_from([None, None, exact, too_many])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: kernel)
        patch.setattr(module, "_RANGE_SEGMENTS", data.draw(st.sampled_from([1, 2, 8])))
        patch.setattr(module, "_BATCH_CHANGES", most := data.draw(st.sampled_from([1, 7, 40, 300, 1 << 21])))
        model = Model(
            {width: data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=6))},
            data.draw(st.sampled_from([1, 16, 64, 500])),
        )
        total = model.totals[width]
        cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
        spans = [(low, high - low) for low, high in pairwise(cuts)]
        model.change(width, data.draw(st.sampled_from(sorted(PATTERNS))), data.draw(st.integers(0, 99)))
        before, live = model.known(width), model.bits(width)
        enough = data.draw(st.sampled_from([None, None, 1, 2]))
        batches = [
            [Found.of(changed) for changed in batch]
            for batch in islice(model.advance(width, spans, detector), enough)
        ]
        batches = [batch for batch in batches if batch]
        found = [changed for batch in batches for changed in batch]
        places, changes = (
            [at for changed in found for at in changed.places],
            np.flatnonzero(before != live).tolist(),
        )
        if enough is None:
            assert {*changes} <= {*places} if detector is too_many else changes == places
            assert np.array_equal(model.known(width), live)
            check_batches(batches, spans, model.snapshot._segment, most)
        assert [bit for changed in found for bit in changed.old] == before[places].tolist()
        assert [bit for changed in found for bit in changed.new] == live[places].tolist()
        assert not model.snapshot.inconsistent
        model.snapshot.roll_back()
        assert np.array_equal(model.known(width), before) and not model.snapshot.inconsistent
        assert np.array_equal(model.bits(width), live)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["everything", "0.3", "tiny"])
def test_batches_of_the_size_that_there_is(pattern: str) -> None:
    """With nothing made small: some millions of bytes, in two chunks that are no multiples of a segment."""
    total, segment = 5_000_000, 1 << 20
    model = Model({1: [total]}, segment)
    model.change(1, pattern, 5)
    before, live, spans = (
        model.known(1),
        model.bits(1),
        [(0, 3 * segment + 12345), (3 * segment + 12345, total - 3 * segment - 12345)],
    )
    changed, batches = np.zeros(total, bool), 0
    for batch in model.advance(1, spans):
        batches += 1
        for found in batch:
            here = changed[found.first : found.first + found.length]
            assert not here.any()
            here[slice(None) if found.positions is None else found.positions.numpy()] = True
            assert np.array_equal(found.old.numpy(), before[found.first : found.first + found.length][here])
            assert np.array_equal(found.new.numpy(), live[found.first : found.first + found.length][here])
    assert np.array_equal(changed, before != live) and np.array_equal(model.known(1), live)
    assert batches == {"everything": 2, "0.3": 1, "tiny": 1}[pattern]
    model.snapshot.roll_back()
    assert np.array_equal(model.known(1), before)


# Detectors --------------------------------------------------------------------------------------------------


def failing_at(call: int, how: str) -> Detector:
    """Return a detector that is right until a call, which raises or returns nonsense."""
    calls = []

    def detector(live: Tensor, known: Tensor) -> Tensor:
        calls.append(len(live))
        if len(calls) <= call:
            return exact(live, known)
        if how == "raises":
            raise ZeroDivisionError
        return (
            torch.tensor([1, 1])
            if how == "not ascending"
            else torch.tensor([len(live)])
            if how == "outside"
            else live != known
        )

    return detector


NOTED = [("nothing", 0), ("some", 0), ("everything", 0), ("everything", 2)]
NOT_NOTED = [("nothing", 1), ("some", 2), ("some", 9), ("everything", 1)]


@pytest.mark.parametrize("how", ["raises", "not ascending", "outside", "a mask"])
@pytest.mark.parametrize(("pattern", "call"), [*NOTED, *NOT_NOTED])
def test_a_detector_that_fails_leaves_the_snapshot_as_it_was(
    kernel: Any, small: None, how: str, pattern: str, call: int
) -> None:
    """In the first range, and in a later one: when those before it have been noted, and when they have
    not.
    """
    model = Model(SIZES)
    before = model.everything()
    for width in SIZES:
        model.change(width, pattern, 2)
    with pytest.raises(ZeroDivisionError if how == "raises" else ValueError):
        model.take_over(failing_at(call, how))
    model.snapshot.roll_back()
    assert model.everything() == before and not model.snapshot.inconsistent
    model.take_over()
    assert model.everything() == model.lives()


def test_a_detector_that_names_what_did_not_change(kernel: Any, small: None) -> None:
    model = Model(SIZES)
    before = model.everything()
    for width in SIZES:
        model.change(width, "tiny", 2)
    found = [
        Found.of(changed)
        for batch in model.advance(4, detector=lambda live, known: torch.arange(len(live)))
        for changed in batch
    ]
    assert (
        all(changed.positions is None for changed in found)
        and sum(changed.length for changed in found) == model.totals[4]
    )
    model.snapshot.roll_back()
    assert model.everything() == before
