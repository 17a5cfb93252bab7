"""One bit of one exchange is flipped on one rank, as by bad memory: no abort, no hang, no wrong bits.

Whether it is a row, a text, a description, or part of a frame: what counts is the number of the operation in
the call, chosen at random.
"""

from __future__ import annotations

import random

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.rounds import check_bits, settle
from tests.chaos.runner import WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SOURCES = 4, 2


@pytest.mark.parametrize(
    ("p2p", "opening", "operations", "short"),
    [(False, False, 24, 14), (True, False, 24, 14), (False, True, 60, 10)],
    ids=["broadcast", "p2p", "the first call"],
)
def test_a_flipped_bit_leaves_no_wrong_bits(
    pool: Pool, p2p: bool, opening: bool, operations: int, short: int
) -> None:
    how = {"p2p": p2p}

    def prepare(world: World) -> None:
        world.run("build", sources=SOURCES, fill=1)
        check_bits(settle(world, how, "prepare"), SOURCES)

    def one(world: World, choose: random.Random) -> bool:
        if opening:
            world.run("build", sources=SOURCES, fill=choose.getrandbits(30))
        result = settle(world, how, str(choose.getrandbits(40)), special={victim: {"fault": fault}})
        check_bits(result, SOURCES)
        after = settle(world, how, str(choose.getrandbits(40)))
        check_bits(after, SOURCES)
        if after.failures:
            raise WentWrong(
                f"a step failed though all was well again:\n{after.story()}\nbefore it:\n{result.story()}"
            )
        return bool(result.failures)

    sweep = Sweep(pool, SIZE, prepare)
    for number in range(rounds(short)):
        choose = pick("flip", p2p, opening, number)
        victim = choose.randrange(SIZE)
        fault = {"kind": "flip", "at": choose.randrange(operations), "where": choose.random()}
        sweep.round(f"rank {victim}: {fault}", one, choose)
    sweep.end(hits=0.3)
