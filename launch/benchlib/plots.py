"""Plots of the rows: seconds and bytes against the share of changed elements, one picture a scenario."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchlib.rows import Row
from benchlib.show import head

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLORS = {
    "dense_broadcast": "#b0b0b0",
    "dense_p2p": "#7f7f7f",
    "published": "#ff7f0e",
    "delta_broadcast": "#1f77b4",
    "delta_p2p": "#2ca02c",
}
_DASHES = ("-", "--", ":", "-.")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every scenario with at least two densities that are not 0; returns the files, none without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for title, group in itertools.groupby(rows, head):
        found = [row for row in group if row.kind == "sync" and row.changed]
        if len({row.density for row in found}) < 2:
            continue
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _lines(left, found, "seconds (median)", "median_s")
        _lines(right, found, "bytes to each receiver, per changed element", "bytes_per_change")
        limits = sorted({(row.density, row.limit_bytes_per_change or 0.0) for row in found})
        right.plot([x for x, _ in limits], [y for _, y in limits], "k.", markersize=4, label="entropy limit")
        left.legend(fontsize=8)
        right.legend(fontsize=8)
        figure.suptitle(title, fontsize=11)
        path = folder / f"{found[0].preset}_{re.sub('[^a-z0-9.]+', '_', title.lower()).strip('_')}.png"
        figure.savefig(path, dpi=130)
        paths.append(path)
    return paths


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
            color=_COLORS.get(method),
            label=label,
        )
    axes.set(xscale="log", yscale="log", xlabel="changed elements, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(what, fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
