"""What the tests of this folder share: the seed in the header, the markers, worlds that are used again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.runner import SEED, World

HERE = Path(__file__).parent


def pytest_report_header() -> str:
    return f"chaos: DTE_CHAOS_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(0))  # the runner has deadlines of its own, which say more


class Pool:
    """Worlds by size; one that is not sound any more is replaced."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def take(self, size: int) -> World:
        """Return a world of so many processes, none of them killed, in a new group."""
        world = self._worlds.get(size)
        if world is None or not world.sound or len(world.living) != size:
            if world is not None:
                world.close()
            world = self._worlds[size] = World(size)
        world.begin()
        return world

    def close(self) -> None:
        """End all of them."""
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def four(pool: Pool) -> World:
    """Four processes in a group: two sources and two receivers in most tests."""
    return pool.take(4)
