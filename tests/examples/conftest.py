"""The ranks that examples share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.launcher import Ranks
from tests.examples.world import WORLD

_SECONDS = 40.0
"""An example that takes longer hangs: the ranks that raised no error wait for one that did."""


class Stage:
    """Ranks that are started when they are first needed, and anew after an example has left them in different
    places.
    """

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a program on all ranks; see `Ranks.run`."""
        self._ranks = self._ranks or Ranks(WORLD)
        try:
            return self._ranks.run(program, *args, seconds=_SECONDS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.__exit__()
            self._ranks = None


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
