"""Threads: two that call at once, one that writes to the weights, one that closes or verifies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.oracle import differences, whole
from tests.chaos.rounds import check_bits, settle
from tests.chaos.runner import WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SOURCES = 4, 2
SLOW = 0.08
"""Seconds by which a source comes late, at most, so that others wait for it inside their call."""


def prepare(world: World) -> None:
    world.run("build", sources=SOURCES, fill=1)
    for number in range(2):
        check_bits(settle(world, {}, f"prepare {number}"), SOURCES)


def sweep(pool: Pool, name: str, short: int, one: Any) -> None:
    """Make some rounds; `one` draws a call, and what which ranks suffer in it."""
    made = Sweep(pool, SIZE, prepare)

    def run(world: World, choose: random.Random) -> None:
        how, special = one(choose)
        result = settle(world, how, str(choose.getrandbits(40)), special=special)
        # What another thread did during the first sync is noticed by this one, at the latest.
        for number in range(2):
            after = settle(world, how, str(choose.getrandbits(40)))
            if number == 0:
                check_bits(after, SOURCES)
        check_bits(after, SOURCES)
        if after.failures:
            raise WentWrong(
                f"a step failed though all was well again:\n{after.story()}\nbefore it:\n{result.story()}"
            )

    for number in range(rounds(short)):
        made.round(f"{name} {number}", run, pick(name, number))
    made.end()


def how_of(choose: random.Random) -> dict[str, Any]:
    return {"p2p": choose.random() < 0.5, "background": choose.random() < 0.3}


def late(choose: random.Random) -> dict[int, dict[str, Any]]:
    """Let one source come late."""
    return {choose.randrange(SOURCES): {"delay": choose.random() * SLOW}}


def test_two_threads_of_a_rank_make_one_call_at_once(pool: Pool) -> None:
    def one(choose: random.Random) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        victims = [choose.randrange(SIZE)] if choose.random() < 0.7 else range(SIZE)
        return how_of(choose), {victim: {"fault": {"kind": "twice"}, "change": 0.0} for victim in victims}

    sweep(pool, "two threads", 8, one)


def test_a_thread_writes_to_a_receivers_weights_during_a_sync(pool: Pool) -> None:
    def one(choose: random.Random) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        victim = choose.randrange(SOURCES, SIZE)
        fault = {
            "kind": "write",
            "seconds": choose.random() * SLOW * 1.5,
            "count": choose.choice([1, 1, 5, 50]),
        }
        return how_of(choose), {**late(choose), victim: {"fault": fault}}

    sweep(pool, "a thread writes", 20, one)


@pytest.mark.parametrize("what", ["close", "invalidate", "verify"])
def test_a_thread_does_something_else_during_a_sync(pool: Pool, what: str) -> None:
    def one(choose: random.Random) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        fault = {"kind": "beside", "what": what, "seconds": choose.random() * SLOW * 1.5}
        victims = range(SIZE) if what == "verify" or choose.random() < 0.5 else [choose.randrange(SIZE)]
        special = {victim: {"fault": fault} for victim in victims}
        for rank, parameters in late(choose).items():
            special[rank] = {**special.get(rank, {}), **parameters}
        return how_of(choose), special

    sweep(pool, what, 8, one)


def test_threads_with_a_module_each_share_a_group(pool: Pool) -> None:
    world = pool.take(SIZE)
    for number in range(rounds(2)):
        choose = pick("two modules", number)
        answers = world.run(
            "two_modules",
            sources=SOURCES,
            seed=str(choose.getrandbits(40)),
            count=6,
            p2p=choose.random() < 0.5,
        )
        for model in range(2):
            for sync, parts in enumerate(zip(*[answer[model] for answer in answers], strict=True)):
                if wrong := differences(whole(parts[:SOURCES]), parts[SOURCES:], "whole"):
                    raise WentWrong(f"round {number}, module {model}, sync {sync}: {wrong}")
