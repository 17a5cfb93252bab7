"""Many rounds, of which each may go wrong: all that did are told at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.chaos.conftest import Pool
from tests.chaos.runner import WentWrong, World

__all__ = ["Sweep"]


class Sweep:
    """Rounds on a world.

    Args:
        pool: gives the worlds.
        size: processes of each.
        prepare: is called with each new world.
        most: rounds that may go wrong before the sweep ends.

    Attributes:
        world: that the next round is to use.
        count, hits: rounds so far, and those in which something happened.
    """

    def __init__(self, pool: Pool, size: int, prepare: Callable[[World], None], *, most: int = 5) -> None:
        self._pool, self._size, self._prepare, self._most = pool, size, prepare, most
        self._wrong: list[str] = []
        self.count = self.hits = 0
        self.world = self._fresh()

    def _fresh(self) -> World:
        world = self._pool.take(self._size)
        self._prepare(world)
        return world

    def round(self, what: str, run: Callable[..., Any], *arguments: Any) -> None:
        """Run `run(world, *arguments)`, which returns whether something happened; what goes wrong is kept."""
        self.count += 1
        begin = time.monotonic()
        try:
            self.hits += bool(run(self.world, *arguments))
        except WentWrong as error:
            self.world.sound = False  # what is still under way there must not meet the next round
            self._wrong.append(f"=== {what}\n{error}")
            if len(self._wrong) >= self._most:
                self.end()
            self.world = self._fresh()
        print(f"{time.monotonic() - begin:6.2f} s, {len(self._wrong)} wrong: {what}", flush=True)

    def end(self, *, hits: float = 0.0) -> None:
        """Raise if any round went wrong, or if in fewer than this share of them something happened."""
        if self._wrong:
            raise WentWrong(
                f"{len(self._wrong)} of {self.count} rounds went wrong\n" + "\n\n".join(self._wrong)
            )
        if self.hits < hits * self.count:
            raise WentWrong(
                f"something happened in {self.hits} of {self.count} rounds only: this sweep shows nothing"
            )
