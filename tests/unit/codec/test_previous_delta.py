"""The history that `again` counts on: the positions of one version, within any range."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec import PreviousDelta
from dte_dist.codec.previous_delta import DeltaPositions
from tests.unit.codec.histories import head_at


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3000), st.data())
def test_places_within_any_range(seed: int, total: int, data: st.DataObject) -> None:
    """Whatever segments the positions came in; gaps between segments are those that were sent whole or did
    not change.
    """
    rng, origin = np.random.default_rng(seed), data.draw(st.sampled_from([0, 7, 1 << 40]))
    flags = rng.random(total) < data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    borders = [0, *sorted(rng.integers(0, total, rng.integers(0, 8)).tolist()), total]
    places = DeltaPositions()
    for low, high in pairwise(borders):
        if high > low and flags[low:high].any():
            if rng.random() < 0.2:
                flags[low:high] = False
                continue
            places.add(
                origin + low, high - low, torch.from_numpy(np.flatnonzero(flags[low:high]).astype(np.int32))
            )
    for _ in range(6):
        first, end = sorted(rng.integers(0, total + 1, 2).tolist())
        expected = np.flatnonzero(flags[first:end]).tolist()
        found = places.within(origin + first, end - first)
        assert (found is None) == (not expected)
        assert found is None or (found.dtype == torch.int32 and found.tolist() == expected)
    assert places.nbytes == 4 * int(flags.sum())


def test_positions_far_apart_in_a_chunk() -> None:
    """Chunks may be longer than 2^31 elements, segments 2^28."""
    places, most = DeltaPositions(), (1 << 28) - 1
    for first in (0, 1 << 28, 1 << 33):
        places.add(first, 1 << 28, torch.tensor([0, most], dtype=torch.int32))
    assert places.within(1 << 33, 1 << 28).tolist() == [0, most]
    assert places.within(most, 2).tolist() == [0, 1]
    assert places.within((1 << 33) + most, 1).tolist() == [0]
    assert places.within(1 << 34, 1 << 28) is None


def test_a_view_does_not_keep_what_it_is_a_view_of() -> None:
    frame = torch.zeros(1 << 20, dtype=torch.uint8)
    places = DeltaPositions()
    places.add(0, 100, frame[64:104].view(torch.int32))
    assert places.within(0, 100).untyped_storage().nbytes() == 40


def test_a_history_speaks_of_one_version() -> None:
    history, places = PreviousDelta(), DeltaPositions()
    places.add(0, 10, torch.tensor([1], dtype=torch.int32))
    history.record(head_at(2), places)
    assert history.before(head_at(3)) is None and history.nbytes == 4
    history.commit(2, 9)
    assert history.before(head_at(3)) is places
    others = [
        head_at(4),
        head_at(2),
        head_at(3, lineage=8),
        head_at(3, schema=2),
        head_at(3, source=1),
        head_at(3, number=1),
    ]
    assert all(history.before(other) is None for other in others)
    history.record(head_at(3), DeltaPositions())
    history.discard()
    assert history.before(head_at(3)) is places
    history.commit(3, 9)  # nothing changed
    assert history.before(head_at(3)) is None and history.before(head_at(4)) is None and history.nbytes == 0
    history.record(head_at(4), places)
    history.reset()
    history.commit(4, 9)
    assert history.before(head_at(5)) is None
