"""The rows that the bench writes, and the JSON file they are in."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

import torch

__all__ = ["Row", "baseline", "machine", "now", "read_rows", "write_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method under one set of conditions. Seconds of a call are those of its slowest rank; medians are
    over repetitions.

    Attributes:
        scenario, kind, preset: as in the preset.
        links: rate of every rank's link, or "loopback".
        method, codec: codec is empty if none was passed.
        updates: "generator" or "adamw".
        density: wanted percentage of changed elements; with adamw, the one found.
        learning_rate: of adamw, else 0.
        elements, changed: of the model, and how many had other bits (median).
        model_mib, tensors, sources, receivers, receivers_hold: as in the preset.
        times: seconds of every repetition, in order.
        median_s, min_s: of `times`.
        cpu_s: process time of all ranks together, in one call (median).
        wire_bytes: to each receiver, the most that one got (median).
        nic_bytes: the most that went through any rank's interface in one direction, all headers included
            (median); None without links.
        bytes_per_change: wire_bytes over changed elements.
        limit_bytes_per_change: the entropy limit, see `benchlib.limit`.
        phases: by phase, seconds of the rank that spent most in it (median).
        source_rss_mib, receiver_rss_mib: most memory that any rank held during a call beyond what it held
            before.
        read_s: seconds in which a source reads its shard and a copy of it once; the slowest source, the best
            of three.
        date, machine, load: when, on what, and the load average (1 minute) before the scenario.
    """

    scenario: str
    kind: str
    preset: str
    links: str
    method: str
    codec: str
    updates: str
    density: float
    learning_rate: float = 0.0
    elements: int
    changed: int
    model_mib: float
    tensors: int
    sources: int
    receivers: int
    receivers_hold: str
    times: Sequence[float]
    median_s: float
    min_s: float
    cpu_s: float
    wire_bytes: int
    nic_bytes: int | None = None
    bytes_per_change: float | None
    limit_bytes_per_change: float | None
    phases: Mapping[str, float] = field(default_factory=dict)
    source_rss_mib: float = 0.0
    receiver_rss_mib: float = 0.0
    read_s: float | None = None
    date: str
    machine: str
    load: float

    @property
    def cell(self) -> tuple[object, ...]:
        """What rows must share to be compared."""
        return (
            self.preset,
            self.scenario,
            self.kind,
            self.links,
            self.model_mib,
            self.tensors,
            self.sources,
            self.receivers,
            self.receivers_hold,
            self.updates,
            self.density if self.updates == "generator" else self.learning_rate,
        )

    @property
    def label(self) -> str:
        """The method, with its codec if one was passed."""
        return f"{self.method} [{self.codec}]" if self.codec else self.method


def baseline(rows: Iterable[Row], row: Row, method: str) -> Row | None:
    """Return the row of a method under the same conditions as `row`."""
    return next((each for each in rows if each.method == method and each.cell == row.cell), None)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows, as a JSON list of objects; the file is replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    fresh.replace(path)


def read_rows(path: Path) -> list[Row]:
    """Read what `write_rows` wrote; keys that are not known are left out."""
    known = {each.name for each in fields(Row)}
    return [
        Row(**{name: value for name, value in each.items() if name in known})
        for each in json.loads(path.read_text())
    ]


def machine() -> str:
    """Describe this machine in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"{platform.system()}, {versions}"
    )


def now() -> str:
    """Return the date and time in UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
