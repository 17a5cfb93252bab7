"""The ranks that examples share."""

from collections.abc import Iterator

import pytest

from tests.distributed.launcher import Ranks
from tests.examples.world import WORLD


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real ranks; an example that fails may leave them in different places, so the examples after it may fail, too."""
    with Ranks(WORLD) as ranks:
        yield ranks
