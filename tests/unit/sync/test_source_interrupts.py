"""Unit tier, no ranks: an interrupt at any line of a source; afterwards it sends everything that differs,
or all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dte_dist.detect import snapshot as module
from dte_dist.detect.detector import Detector
from dte_dist.report import Phases
from tests.unit.detect.snapshots import exact
from tests.unit.sync.broken_off import Line, every_line
from tests.unit.sync.pair import STREAM


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of a few changes and ranges of one segment, of a few hundred elements."""
    monkeypatch.setattr(module, "_BATCH_CHANGES", 2)


def prepare(pair: Line) -> Callable[[], object]:
    return pair.sends


def prepare_again(pair: Line) -> Callable[[], object]:
    """After a try that failed: what it took over goes back first."""
    pair.sends()
    pair.step()
    return pair.sends


def prepare_in_full(pair: Line) -> Callable[[], object]:
    return lambda: pair.source.prepare(2, True, Phases())


def roll_back(pair: Line) -> Callable[[], object]:
    pair.sends()
    return pair.source.rollback


def detach(pair: Line) -> Callable[[], object]:
    pair.sends()
    return pair.source.detach


SOURCES = {each.__name__: each for each in (prepare, prepare_again, prepare_in_full, roll_back, detach)}


@pytest.mark.slow
@pytest.mark.parametrize("detector", [None, exact], ids=["alone", "detector"])
@pytest.mark.parametrize("what", SOURCES.values(), ids=SOURCES)
def test_an_interrupted_source_sends_all_that_differs_next(
    what: Callable[[Line], Callable[[], object]], detector: Detector | None
) -> None:
    """Nothing of it was delivered: by a delta that starts from what the receiver holds, or by a seed."""
    ways = set()

    def start() -> tuple[Line, Callable[[], object]]:
        pair = Line(detector)
        return pair, what(pair)

    for where, pair in every_line(start):
        pair.step()
        ways.add(pair.follows())
        assert pair.is_right(), where
    assert ways == {"detach": {"delta", "seed"}, "prepare_in_full": {"delta", "seed"}}.get(
        what.__name__, ways | {"delta"}
    )


def test_an_interrupted_commit_of_a_source_whose_receivers_committed() -> None:
    """They hold a version that the source may not know of: it seeds them, or goes on from there."""
    ways = set()

    def start() -> tuple[Line, Callable[[], object]]:
        pair = Line()
        assert pair.deliver(pair.prepare()) is None
        pair.receiver.apply()
        pair.receiver.commit(2, STREAM)
        return pair, lambda: pair.source.commit(2, STREAM, full=False, all_follow=True)

    for where, pair in every_line(start):
        pair.step()
        ways.add(pair.follows())
        assert pair.is_right(), where
    assert "seed" in ways


@pytest.mark.slow
def test_an_interrupted_source_that_remembers_positions_of_the_last_delta() -> None:
    """With `codec="small"` a delta may count on the one before; what was interrupted costs at most that."""

    def start() -> tuple[Line, Callable[[], object]]:
        pair = Line(codec="small")
        assert pair.follows() == "delta"
        pair.step()
        return pair, pair.sends

    for where, pair in every_line(start):
        pair.step()
        assert pair.follows() == "delta" or where.startswith("snapshot.py"), where
        assert pair.is_right(), where
