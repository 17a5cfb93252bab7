"""Distributed tier, five ranks over gloo: deltas that count on the positions of the one before, on both
routes, and what comes between.

Three sources hold a bf16 weight by rows; one receiver holds it by columns, the other whole. Each step changes
mostly what the last one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dte_dist
from dte_dist import Layout
from dte_dist.errors import DeltaError
from dte_dist.sync.receiver import Receiver
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT, parts_of

pytestmark = pytest.mark.slow

ROWS, COLUMNS, SOURCES = 6000, 64, 3
PLAIN, COUNTS = False, True


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(5) as ranks:
        yield ranks


class Trainer:
    """The same on every rank: the whole weight step by step, and this rank's part of it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.rng = rank, np.random.default_rng(0)
        self.whole = torch.from_numpy(self.rng.integers(0, 100, (ROWS, COLUMNS))).bfloat16()
        self.flags = self.rng.random((ROWS, COLUMNS)) < 0.02
        self.tensor = self.part().clone() if rank < SOURCES else torch.zeros_like(self.part())
        where = [(rank * ROWS // SOURCES, 0)] * SOURCES + [(0, 10), (0, 0)]
        self.layout = Layout.from_views([("w", self.tensor, (ROWS, COLUMNS), where[rank])])

    def part(self) -> Tensor:
        low = self.rank * ROWS // SOURCES
        parts = [self.whole[low : low + ROWS // SOURCES]] * SOURCES + [self.whole[:, 10:40], self.whole]
        return parts[self.rank]

    def step(self) -> None:
        self.whole.view(torch.int16)[torch.from_numpy(self.flags)] ^= 1
        self.flags = (self.flags & (self.rng.random(self.flags.shape) < 0.84)) | (
            self.rng.random(self.flags.shape) < 0.003
        )
        if self.rank < SOURCES:
            self.tensor.copy_(self.part())

    def sync(self, route: str, **options: Any) -> dte_dist.SyncReport:
        call = {"broadcast": dte_dist.delta_broadcast, "p2p": dte_dist.delta_p2p}[route]
        how = {
            "src": list(range(SOURCES)),
            "codec": "again+planes",
            "bucket_bytes": 1 << 17,
            "timeout": TIMEOUT,
        }
        return call(self.layout, **{**how, **options})

    def try_sync(self, route: str, **options: Any) -> tuple[Any, ...]:
        """Sync after a step: who was seeded, whether this source counted on the last delta, whether the bits
        are right; or the error.
        """
        self.step()
        try:
            report = self.sync(route, **options)
        except DeltaError as error:
            return (type(error).__name__,)
        counted = any(name.startswith("again") for name in report.codecs) if self.rank < SOURCES else None
        return report.seeded, counted, same_bits(self.tensor, self.part().contiguous()), report.wire_bytes


def both_routes(rank: int, world: int, codec: str) -> list[Any]:
    trainer = Trainer(rank)
    routes = ["broadcast", "broadcast", "broadcast", "p2p", "p2p", "p2p", "broadcast", "broadcast"]
    return [trainer.try_sync(route, codec=codec) for route in routes]


def test_several_syncs_on_both_routes(ranks: Ranks) -> None:
    """A delta counts on the one before from the second on, if that took the same route; each takes fewer
    bytes for it.
    """
    found, plain = ranks.run(both_routes, "small"), ranks.run(both_routes, "ef+planes")
    counted = [PLAIN, PLAIN, COUNTS, PLAIN, COUNTS, COUNTS, PLAIN, COUNTS]
    for rank, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
        assert all(right for _, _, right, _ in ours + theirs)
        assert [seeded for seeded, *_ in ours] == [(3, 4)] + [()] * 7
        if rank < SOURCES:
            assert [again for _, again, *_ in ours] == counted and not any(again for _, again, *_ in theirs)
        for used, (*_, size), (*_, size_plain) in zip(counted, ours, theirs, strict=True):
            assert size < 0.75 * size_plain if used else size <= size_plain


def disturbed(rank: int, world: int, route: str) -> list[Any]:
    trainer = Trainer(rank)
    found = [trainer.try_sync(route) for _ in range(3)]
    if rank == 3:
        trainer.tensor.zero_()
    return found + [trainer.try_sync(route) for _ in range(3)]


@pytest.mark.parametrize("route", ["broadcast", "p2p"])
def test_a_receiver_that_is_seeded_has_no_history_and_is_not_asked_for_one(ranks: Ranks, route: str) -> None:
    """The other one follows, which had the last delta; after a sync that only some followed nobody counts on
    it.
    """
    found = ranks.run(disturbed, route)
    assert all(right for seen in found for _, _, right, _ in seen)
    assert [seeded for seeded, *_ in found[0]] == [(3, 4), (), (), (3,), (), ()]
    assert all(
        [again for _, again, *_ in seen] == [PLAIN, PLAIN, COUNTS, COUNTS, PLAIN, COUNTS]
        for seen in found[:SOURCES]
    )


def failing_vote(rank: int, world: int, route: str) -> list[Any]:
    trainer = Trainer(rank)
    found = [trainer.try_sync(route) for _ in range(3)]
    if rank == 4:
        take = Receiver._take
        Receiver._take = lambda *_: (_ for _ in ()).throw(dte_dist.errors.FrameError("for the test"))
    found.append(trainer.try_sync(route))
    if rank == 4:
        Receiver._take = take
    return found + [trainer.try_sync(route) for _ in range(2)]


@pytest.mark.parametrize("route", ["broadcast", "p2p"])
def test_after_a_failed_vote(ranks: Ranks, route: str) -> None:
    found = ranks.run(failing_vote, route)
    for seen in found:
        assert seen.pop(3) == ("FrameError",)
        assert all(right for _, _, right, _ in seen)
    assert [seeded for seeded, *_ in found[0]] == [(3, 4), (), (), (), ()]
    assert all(
        [again for _, again, *_ in seen] == [PLAIN, PLAIN, COUNTS, PLAIN, COUNTS] for seen in found[:SOURCES]
    )


def anchored(rank: int, world: int) -> list[Any]:
    trainer = Trainer(rank)
    return [trainer.try_sync("broadcast", anchor_interval=3) for _ in range(7)]


def test_after_an_anchor(ranks: Ranks) -> None:
    found = ranks.run(anchored)
    assert all(right for seen in found for _, _, right, _ in seen)
    assert all(
        [again for _, again, *_ in seen] == [PLAIN, PLAIN, COUNTS, COUNTS, PLAIN, PLAIN, COUNTS]
        for seen in found[:SOURCES]
    )


def lost(rank: int, world: int) -> list[Any]:
    trainer = Trainer(rank)
    found = [trainer.try_sync("broadcast") for _ in range(2)]
    if rank == 3:
        parts_of(trainer.layout).receiver._history.reset()
    found += [trainer.try_sync("broadcast") for _ in range(3)]
    dist.barrier()
    return found


def test_a_history_that_is_lost_is_an_error_on_all_ranks_once(ranks: Ranks) -> None:
    """It cannot come to that; should it, nobody guesses, nobody hangs, and the next sync is well."""
    found = ranks.run(lost)
    for seen in found:
        assert seen.pop(2) == ("FrameError",)
        assert all(right for _, _, right, _ in seen)
    assert all([again for _, again, *_ in seen] == [PLAIN, PLAIN, PLAIN, COUNTS] for seen in found[:SOURCES])
