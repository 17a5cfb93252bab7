"""Unit tier, no ranks: an interrupt at any line of a receiver; afterwards it holds the bits of its
version, or has none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from dte_dist.detect import snapshot as module
from dte_dist.report import Phases
from dte_dist.sync.version import NONE
from tests.unit.sync.broken_off import OLD, Line, begin, every_line
from tests.unit.sync.pair import STREAM, same_bits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of a few changes and ranges of one segment, of a few hundred elements."""
    monkeypatch.setattr(module, "_BATCH_CHANGES", 2)


def take(pair: Line) -> Callable[[], object]:
    pair.receiver.begin()

    def frames() -> None:
        for chunk, frame in zip(pair.chunks, pair.source.frames(), strict=True):
            pair.receiver.take(frame, pair.head(chunk))

    return frames


def look(pair: Line) -> Callable[[], object]:
    take(pair)()
    return pair.receiver.is_written


def apply(pair: Line) -> Callable[[], object]:
    take(pair)()
    return pair.receiver.apply


def commit(pair: Line) -> Callable[[], object]:
    apply(pair)()
    return lambda: pair.receiver.commit(2, STREAM)


def whole(pair: Line) -> Callable[[], object]:
    def run() -> None:
        take(pair)()
        pair.receiver.is_written()
        pair.receiver.apply()
        pair.receiver.commit(2, STREAM)
        pair.receiver.rollback()

    return run


RECEIVERS = {each.__name__: each for each in (begin, take, look, apply, commit, whole)}


def holds(pair: Line, version: int, tensors: dict[str, Tensor]) -> bool:
    """Whether a receiver that says that it holds a version has its bits."""
    return pair.receiver.state.version != version or same_bits(tensors, pair.copy)


@pytest.mark.parametrize("what", RECEIVERS.values(), ids=RECEIVERS)
def test_an_interrupted_receiver_never_has_a_version_with_other_bits(
    what: Callable[[Line], Callable[[], object]],
) -> None:
    versions = set()

    def start() -> tuple[Line, Callable[[], object]]:
        pair = Line()
        pair.sends()
        return pair, what(pair)

    for where, pair in every_line(start):
        assert holds(pair, 1, OLD) and holds(pair, 2, pair.trained), where
        versions.add(pair.receiver.state.version)
        # The source may have come to know of it, or not.
        if pair.receiver.state.version == 2 and len(versions) % 2:
            pair.source.commit(2, STREAM, full=False)
        pair.follows()
        assert pair.is_right(), where
    expected = {apply: {1, NONE}, commit: {NONE, 2}, whole: {1, NONE, 2}}
    assert versions == expected.get(what, {1})


@pytest.mark.slow
def test_an_interrupted_receiver_of_a_seed_has_no_version_or_all_of_it() -> None:
    versions = set()

    def start() -> tuple[Line, Callable[[], object]]:
        pair = Line()
        pair.source.prepare(2, True, Phases())
        frames = pair.seed_frames(2)

        def seed() -> None:
            pair.receiver.begin()
            for chunk, frame in zip(pair.chunks, frames, strict=True):
                pair.receiver.take(frame, pair.head(chunk, base=NONE, version=2, lineage=STREAM))
            pair.receiver.check_own()
            pair.receiver.commit(2, STREAM, full=True)

        return pair, seed

    for where, pair in every_line(start):
        assert holds(pair, 1, OLD) and holds(pair, 2, pair.trained), where
        versions.add(pair.receiver.state.version)
        pair.follows()
        assert pair.is_right(), where
    assert versions == {1, NONE, 2}


def test_an_interrupt_while_a_write_of_others_is_noticed_does_not_hide_it() -> None:
    """At the look before the vote, and at the beginning of a sync."""
    for what in (look, begin):

        def start(what: Callable[[Line], Callable[[], object]] = what) -> tuple[Line, Callable[[], object]]:
            pair = Line()
            pair.sends()
            call = what(pair)
            pair.copy["a"][50] = 12345.0
            return pair, call

        for where, pair in every_line(start):
            assert pair.follows() == "seed" and pair.is_right(), where
