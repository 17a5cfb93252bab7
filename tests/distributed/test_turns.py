"""Distributed tier, four ranks over gloo: calls of several threads on one module take turns, and an
interrupted call is known to all.

Where the timeout is `LONG`, an end within `SOON` shows that nobody waited for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dte_dist
from dte_dist.sync.background import DeltaWork
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, model, nudge, prints, same, sync, why

pytestmark = pytest.mark.slow

LONG, SOON = 60.0, 25.0


class Interrupt(KeyboardInterrupt):
    """What a signal handler raises."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


# Threads ----------------------------------------------------------------------------------------------------


def side_by_side(*calls: Callable[[], Any]) -> list[str]:
    """Run calls in a thread each; return what they raise."""
    errors: list[str] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LONG)
    return [*errors, *("a thread hangs" for thread in threads if thread.is_alive())]


def two_threads(rank: int, world: int, how: str) -> Any:
    """Two threads of each rank call thirty times each; on the source each of them trains, too."""
    module, made = model(rank), list[Any]()

    def calls(name: str) -> None:
        for step in range(30):
            if rank == 0:
                nudge(module, name, step % 5)
            if how == "background":
                made.append(sync(module, timeout=LONG, async_op=True))
            else:
                made.append(sync(module, timeout=LONG, route="p2p" if how == "p2p" else "broadcast"))

    errors = side_by_side(lambda: calls("0.weight"), lambda: calls("2.weight"))
    reports = [each.wait() if isinstance(each, DeltaWork) else each for each in made]
    last = sync(module, timeout=LONG)
    return errors, sorted(why(report)[:4] for report in reports), why(last), prints(module)


@pytest.mark.parametrize("how", ["foreground", "background", "p2p"])
def test_two_threads_of_each_rank_call_on_one_module(ranks: Ranks, how: str) -> None:
    errors, reports, last, _ = same(ranks.run(two_threads, how, seconds=400))
    assert not errors and last == (61, 60, "delta", "", ())
    assert reports == [
        (1, None, "full", "first sync"),
        *((step, step - 1, "delta", "") for step in range(2, 61)),
    ]


def some_verify(rank: int, world: int) -> Any:
    """One thread syncs, another one invalidates on one rank and closes nothing: the copy comes to what it
    should be.
    """
    module = model(rank)
    sync(module, timeout=LONG)
    reasons: list[str] = []

    def syncs() -> None:
        for step in range(15):
            if rank == 0:
                nudge(module, "0.weight", step + 1)
            reasons.append(sync(module, timeout=LONG).reason)

    def distrusts() -> None:
        for _ in range(15):
            if rank == 2:
                dte_dist.invalidate(module)
            time.sleep(0.002)

    errors = side_by_side(syncs, distrusts)
    return errors, reasons, prints(module)


def test_a_thread_that_invalidates_beside_one_that_syncs(ranks: Ranks) -> None:
    errors, reasons, _ = same(ranks.run(some_verify))
    assert (
        not errors
        and {*reasons} <= {"", "rank 2 seeded: dte_dist.invalidate was called for it"}
        and len({*reasons}) == 2
    )


def opposite_orders(rank: int, world: int) -> Any:
    """Each receiver has two modules, and receives over one group into the one, over the other into the other:
    of a pair, each is both.
    """
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    one, other = (model(10 * part + rank) for part in range(2))
    seen: list[Any] = [[], []]

    def calls(part: int) -> None:
        module, into = (one, other) if part == 0 else (other, one)
        for step in range(20):
            if rank == 0:
                nudge(module, "0.weight", step % 3)
            seen[part].append(
                why(sync(module, groups[part], src=0, timeout=LONG, **({} if rank == 0 else {"into": into})))[
                    :3
                ]
            )

    errors = side_by_side(lambda: calls(0), lambda: calls(1))
    bits = [prints(one), prints(other)]
    return errors, seen, bits if rank == 0 else bits[::-1]


def test_threads_with_two_modules_in_opposite_orders_do_not_wait_for_each_other(ranks: Ranks) -> None:
    errors, seen, _ = same(ranks.run(opposite_orders, seconds=300))
    assert (
        not errors
        and seen == [[(1, None, "full"), *((step, step - 1, "delta") for step in range(2, 21))]] * 2
    )


# Calls within calls -----------------------------------------------------------------------------------------

WITHIN: dict[str, Callable[[nn.Module], Any]] = {
    "delta_broadcast": sync,
    "in the background": lambda module: sync(module, async_op=True),
    "delta_p2p": lambda module: dte_dist.delta_p2p(module, timeout=LONG),
    "verify": dte_dist.verify,
    "invalidate": dte_dist.invalidate,
    "close": dte_dist.close,
}


def within(rank: int, world: int, what: str, background: bool) -> Any:
    module = model(rank)
    sync(module, timeout=LONG)
    if rank == 0:
        nudge(module, "0.weight", 3)

    def detector(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        WITHIN[what](module)
        raise AssertionError("a call within a call was made")

    begin, how = time.monotonic(), {"timeout": LONG, "detector": detector if rank == 0 else None}
    error = caught(lambda: sync(module, **how, async_op=True).wait() if background else sync(module, **how))
    prompt = time.monotonic() - begin < SOON
    return error, prompt, why(sync(module, timeout=LONG)), prints(module)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("what", WITHIN)
def test_a_detector_that_calls_on_its_module_is_refused_and_all_ranks_learn_of_it(
    ranks: Ranks, what: str, background: bool
) -> None:
    (name, text), prompt, report, _ = same(ranks.run(within, what, background))
    assert name == "ValueError" and "running in this thread" in text and "rank 0 of the group" in text
    assert prompt and report == (2, 1, "delta", "", ())


def on_another_module(rank: int, world: int) -> Any:
    """A detector may sync another module, if all ranks do it."""
    module, other = model(rank), model(50 + rank)
    sync(module, timeout=LONG)
    sync(other, timeout=LONG)
    if rank == 0:
        nudge(module, "0.weight", 3)
        nudge(other, "0.weight", 2)
    asked: list[Any] = []

    def detector(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        if not asked:
            asked.append(why(sync(other, timeout=LONG)))
        return (live != known).nonzero().view(-1)

    if rank:
        asked.append(why(sync(other, timeout=LONG)))
    report = why(sync(module, timeout=LONG, detector=detector if rank == 0 else None))
    return asked, report, prints(module), prints(other)


def test_a_detector_may_sync_another_module(ranks: Ranks) -> None:
    asked, report, *_ = same(ranks.run(on_another_module))
    assert asked == [(2, 1, "delta", "", ())] and report == (2, 1, "delta", "", ())


# Interrupts -------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_in(place: str, here: bool) -> Iterator[None]:
    """Raise before the second line of a function, "file:name", that this thread runs in the block; once."""
    file, name = place.split(":")
    left = 2

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if not left and event == "line":
            sys.settrace(None)
            raise Interrupt(place)
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file) else None

    sys.settrace(on_call if here else None)
    try:
        yield
    finally:
        sys.settrace(None)


def told(call: Callable[[], Any]) -> tuple[str, str, bool]:
    """Return class and text of what a call raises, and whether that was soon."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begin < SOON
    return "", "", time.monotonic() - begin < SOON


PLACES = {
    "a source looks": (0, "sync/source.py:prepare"),
    "a source takes over": (0, "detect/snapshot.py:changes"),
    "a source notes": (0, "detect/snapshot.py:_record"),
    "a source encodes": (1, "sync/frame_builder.py:add"),
    "a source has prepared": (0, "sync/channel.py:_row"),
    "a receiver begins": (2, "sync/receiver.py:begin"),
    "a receiver prepares": (3, "sync/channel.py:prepare"),
}


def interrupted(rank: int, world: int, who: int, place: str, background: bool) -> Any:
    """Ranks 0 and 1 train a weight each, which one interrupted call was to bring to the others."""
    tensors = {f"w{part}": torch.full((30,), float(rank)) for part in range(2) if rank in (part, 2, 3)}
    layout = dte_dist.Layout.from_tensors(tensors)

    def call(**how: Any) -> dte_dist.SyncReport:
        return sync(layout, src=[0, 1], timeout=LONG, **how)

    def step() -> None:
        for tensor in tensors.values() if rank < 2 else ():
            tensor[:7] += 1

    seen = []
    call()
    step()
    call()
    step()
    with interrupted_in(place, rank == who):
        first = told(lambda: call(async_op=True).wait() if background else call())
    step()
    for _ in range(2):
        seen.append(why(call(async_op=True).wait() if background else call()))
        step()
    seen.append(why(call()))
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, {name: tensor.tolist() for name, tensor in tensors.items()})
    return first, (seen, parts[2] == parts[3] == parts[0] | parts[1])


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_while_a_rank_prepares_is_known_to_the_others_soon(
    ranks: Ranks, place: str, background: bool
) -> None:
    """Nobody waits for the timeout. The next calls of all go on, and lose nothing."""
    who, where = PLACES[place]
    first, rest = zip(*ranks.run(interrupted, who, where, background), strict=True)
    assert first[who] == ("Interrupt", where, True)
    name, text, soon = same([each for rank, each in enumerate(first) if rank != who])
    assert name == "PeerLost" and f"rank {who} " in text and "Interrupt" in text and soon, text
    reports, is_right = same(list(rest))
    assert is_right
    full = ("full", "sources hold different versions", (2, 3))
    third = reports[0]
    assert third[:2] == (3, 2) and third[2:] in ((("delta", "", ())), full), reports
    assert third[2:] != full or "snapshot" in where, "only what was taken over halfway costs the version"
    assert reports[1:] == [(4, 3, "delta", "", ()), (5, 4, "delta", "", ())]


def interrupted_detector(rank: int, world: int, background: bool) -> Any:
    module = model(rank)
    sync(module, timeout=LONG)
    if rank == 0:
        nudge(module, "0.weight", 3)

    def detector(live: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        raise Interrupt("in a detector")

    how = {"timeout": LONG, "detector": detector if rank == 0 else None}
    first = told(lambda: sync(module, **how, async_op=True).wait() if background else sync(module, **how))
    if rank == 0:
        nudge(module, "2.weight", 2)
    return first, (why(sync(module, timeout=LONG)), why(sync(module, timeout=LONG)), prints(module))


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_an_interrupt_in_a_detector_costs_no_seed(ranks: Ranks, background: bool) -> None:
    first, rest = zip(*ranks.run(interrupted_detector, background), strict=True)
    assert first[0] == ("Interrupt", "in a detector", True)
    name, text, soon = same(list(first[1:]))
    assert name == "PeerLost" and text == "rank 0 failed: Interrupt: in a detector" and soon
    assert same(list(rest))[:2] == ((2, 1, "delta", "", ()), (3, 2, "delta", "", ()))


def interrupted_start(rank: int, world: int, who: int, started: bool) -> Any:
    """The call is interrupted when the work is made and its thread is about to start, or has started."""
    module, start = model(rank), DeltaWork.start
    sync(module, timeout=LONG)
    if rank == 0:
        nudge(module, "0.weight", 3)

    def broken(work: DeltaWork) -> None:
        if started:
            start(work)
        raise Interrupt("at the start")

    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(DeltaWork, "start", broken)
        first = told(lambda: sync(module, timeout=LONG, async_op=True).wait())
    if rank == 0:
        nudge(module, "2.weight", 2)
    second = why(sync(module, timeout=LONG, async_op=True).wait())
    return first, (second, why(sync(module, timeout=LONG)), prints(module))


@pytest.mark.parametrize("who", [0, 2], ids=["on the source", "on a receiver"])
def test_an_interrupt_between_the_making_of_a_work_and_its_start_is_known_to_the_others(
    ranks: Ranks, who: int
) -> None:
    first, rest = zip(*ranks.run(interrupted_start, who, False), strict=True)
    assert first[who] == ("Interrupt", "at the start", True)
    name, text, soon = same([each for rank, each in enumerate(first) if rank != who])
    assert name == "PeerLost" and text == f"rank {who} failed: Interrupt: at the start" and soon
    assert same(list(rest))[:2] == ((2, 1, "delta", "", ()), (3, 2, "delta", "", ()))


@pytest.mark.parametrize("who", [0, 2], ids=["on the source", "on a receiver"])
def test_an_interrupt_after_the_start_of_a_work_stops_nobody(ranks: Ranks, who: int) -> None:
    """The sync goes on behind the caller, who does not have its handle; the next call waits for it."""
    first, rest = zip(*ranks.run(interrupted_start, who, True), strict=True)
    assert [name for name, *_ in first] == ["Interrupt" if rank == who else "" for rank in range(4)]
    assert same(list(rest))[:2] == ((3, 2, "delta", "", ()), (4, 3, "delta", "", ()))
