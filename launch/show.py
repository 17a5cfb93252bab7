"""What the demo shows on rank 0: lines, a progress bar where there is a terminal, and the closing table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import mean
from types import TracebackType
from typing import Any

from dte_dist import SyncReport

__all__ = ["Screen", "Step", "summary"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step cost, by delta and by dense broadcast of the same weights."""

    kind: str  # "full" or "delta"
    changed: float  # share of the elements
    delta_bytes: int
    delta_seconds: float
    dense_bytes: int
    dense_seconds: float

    @classmethod
    def of(cls, report: SyncReport, delta_seconds: float, dense_bytes: int, dense_seconds: float) -> Step:
        """From the report of the delta and what was measured around it."""
        return cls(
            kind=report.kind,
            changed=report.density,
            delta_bytes=report.wire_bytes,
            delta_seconds=delta_seconds,
            dense_bytes=dense_bytes,
            dense_seconds=dense_seconds,
        )


class Screen(AbstractContextManager):
    """Prints on the rank that speaks, above a progress bar if a person is looking; silent elsewhere."""

    def __init__(self, speaks: bool, total: int) -> None:
        self._speaks = speaks
        self._bar = _progress_bar() if speaks and sys.stdout.isatty() else None
        self._task = self._bar.add_task("", total=total) if self._bar else None

    def __enter__(self) -> Screen:
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
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._speaks:
            print(text, flush=True)

    def advance(self, doing: str) -> None:
        """One more step is done."""
        if self._bar:
            self._bar.update(self._task, advance=1, description=doing)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Print `rows`, the first of which is the head."""
        if self._speaks:
            _print_table(rows)


def summary(steps: Sequence[Step]) -> list[tuple[str, str, str, str]]:
    """The closing table: means over all syncs that sent a delta."""
    deltas = [step for step in steps if step.kind == "delta"]
    if not deltas:
        return [("mean of a step", "delta", "dense", "ratio"), ("no delta was sent", "-", "-", "-")]
    moved, dense_moved = mean(step.delta_bytes for step in deltas), mean(step.dense_bytes for step in deltas)
    stood, dense_stood = (
        mean(step.delta_seconds for step in deltas),
        mean(step.dense_seconds for step in deltas),
    )
    return [
        (f"mean of {len(deltas)} steps", "delta", "dense", "ratio"),
        ("elements changed", f"{mean(step.changed for step in deltas):.2%}", "100%", ""),
        (
            "to each receiver",
            f"{moved / 1e6:.2f} MB",
            f"{dense_moved / 1e6:.2f} MB",
            f"{dense_moved / max(moved, 1):.1f}x less",
        ),
        (
            "trainers stand still",
            f"{stood:.3f} s",
            f"{dense_stood:.3f} s",
            f"{dense_stood / stood:.1f}x as fast",
        ),
    ]


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


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join("  ".join(f"{cell:<22}" for cell in row).rstrip() for row in rows), flush=True)
        return
    table = Table()
    for number, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if number else "left")
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)
