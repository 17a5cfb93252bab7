"""The picture at the end of the demo: bytes and seconds of every step, delta beside dense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from show import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

DELTA, DENSE = "#1f77b4", "#b0b0b0"


def draw(steps: Sequence[Step], title: str, path: Path) -> str:
    """Write the plot to `path`; returns the line to print about it."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        return "plot: not drawn, matplotlib is not installed"
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _lines(
        left,
        "MB to each receiver",
        [s.delta_bytes / 1e6 for s in steps],
        [s.dense_bytes / 1e6 for s in steps],
    )
    _lines(
        right,
        "seconds that the trainers stand still",
        [s.delta_seconds for s in steps],
        [s.dense_seconds for s in steps],
    )
    for axes in (left, right):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    left.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return f"plot: {path}"


def _lines(axes: Axes, what: str, delta: Sequence[float], dense: Sequence[float]) -> None:
    numbers = range(1, len(delta) + 1)
    axes.plot(numbers, dense, "s--", color=DENSE, label="dense broadcast")
    axes.plot(numbers, delta, "o-", color=DELTA, label="delta_broadcast")
    axes.set_title(what, fontsize=11)
    axes.set_xlabel("step (the first opens the channel and sends everything)")
    axes.set_xticks(list(numbers))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
