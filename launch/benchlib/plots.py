"""Plots of the rows: seconds and bytes against the share of changed elements, one picture a scenario."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchlib.report import head
from benchlib.rows import Row
from commonlib.plots import COLORS, draw_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_DASHES = ("-", "--", ":", "-.")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every scenario with at least two densities that are not 0; returns the files, none without
    matplotlib.
    """
    paths = []
    for title, group in itertools.groupby(rows, head):
        found = [row for row in group if row.kind == "sync" and row.changed]
        if len({row.density for row in found}) < 2:
            continue
        name = re.sub("[^a-z0-9.]+", "_", title.lower()).strip("_")
        path = folder / f"{found[0].preset}_{name}.png"
        paths.append(draw_panels(path, title, partial(_fill, found)))
    return [path for path in paths if path is not None]


def _fill(rows: Sequence[Row], left: Axes, right: Axes) -> None:
    _lines(left, rows, "seconds (median)", "median_s")
    _lines(right, rows, "bytes to each receiver, per changed element", "bytes_per_change")
    limits = sorted({(row.density, row.limit_bytes_per_change or 0.0) for row in rows})
    right.plot([x for x, _ in limits], [y for _, y in limits], "k.", markersize=4, label="entropy limit")


def _lines(axes: Axes, rows: Sequence[Row], what: str, field: str) -> None:
    labels = dict.fromkeys((row.method, row.codec) for row in rows)
    codecs = list(dict.fromkeys(codec for _, codec in labels))
    for method, codec in labels:
        points = sorted(
            (row.density, getattr(row, field)) for row in rows if (row.method, row.codec) == (method, codec)
        )
        label = f"{method} [{codec}]" if codec else method
        style = _DASHES[codecs.index(codec) % len(_DASHES)]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            style,
            marker="o",
            markersize=3,
            color=COLORS.get(method),
            label=label,
        )
    axes.set(xscale="log", xlabel="changed elements, %", title=what)
    axes.xaxis.set_major_formatter("{x:g}")
