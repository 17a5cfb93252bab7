"""The ways to bring the sources' weights to the receivers, and how the bench talks to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Method", "Moved"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call reports on one rank.

    Attributes:
        wire_bytes: that each receiver got; the most that one got.
        phases: seconds by phase, on this rank.
    """

    wire_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


class Method(ABC):
    """One way, on one rank. All ranks of the scenario call everything, in the same order.

    Attributes:
        name: of the method, as in the rows.
        codec: that it was told to use; empty if none.
    """

    name: str
    codec: str = ""

    @property
    def channel(self) -> object:
        """What knows the receivers' state after a call; methods may share one."""
        return self

    def begin(self) -> None:  # noqa: B027  (most have nothing to do)
        """Get ready for other weights than those of the last call; not timed, receivers hold anything."""

    def catch_up(self) -> None:  # noqa: B027
        """Get ready for the next update, before it is made, where another channel wrote last.

        Not timed; receivers hold the sources' bits.
        """

    @abstractmethod
    def run(self) -> Moved:
        """Bring the live weights of the sources to the receivers: this is what is timed."""

    def close(self) -> None:  # noqa: B027
        """Release what the method holds."""
