"""A rank is stopped (SIGSTOP) for longer than the timeout, in the middle of a call, and goes on later.

The others raise `PeerLost` after their timeout and try again; so does the late rank when it finds that they
are gone. They meet.
"""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.rounds import Round, check_bits, settle
from tests.chaos.runner import Message, WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SOURCES = 4, 2
TIMEOUT = 3.0
MOST = 4 * TIMEOUT + 10


def stopped(world: World, how: dict[str, Any], victim: int, choose: random.Random, opening: bool) -> Round:
    """Stop a rank within its first call, and wake it after longer than the timeout."""
    number, moment = world.members[victim], choose.random() * (0.1 if opening else 0.02)
    seconds = TIMEOUT * (1.1 + choose.random())
    wake: list[float] = []

    def watch(rank: int, message: Message) -> None:
        if rank == victim and message.get("said") == "calling" and not wake:
            time.sleep(moment)
            world.hit(number, signal.SIGSTOP)
            wake.append(time.monotonic() + seconds)

    def idle() -> None:
        if wake and wake[0] < time.monotonic():
            world.hit(number, signal.SIGCONT)
            wake[0] = float("inf")

    try:
        return settle(world, how, str(choose.getrandbits(40)), watch=watch, idle=idle)
    finally:
        world.hit(number, signal.SIGCONT)


@pytest.mark.parametrize("opening", [False, True], ids=["a sync", "the first call"])
def test_a_rank_that_was_stopped_and_the_others_meet_again(pool: Pool, opening: bool) -> None:
    def prepare(world: World) -> None:
        world.run("build", sources=SOURCES, fill=1)
        for number in range(2):
            check_bits(settle(world, {"options": {"timeout": TIMEOUT}}, f"prepare {number}"), SOURCES)

    def one(world: World, choose: random.Random) -> bool:
        how = {"p2p": choose.random() < 0.5, "options": {"timeout": TIMEOUT}}
        if opening:
            world.run("build", sources=SOURCES, fill=choose.getrandbits(30))
        result = stopped(world, how, victim, choose, opening)
        check_bits(result, SOURCES)
        if any(message["error"] not in ("PeerLost", "ChannelClosed") for _, message in result.failures):
            raise WentWrong(f"a stopped rank led to another error than PeerLost:\n{result.story()}")
        if any(message["seconds"] > MOST for rank, message in result.failures if rank != victim):
            raise WentWrong(f"the others learnt too late of a rank that was stopped:\n{result.story()}")
        after = settle(world, how, str(choose.getrandbits(40)))
        check_bits(after, SOURCES)
        if after.failures:
            raise WentWrong(
                f"a step failed though all were back:\n{after.story()}\nbefore it:\n{result.story()}"
            )
        return bool(result.failures)

    sweep = Sweep(pool, SIZE, prepare)
    for number in range(rounds(2)):
        choose = pick("stop", opening, number)
        victim = choose.randrange(SIZE)
        sweep.round(f"rank {victim} is stopped", one, choose)
    sweep.end()
