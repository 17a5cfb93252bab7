"""The tables on the terminal and in documents: one for each scenario, with ratios to the three baselines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchlib.rows import Row, baseline
from benchlib.settings import BASELINES
from commonlib.console import Console
from dte_dist.report import PHASES

__all__ = ["cells", "head", "markdown", "phase_lines", "print_tables", "tables"]

_HEAD = (
    "changed",
    "method",
    "median",
    "vs (a)",
    "vs (b)",
    "vs (c)",
    "to each receiver",
    "B/change",
    "limit",
    "CPU",
    "memory s/r",
)


def head(row: Row) -> str:
    """Return what the rows of one table have in common."""
    if row.kind == "compile":
        return f"{row.scenario}: kernels for bf16, one process"
    what = (
        f"{row.scenario}: {row.sources}+{row.receivers}, {row.model_mib:g} MiB bf16 in "
        f"{row.tensors} tensors, {row.links}"
    )
    extra = [row.updates] * (row.updates != "generator") + ["tensor-parallel receivers"] * (
        row.receivers_hold == "tp"
    )
    return ", ".join([what, *extra])


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield a title and lines, the first of which is the head, for every group of rows that follow each
    other.
    """
    for title, group in itertools.groupby(rows, head):
        together = list(group)
        columns = _used([_HEAD, *(cells(row, rows) for row in together)])
        yield title, columns


def phase_lines(rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield a title and lines with the phases of every delta, for every group of rows that follow each
    other.
    """
    for title, group in itertools.groupby(rows, head):
        deltas = [row for row in group if row.kind == "sync" and row.method.startswith("delta")]
        if deltas:
            lines: list[tuple[str, ...]] = [("changed", "method", *PHASES)]
            lines += [
                (f"{row.density:.3g} %", row.label, *(_milliseconds(row.phases.get(name)) for name in PHASES))
                for row in deltas
            ]
            yield title, _used(lines)


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return one line of a table."""
    ratios = []
    for method in BASELINES:
        other = baseline(rows, row, method)
        ratios.append("" if other is None or other is row else f"{other.median_s / row.median_s:.2f}x")
    changed = "" if row.kind != "sync" else f"{row.density:.3g} %"
    return (
        changed,
        row.label,
        _seconds(row.median_s),
        *ratios,
        _bytes(row.wire_bytes),
        _number(row.bytes_per_change),
        _number(row.limit_bytes_per_change),
        _seconds(row.cpu_s) if row.kind != "compile" else "",
        f"{row.source_rss_mib:.0f}/{row.receiver_rss_mib:.0f} MiB" if row.kind != "compile" else "",
    )


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print all tables."""
    for title, lines in tables(rows):
        console.table(lines, title=title, left=("method",))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---" if name in ("method", "target") else "---:" for name in lines[0]]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _used(lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out columns in which there is nothing but a head."""
    kept = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return list(zip(*kept, strict=True))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _milliseconds(value: float | None) -> str:
    return "" if not value else f"{value * 1e3:.1f}"


def _bytes(value: int) -> str:
    return "" if not value else f"{value / 1e6:.3g} MB" if value >= 1e6 else f"{value / 1e3:.3g} kB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
