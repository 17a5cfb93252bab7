"""Distributed tier, four ranks over gloo: what `dte_dist.verify` says of sources, and of channels whose syncs
verify too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dte_dist
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, model, nudge, prints, same, sync
from tests.distributed.verifying import DIFFERENT, call, flip, found, fsdp2, why


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


# Sources ----------------------------------------------------------------------------------------------------


def moved(rank: int, world: int) -> Any:
    side = fsdp2(rank, world)
    module, seen = side.target, []
    call(side)
    seen.append(dte_dist.verify(module).moved)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    if rank < 2:
        module(torch.ones(2, 12)).sum().backward()
        optimizer.step()
    seen.append(dte_dist.verify(module).moved)
    call(side)
    seen.append(dte_dist.verify(module).moved)
    forgetful = (lambda live, known: torch.zeros(0, dtype=torch.int64)) if rank < 2 else None
    if rank == 0:
        flip(side.trained["2.weight"], 0)
    report = call(side, detector=forgetful)
    seen += [report.changed, dte_dist.verify(module).moved, dte_dist.verify(module).equal]
    report = call(side)
    seen += [report.changed, dte_dist.verify(module).moved]
    return seen


def test_moved_counts_what_was_trained_since_and_what_a_detector_forgot(ranks: Ranks) -> None:
    first, trained, second, changed, forgotten, equal, later, last = same(ranks.run(moved))
    assert (first, second) == (0, 0) and trained > 5
    assert (changed, forgotten, equal) == (0, 1, True) and (later, last) == (1, 0)


def no_version(rank: int, world: int) -> Any:
    """A receiver that distrusts its copy, and sources whose last sync failed, have nothing to be compared
    with.
    """
    module, seen = model(rank), []
    sync(module)
    if rank == 2:
        dte_dist.invalidate(module)
        flip(module[2].weight, 0)
    seen.append(found(dte_dist.verify(module)))
    error = caught(lambda: sync(module, mode="full", version=1))
    if rank == 0:
        nudge(module, "0.weight", 1)  # from no version nothing can have moved
    report = dte_dist.verify(module)
    seen += [error[0], found(report), report.equal, str(report).rpartition(",")[0]]
    seen += [why(sync(module))[1:], found(dte_dist.verify(module))]
    return seen


def test_receivers_without_a_version_are_not_compared(ranks: Ranks) -> None:
    partly, error, nothing, equal, text, again, after = same(ranks.run(no_version))
    assert partly == (1, 0, None, (), (1, 3), 0) and error == "VersionReplay"
    assert nothing == (None, 0, None, (), (), 0) and equal
    assert text == "no version: 0 of 6 tensors differ (ranks none); sources: 0 shards moved since"
    assert again == ("full", "no version since a sync broke off", (1, 2, 3)) and after == (
        2,
        0,
        None,
        (),
        (1, 2, 3),
        0,
    )


# With syncs -------------------------------------------------------------------------------------------------


def at_intervals(rank: int, world: int, every: int, how: str) -> Any:
    module, seen = model(rank), []
    for step in range(6):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank == 3 and step == 3:
            flip(module[2].weight, 5)
        options: dict[str, Any] = {"verify_interval": every, "route": "p2p" if "p2p" in how else "broadcast"}
        if step == 4:
            options["version"] = 10
        report = sync(module, **options, async_op=True).wait() if "async" in how else sync(module, **options)
        seen.append((why(report), report.verified and found(report.verified), "verify" in report.phases))
    return seen, prints(module)


@pytest.mark.parametrize("how", ["broadcast", "p2p", "async", "async p2p"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_syncs_verify_at_versions_that_the_interval_divides(ranks: Ranks, every: int, how: str) -> None:
    seen, _ = same(ranks.run(at_intervals, every, how))
    assert [report[0] for report, *_ in seen] == [1, 2, 3, 4, 10, 11]
    broken = False
    for (version, kind, reason, seeded), verified, phase in seen:
        if broken:
            assert (kind, reason, seeded) == ("delta", f"rank 3 seeded: {DIFFERENT}", (3,))
        else:
            assert seeded == ((1, 2, 3) if version == 1 else ())
        assert (verified is not None) == phase == (version % every == 0), version
        flipped_now = version in (4, 10) and not broken and every != 3
        broken = verified is not None and verified[3] == (3,)
        if verified is not None:
            assert verified[0] == version and verified[4:] == ((1, 2, 3), None if "async" in how else 0)
            assert verified[1:4] == ((1, "2.weight", (3,)) if flipped_now else (0, None, ())), version


def trained_meanwhile(rank: int, world: int) -> Any:
    """The optimizer steps as soon as the call has returned, while the sync, and its verification, are on
    their way.
    """
    module = model(rank)
    sync(module, verify_interval=1)
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    work = sync(module, verify_interval=1, async_op=True)
    if rank == 0:
        nudge(module, "0.weight", 5)
        dist.send(torch.ones(1), 1)
    verified = work.wait().verified
    return found(verified), "moved" in str(verified), found(dte_dist.verify(module))


def test_a_verification_in_the_background_does_not_look_at_what_is_trained_meanwhile(ranks: Ranks) -> None:
    behind, says_moved, after = same(ranks.run(trained_meanwhile))
    assert (
        behind == (2, 0, None, (), (1, 2, 3), None)
        and not says_moved
        and after == (2, 0, None, (), (1, 2, 3), 1)
    )


def unlike(rank: int, world: int, is_open: bool) -> Any:
    module = model(rank)
    if is_open:
        sync(module, verify_interval=2)
    error = caught(lambda: sync(module, verify_interval=2 if rank else 3))
    return error, sync(module, verify_interval=2).version


@pytest.mark.parametrize("is_open", [False, True], ids=["opening", "open"])
def test_intervals_that_differ_are_refused(ranks: Ranks, is_open: bool) -> None:
    (name, text), version = same(ranks.run(unlike, is_open))
    assert (
        name == ("ValueError" if is_open else "LayoutMismatch")
        and "verify_interval" in text
        and version == 1 + is_open
    )


def in_the_background(rank: int, world: int) -> Any:
    """A sync on its way, to the module or into it, ends before a verification begins."""
    module, copy = model(rank), model(20 + rank)
    into = {"into": copy} if rank == 2 else {}
    sync(module, **into)
    if rank == 0:
        nudge(module, "0.weight", 3)
        dist.recv(torch.empty(1), 2)
    work = sync(module, async_op=True, **into)
    if rank == 2:
        threading.Timer(0.3, lambda: dist.send(torch.ones(1), 0)).start()
    report = dte_dist.verify(module)
    return work.is_completed(), found(report), why(work.wait())


def test_it_waits_for_a_sync_in_the_background(ranks: Ranks) -> None:
    assert same(ranks.run(in_the_background)) == (True, (2, 0, None, (), (1, 2, 3), 0), (2, "delta", "", ()))


def into_one_copy(rank: int, world: int) -> Any:
    """Ranks 0 and 1 train a model each, rank 2 receives both into one; a verification of one waits for a sync
    of the other.
    """
    near, far = dist.new_group([0, 2]), dist.new_group([1, 2])
    if rank == 3:
        dist.barrier()
        return None
    if rank < 2:
        module, group = model(rank), (near, far)[rank]
        sync(module, group, group_src=0)
        if rank == 1:
            nudge(module, "0.weight", 5)
            dist.recv(torch.empty(1), 2)
            sync(module, group, group_src=0)
        else:
            dte_dist.verify(module, group)
        dist.barrier()
        return None
    copy, one, other = model(9), model(10), model(11)
    sync(one, near, group_src=0, into=copy)
    sync(other, far, group_src=0, into=copy)
    work = sync(other, far, group_src=0, into=copy, async_op=True)
    threading.Timer(0.3, lambda: dist.send(torch.ones(1), 1)).start()
    report = dte_dist.verify(one, near)
    ended = work.is_completed()
    work.wait()
    dist.barrier()
    return ended, found(report)


def test_it_waits_for_a_sync_in_the_background_of_another_channel_into_the_same_copy(ranks: Ranks) -> None:
    *_, (ended, report), _ = ranks.run(into_one_copy)
    assert ended and report == (1, 0, None, (), (), 0), "what another channel wrote to is of no version"


def unmoved(rank: int, world: int) -> Any:
    """It writes nothing: no counter moves, and nothing is sent anew."""
    side = fsdp2(rank, world)
    call(side)
    versions = [tensor._version for tensor in (side.held if rank > 1 else side.trained).values()]
    with torch.inference_mode(rank == 2):
        reports = [dte_dist.verify(side.target) for _ in range(3)]
    after = [tensor._version for tensor in (side.held if rank > 1 else side.trained).values()]
    return versions == after, [found(report) for report in reports], why(call(side))


def test_it_writes_nothing(ranks: Ranks) -> None:
    same_versions, reports, again = same(ranks.run(unmoved))
    assert same_versions and reports == [(1, 0, None, (), (2, 3), 0)] * 3 and again == (2, "delta", "", ())
