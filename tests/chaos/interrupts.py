"""Exceptions that come between two lines, or wherever a signal handler may run, as those of handlers do.

`points_of` lists where a call can be interrupted, `broken_at` runs it again and raises at one of these
points. A point is either before a line of the package (`unit="line"`), or where CPython runs signal handlers
(`unit="signal"`): when a function begins, when a call has returned and before its result is used, and when a
loop goes round; in the package, and in what it calls of `contextlib`, `threading` and `weakref`. `Alarm`
raises from a real handler at a random time instead.

The end of a `with` block is no point: its line is traced once more there, but no handler runs before
`__exit__` does.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Final, Literal

import dte_dist

__all__ = ["Alarm", "Interrupt", "Unit", "broken_at", "points_of", "spread"]

Unit = Literal["line", "signal"]

_PACKAGE: Final = os.path.dirname(dte_dist.__file__)
_LIBRARY: Final = tuple(str(module.__file__) for module in (contextlib, threading, weakref))
_OPCODES: Final = {
    dis.opmap[name]
    for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD")
    if name in dis.opmap
}
"""After these CPython looks whether a handler is to run."""


class Interrupt(KeyboardInterrupt):
    """What a signal handler raises; its text says where."""


ERRORS: Final[dict[str, type[BaseException]]] = {"Interrupt": Interrupt, "MemoryError": MemoryError}


def points_of(call: Callable[[], object], unit: Unit = "line") -> list[str]:
    """Run a call to its end; return where it could have been interrupted, in order: "file:function:line"."""
    found: list[str] = []
    _run(call, unit, lambda frame: found.append(_where(frame)))
    return found


def broken_at(
    call: Callable[[], object], at: int, unit: Unit = "line", error: str = "Interrupt"
) -> str | None:
    """Run a call, and raise at its point `at`; return where, or None if the call came to an end before.

    What the call raises of its own comes through.
    """
    raised: list[BaseException] = []
    left = at

    def visit(frame: FrameType) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raised.append(ERRORS[error](_where(frame)))
            raise raised[0]

    try:
        _run(call, unit, visit)
    except (Interrupt, MemoryError) as caught:
        if not raised or caught is not raised[0]:
            raise
    return str(raised[0]) if raised else None


def _run(call: Callable[[], object], unit: Unit, visit: Callable[[FrameType], None]) -> None:
    """Run a call, looking at each point of this thread; once `visit` raised, it looks no more."""
    looking = True

    def look(frame: FrameType) -> None:
        nonlocal looking
        if looking:
            try:
                visit(frame)
            except BaseException:
                looking = False
                raise

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _leaves_with(frame):
            look(frame)
        return on_line

    def between_opcodes() -> Any:
        last = dis.opmap["RESUME"]

        def on_opcode(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, _code_of(frame)[frame.f_lasti]
                if before in _OPCODES:
                    look(frame)
            return on_opcode

        return on_opcode

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not looking or not (name.startswith(_PACKAGE) or (unit == "signal" and name in _LIBRARY)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = unit == "signal", unit == "line"
        return on_line if unit == "line" else between_opcodes()

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)


@functools.cache
def _bytes_of(code: CodeType) -> bytes:
    return code.co_code


def _code_of(frame: FrameType) -> bytes:
    return _bytes_of(frame.f_code)


def _leaves_with(frame: FrameType) -> bool:
    """Return whether a line is traced because its `with` block ends, so that `__exit__` comes next."""
    code, at, load = _code_of(frame), frame.f_lasti, dis.opmap["LOAD_CONST"]
    skipped = {dis.opmap[name] for name in ("SWAP", "NOP", "POP_TOP") if name in dis.opmap}
    while code[at] in skipped:
        at += 2
    return code[at : at + 6 : 2] == bytes([load] * 3) and len({code[at + 1], code[at + 3], code[at + 5]}) == 1


def _where(frame: FrameType) -> str:
    code = frame.f_code
    inside = code.co_filename.startswith(_PACKAGE)
    name = os.path.relpath(code.co_filename, _PACKAGE) if inside else os.path.basename(code.co_filename)
    return f"{name}:{code.co_qualname}:{frame.f_lineno}"


def spread(points: Sequence[str], count: int, choose: random.Random) -> list[int]:
    """Choose `count` points, if there are so many: one of each function, then one of each line, then any."""
    left = list(range(len(points)))
    choose.shuffle(left)
    chosen: list[int] = []
    for name in (lambda point: point.rsplit(":", 1)[0], lambda point: point):
        known = {name(points[number]) for number in chosen}
        for number in left:
            if name(points[number]) not in known:
                known.add(name(points[number]))
                chosen.append(number)
    chosen += sorted(set(left) - set(chosen))
    return chosen[:count]


class Alarm:
    """Let SIGALRM and SIGINT raise an `Interrupt` while the block runs; in the main thread only.

    Args:
        seconds: until the alarm; 0 for none, when signals come from elsewhere.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds, self._armed = seconds, False

    def __enter__(self) -> Alarm:
        self._before = {
            number: signal.signal(number, self._raise) for number in (signal.SIGALRM, signal.SIGINT)
        }
        self._armed = True
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False  # once: what the application does next must come to an end
            while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
                frame = frame.f_back
            raise Interrupt(
                f"{signal.Signals(number).name} at {_where(frame) if frame else 'no line of the package'}"
            )
