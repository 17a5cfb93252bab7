"""What is done to one rank while it makes a call, by name, with parameters that can be sent as JSON.

| kind | what happens |
|---|---|
| point | an exception at a point of the call, see `interrupts.broken_at`: `at`, `unit`, `error` |
| alarm | an exception from a signal handler: after `seconds`; if that is 0, when the parent sends SIGINT |
| flip | one bit of what this rank sends or receives: in operation number `at`, at the share `where` of it |
| write | another thread writes to the weights `seconds` after the call began, `count` times |
| beside | another thread calls `what` (close, invalidate, verify) after `seconds` |
| twice | two threads make the call at once |
| describe | the rank cannot describe itself: `select=` raises |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import dte_dist
from dte_dist import DeltaError
from dte_dist.transport.communicator import Communicator
from tests.chaos.interrupts import Alarm, Interrupt, broken_at
from tests.chaos.model import Model

__all__ = ["options_of", "suffer"]

Call = Callable[[], object]


def suffer(model: Model, call: Call, kind: str, **parameters: Any) -> None:
    """Make a call, and let something happen to it.

    Raises:
        Interrupt: it broke off, or its result was lost.
        DeltaError, ValueError: it failed.
    """
    {"point": _point, "alarm": _alarm, "flip": _flip, "write": _write, "beside": _beside, "twice": _twice}[
        kind
    ](model, call, **parameters)


def _point(model: Model, call: Call, *, at: int, unit: str = "line", error: str = "Interrupt") -> None:
    where = broken_at(call, at, unit, error)  # type: ignore[arg-type]
    if where is not None:
        raise Interrupt(where)


def _alarm(model: Model, call: Call, *, seconds: float) -> None:
    with Alarm(seconds):
        call()


def _flip(model: Model, call: Call, *, at: int, where: float) -> None:
    with _flipped(at, where):
        call()


class _Late:
    """An operation on its way, whose data are damaged once they are there."""

    def __init__(self, pending: Any, damage: Callable[[], None]) -> None:
        self._pending, self._damage = pending, damage

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait as before."""
        result = self._pending.wait(*arguments, **options)
        self._damage()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)


@contextmanager
def _flipped(at: int, where: float) -> Iterator[None]:
    """Flip one bit in operation number `at` on any wire: of a copy that is sent, or of what was received."""
    count, kept = 0, list[Tensor]()
    originals = {name: getattr(Communicator, name) for name in ("send", "receive", "broadcast")}

    def flip(tensor: Tensor) -> None:
        raw = tensor.reshape(-1).view(torch.uint8)
        if len(raw):
            bit = min(int(where * 8 * len(raw)), 8 * len(raw) - 1)
            raw[bit // 8] ^= 1 << bit % 8

    def wrapped(name: str) -> Callable[..., Any]:
        def method(wire: Communicator, tensor: Tensor, peer: int) -> Any:
            nonlocal count
            count += 1
            if count - 1 != at:
                return originals[name](wire, tensor, peer)
            if name == "send" or (name == "broadcast" and peer == wire.rank):
                kept.append(tensor.clone())
                flip(kept[-1])
                return originals[name](wire, kept[-1], peer)
            return _Late(originals[name](wire, tensor, peer), lambda: flip(tensor))

        return method

    for name in originals:
        setattr(Communicator, name, wrapped(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Communicator, name, original)


@contextmanager
def _thread(target: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Run something in another thread meanwhile; what it raises is in the list."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield raised
    finally:
        thread.join()


def _write(model: Model, call: Call, *, seconds: float, count: int) -> None:
    def write() -> None:
        for number in range(count):
            time.sleep(seconds / count)
            for tensor in model.tensors.values():
                with torch.no_grad():
                    tensor.view(-1)[number % max(tensor.numel(), 1) :][:1] += 1  # moves the version counter

    with _thread(write) as raised:
        call()
    if raised:
        raise raised[0]


def _beside(model: Model, call: Call, *, what: str, seconds: float) -> None:
    def act() -> None:
        time.sleep(seconds)
        getattr(dte_dist, what)(model.handle)

    with _thread(act) as raised:
        call()
    # A source has no copy to invalidate, and is told so.
    if raised and not isinstance(raised[0], DeltaError | ValueError):
        raise raised[0]


def _twice(model: Model, call: Call) -> None:
    with _thread(lambda: _again(call)) as raised:
        _again(call)
    if raised:
        raise raised[0]


def _again(call: Call, tries: int = 8) -> None:
    """Call until it ends well."""
    for number in range(tries):
        try:
            call()
            return
        except (DeltaError, ValueError):
            if number == tries - 1:
                raise


def options_of(fault: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that a fault adds to the call itself."""
    if fault is None or fault["kind"] != "describe":
        return {}

    def select(name: str) -> bool:
        raise OSError(f"nobody knows {name}")

    return {"select": select}
