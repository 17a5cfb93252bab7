"""Distributed tier, four ranks over gloo: one rank fails in the middle of a sync; all are told, and the next
sync makes it good.

Every program runs on all ranks. Rank 0 is the source unless the test says otherwise; bits are compared
through hashes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dte_dist
from dte_dist.errors import PeerLost
from dte_dist.sync.protocol import Sync
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.staging import StagedPatch
from dte_dist.transport.broadcast import BucketedBroadcast
from tests.distributed.launcher import Ranks
from tests.distributed.tools import (
    TIMEOUT,
    Rows,
    caught,
    digest,
    facts,
    model,
    nudge,
    parts_of,
    prints,
    same,
    sync,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def detector_raises(rank: int, world: int) -> Any:
    rows = Rows(rank, 2)
    bad = []

    def detector(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        if bad:
            raise KeyError("no such mask")
        return (live != known).nonzero().flatten()

    def call() -> Any:
        return sync(rows.layout, src=[0, 1], detector=detector if rank < 2 else None)

    call()
    before = rows.whole(2)
    if rank < 2:
        rows.parts[0][1] += 1
    bad += [1] if rank == 1 else []
    error = caught(call)
    after = rows.whole(2)
    untouched = rank < 2 or after == before
    bad.clear()
    report = call()
    return error, untouched, facts(report)[:5], rows.whole(2)


def test_a_detector_that_raises_on_one_source_is_an_error_on_all_and_nothing_moved(ranks: Ranks) -> None:
    (name, text), untouched, report, _ = same(ranks.run(detector_raises))
    assert name == "SyncFailed" and "KeyError" in text and "rank 1 of the group" in text and untouched
    assert report == (2, 1, "delta", "", 10)


def apply_raises(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    seen: list[Any] = []

    def failing(*_: Any) -> None:
        nudge(module, "0.weight", 2, by=100.0)  # some of it was written
        raise OSError("a write failed")

    for step in (2, 3, 4, 5):
        if rank == 0:
            nudge(module, "0.weight", 10 * step)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2 and step == 3:
                patch.setattr(StagedPatch, "apply", failing)
            reports: list[Any] = []
            error = caught(lambda found=reports: found.append(facts(sync(module))))
        seen += reports or [error]
    return seen, prints(module)


def test_a_receiver_that_raises_inside_its_third_apply_is_seeded_by_the_fourth_and_only_it(
    ranks: Ranks,
) -> None:
    (second, third, fourth, fifth), _ = same(ranks.run(apply_raises))
    assert second[:4] == (2, 1, "delta", "")
    assert third[0] == "ApplyFailed" and "rank 2 of the group" in third[1] and "OSError" in third[1]
    assert fourth[:4] == (4, 3, "delta", "rank 2 seeded: it had no version") and fourth[10] == (2,)
    assert fifth[:4] == (5, 4, "delta", "") and fifth[10] == ()


def test_bytes_to_each_receiver_of_a_delta_do_not_count_the_seed_of_another(ranks: Ranks) -> None:
    (_, _, fourth, fifth), _ = same(ranks.run(apply_raises))
    assert 0 < fourth[6] < fifth[6]  # 40 changes against 50


def damaged_in_transit(rank: int, world: int, where: str) -> Any:
    rows = Rows(rank, 1, (48, 4))
    sync(rows.layout, bucket_bytes=256)
    before = rows.whole(1)
    if rank == 0:
        rows.parts[0].neg_()
    place, name, who = (BucketedBroadcast, "_send_bucket", 0) if where == "sent" else (Receiver, "take", 2)
    original, calls = getattr(place, name), []

    def damaging(self: Any, buffer: torch.Tensor, other: Any) -> Any:
        calls.append(buffer)
        if len(calls) == 2:
            buffer[-8] ^= 1
        return original(self, buffer, other)

    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(place, name, damaging)
        error = caught(lambda: sync(rows.layout, bucket_bytes=256))
    after = rows.whole(1)
    untouched = rank == 0 or after == before
    return error, untouched, facts(sync(rows.layout, bucket_bytes=256))[:5], rows.whole(1)


@pytest.mark.parametrize(("where", "who"), [("received", "rank 2 of"), ("sent", "rank 1, 2, 3 of")])
def test_frame_two_of_three_damaged_in_transit_fails_all_and_the_next_delta_is_a_superset(
    ranks: Ranks, where: str, who: str
) -> None:
    (name, text), untouched, report, _ = same(ranks.run(damaged_in_transit, where))
    assert name == "FrameError" and who in text and untouched
    assert report == (2, 1, "delta", "", 192)


def source_fails_after_the_gather(rank: int, world: int) -> Any:
    rows = Rows(rank, 2)
    sync(rows.layout, src=[0, 1])
    snapshot = parts_of(rows.layout).source.snapshot.bits[4] if rank < 2 else torch.zeros(1)
    before = digest(rows.parts[0]), digest(snapshot)
    if rank < 2:
        rows.parts[0].neg_()
    move = BucketedBroadcast.move

    def failing(*args: Any, **kept: Any) -> None:
        move(*args, **kept)
        raise MemoryError("no room")

    cause, begin = None, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(BucketedBroadcast, "move", failing)
        try:
            error = ("", "")
            sync(rows.layout, src=[0, 1])
        except PeerLost as lost:
            error, cause = (type(lost).__name__, str(lost)), type(lost.__cause__).__name__
    took = time.monotonic() - begin
    unmoved = digest(snapshot) == before[1] and (rank < 2 or digest(rows.parts[0]) == before[0])
    return cause, (error, took < TIMEOUT, unmoved, facts(sync(rows.layout, src=[0, 1]))[:5], rows.whole(2))


def test_a_source_that_fails_after_the_gather_lets_no_rank_commit_and_the_next_call_goes_on_without_a_seed(
    ranks: Ranks,
) -> None:
    causes, found = zip(*ranks.run(source_fails_after_the_gather), strict=True)
    (name, text), prompt, unmoved, report, _ = same(list(found))
    assert name == "PeerLost" and "rank 1 failed: MemoryError: no room" in text
    assert causes == ("PeerLost", "MemoryError", "PeerLost", "PeerLost")
    assert prompt and unmoved and report == (2, 1, "delta", "", 60)


def vote_known_to_one(rank: int, world: int) -> Any:
    """Ranks 0 and 1 lose the vote in which rank 2 learns that all agreed; rank 2 is away for one version and
    comes back.
    """
    module = model(rank)
    vote, reports = Sync._vote, []

    def lost(sync: Sync) -> None:
        vote(sync)
        raise PeerLost("the connection broke")

    for value, members in ((0.0, [0, 1, 2]), (5.0, [0, 1, 2]), (0.0, [0, 1]), (0.0, [0, 1, 2])):
        group = dist.new_group(members)
        if rank == 0:
            module[0].bias.data[0] = value
        if rank in members:
            with pytest.MonkeyPatch.context() as patch:
                if value and rank < 2:
                    patch.setattr(Sync, "_vote", lost)
                error = caught(lambda group=group: reports.append(facts(sync(module, group))))
            assert error[0] == ("PeerLost" if value else "")
            dist.destroy_process_group(group)
        dist.barrier()
    return (reports or [None])[-1], prints(module)


def test_a_version_that_only_some_committed_is_never_taken_for_the_one_made_in_its_place(
    ranks: Ranks,
) -> None:
    *members, _ = ranks.run(vote_known_to_one)
    report, _ = same(members)
    assert report[2:4] == ("delta", "rank 2 seeded: it followed another run") and report[10] == (2,)


def absent(rank: int, world: int) -> Any:
    module = model(rank)
    begin = time.monotonic()
    error = ("PeerLost", "") if rank == 1 else caught(lambda: sync(module, timeout=1.5))
    took = time.monotonic() - begin
    dist.barrier()
    return error[0], took < 15, facts(sync(module))[:4], prints(module)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_peer_lost_on_the_others_and_may_come_to_the_next_call(
    ranks: Ranks,
) -> None:
    error, prompt, report, _ = same(ranks.run(absent))
    assert error == "PeerLost" and prompt and report == (1, None, "full", "first sync")


def module_changes_shape(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 1:
        module[2] = nn.Linear(8, 5, bias=False)
    error = caught(lambda: sync(module))
    if rank == 1:
        module[2] = nn.Linear(8, 3, bias=False)
    dte_dist.close(module)
    return error, sync(module).version, prints(module)


def test_a_module_that_changed_between_syncs_is_named_on_every_rank(ranks: Ranks) -> None:
    (name, text), version, _ = same(ranks.run(module_changes_shape))
    assert name == "LayoutMismatch" and "'2.weight'" in text and "rank 1" in text and version == 1
