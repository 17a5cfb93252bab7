"""How the bench was started, as its parts need to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchlib.rows import Row

__all__ = ["LOOPBACK", "Context"]

LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class Context:
    """How the bench was started, and what it has found so far.

    Attributes:
        preset: its name.
        links: rate of the links, or "loopback".
        say: prints a line, on rank 0.
        done: called with all rows so far, on rank 0.
        rows: so far.
    """

    preset: str
    links: str
    say: Callable[[str], None]
    done: Callable[[list[Row]], None]
    rows: list[Row] = field(default_factory=list)

    @property
    def linked(self) -> bool:
        """Whether every rank has a link of its own."""
        return self.links != LOOPBACK
