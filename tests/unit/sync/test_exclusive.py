"""Unit tier, no ranks: one call at a time for each module, whatever threads, orders and interrupts there
are.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dte_dist import Layout
from dte_dist.sync import exclusive as module
from dte_dist.sync.exclusive import exclusive
from tests.unit.interrupts import Interrupt, at_every_line, interrupted, raise_at

SOON = 30.0
"""Seconds within which a thread surely comes to its turn."""

FILES = ("sync/exclusive.py", "contextlib.py")


class Inside:
    """Counts who is within a block at once, and notes in what order they came."""

    def __init__(self) -> None:
        self.now, self.most, self.order = 0, 0, list[Any]()
        self._lock = threading.Lock()

    def stay(self, name: Any = None, seconds: float = 0.0) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(name)
        time.sleep(seconds)
        with self._lock:
            self.now -= 1


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ends(*threads: threading.Thread) -> bool:
    deadline = time.monotonic() + SOON
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def is_free(*modules: Any) -> bool:
    """Return whether this thread comes to its turn at once, and another one soon."""

    def enter() -> None:
        with exclusive(*modules):
            pass

    enter()
    return ends(in_thread(enter))


class Holder:
    """A thread that is within a call until it is let go."""

    def __init__(self, *modules: Any) -> None:
        self.has, self._go = threading.Event(), threading.Event()
        self.thread = in_thread(lambda: self._run(modules))
        assert self.has.wait(SOON)

    def _run(self, modules: Any) -> None:
        with exclusive(*modules):
            self.has.set()
            self._go.wait(2 * SOON)

    def let_go(self) -> bool:
        self._go.set()
        return ends(self.thread)


@pytest.fixture
def layer() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def other() -> Iterator[Any]:
    yield Layout.from_tensors({"w": torch.zeros(3)})


# Threads ----------------------------------------------------------------------------------------------------


def test_never_two_threads_at_once(layer: nn.Module) -> None:
    inside = Inside()

    def calls() -> None:
        for _ in range(30):
            with exclusive(layer):
                inside.stay(seconds=0.0005)

    assert ends(*[in_thread(calls) for _ in range(6)])
    assert inside.most == 1 and len(inside.order) == 180
    assert len(module._queues[layer]) <= 1, "who is over is taken out"


def test_calls_come_to_their_turn_in_the_order_in_which_they_came(layer: nn.Module) -> None:
    """So that the n-th call of each rank is the n-th that runs."""
    inside, holder, threads = Inside(), Holder(layer), []

    def call(number: int) -> None:
        with exclusive(layer):
            inside.stay(number)

    for number in range(8):
        threads.append(in_thread(lambda number=number: call(number)))
        deadline = time.monotonic() + SOON
        while len(module._queues[layer]) < number + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert holder.let_go() and ends(*threads)
    assert inside.order == list(range(8))


def test_other_modules_do_not_wait(layer: nn.Module, other: Any) -> None:
    holder = Holder(layer)
    begin = time.monotonic()
    assert is_free(other) and is_free(nn.Linear(2, 2), None) and is_free()
    assert not is_free_soon(layer)
    assert time.monotonic() - begin < SOON and holder.let_go()
    assert is_free(layer, other)


def is_free_soon(*modules: Any) -> bool:
    """Return whether another thread comes to its turn in a moment; it may come to it later."""
    entered, refused = threading.Event(), []

    def enter() -> None:
        try:
            with exclusive(*modules):
                entered.set()
        except ValueError as error:
            refused.append(error)

    in_thread(enter)
    has_entered = entered.wait(0.3)
    assert not refused, "another thread is not this one, though it may have its number"
    return has_entered


def test_two_modules_in_opposite_orders_do_not_wait_for_each_other(layer: nn.Module, other: Any) -> None:
    inside = Inside()

    def calls(*modules: Any) -> None:
        for _ in range(100):
            with exclusive(*modules):
                inside.stay()

    orders = (layer, other), (other, layer), (layer, other), (other, None, layer)
    assert ends(*[in_thread(lambda order=order: calls(*order)) for order in orders])
    assert inside.most == 1 and len(inside.order) == 400


@pytest.mark.parametrize("which", [0, 1])
def test_who_shares_one_of_two_modules_waits(layer: nn.Module, other: Any, which: int) -> None:
    holder = Holder(layer, other)
    assert not is_free_soon((layer, other)[which])
    assert holder.let_go() and is_free(layer) and is_free(other)


def test_what_is_no_module_is_left_out_and_one_that_comes_twice_counts_once(layer: nn.Module) -> None:
    with exclusive(None, 3, "module", {}, [], layer, layer, torch.zeros(2)):
        assert not is_free_soon(layer)
    assert is_free(layer, layer)


def test_a_module_is_not_kept_alive() -> None:
    layer = nn.Linear(2, 2)
    with exclusive(layer):
        pass
    alive, before = weakref.ref(layer), len(module._queues)
    del layer
    gc.collect()
    assert alive() is None and len(module._queues) == before - 1


# One thread -------------------------------------------------------------------------------------------------


def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on(layer: nn.Module, other: Any) -> None:
    with exclusive(layer):
        for modules in ((layer,), (layer, other), (other, layer), (other, layer, None)):
            with pytest.raises(ValueError, match="running in this thread"), exclusive(*modules):
                raise AssertionError
            assert is_free(other), "the other module of a call that was refused is free"
        with exclusive(other):  # of another module it is no matter
            assert not is_free_soon(layer)
        assert not is_free_soon(layer)
    assert is_free(layer, other)


def test_a_call_of_a_signal_handler_while_its_thread_waits_is_refused_at_once(layer: nn.Module) -> None:
    """It would wait for itself."""
    holder, found = Holder(layer), []

    class Handled(threading.Event().__class__):  # type: ignore[misc]
        def wait(self, timeout: float | None = None) -> bool:
            try:
                with exclusive(layer):
                    found.append("entered")
            except ValueError as error:
                found.append(str(error))
            return super().wait(timeout)

    def call() -> None:
        with exclusive(layer):
            found.append("came to its turn")

    with pytest.MonkeyPatch.context() as patch:
        for place in module._queues[layer]:
            patch.setattr(place(), "ended", Handled())
        thread = in_thread(call)
        deadline = time.monotonic() + SOON
        while not found and time.monotonic() < deadline:
            time.sleep(0.001)
    assert holder.let_go() and ends(thread)
    assert "running in this thread" in found[0] and found[-1] == "came to its turn" and "entered" not in found


@pytest.mark.parametrize("error", [ZeroDivisionError, Interrupt, GeneratorExit])
def test_whatever_ends_a_call_ends_its_turn(layer: nn.Module, other: Any, error: type[BaseException]) -> None:
    """Also while the error, and with it what it came through, is kept."""
    with pytest.raises(error) as kept, exclusive(layer, other):
        raise error
    assert is_free(layer) and is_free(other) and kept.tb is not None


def test_who_waits_comes_to_its_turn_at_once(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when it next looks whether anybody is there."""
    monkeypatch.setattr(module, "_LOOK", 4 * SOON)
    holder, entered = Holder(layer), threading.Event()

    def wait() -> None:
        with exclusive(layer):
            entered.set()

    thread = in_thread(wait)
    assert not entered.wait(0.2)
    assert holder.let_go() and entered.wait(SOON) and ends(thread)


# Interrupts -------------------------------------------------------------------------------------------------


def test_an_interrupt_at_any_line_leaves_the_modules_free(layer: nn.Module, other: Any) -> None:
    """Those of `contextlib` count: between its lines, too, a call has a turn that nobody else knows of."""

    def call() -> None:
        with exclusive(layer, other):
            pass

    places = []
    for where in at_every_line(lambda: call, *FILES):
        assert is_free(layer, other), where
        places.append(where.split(":")[1])
    assert {"exclusive", "_wait", "_before", "__enter__", "__exit__"} <= {*places}


def test_an_interrupt_that_is_kept_leaves_the_modules_free(layer: nn.Module, other: Any) -> None:
    """Who keeps the exception keeps the frames that it came through, and the call in them."""
    kept: list[BaseException] = []

    def call() -> None:
        with exclusive(layer, other):
            pass

    def keep(where: list[str | None], number: int) -> None:
        try:
            raise_at(call, number, *FILES)
        except Interrupt as error:
            kept.append(error)
            where.append(str(error))

    for number in range(1, 5000):
        where: list[str | None] = []
        keep(where, number)
        assert is_free(layer, other), where
        if not where:
            break
    assert len(kept) == number - 1 > 20


def test_an_interrupt_at_any_line_of_a_wait_leaves_the_modules_to_who_comes_next(
    layer: nn.Module, other: Any
) -> None:
    """One thread has the turn, this one waits for it and is interrupted, and a third one has come after
    it.
    """
    for number in range(1, 5000):
        holder, third = Holder(other), []

        def come(third: list[threading.Thread] = third, holder: Holder = holder) -> None:
            def enter() -> None:
                with exclusive(layer, other):
                    pass

            third.append(in_thread(enter))
            in_thread(lambda: time.sleep(0.02) or holder.let_go())

        def wait(come: Callable[[], None] = come) -> None:
            come()
            with exclusive(layer, other):
                pass

        where = interrupted(wait, number, *FILES)
        assert holder.let_go() and ends(*third), where
        assert is_free(layer, other), where
        if where is None:
            return
    raise AssertionError("a wait has fewer lines")


def test_a_thread_that_ends_in_the_middle_of_a_call_blocks_nobody(layer: nn.Module) -> None:
    """As one whose call was taken away without its end being told."""
    context: list[Any] = []

    def begin() -> None:
        context.append(exclusive(layer))
        context[0].__enter__()

    assert ends(in_thread(begin))
    assert is_free(layer) and context
