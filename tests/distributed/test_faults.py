"""Distributed tier, four ranks over gloo: faults in the middle of a sync, lies in the control row, and syncs
in the background that meet closed channels or each other. Faults are put into one rank's classes; every rank
is a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import dte_dist
from dte_dist.detect.snapshot import Snapshot
from dte_dist.errors import PeerLost
from dte_dist.sync.control import ControlRow
from dte_dist.sync.frame_builder import Lanes
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.source import Source
from dte_dist.transport.broadcast import BucketedBroadcast
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT, Rows, caught, channel_of, facts, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow

LATE = 0.5
KEPT: list[Exception] = []


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@contextmanager
def failing(place: Any, name: str, call: int, error: Exception, here: bool = True) -> Iterator[None]:
    """Let call number `call` of a method raise, on the ranks where this is `here`."""
    original, calls = getattr(place, name), []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise error
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(place, name, method)
        yield


def outcome(call: Callable[[], Any]) -> tuple[str, str, str | None]:
    """Class and text of what a call raises, and the class of its cause.

    The error is kept, as a caller may: peers must not wait for it.
    """
    KEPT.clear()
    try:
        call()
    except Exception as error:
        KEPT.append(error)
        return (
            type(error).__name__,
            str(error),
            type(error.__cause__).__name__ if error.__cause__ is not None else None,
        )
    return "", "", None


# After the vote
# ----------------------------------------------------------------------------------------------------------


def source_breaks_off(rank: int, world: int, sources: int, method: str, number: int) -> Any:
    rows, src = Rows(rank, sources, (48, 4)), list(range(sources))

    def call() -> dte_dist.SyncReport:
        return sync(rows.layout, src=src, bucket_bytes=256)

    call()
    if rank < sources:
        rows.parts[0].neg_()
    with failing(Snapshot, method, number, OSError("the device is gone"), rank == sources - 1):
        error = outcome(call)
    if rank < sources:
        rows.parts[0][0] += 1
        rows.parts[0][
            1
        ].neg_()  # as in the first version: a snapshot that is half of the second one must not be trusted
    reports, bits = [], []
    for step in range(3):
        reports.append(facts(call())[:5])
        bits.append(rows.whole(sources))
        if rank < sources:
            rows.parts[0][step, 0] += 1
    return error[2], (error[:2], reports, bits)


@pytest.mark.parametrize("sources", [1, 2])
def test_a_commit_that_breaks_off_loses_no_bits(ranks: Ranks, sources: int) -> None:
    """A steady sync settles its snapshot once, when all ranks hold the version."""
    causes, found = zip(*ranks.run(source_breaks_off, sources, "commit", 1), strict=True)
    (name, text), reports, bits = same(list(found))
    assert (
        name == "ApplyFailed"
        and f"rank {sources - 1} of the group" in text
        and "OSError: the device is gone" in text
    )
    assert causes[sources - 1] == "ApplyFailed" and {*causes[: sources - 1], *causes[sources:]} == {None}
    reason = "no version since a sync broke off" if sources == 1 else "sources hold different versions"
    assert reports == [
        (3, 2, "full", reason, 192),
        (4, 3, "delta", "", sources),
        (5, 4, "delta", "", sources),
    ]
    assert len({str(each) for each in bits}) == 3


@pytest.mark.parametrize(("sources", "number"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)])
def test_a_source_that_breaks_off_while_it_takes_changes_over_loses_no_bits(
    ranks: Ranks, sources: int, number: int
) -> None:
    """What it took over before is put back: the next delta contains it."""
    _, found = zip(*ranks.run(source_breaks_off, sources, "_update_range", number), strict=True)
    (name, text), reports, bits = same(list(found))
    assert (
        name == "SyncFailed"
        and f"rank {sources - 1} of the group" in text
        and "OSError: the device is gone" in text
    )
    assert reports[0][:4] == (2, 1, "delta", "")
    assert [report[2] for report in reports[1:]] == ["delta", "delta"]
    assert len({str(each) for each in bits}) == 3


def seed_fails(rank: int, world: int, who: int, where: str) -> Any:
    rows = Rows(rank, 2, (48, 4))

    def call() -> dte_dist.SyncReport:
        return sync(rows.layout, src=[0, 1], bucket_bytes=256)

    place: Any = Lanes if where == "write_seed" else Receiver if where == "_place" else Source
    with failing(place, where, 2 if where != "commit" else 1, OSError("no room"), rank == who):
        error = caught(call)
    first = facts(call())[:4]
    if rank < 2:
        rows.parts[0][3] += 1
    return error, first, facts(call())[:5], rows.whole(2)


@pytest.mark.parametrize(
    ("who", "where"),
    [(0, "write_seed"), (1, "write_seed"), (2, "_place")],
    ids=["on the root", "on another source", "on a receiver"],
)
def test_a_seed_that_fails_on_one_rank_is_apply_failed_on_all_and_the_next_sync_seeds(
    ranks: Ranks, who: int, where: str
) -> None:
    (name, text), first, second, _ = same(ranks.run(seed_fails, who, where))
    assert name == "ApplyFailed" and "OSError: no room" in text and text.count("ApplyFailed") == 0
    assert f"rank {who}" in text
    assert first[2:4] == ("full", "first sync") and second[1:] == (first[0], "delta", "", 8)


def seed_beside_a_delta_fails(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 3:
        dte_dist.close(module)
    seen: list[Any] = []
    for step in range(3):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        with failing(Receiver, "_place", 1, OSError("no room"), rank == 3 and step == 0):
            reports: list[Any] = []
            error = caught(lambda found=reports: found.append(facts(sync(module))))
        report = reports[0][:4] + reports[0][10:] if reports else error
        seen.append((report, prints(module) if rank < 3 or step else None))
    return seen


def test_a_seed_that_fails_beside_a_delta_leaves_the_others_at_the_new_version(ranks: Ranks) -> None:
    found = ranks.run(seed_beside_a_delta_fails)
    assert same([[report for report, _ in seen] for seen in found])[1:] == [
        (3, 2, "delta", "rank 3 seeded: it had no version", (3,)),
        (4, 3, "delta", "", ()),
    ]
    assert (
        found[0][0][0][0] == "ApplyFailed"
        and "OSError" in found[0][0][0][1]
        and "rank 3 of" in found[0][0][0][1]
    )
    same([seen[0][1] for seen in found[:3]])
    same([seen[1:] for seen in found])


# Failures of a rank's own
# ------------------------------------------------------------------------------------------------

PLACES = {
    "a source before it sends": (1, BucketedBroadcast, "_send_frames", 2),
    "the root while it relays": (0, BucketedBroadcast, "_send_bucket", 2),
    "a receiver before it decodes": (2, BucketedBroadcast, "_receive_bucket", 2),
}


def local_failure(rank: int, world: int, who: int, where: str) -> Any:
    _, place, name, call_number = PLACES[where]
    rows = Rows(rank, 2, (48, 4))

    def call() -> dte_dist.SyncReport:
        return sync(rows.layout, src=[0, 1], bucket_bytes=256)

    call()
    before = rows.whole(2)
    if rank < 2:
        rows.parts[0].neg_()
    begin = time.monotonic()
    with failing(place, name, call_number, ZeroDivisionError("by chance"), rank == who):
        *error, cause = outcome(call)
    took = time.monotonic() - begin
    after = rows.whole(2)
    unmoved = rank < 2 or after == before
    return cause, (error, took < TIMEOUT / 2, unmoved, facts(call())[:5], rows.whole(2))


@pytest.mark.parametrize("where", PLACES)
def test_an_unexpected_error_on_one_rank_is_peer_lost_with_one_text_on_all(ranks: Ranks, where: str) -> None:
    who = PLACES[where][0]
    causes, found = zip(*ranks.run(local_failure, who, where), strict=True)
    (name, text), prompt, unmoved, report, _ = same(list(found))
    assert name == "PeerLost" and f"rank {who} failed: ZeroDivisionError: by chance" in text
    assert causes == tuple("ZeroDivisionError" if rank == who else "PeerLost" for rank in range(4))
    assert prompt and unmoved and report == (2, 1, "delta", "", 192)


# Sizes that cannot be
# ----------------------------------------------------------------------------------------------------

LIES: dict[str, tuple[int, list[int]]] = {
    "negative": (0, [-8]),
    "no whole words": (1, [100]),
    "a word too large": (0, [8 * 10_000]),
    "more than all memory": (1, [0, 1 << 62]),
    "a frame too many": (1, [0, 0, 8]),
    "in the last column": (0, [0] * 31 + [8]),
    "of a receiver": (3, [96]),
}


def lying(rank: int, world: int, who: int, sizes: list[int]) -> Any:
    rows = Rows(rank, 2, (24, 4))

    def call() -> dte_dist.SyncReport:
        return sync(rows.layout, src=[0, 1], bucket_bytes=128)

    call()
    before = rows.whole(2)
    if rank < 2:
        rows.parts[0][:2].neg_()
    pack = ControlRow.pack

    def lie(row: ControlRow, mine: Any, room: int) -> Any:
        return pack(row, sizes + [0] * (room - len(sizes)), room)

    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(ControlRow, "pack", lie)
        error = caught(call)
    after = rows.whole(2)
    return error, rank < 2 or after == before, facts(call())[:5], rows.whole(2)


@pytest.mark.parametrize(("who", "sizes"), LIES.values(), ids=LIES)
def test_a_size_that_no_frame_can_have_is_refused_on_all_ranks_before_anything_moves(
    ranks: Ranks, who: int, sizes: list[int]
) -> None:
    (name, text), untouched, report, _ = same(ranks.run(lying, who, sizes))
    wrong = next(size for size in sizes if size)
    assert (
        name == "FrameError"
        and f"a frame cannot have this size [ranks {who}; " in text
        and f"got {wrong}]" in text
    )
    assert untouched and report == (2, 1, "delta", "", 16)


# In the background
# -------------------------------------------------------------------------------------------------------


def closed_by_one(rank: int, world: int, who: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == who:
        dte_dist.close(module)
    dist.barrier()
    if rank == 0:
        nudge(module, "0.weight", 7)
    begin = time.monotonic()
    error = caught(lambda: sync(module, async_op=True).wait()) if rank != who else ("", "")
    prompt = time.monotonic() - begin < TIMEOUT / 2
    return error, prompt, facts(sync(module, async_op=True).wait())[2:4], prints(module)


@pytest.mark.parametrize("who", [0, 2], ids=["the source", "a receiver"])
def test_a_channel_that_another_rank_closed_is_closed_in_the_background_and_opens_at_the_next_call(
    ranks: Ranks, who: int
) -> None:
    found = ranks.run(closed_by_one, who)
    errors = [error for error, *_ in found]
    name, text = same([error for rank, error in enumerate(errors) if rank != who])
    assert name == "ChannelClosed" and f"rank {who} closed the channel" in text and errors[who] == ("", "")
    prompt, report, _ = same([rest for _, *rest in found])
    assert prompt and report == (
        ("full", "sources restarted, receivers held v1")
        if who == 0
        else ("delta", "rank 2 seeded: it had no version")
    )


def closed_while_it_runs(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 0:
        nudge(module, "0.weight", 3)
    if rank == 1:
        time.sleep(LATE)
    work = sync(module, async_op=True)
    joined = True
    if rank == 2:
        dte_dist.close(module)
        joined = work.is_completed() and work.is_success()
    report, bits = facts(work.wait())[:5], prints(module)
    return joined, report, bits, facts(sync(module))[2:4]


def test_close_lets_a_sync_in_the_background_end_first(ranks: Ranks) -> None:
    joined, report, _, after = same(ranks.run(closed_while_it_runs))
    assert (
        joined and report == (2, 1, "delta", "", 3) and after == ("delta", "rank 2 seeded: it had no version")
    )


def one_copy_two_groups(rank: int, world: int, kind: str) -> Any:
    """Ranks 0 and 1 train a model each; rank 2 receives both into one copy, rank 3 looks on."""
    near, far = dist.new_group([0, 2]), dist.new_group([1, 2])
    if rank == 3:
        dist.barrier()
        return None
    if rank < 2:
        module, group = model(rank), (near, far)[rank]
        sync(module, group, group_src=0)
        nudge(module, "0.weight", 5)
        dist.barrier()
        if rank == 0:
            time.sleep(LATE)
        work = sync(module, group, group_src=0, async_op=True)
        return [facts(work.wait())[:4]], prints(module)
    copy = model(9)
    one, other = (copy, copy) if kind == "module" else (model(10), model(11))
    into = None if kind == "module" else copy
    for module, group in ((one, near), (other, far)):
        sync(module, group, group_src=0, into=into)
    dist.barrier()
    first = sync(one, near, group_src=0, into=into, async_op=True)
    second = sync(other, far, group_src=0, into=into, async_op=True)
    waited = first.is_completed()
    return [waited, facts(first.wait())[:4], facts(second.wait())[:4]], prints(copy)


@pytest.mark.parametrize("kind", ["into", "module"])
def test_two_groups_that_write_into_one_copy_in_the_background_take_turns(ranks: Ranks, kind: str) -> None:
    near, far, (reports, bits), _ = ranks.run(one_copy_two_groups, kind)
    assert reports[0], "the second call began while the first was writing"
    assert [reports[1]] == near[0] and [reports[2]] == far[0]
    assert bits == far[1]
    assert reports[1][2:] == reports[2][2:] == ("full", "rank 1 seeded: it followed another run")


def wrong_into(rank: int, world: int, wrong: Any) -> Any:
    module = model(rank)
    sync(module)
    error = caught(lambda: sync(module, into=wrong if rank == 2 else None, async_op=True).wait())
    return error, facts(sync(module))[:4]


@pytest.mark.parametrize("wrong", ["copy", 3, {}], ids=str)
def test_a_wrong_into_in_the_background_is_told_to_all_ranks(ranks: Ranks, wrong: Any) -> None:
    (name, text), report = same(ranks.run(wrong_into, wrong))
    assert (
        name == "ValueError"
        and "into= must be" in text
        and "rank 2 of the group" in text
        and report == (2, 1, "delta", "")
    )


def no_time(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
    work = sync(module, async_op=True)
    begin = time.monotonic()
    error = caught(lambda: work.wait(0)) if rank == 0 else ("TimeoutError", "")
    return error[0], time.monotonic() - begin < LATE, work.wait().version


def test_a_wait_of_no_time_raises_at_once_and_the_sync_goes_on(ranks: Ranks) -> None:
    assert same(ranks.run(no_time)) == ("TimeoutError", True, 2)


# A lost peer of something else
# --------------------------------------------------------------------------------------------


def lost_elsewhere(rank: int, world: int, when: str) -> Any:
    module = model(rank)

    def lose(*_: Any) -> Any:
        raise PeerLost("another group of the caller lost a rank")

    if when == "opening":
        error = outcome(lambda: sync(module, select=lose if rank == 2 else None))
        return error[2], (error[:2], facts(sync(module))[:4], prints(module))
    sync(module)
    channel = channel_of(module)
    error = outcome(lambda: sync(module, detector=lose if rank == 0 else None))
    if rank == 0:
        nudge(module, "0.weight", 3)
    again = facts(sync(module))[:4]
    return error[2], (error[:2], channel.broken, again, prints(module))


def test_a_lost_peer_that_code_of_the_caller_raises_ends_the_channel_on_all_ranks(ranks: Ranks) -> None:
    causes, found = zip(*ranks.run(lost_elsewhere, "open"), strict=True)
    (name, text), broken, again, _ = same(list(found))
    assert (
        name == "PeerLost"
        and text == "another group of the caller lost a rank (raised on rank 0 of the group)"
    )
    assert broken == f"PeerLost in an earlier call: {text}" and set(causes) == {"PeerLost"}
    assert again == (2, 1, "delta", "")


def test_a_lost_peer_that_code_of_the_caller_raises_at_opening_is_raised_on_all_ranks(ranks: Ranks) -> None:
    causes, found = zip(*ranks.run(lost_elsewhere, "opening"), strict=True)
    (name, text), again, _ = same(list(found))
    assert (
        name == "PeerLost"
        and text == "another group of the caller lost a rank (raised on rank 2 of the group)"
    )
    assert again == (1, None, "full", "first sync") and causes == (None, None, "PeerLost", None)
