"""Unit tier, no ranks: an interrupt at any line of a source, a receiver, a tracker or a chain leaves a state
that knows itself.

After it a source sends everything that differs, or all; a receiver holds the bits of its version, or has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist import DeltaTracker, Payload, reconstruct_against_base
from dte_dist.codec import CodecSelector
from dte_dist.detect import snapshot as module
from dte_dist.detect.detector import Detector
from dte_dist.report import Phases
from dte_dist.sync.control import OTHER_CHANNEL, WRITTEN
from dte_dist.sync.version import NONE, VersionState
from tests.unit.detect.test_snapshot import exact
from tests.unit.interrupts import Interrupt, at_every_line
from tests.unit.sync.test_source import STREAM, Pair, same_bits

FILES = (
    "detect/snapshot.py",
    "sync/source.py",
    "sync/versioned_snapshot.py",
    "sync/version.py",
    "codec/previous_delta.py",
    "sync/receiver.py",
    "sync/versioned_copy.py",
    "sync/staging.py",
    "sync/tracker.py",
)
"""All that holds something between syncs."""

OLD = {"a": torch.arange(60.0), "b": torch.arange(20).bfloat16()}
LATER = {"a": [3, 9, 15, 40, 55], "b": [0, 10]}
"""Elements that change first after version 1; each step changes those after them."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of a few changes and ranges of one segment, of a few hundred elements."""
    monkeypatch.setattr(module, "_BATCH_CHANGES", 2)


class Line(Pair):
    """A pair at version 1, its trainer a step further; `follows` brings the copy on, as the protocol would,
    and says how.
    """

    def __init__(self, detector: Detector | None = None, codec: str = "fast") -> None:
        super().__init__(
            {name: tensor.clone() for name, tensor in OLD.items()}, bucket_bytes=128, detector=detector
        )
        self.selector, self.steps = CodecSelector(codec), 0
        self.step()

    def step(self) -> None:
        """Change elements that no other step changes: what is lost of one is not made good by the next."""
        for name, places in LATER.items():
            self.trained[name][torch.tensor(places) + self.steps] += 1
        self.steps += 1

    def sends(self, version: int = 2) -> None:
        self.source.prepare(version, False, Phases(), self.detector, selector=self.selector)

    def follows(self) -> str:
        """Sync as the next call would; only what both sides say of themselves counts."""
        self.source.rollback()
        full, newest = (
            self.source.state.version == NONE,
            max(self.source.state.newest, self.receiver.state.newest, 1),
        )
        self.receiver.begin()
        ours, theirs = self.source.state, self.receiver.state
        if full:
            self.source.prepare(newest + 1, True, Phases())
        else:
            self.sends(newest + 1)
        if (
            not full
            and theirs.version == ours.version
            and theirs.lineage == ours.lineage
            and not theirs.seed_reason
        ):
            for chunk, frame in zip(self.chunks, self.source.frames(), strict=True):
                if len(frame):
                    self.receiver.take(frame, self.head(chunk, version=newest + 1))
            assert self.receiver.error is None
            self.receiver.apply()
            self.receiver.commit(newest + 1, ours.lineage)
            self.source.commit(newest + 1, ours.lineage, full=False)
            return "delta"
        if not full:
            self.source.detach()
        self.place(newest + 1, STREAM + 1)
        return "seed"

    def is_right(self) -> bool:
        """Whether the copy holds what the trainer has, and a step more does after one sync more, by delta."""
        if not same_bits(self.trained, self.copy):
            return False
        self.step()
        return self.follows() == "delta" and same_bits(self.trained, self.copy)


def every_line(start: Callable[[], tuple[Any, Callable[[], object]]]) -> Iterator[tuple[str, Any]]:
    """Interrupt a call at each of its lines; yield where, and what it was called on."""
    kept: list[Any] = []

    def begin() -> Callable[[], object]:
        thing, call = start()
        kept[:] = [thing]
        return call

    for where in at_every_line(begin, *FILES):
        yield where, kept[0]


# Sources ----------------------------------------------------------------------------------------------------


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


# Receivers --------------------------------------------------------------------------------------------------


def begin(pair: Line) -> Callable[[], object]:
    return pair.receiver.begin


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


# Trackers ---------------------------------------------------------------------------------------------------


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


# Chains -----------------------------------------------------------------------------------------------------


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
