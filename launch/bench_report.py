"""Writes docs/results.md from the JSON files of launch/bench.py.

    python launch/bench_report.py out/bench_quick.json out/bench_links_1gbit.json

The text between the two `notes` comments of an existing file is kept: what bounds the targets that were not
reached is for people to say.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from benchlib.plots import draw
from benchlib.report import markdown, phase_lines, tables
from benchlib.rows import Row, read_rows
from benchlib.targets import verdicts
from commonlib.settings import parse, refuse

BEGIN, END = "<!-- notes: kept when this file is written anew -->", "<!-- end of notes -->"
RESULTS = Path(__file__).parent.parent / "docs" / "results.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The command line.

    Attributes:
        files: JSON files of launch/bench.py.
        out: the document.
        plots: folder for the plots; None stands for one beside the document that has its name.
    """

    files: Positional[tuple[Path, ...]] = ()
    out: Path = RESULTS
    plots: Path | None = None


def main() -> int:
    said = parse(Flags(), None, "Write docs/results.md from what launch/bench.py measured.")
    if not said.files:
        refuse("name the JSON files of launch/bench.py")
    try:
        rows = [row for path in said.files for row in read_rows(path)]
    except (OSError, ValueError, TypeError) as error:
        print(f"not rows of launch/bench.py: {error}", file=sys.stderr)
        return 1
    plots = draw(rows, said.plots or said.out.with_suffix(""))
    notes = kept_notes(said.out)
    text = "\n\n".join(
        document(rows, [Path(os.path.relpath(path, said.out.parent)) for path in plots], notes)
    )
    said.out.write_text(text + "\n")
    print(f"{said.out}: {len(rows)} rows, {len(plots)} plots")
    return 0


def document(rows: Sequence[Row], plots: Sequence[Path], notes: str) -> Iterator[str]:
    """Yield the paragraphs."""
    yield "# Results"
    yield INTRODUCTION
    yield "## Targets"
    yield targets(rows)
    yield "\n".join([BEGIN, notes, END])
    for (preset, links), group in itertools.groupby(rows, lambda row: (row.preset, row.links)):
        measured = list(group)
        yield f"## Preset {preset}, {links}"
        yield where_and_when(measured)
        for title, lines in tables(measured):
            yield f"**{title}**"
            yield markdown(lines)
        for title, lines in phase_lines(measured):
            yield f"Phases of {title}; milliseconds of the rank that spent most in each, median:"
            yield markdown(lines)
    for path in plots:
        yield f"![{path.stem}]({path})"


INTRODUCTION = """\
This file is written by `launch/bench_report.py` from the JSON of `launch/bench.py`; how it measures is said there. In short: all methods
take turns on the same ranks, weights and buffers; a time is the median over the repetitions of the slowest rank's; after every call
the receivers' bits are compared with the sources'. Ratios hold within one table and nowhere else: absolute times depend on the
machine and on what else it is doing.

(a) `dense_broadcast`: everything, gathered with `full_tensor()`, packed into buckets, broadcast. (b) `dense_p2p`: everything, shard to
shard, by `delta_p2p(mode="full")`. (c) `published`: the design of public trainers as it stands. "limit" is the entropy of the update in
bytes per changed element; "CPU" is the process time of all ranks; "memory s/r" is what sources and receivers hold at the peak of
a call beyond what they held before it."""  # noqa: E501


def targets(rows: Sequence[Row]) -> str:
    """Return the table of targets."""
    lines = [("", "target", "wanted", "measured", "reached", "preset")]
    for each in verdicts(rows):
        preset = f"{each.row.preset}, {each.row.links}"
        lines.append(
            (
                str(each.number),
                each.what,
                each.wanted,
                each.found,
                "yes" if each.reached else "**no**",
                preset,
            )
        )
    return markdown(lines) if len(lines) > 1 else "None of the rows is about a target."


def where_and_when(rows: Sequence[Row]) -> str:
    """Return machine, dates and load of some rows."""
    machines = "; ".join(dict.fromkeys(row.machine for row in rows))
    dates = sorted({row.date for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    loads = [row.load for row in rows]
    load = f"{min(loads):.1f}" if min(loads) == max(loads) else f"{min(loads):.1f} to {max(loads):.1f}"
    return (
        f"{machines}. {when}. Load average before each scenario: {load} (the bench "
        "itself raises it for the next)."
    )


def kept_notes(path: Path) -> str:
    """Return the notes of the document as it is."""
    text = path.read_text() if path.exists() else ""
    return text.split(BEGIN, 1)[1].split(END, 1)[0].strip() if BEGIN in text and END in text else ""


if __name__ == "__main__":
    sys.exit(main())
