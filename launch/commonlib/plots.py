"""What the plots of the demo and of the bench have in common: two panels beside each other, in a PNG file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLORS", "draw_panels"]

COLORS = {
    "dense_broadcast": "#b0b0b0",
    "dense_p2p": "#7f7f7f",
    "published": "#ff7f0e",
    "delta_broadcast": "#1f77b4",
    "delta_p2p": "#2ca02c",
}


def draw_panels(path: Path, title: str, fill: Callable[[Axes, Axes], None]) -> Path | None:
    """Write a picture of two panels, with logarithmic y axes.

    Args:
        path: of the file; its folder is made.
        title: above both.
        fill: draws into the left and the right panel.

    Returns:
        The path; None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    fill(left, right)
    for axes in (left, right):
        axes.yaxis.set_major_formatter("{x:g}")
        axes.title.set_fontsize(10)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
