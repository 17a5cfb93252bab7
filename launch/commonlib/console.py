"""What a program on several ranks shows: rank 0 speaks. Lines, tables, and a progress bar where there is a
terminal; with rich where it is installed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from types import TracebackType
from typing import Any

__all__ = ["Console", "complain", "leads", "only_rank_0_prints", "wait_for_rank_0"]

_PATIENCE = 5.0  # seconds
_WIDTH = 180  # columns, where there is no terminal that has a width of its own


def leads() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def complain(text: str, *, code: int) -> int:
    """Print an error that every rank finds, on rank 0, and return the exit code for it."""
    if leads():
        print(text, file=sys.stderr, flush=True)
    wait_for_rank_0()
    return code


def wait_for_rank_0() -> None:
    """On other ranks, give rank 0 the time to print why all of them fail.

    torchrun ends all ranks as soon as it sees one that failed. There is no process group yet to wait with.
    """
    if not leads():
        time.sleep(_PATIENCE)


@contextmanager
def only_rank_0_prints() -> Iterator[None]:
    """Drop what other ranks print, within a `with` block in which all of them would print the same."""
    if leads():
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


class Console(AbstractContextManager):
    """Prints on the rank that speaks, above a progress bar if a person is looking; silent elsewhere.

    Args:
        speaks: whether this rank does.
        total: steps of the progress bar, which is shown inside of a `with` block; 0 shows none.
    """

    def __init__(self, speaks: bool, total: int = 0) -> None:
        self._speaks = speaks
        self._bar = _progress_bar() if speaks and total and sys.stdout.isatty() else None
        self._task = self._bar.add_task("", total=total) if self._bar else None

    def __enter__(self) -> Console:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        if self._bar and self._bar.live.is_started:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._speaks:
            print(text, flush=True)

    def advance(self, doing: str) -> None:
        """Move the progress bar by one step."""
        if self._bar:
            self._bar.update(self._task, advance=1, description=doing)

    def table(self, lines: Sequence[Sequence[str]], title: str = "", left: Collection[str] = ()) -> None:
        """Print lines in columns, the first line as the head.

        Args:
            lines: all of one length.
            title: above the table.
            left: heads of the columns that are aligned to the left; the others are to the right.
        """
        if self._speaks:
            _print_table(lines, title, left)


def _progress_bar() -> Any:
    """A bar that disappears when it is done; None without rich."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        transient=True,
    )


def _print_table(lines: Sequence[Sequence[str]], title: str, left: Collection[str]) -> None:
    try:
        from rich.console import Console as RichConsole
        from rich.table import Table
    except ImportError:
        _print_plain(lines, title, left)
        return
    table = Table(title=title or None, title_justify="left")
    for name in lines[0]:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    RichConsole(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _print_plain(lines: Sequence[Sequence[str]], title: str, left: Collection[str]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        print(title)
    for line in lines:
        cells = zip(lines[0], line, widths, strict=True)
        text = "  ".join(f"{cell:{'<' if name in left else '>'}{width}}" for name, cell, width in cells)
        print(text.rstrip(), flush=True)
