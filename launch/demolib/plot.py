"""The picture at the end of the demo: bytes and seconds of every step, delta beside dense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commonlib.plots import COLORS, draw_panels
from demolib.steps import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]


def draw(steps: Sequence[Step], title: str, path: Path) -> str:
    """Write the plot to `path`; returns the line to print about it."""

    def fill(left: Axes, right: Axes) -> None:
        delta, dense = [s.delta_bytes / 1e6 for s in steps], [s.dense_bytes / 1e6 for s in steps]
        _lines(left, "MB to each receiver", delta, dense)
        delta, dense = [s.delta_seconds for s in steps], [s.dense_seconds for s in steps]
        _lines(right, "seconds that the trainers stand still", delta, dense)

    drawn = draw_panels(path, title, fill)
    return f"plot: {drawn}" if drawn else "plot: not drawn, matplotlib is not installed"


def _lines(axes: Axes, what: str, delta: Sequence[float], dense: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    numbers = range(1, len(delta) + 1)
    axes.plot(numbers, dense, "s--", color=COLORS["dense_broadcast"], label="dense broadcast")
    axes.plot(numbers, delta, "o-", color=COLORS["delta_broadcast"], label="delta_broadcast")
    axes.set_title(what)
    axes.set_xlabel("step (the first opens the channel and sends everything)")
    axes.set_xticks(list(numbers))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter("")
