"""A call on one of four ranks is interrupted, at a line of the package or by a signal; then all go on."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.interrupts import spread
from tests.chaos.programs import TIMEOUT
from tests.chaos.rounds import Round, check_bits, settle
from tests.chaos.runner import Message, WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SOURCES = 4, 2
LONGEST = TIMEOUT + 5.0
ROOT, SOURCE, RECEIVER, LAST = range(4)


def check_times(result: Round) -> None:
    """No call may take longer than its timeout, and a little for busy machines."""
    late = [(rank, message) for rank, message in result.failures if message["seconds"] > LONGEST]
    if late:
        raise WentWrong(f"calls took longer than {LONGEST} s: {late}\n{result.story()}")


def interrupt(
    world: World, how: dict[str, Any], special: Mapping[int, Mapping[str, Any]], seed: str, **settling: Any
) -> Round:
    """Interrupt a call of one rank, and let all go on; the step after that has nothing to complain about."""
    sources, cut = sources_of(how), cut_of(how)
    result = settle(world, how, seed, special=special, **settling)
    check_bits(result, sources, cut)
    check_times(result)
    after = settle(world, {**how, "options": {}}, f"{seed} after")
    check_bits(after, sources, cut)
    if after.failures or after.answers[0]["kind"] != "delta" or after.answers[0]["seeded"]:
        raise WentWrong(
            f"an interrupt costs more than a seed:\n{after.story()}\nbefore it:\n{result.story()}"
        )
    return result


def cut_of(how: Mapping[str, Any]) -> str:
    return "columns" if how.get("p2p") and not how.get("colocated") else "whole"


def sources_of(how: Mapping[str, Any]) -> int:
    return SIZE if how.get("colocated") else SOURCES


def build(world: World, how: Mapping[str, Any], kind: str, fill: int) -> None:
    """Give all ranks a new model, for which no channel is open."""
    colocated = bool(how.get("colocated"))
    world.run("build", sources=sources_of(how), cut=cut_of(how), kind=kind, fill=fill, colocated=colocated)


def prepare(world: World, how: Mapping[str, Any], kind: str) -> None:
    """Come to where the next sync is an ordinary one: the first delta goes on its route, then as inline
    frames.
    """
    build(world, how, kind, 1)
    for number in range(3):
        check_bits(settle(world, {**how, "options": {}}, f"prepare {number}"), sources_of(how), cut_of(how))


def sweep_points(
    pool: Pool,
    victim: int,
    how: dict[str, Any],
    short: int,
    *,
    kind: str,
    unit: str,
    error: str,
    opening: bool,
) -> None:
    """Interrupt a call at one point after the other."""

    def one(world: World, at: int) -> bool:
        if opening:
            build(world, how, kind, at)
        fault = {"kind": "point", "at": at, "unit": unit, "error": error}
        return bool(interrupt(world, how, {victim: {"fault": fault}}, f"{how} {victim} {at}").failures)

    sweep = Sweep(pool, SIZE, lambda world: prepare(world, how, kind))
    if opening:
        build(sweep.world, how, kind, 1)
    points = sweep.world.run("points", how=how, change=0.05, seed="points", unit=unit)[victim]
    for at in spread(points, rounds(short, len(points)), pick(how, victim, unit, error)):
        sweep.round(f"rank {victim}, {error} at {unit} {at}: {points[at]}", one, at)
    sweep.end(hits=0.5)


@pytest.mark.parametrize("victim", [ROOT, SOURCE, RECEIVER])
@pytest.mark.parametrize("p2p", [False, True], ids=["broadcast", "p2p"])
def test_a_call_is_interrupted_at_a_line(pool: Pool, p2p: bool, victim: int) -> None:
    kind = "views" if p2p else "module"
    sweep_points(pool, victim, {"p2p": p2p}, 30, kind=kind, unit="line", error="Interrupt", opening=False)


@pytest.mark.parametrize(
    ("victim", "how", "point", "opening"),
    [
        (ROOT, {}, ("signal", "Interrupt"), False),
        (RECEIVER, {"p2p": True}, ("signal", "Interrupt"), False),
        (SOURCE, {}, ("line", "MemoryError"), False),
        (LAST, {}, ("line", "MemoryError"), False),
        (ROOT, {"background": True}, ("line", "Interrupt"), False),
        (RECEIVER, {"background": True}, ("signal", "Interrupt"), False),
        (SOURCE, {"options": {"mode": "full"}}, ("line", "Interrupt"), False),
        (RECEIVER, {"options": {"mode": "full"}}, ("line", "Interrupt"), False),
        (SOURCE, {"verify": True}, ("signal", "Interrupt"), False),
        (LAST, {"verify": True}, ("line", "MemoryError"), False),
        (ROOT, {"colocated": True}, ("line", "Interrupt"), False),
        (LAST, {"colocated": True, "p2p": True}, ("signal", "Interrupt"), False),
        (ROOT, {}, ("line", "Interrupt"), True),
        (RECEIVER, {"p2p": True}, ("line", "Interrupt"), True),
        (RECEIVER, {}, ("signal", "MemoryError"), True),
    ],
)
def test_other_calls_are_interrupted(
    pool: Pool, victim: int, how: dict[str, Any], point: tuple[str, str], opening: bool
) -> None:
    sweep_points(pool, victim, how, 8, kind="views", unit=point[0], error=point[1], opening=opening)


def from_parent(world: World, victim: int, seconds: float) -> Callable[[int, Message], None]:
    """Return what sends SIGINT to a rank so many seconds after its first call began."""
    sent: list[int] = []

    def watch(rank: int, message: Message) -> None:
        if rank == victim and message.get("said") == "calling" and not sent:
            time.sleep(seconds)
            world.hit(world.members[victim], signal.SIGINT)
            sent.append(rank)

    return watch


def seconds_of(world: World, how: Mapping[str, Any]) -> float:
    """Return how long a call takes that nobody interrupts: a signal that comes later shows nothing."""
    calls = [settle(world, how, f"measure {number}").answers for number in range(5)]
    return statistics.median(answer["seconds"] for answers in calls for answer in answers)


@pytest.mark.parametrize("p2p", [False, True], ids=["broadcast", "p2p"])
def test_a_signal_comes_at_a_random_time(pool: Pool, p2p: bool) -> None:
    """Between any bytecodes, and in what torch does in Python: what no trace of lines shows."""

    def one(world: World, choose: random.Random, call: float) -> bool:
        how = {"p2p": p2p, "background": choose.random() < 0.3}
        victim, seconds, by_parent = (
            choose.randrange(SIZE),
            choose.random() * call + 1e-5,
            choose.random() < 0.3,
        )
        special = {victim: {"fault": {"kind": "alarm", "seconds": 0.0 if by_parent else seconds}}}
        watch = from_parent(world, victim, seconds) if by_parent else None
        return bool(interrupt(world, how, special, str(choose.getrandbits(40)), watch=watch).failures)

    sweep = Sweep(pool, SIZE, lambda world: prepare(world, {"p2p": p2p}, "views"))
    call = seconds_of(sweep.world, {"p2p": p2p})
    for number in range(rounds(20)):
        sweep.round(f"signal {number}", one, pick("signal", p2p, number), call)
    sweep.end(hits=0.2)
