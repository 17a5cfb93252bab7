"""A snapshot finds changes and takes them over, in ranges and waves; it can go back until it is settled, and
says if it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect import snapshot as module
from dte_dist.detect.detector import Changed, Detector
from dte_dist.detect.snapshot import Snapshot
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.interrupts import at_every_line
from tests.unit.kernels.test_cpu import FLOATS
from tests.unit.kernels.test_cpu_advance import PATTERNS, changed_from, make

SEGMENT = 16
KERNELS = [cpu, torch_kernels]
both = pytest.mark.parametrize("kernel", KERNELS, ids=["cpu", "torch"])
Spans = list[tuple[int, int]]


class Model:
    """Tensors of several widths, some strided, some fp32 that is read as bf16; and a snapshot of them."""

    def __init__(self, sizes: dict[int, list[int]], segment: int = SEGMENT) -> None:
        self.tensors: dict[int, list[Tensor]] = {}
        for width, numels in sizes.items():
            own = [
                torch.float32 if width == 2 and number % 2 else FLOATS[width] for number in range(len(numels))
            ]
            self.tensors[width] = [
                make(numel, own[i], 10 * width + i, i % 3 == 2) for i, numel in enumerate(numels)
            ]
        self.totals = {width: sum(numels) for width, numels in sizes.items()}
        for width in sizes:
            self.set(width, self.bits(width))
        self.snapshot = Snapshot(self.totals, torch.device("cpu"), segment)
        self.refresh()

    def live(self, width: int) -> FlatTensors:
        return FlatTensors(self.tensors[width], width).read_as([FLOATS[width]] * len(self.tensors[width]))

    def refresh(self) -> None:
        ranges = [
            (width, first, min(50, total - first))
            for width, total in self.totals.items()
            for first in range(0, total, 50)
        ]
        self.snapshot.refresh({width: self.live(width) for width in self.totals}, ranges)

    def bits(self, width: int) -> np.ndarray:
        """Return what would be sent now."""
        out = torch.zeros(self.totals[width], dtype=BITS[width])
        cpu.read(self.live(width), 0, out)
        return out.numpy()

    def set(self, width: int, bits: np.ndarray) -> None:
        """Let the tensors hold these bits; where they are fp32, finite numbers near them, of which none is
        halfway to the next.
        """
        parts = torch.from_numpy(bits.copy()).split([tensor.numel() for tensor in self.tensors[width]])
        for tensor, part in zip(self.tensors[width], parts, strict=True):
            own = (
                part
                if tensor.element_size() == width
                else ((part & ~0x80).int() << 16) | torch.randint(0x7FFF, part.shape).int()
            )
            tensor.view(own.dtype).copy_(own.view(tensor.shape))

    def change(self, width: int, pattern: str, seed: int) -> None:
        """Let live elements differ from what they were."""
        live = self.bits(width)
        self.set(width, changed_from(live, PATTERNS[pattern](len(live), np.random.default_rng(seed)), seed))

    def known(self, width: int) -> np.ndarray:
        return self.snapshot.bits[width].numpy().copy()

    def everything(self) -> dict[int, list[int]]:
        return {width: self.known(width).tolist() for width in self.totals}

    def lives(self) -> dict[int, list[int]]:
        return {width: self.bits(width).tolist() for width in self.totals}

    def advance(
        self, width: int, spans: Spans | None = None, detector: Detector | None = None
    ) -> Iterator[list[Changed]]:
        return self.snapshot.diff_and_update(
            self.live(width), width, spans or [(0, self.totals[width])], detector
        )

    def take_over(self, detector: Detector | None = None) -> None:
        for width in self.totals:
            for _ in self.advance(width, detector=detector):
                pass


class Found(NamedTuple):
    """What was found in a range, copied: the tensors are used again."""

    first: int
    length: int
    positions: list[int] | None
    old: list[int]
    new: list[int]

    @classmethod
    def of(cls, changed: Changed) -> Found:
        positions = None if changed.positions is None else changed.positions.tolist()
        return cls(changed.first, changed.length, positions, changed.old.tolist(), changed.new.tolist())

    @property
    def places(self) -> list[int]:
        return [self.first + at for at in (range(self.length) if self.positions is None else self.positions)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments at once and a wave of 40 changes: a few hundred elements make many of both."""
    monkeypatch.setattr(module, "_RANGE_SEGMENTS", 2)
    monkeypatch.setattr(module, "_BATCH_CHANGES", 40)


@pytest.fixture(params=KERNELS, ids=["cpu", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run a test with the kernels of both kinds of device, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield request.param


SIZES = {1: [70, 200], 2: [33, 150, 48, 91, 5], 4: [300], 8: [100, 57, 3]}

# Finding ----------------------------------------------------------------------------------------------------
# -------------


def exact(live: Tensor, known: Tensor) -> Tensor:
    return (live != known).nonzero().view(-1)


def too_many(live: Tensor, known: Tensor) -> Tensor:
    return torch.unique(torch.cat([exact(live, known), torch.arange(0, len(live), 5)])).int()


def check_waves(waves: list[list[Found]], spans: Spans, segment: int, most: int) -> None:
    """Waves end once they have enough; ranges ascend, are whole segments of a span, and have changes."""
    for wave in waves[:-1]:
        assert sum(len(found.new) for found in wave) >= most
    for wave in waves:
        assert sum(len(found.new) for found in wave[:-1]) < most
    border, left = 0, iter(spans)
    begin, length = next(left, (0, 0))
    for found in (found for wave in waves for found in wave):
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
        waves = [
            [Found.of(changed) for changed in wave]
            for wave in islice(model.advance(width, spans, detector), enough)
        ]
        waves = [wave for wave in waves if wave]
        found = [changed for wave in waves for changed in wave]
        places, changes = (
            [at for changed in found for at in changed.places],
            np.flatnonzero(before != live).tolist(),
        )
        if enough is None:
            assert {*changes} <= {*places} if detector is too_many else changes == places
            assert np.array_equal(model.known(width), live)
            check_waves(waves, spans, model.snapshot._segment, most)
        assert [bit for changed in found for bit in changed.old] == before[places].tolist()
        assert [bit for changed in found for bit in changed.new] == live[places].tolist()
        assert not model.snapshot.inconsistent
        model.snapshot.roll_back()
        assert np.array_equal(model.known(width), before) and not model.snapshot.inconsistent
        assert np.array_equal(model.bits(width), live)


@pytest.mark.parametrize("pattern", ["everything", "0.3", "tiny"])
def test_waves_of_the_size_that_there_is(pattern: str) -> None:
    """With nothing made small: some millions of bytes, in two chunks that are no multiples of a segment."""
    total, segment = 5_000_000, 1 << 20
    model = Model({1: [total]}, segment)
    model.change(1, pattern, 5)
    before, live, spans = (
        model.known(1),
        model.bits(1),
        [(0, 3 * segment + 12345), (3 * segment + 12345, total - 3 * segment - 12345)],
    )
    changed, waves = np.zeros(total, bool), 0
    for wave in model.advance(1, spans):
        waves += 1
        for found in wave:
            here = changed[found.first : found.first + found.length]
            assert not here.any()
            here[slice(None) if found.positions is None else found.positions.numpy()] = True
            assert np.array_equal(found.old.numpy(), before[found.first : found.first + found.length][here])
            assert np.array_equal(found.new.numpy(), live[found.first : found.first + found.length][here])
    assert np.array_equal(changed, before != live) and np.array_equal(model.known(1), live)
    assert waves == {"everything": 2, "0.3": 1, "tiny": 1}[pattern]
    model.snapshot.roll_back()
    assert np.array_equal(model.known(1), before)


# Going back -------------------------------------------------------------------------------------------------
# -------------


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
            found = [Found.of(changed) for wave in model.advance(width) for changed in wave]
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


def test_waves_that_nobody_asked_for_are_not_taken_over(kernel: Any, small: None) -> None:
    """Whoever makes frames of a wave may fail: what is known then is the waves before it, and it, and all of
    them go back.
    """
    model = Model({4: [400]})
    before = model.known(4)
    model.change(4, "everything", 1)
    waves = model.advance(4)
    next(waves)
    taken = model.known(4) == model.bits(4)
    assert taken[:40].all() and not taken[80:].any() and not model.snapshot.inconsistent
    del waves
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
            for note in model.snapshot._undo_log
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
        assert not model.snapshot._undo_log


def test_a_range_that_changed_much_costs_the_others_nothing(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One range of a wave is kept whole, the others where they changed; all go back."""
    monkeypatch.setattr(module, "_RANGE_SEGMENTS", 1)
    model = Model({2: [40_000]}, 1000)
    before, bits = model.known(2), model.bits(2)
    bits[3000:4000] ^= 1
    bits[[5, 2999, 4000, 17_000, 39_999]] ^= 1
    model.set(2, bits)
    model.take_over()
    notes = [
        part for note in model.snapshot._undo_log for part in (note.positions, note.bits) if part is not None
    ]
    assert (
        sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in notes}.values())
        <= 2000 + 5 * 6
    )
    model.snapshot.roll_back()
    assert np.array_equal(model.known(2), before)


# Breaking off
# ------------------------------------------------------------------------------------------------------------


class Failing:
    """The kernels of a device, one of which fails when it is called for the k-th time: before it did
    anything, or after.
    """

    def __init__(self, kernel: Any, name: str, at: int, done: bool) -> None:
        self._kernel, self._name, self.left, self._done = kernel, name, at, done

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._fail if name == self._name else getattr(self._kernel, name)

    def _fail(self, *args: Any) -> Any:
        self.left -= 1
        if self.left >= 0 or self._done:
            result = getattr(self._kernel, self._name)(*args)
        if self.left < 0:
            raise OSError("the device is gone")
        return result


def heals(model: Model) -> None:
    """The snapshot is of no version, whatever is undone, until all live bits are taken over."""
    assert model.snapshot.inconsistent
    model.snapshot.roll_back()
    assert model.snapshot.inconsistent
    model.snapshot.commit()
    assert model.snapshot.inconsistent
    model.refresh()
    before = model.everything()
    assert before == model.lives() and not model.snapshot.inconsistent
    for width in model.totals:
        model.change(width, "0.3", 8)
    model.take_over()
    assert model.everything() == model.lives()
    model.snapshot.roll_back()
    assert model.everything() == before and not model.snapshot.inconsistent


@pytest.mark.parametrize("done", [False, True], ids=["at once", "when it was done"])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("pattern", ["tiny", "0.3", "everything"])
def test_a_kernel_that_fails_while_bits_are_taken_over(
    kernel: Any, small: None, pattern: str, at: int, done: bool
) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, pattern, 2)
    model.snapshot._kernels = Failing(kernel, "advance", at, done)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        model.take_over()
    model.snapshot._kernels = kernel
    heals(model)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("pattern", ["some", "everything"])
def test_notes_that_cannot_be_made(
    kernel: Any, small: None, monkeypatch: pytest.MonkeyPatch, pattern: str, at: int
) -> None:
    model, empty, made = Model(SIZES), kernels.empty, []
    for width in SIZES:
        model.change(width, pattern, 2)
        model.snapshot._scratch[width] = module._ScratchBuffers.of(
            model.totals[width], width, torch.device("cpu")
        )

    def failing(*args: Any) -> Tensor:
        made.append(args)
        if len(made) > at:
            raise MemoryError("no room")
        return empty(*args)

    monkeypatch.setattr(kernels, "empty", failing)
    with pytest.raises(MemoryError):
        model.take_over()
    monkeypatch.setattr(kernels, "empty", empty)
    heals(model)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_bits_that_cannot_be_put_back(kernel: Any, small: None, at: int) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "some", 2)
    model.take_over()
    assert not model.snapshot.inconsistent
    model.snapshot._kernels = Failing(kernel, "scatter_1d", at, False)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        model.snapshot.roll_back()
    model.snapshot._kernels = kernel
    heals(model)


@pytest.mark.parametrize("at", [0, 3])
def test_a_refresh_that_breaks_off_leaves_no_version(kernel: Any, at: int) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "some", 2)
    model.take_over()
    model.snapshot._kernels = Failing(kernel, "read", at, False)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        model.refresh()
    model.snapshot._kernels = kernel
    heals(model)


def test_a_refresh_cannot_be_undone(kernel: Any, small: None) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "some", 2)
    model.take_over()
    for width in SIZES:
        model.change(width, "some", 3)
    model.refresh()
    model.snapshot.roll_back()
    assert model.everything() == model.lives() and not model.snapshot.inconsistent


# Interrupts -------------------------------------------------------------------------------------------------
# -------------

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
            [at for wave in self.model.advance(width) for changed in wave for at in Found.of(changed).places]
            == places
            for width, places in self.differ.items()
        )


FEW = {2: [33, 50, 40], 8: [60]}
PATTERN = pytest.mark.parametrize("pattern", ["some", "0.3", "everything"])


@pytest.mark.parametrize(
    ("pattern", "detector"),
    [("some", None), ("everything", None), ("0.3", exact), ("everything", exact), ("some", too_many)],
)
def test_an_interrupt_at_any_line_of_advance(
    kernel: Any, small: None, pattern: str, detector: Detector | None
) -> None:
    """Over several ranges and waves: the snapshot is of no version, or goes back to what was known, and finds
    all that differs again.
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
    assert {"diff_and_update", "_ranges", "_update_range", "_record"} <= places and (
        "_detected" in places
    ) == (detector is not None)
    assert torn


@PATTERN
def test_an_interrupt_of_who_takes_the_waves_tears_nothing(kernel: Any, small: None, pattern: str) -> None:
    """Whatever it does between two waves, the snapshot is between two waves."""
    restart = Restart(pattern, FEW)
    for enough in range(8):
        model = restart()
        waves = [model.advance(width) for width in FEW]
        for _ in islice((wave for each in waves for wave in each), enough):
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


# Detectors --------------------------------------------------------------------------------------------------
# -------------


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
        for wave in model.advance(4, detector=lambda live, known: torch.arange(len(live)))
        for changed in wave
    ]
    assert (
        all(changed.positions is None for changed in found)
        and sum(changed.length for changed in found) == model.totals[4]
    )
    model.snapshot.roll_back()
    assert model.everything() == before
