"""Distributed tier, three ranks over gloo: several channels over one group, called in different orders.

Ranks that wait for each other in different channels are told so at once, and go on afterwards. Everything
that
only looks like it, and is none, must not be told anything: `LONG` waits come to their end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import dte_dist
from dte_dist import ProcessGroupTransport
from tests.distributed.launcher import Ranks
from tests.distributed.tools import channel_of, facts, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow

LONG, SOON, LATE = 60.0, 25.0, 4.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def call(module: Any, **options: Any) -> Any:
    return sync(module, timeout=LONG, **options)


def told(what: Callable[[], Any]) -> tuple[str, str, bool]:
    """Class and text of what a call raises, and whether that was soon."""
    begin = time.monotonic()
    try:
        what()
    except dte_dist.DeltaError as error:
        return type(error).__name__, str(error), time.monotonic() - begin < SOON
    return "", "", time.monotonic() - begin < SOON


def numbers(*modules: Any) -> list[int]:
    return [channel_of(module).watch.membership.channel for module in modules]


def crossed(rank: int, world: int, late: int | None, change: bool) -> Any:
    """Rank 1 calls the second channel while the others call the first one; then all call both, twice."""
    one, other = model(rank), model(rank + 10)
    for module in (one, other):
        call(module)
    channels = numbers(one, other)
    if rank == 0 and change:
        nudge(one, "0.weight", 3)
        nudge(other, "0.bias", 2)
    dist.barrier()
    if rank == late:
        time.sleep(LATE)
    error = told(lambda: call(other if rank == 1 else one))
    reports = [facts(call(module))[:5] for module in (one, other, one, other)]
    return error, channels, reports, prints(one), prints(other)


@pytest.mark.parametrize("late", [None, 0, 1, 2], ids=lambda late: f"late {late}")
def test_ranks_that_wait_for_each_other_in_two_channels_are_told_soon_and_go_on(
    ranks: Ranks, late: int | None
) -> None:
    (name, text, soon), (first, second), reports, *_ = same(ranks.run(crossed, late, True))
    assert name == "OrderMismatch" and soon
    assert f"in channel {first}, rank 1 in channel {second}. Hint: call the channels" in text
    assert reports == [
        (2, 1, "delta", "", 3),
        (2, 1, "delta", "", 2),
        (3, 2, "delta", "", 0),
        (3, 2, "delta", "", 0),
    ]


def crossed_again(rank: int, world: int) -> Any:
    one, other = model(rank), model(rank + 10)
    for module in (one, other):
        call(module)
    before = prints(one), prints(other)
    errors = [told(lambda: call(other if rank == 1 else one)) for _ in range(3)]
    return (
        errors,
        before == (prints(one), prints(other)),
        [facts(call(module))[:4] for module in (one, other)],
    )


def test_modules_of_one_shape_are_not_mixed_up_where_the_ranks_do_it_again(ranks: Ranks) -> None:
    errors, untouched, reports = same(ranks.run(crossed_again))
    assert [(name, soon) for name, _, soon in errors] == [("OrderMismatch", True)] * 3
    assert "opens again, but with different modules: ranks 0 and 2 that of" in errors[1][1]
    assert untouched and reports == [(2, 1, "delta", "")] * 2


def changed_places(rank: int, world: int) -> Any:
    one, other = model(rank), model(rank + 10)
    for module in (one, other):
        call(module)
    for module in (one, other):
        dte_dist.close(module)
    return told(lambda: call(other if rank == 1 else one))[0], told(
        lambda: call(one if rank == 1 else other)
    )[0]


def test_after_close_modules_may_change_places(ranks: Ranks) -> None:
    assert same(ranks.run(changed_places)) == ("", "")


def opens_out_of_turn(rank: int, world: int, kind: str) -> Any:
    """Rank 1 opens a channel for another module while the others call the one that is open."""
    one = model(rank)
    call(one)
    dist.barrier()
    other = model(rank + 20)
    error = told(lambda: call(other if rank == 1 else one))
    if kind == "another module":
        return error, [facts(call(module))[:4] for module in (one, other)]
    mine = other if rank == 1 else one
    return error, [facts(call(mine))[:4], facts(call(mine))[:4]]


@pytest.mark.parametrize("kind", ["another module", "the same, rebuilt"])
def test_a_rank_that_opens_a_channel_while_the_others_call_an_open_one_is_told_from_a_dead_one(
    ranks: Ranks, kind: str
) -> None:
    (name, text, soon), reports = same(ranks.run(opens_out_of_turn, kind))
    assert name == "OrderMismatch" and soon and "rank 1 in the opening of channel" in text
    assert "pass the module that a channel was opened with, or dte_dist.close(module, group)" in text
    if kind == "another module":
        assert reports == [(2, 1, "delta", ""), (1, None, "full", "first sync")]
    else:
        assert reports == [(2, 1, "delta", "rank 1 seeded: it had no version"), (3, 2, "delta", "")]


def rebuilt_with_a_name(rank: int, world: int, who: int) -> Any:
    """One rank builds its module anew and keeps the old one; two channels have names."""
    one, other = model(rank), model(rank + 10)
    call(one, name="actor")
    call(other, name="reference")
    dist.barrier()
    mine = model(rank + 20) if rank == who else one
    reports: list[Any] = []
    errors = [told(lambda: reports.append(facts(call(mine, name="actor"))[2:4])) for _ in range(2)]
    reports.append(facts(call(other, name="reference"))[:4])
    return errors, reports, prints(mine), prints(other)


@pytest.mark.parametrize("who", [0, 1], ids=["on the source", "on a receiver"])
def test_a_module_that_was_built_anew_takes_the_name_of_its_channel_and_nobody_waits(
    ranks: Ranks, who: int
) -> None:
    errors, (first, second, third), *_ = same(ranks.run(rebuilt_with_a_name, who))
    assert errors == [("", "", True)] * 2
    assert (
        first
        == (("full", "sources restarted, receivers held v1"), ("delta", "rank 1 seeded: it had no version"))[
            who
        ]
    )
    assert second == ("delta", "") and third == (2, 1, "delta", "")


def transports(rank: int, world: int) -> Any:
    """A transport and a channel over one group."""
    module, transport = model(rank), ProcessGroupTransport(timeout=LONG)
    call(module)
    dist.barrier()
    error = told(lambda: call(module) if rank == 1 else transport.fail(ValueError("no"), timeout=LONG))
    transport.close()
    return error, facts(call(module))[:4]


def test_a_transport_and_a_channel_that_wait_for_each_other_are_told(ranks: Ranks) -> None:
    (name, text, soon), report = same(ranks.run(transports))
    assert name == "OrderMismatch" and soon
    assert "in channel" in text and "rank 1 in channel" in text
    assert report == (2, 1, "delta", "")


# What is no crossing ----------------------------------------------------------------------------------------


def in_the_background(rank: int, world: int) -> Any:
    """Two channels in the background, begun in different orders, and ended late."""
    one, other = model(rank), model(rank + 10)
    for module in (one, other):
        call(module)
    first, second = (other, one) if rank == 1 else (one, other)
    works = {first: call(first, async_op=True)}
    time.sleep(LATE)
    works[second] = call(second, async_op=True)
    return [facts(works[module].wait())[:4] for module in (one, other)], numbers(one, other)


def one_in_the_background(rank: int, world: int) -> Any:
    """Ranks wait in the foreground of different channels, but the other one is in the background here."""
    one, other = model(rank), model(rank + 10)
    for module in (one, other):
        call(module)
    first, second = (other, one) if rank == 1 else (one, other)
    if rank == 2:
        time.sleep(LATE)
    work = call(first, async_op=True)
    report = facts(call(second))[:4]
    reports = {first: facts(work.wait())[:4], second: report}
    return [reports[one], reports[other]], numbers(one, other)


def two_threads(rank: int, world: int) -> Any:
    """Each channel has a thread of its own; on each rank another one is late."""
    one, other = model(rank), model(rank + 10)
    for module in (one, other):
        call(module)
    reports: dict[Any, Any] = {}

    def run(module: Any, is_late: bool) -> None:
        call(module)
        if is_late:
            time.sleep(LATE)
        reports[module] = facts(call(module))[:4]

    threads = [
        threading.Thread(target=run, args=(one, rank == 1)),
        threading.Thread(target=run, args=(other, rank == 0)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[one], reports[other]], numbers(one, other)


def opened_in_a_thread(rank: int, world: int) -> Any:
    """One rank is late in the thread that opens a channel, another in the thread that calls an open one."""
    one, other = model(rank), model(rank + 10)
    reports: dict[Any, Any] = {}

    def run(module: Any, is_late: bool, calls: int) -> None:
        if is_late:
            time.sleep(LATE)
        for _ in range(calls):
            reports[module] = facts(call(module))[:4]

    thread = threading.Thread(target=run, args=(one, False, 1))
    thread.start()
    thread.join()
    threads = [
        threading.Thread(target=run, args=(one, rank == 1, 1)),
        threading.Thread(target=run, args=(other, rank == 0, 2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[one], reports[other]], numbers(one, other)


def just_late(rank: int, world: int) -> Any:
    """Every rank is late once, in a channel of its own."""
    modules = [model(rank + 10 * number) for number in range(3)]
    for module in modules:
        call(module)
    reports = []
    for number, module in enumerate(modules):
        if number == rank:
            time.sleep(LATE)
        reports.append(facts(call(module))[:4])
    return reports, numbers(*modules)


@pytest.mark.parametrize(
    "program", [in_the_background, one_in_the_background, two_threads, opened_in_a_thread, just_late]
)
def test_what_only_looks_like_a_crossing_comes_to_its_end(ranks: Ranks, program: Any) -> None:
    reports, _ = same(ranks.run(program))
    assert {report[2:] for report in reports} == {("delta", "")}
