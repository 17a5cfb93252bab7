"""What each step of the demo cost, and the closing table of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from dte_dist import SyncReport

__all__ = ["Step", "summary"]


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
