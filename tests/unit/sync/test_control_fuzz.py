"""Control rows, damaged at random: what is decided from them is sound, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from dte_dist import kernels
from dte_dist.sync.control import NONE, ControlRow, check_calls, common_version, decide
from dte_dist.sync.protocol import Sync
from dte_dist.sync.row_bounds import check_rows
from dte_dist.tensors.flat import BITS
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import EXTREMES, refuses_or_is_harmless


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


def a_table(rng: Random) -> tuple[list[ControlRow], list[int], list[int]]:
    """Return sound rows of three to five ranks, and which are sources and receivers."""
    ranks, version = rng.randint(3, 5), rng.choice([NONE, 1, 7, 1 << 40])
    sources = sorted(rng.sample(range(ranks), rng.randint(1, ranks - 1)))
    receivers = [rank for rank in range(ranks) if rank not in sources or rng.random() < 0.2]
    rows = []
    for rank in range(ranks):
        row = ControlRow(proposed_lineage=rng.randrange(1, 1 << 62), newest=version)
        if rank in sources:
            full = int(version == NONE)
            row = replace(row, is_source=1, source_version=version, source_lineage=5, full=full, reason=full)
        if rank in receivers:
            at, why = rng.choice([(version, 0), (version, 0), (NONE, 1), (3, 0)])
            row = replace(row, is_receiver=1, receiver_version=at, receiver_lineage=5, seed_reason=why)
        rows.append(row)
    return rows, sources, receivers


def control_rows(rng: Random) -> str:
    rows, sources, receivers = a_table(rng)
    route = SimpleNamespace(
        max_bytes={source: [800, 800] for source in sources}, chunks={source: [0, 0] for source in sources}
    )
    table = np.stack([row.pack([8, 800] if row.is_source else [], 5) for row in rows])
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        table[rng.randrange(len(table)), rng.randrange(table.shape[1])] = rng.choice(
            [*EXTREMES, *range(-1, 9), rng.getrandbits(62)]
        )
    check_rows(table, sources, receivers)
    unpacked, _ = ControlRow.unpack(table)
    check_calls(unpacked)
    sizes, sync = table[:, ControlRow.columns() :], cast(Sync, SimpleNamespace(_route=route))
    Sync._check_sizes(sync, sizes)
    assert all(0 <= size <= 800 and size % 8 == 0 for size in sizes.flatten().tolist())
    decision = decide(unpacked, sources[0])
    version, ranks = common_version(unpacked)
    assert sorted([*decision.followers, *decision.seeded]) == receivers and set(ranks) <= set(receivers)
    assert (
        version >= NONE
        and 0 < decision.version < 1 << 62
        and decision.version > decision.base
        and decision.reason is not None
    )
    return "decided"


READERS: dict[Callable[[Random], str], int] = {
    control_rows: 5000,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])


def test_what_is_not_damaged_is_read() -> None:
    for _ in range(50):
        rows, sources, receivers = a_table(Random(3))
        check_rows(np.stack([row.pack([], 0) for row in rows]), sources, receivers)
