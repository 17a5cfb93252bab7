"""Every rank or no rank: `transport/all_or_none.py` over real gloo groups, each rank a thread of this
process.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dte_dist.errors import ChannelClosed, FrameError, LayoutMismatch, PeerLost, VersionGap
from dte_dist.liveness.watch import Watch
from dte_dist.transport.all_or_none import (
    AgreedError,
    agreed,
    capture,
    capture_error,
    end_together,
    forget_frames,
    raise_if_any,
    raise_together,
)
from dte_dist.transport.communicator import Communicator, Membership

MEMBERS = (1, 2, 4)
SIZE = 5
PATIENCE = timedelta(seconds=20)


def memberships(ranks: Sequence[int]) -> list[Membership]:
    store = dist.HashStore()
    return [
        Membership(rank, SIZE, tuple(range(SIZE)), dist.PrefixStore("test", store), "cpu:gloo", PATIENCE)
        for rank in ranks
    ]


def on_wires(call: Callable[[Communicator], Any]) -> list[Any]:
    """Call something on every member of one group at a time; return what each returns."""

    def run(mine: Membership) -> Any:
        wire = Communicator("control", MEMBERS, mine, "gloo")
        try:
            return call(wire)
        finally:
            wire.close()

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return list(pool.map(run, memberships(MEMBERS)))


def marked(call: Callable[[], Any]) -> Exception:
    """Return what every rank raises."""
    with pytest.raises(AgreedError) as caught:
        call()
    return caught.value.error


def facts(errors: Sequence[Exception]) -> set[tuple[type, str]]:
    return {(type(error), str(error)) for error in errors}


# Rows -------------------------------------------------------------------------------------------------------
# -------------


def test_if_no_rank_fails_all_know_what_the_others_say() -> None:
    tables = on_wires(lambda wire: raise_if_any(wire, None, [wire.rank, -1]))
    assert [table.tolist() for table in tables] == [[[1, -1], [2, -1], [4, -1]]] * len(MEMBERS)
    assert all(table.dtype == np.int64 for table in tables)


def test_the_error_of_the_lowest_rank_is_raised_on_all_and_its_cause_stays_where_it_began() -> None:
    own: dict[int, Exception] = {2: VersionGap("lost one"), 4: OSError("the disk is full")}
    errors = on_wires(lambda wire: marked(lambda: raise_if_any(wire, own.get(wire.rank), [7])))
    assert facts(errors) == {(VersionGap, "lost one (raised on rank 2, 4 of the group)")}
    assert [error.__cause__ for error in errors] == [None, own[2], own[4]]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError("the disk is full"), "SyncFailed", "OSError: the disk is full"),
        (PeerLost("another group lost a rank"), "PeerLost", "another group lost a rank"),
        (ValueError(), "ValueError", ""),
    ],
)
def test_an_error_of_any_kind_is_agreed_and_the_ranks_stay_in_step(
    error: Exception, kind: str, text: str
) -> None:
    def twice(wire: Communicator) -> tuple[Exception, np.ndarray]:
        return marked(lambda: raise_together(wire, error if wire.rank == 4 else None)), raise_if_any(
            wire, None, [wire.rank]
        )

    errors, rows = zip(*on_wires(twice), strict=True)
    assert {(type(told).__name__, str(told)) for told in errors} == {
        (kind, f"{text} (raised on rank 4 of the group)")
    }
    assert [row.tolist() for row in rows] == [[[1], [2], [4]]] * len(MEMBERS)


def test_an_error_that_all_ranks_have_is_raised_as_it_is() -> None:
    errors = on_wires(lambda wire: marked(lambda: raise_if_any(wire, VersionGap("lost one"))))
    assert facts(errors) == {(VersionGap, "lost one")} and all(
        isinstance(error.__cause__, VersionGap) for error in errors
    )
    errors = on_wires(lambda wire: marked(lambda: raise_if_any(wire, VersionGap(f"lost {wire.rank}"))))
    assert facts(errors) == {(VersionGap, "lost 1 (raised on rank 1, 2, 4 of the group)")}


def test_ranks_that_do_not_say_how_they_failed_are_an_error_on_all() -> None:
    errors = on_wires(lambda wire: marked(lambda: raise_together(wire, None)))
    ((kind, text),) = facts(errors)
    assert kind is FrameError and text.startswith("a rank said that it failed, but not how")
    for found in on_wires(
        lambda wire: capture_error(lambda: raise_together(wire, None, unsaid=PeerLost("no word")))
    ):
        assert type(found) is PeerLost and str(found) == "no word"


# Calls ------------------------------------------------------------------------------------------------------
# -------------


def test_the_ranks_of_a_lost_peer_are_told_to_all() -> None:
    mine = PeerLost("another group lost ranks 4 and 5", lost=[4, 5], late=True)
    errors = on_wires(lambda wire: marked(lambda: raise_if_any(wire, mine if wire.rank == 1 else None)))
    found = [error.error if isinstance(error, AgreedError) else error for error in errors]
    assert {(type(error), error.lost, error.late) for error in found} == {(PeerLost, (4, 5), True)}


def fail(error: BaseException) -> Any:
    raise error


def test_errors_are_kept_and_marked_but_a_lost_peer_is_never_marked() -> None:
    wrong, lost = LayoutMismatch("no"), PeerLost("gone")
    assert agreed(lambda: 3) == 3 and marked(lambda: agreed(lambda: fail(wrong))) is wrong
    with pytest.raises(PeerLost) as caught:
        agreed(lambda: fail(lost))
    assert caught.value is lost
    assert capture(lambda: 3) == (3, None) and capture(lambda: fail(wrong)) == (None, wrong)
    assert capture_error(lambda: 3) is None and capture_error(lambda: fail(lost)) is lost
    with pytest.raises(KeyboardInterrupt):
        capture_error(lambda: fail(KeyboardInterrupt()))


# The end ----------------------------------------------------------------------------------------------------
# -------------


def closed(ranks: Sequence[int]) -> ChannelClosed:
    return ChannelClosed("somebody closed it", ranks=ranks)


def watches(ranks: Sequence[int]) -> list[Watch]:
    return [Watch(mine) for mine in memberships(ranks)]


def test_survivors_raise_the_text_of_the_first_and_each_knows_its_own_reason() -> None:
    each = watches([0, 1, 2])
    why: list[str] = []
    failed = end_together(OSError("no memory"), each[0], why.append)
    lost = [
        end_together(PeerLost(f"no answer on {rank}"), each[rank], why.append, left=closed) for rank in (1, 2)
    ]
    assert facts([failed, *lost]) == {(PeerLost, "rank 0 failed: OSError: no memory")}
    assert why == [
        "OSError in an earlier call: no memory",
        *(f"PeerLost in an earlier call: no answer on {rank}" for rank in (1, 2)),
    ]


@pytest.mark.parametrize(
    "error", [OSError("no memory"), PeerLost("no answer"), KeyboardInterrupt()], ids=repr
)
def test_a_rank_tells_why_before_it_drops_its_groups(error: BaseException) -> None:
    watch, other = watches([0, 1])
    seen: list[str] = []
    told = end_together(error, watch, lambda why: seen.append(other.settle(PeerLost("mine")).text))
    assert seen == [str(told)] and str(told) != "mine"


@pytest.mark.parametrize("left", [None, closed])
def test_ranks_that_closed_on_purpose_are_told_from_lost_ones(left: Any) -> None:
    watch, other = watches([0, 3])
    other.board.leave(3)
    told = end_together(PeerLost("no answer"), watch, lambda why: None, left=left)
    assert (type(told), str(told)) == (
        (PeerLost, "rank 3 closed the channel") if left is None else (ChannelClosed, str(closed([3])))
    )


def test_a_lost_peer_says_who_is_lost_and_so_do_the_others() -> None:
    watch, other = watches([0, 1])
    errors = [
        end_together(
            PeerLost("ranks 2 and 4 did not answer", lost=[2, 4], late=True), watch, lambda why: None
        ),
        end_together(PeerLost("rank 0 died", lost=[0]), other, lambda why: None),
    ]
    assert [(error.lost, error.late) for error in errors if isinstance(error, PeerLost)] == [
        ((2, 4), True)
    ] * 2
    assert facts(errors) == {(PeerLost, "ranks 2 and 4 did not answer")}


class Operation:
    """Stands for what holds a connection."""


def test_an_error_that_is_kept_does_not_keep_what_its_frames_held() -> None:
    held: list[weakref.ref[Operation]] = []

    def wait() -> None:
        operation = Operation()
        held.append(weakref.ref(operation))
        raise RuntimeError("the connection is closed")

    def guard() -> None:
        try:
            wait()
        except RuntimeError as error:
            raise PeerLost("could not wait") from error

    error = capture_error(guard)
    gc.collect()
    assert held[0]() is not None, "the frames of the cause hold it"
    forget_frames(error)
    assert held[0]() is None
