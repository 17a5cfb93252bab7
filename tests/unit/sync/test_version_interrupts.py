"""Unit tier, no ranks: an interrupt at any line of a version chain, and that the interrupts of these tests
are such as a signal handler raises.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dte_dist.detect import snapshot as module
from dte_dist.sync.control import OTHER_CHANNEL, WRITTEN
from dte_dist.sync.version import NONE, VersionState
from tests.unit.interrupts import Interrupt
from tests.unit.sync.broken_off import Line, every_line


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of a few changes and ranges of one segment, of a few hundred elements."""
    monkeypatch.setattr(module, "_BATCH_CHANGES", 2)


def of_chain(
    call: Callable[[VersionState], object], version: int = 3
) -> Callable[[], tuple[VersionState, Callable[[], object]]]:
    def start() -> tuple[VersionState, Callable[[], object]]:
        state = VersionState(version=version, lineage=7, deltas=2, newest=3)
        return state, lambda: call(state)

    return start


def test_an_interrupted_move_is_made_or_leaves_no_version() -> None:
    found = set()
    for _, state in every_line(of_chain(lambda state: state.advance_to(4, 9, full=False))):
        found.add((state.version, state.lineage))
    assert {version for version, _ in found} == {3, NONE}, "the version comes last"
    assert (3, 7) in found and (3, 9) not in found


def test_an_interrupted_forget_or_distrust_leaves_no_version_or_what_there_was() -> None:
    for _, state in every_line(of_chain(VersionState.reset)):
        assert state.version == NONE or (state.version, state.lineage, state.newest, state.seed_reason) == (
            3,
            7,
            3,
            0,
        )
    seen = set()
    for _, state in every_line(of_chain(lambda state: state.invalidate(WRITTEN))):
        seen.add((state.version, state.seed_reason))
    assert seen == {(3, 0), (NONE, 0)}, "a reason without the seed would be of no use"
    for _, state in every_line(of_chain(lambda state: state.invalidate(OTHER_CHANNEL), NONE)):
        assert state.version == NONE


@pytest.mark.slow
def test_the_interrupts_of_these_tests_are_such_as_a_signal_handler_raises() -> None:
    assert issubclass(Interrupt, KeyboardInterrupt) and not issubclass(Interrupt, Exception)
    places = []
    for where, _ in every_line(lambda: (pair := Line(), pair.sends)):
        places.append(where)
    assert len(places) > 60 and {where.split(":")[0] for where in places} >= {
        "snapshot.py",
        "source.py",
        "version.py",
        "previous_delta.py",
    }
