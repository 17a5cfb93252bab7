"""Interrupts at any line: what a signal handler that raises would do, one line after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """What the handler raises."""


def interrupted(call: Callable[[], object], number: int, *files: str) -> str | None:
    """Call something, and raise before line number `number`, counted from 1, of all that it executes in some
    files.

    Args:
        call: what to interrupt.
        number: of the line among those that are executed.
        files: ends of the names of files; other lines do not count.

    Returns:
        Where it was interrupted, such as "snapshot.py:undo:231"; None if it ended before.
    """
    try:
        raise_at(call, number, *files)
    except Interrupt as error:
        return str(error)
    return None


def raise_at(call: Callable[[], object], number: int, *files: str) -> None:
    """Do what `interrupted` does, and let the interrupt through: its text says where."""
    count = 0

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        if event == "line" and count == number:
            sys.settrace(None)
            name = frame.f_code.co_filename.rpartition("/")[2]
            raise Interrupt(f"{name}:{frame.f_code.co_name}:{frame.f_lineno}")
        return on_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: on_line if frame.f_code.co_filename.endswith(files) else None)
    try:
        call()
    finally:
        sys.settrace(before)


def at_every_line(
    start: Callable[[], Callable[[], object]], *files: str, most: int = 20_000
) -> Iterator[str]:
    """Interrupt a call at each of its lines, one after the other, and yield where.

    Args:
        start: makes things as they are to be before each call, and returns the call.
        files: as for `interrupted`.
        most: lines that it surely has fewer of.
    """
    for number in range(1, most):
        where = interrupted(start(), number, *files)
        if where is None:
            return
        yield where
    raise AssertionError(f"there are more than {most} lines")
