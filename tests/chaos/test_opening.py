"""The first call goes wrong on one rank: it cannot describe itself, or a signal interrupts it.

Ranks that are killed in their first call are in `test_killed.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.rounds import check_bits, settle
from tests.chaos.runner import WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SOURCES = 4, 2


@pytest.mark.parametrize("kind", ["describe", "alarm"])
def test_a_first_call_that_fails_on_one_rank_works_when_it_is_made_again(pool: Pool, kind: str) -> None:
    def one(world: World, number: int) -> bool:
        choose = pick("open", kind, number)
        victim = choose.randrange(SIZE)
        fault: dict[str, Any] = (
            {"kind": kind} if kind == "describe" else {"kind": kind, "seconds": choose.random() * 0.15 + 1e-4}
        )
        world.run(
            "build",
            sources=SOURCES,
            kind="module" if kind == "describe" else choose.choice(["views", "module"]),
            fill=choose.getrandbits(30),
        )
        how = {"p2p": choose.random() < 0.5}
        result = settle(world, how, str(choose.getrandbits(40)), special={victim: {"fault": fault}})
        check_bits(result, SOURCES)
        if kind == "describe":
            told = {(message["error"], message["text"]) for _, message in result.failures}
            if len(told) != 1 or len(result.failures) != SIZE or "nobody knows" not in str(told):
                raise WentWrong(
                    f"rank {victim} could not describe itself, and not all were told so:\n{result.story()}"
                )
        after = settle(world, how, str(choose.getrandbits(40)))
        check_bits(after, SOURCES)
        if after.failures or after.answers[0]["kind"] != "delta":
            raise WentWrong(f"the step after the first call:\n{after.story()}\nbefore it:\n{result.story()}")
        return bool(result.failures)

    sweep = Sweep(pool, SIZE, lambda world: None)
    for number in range(rounds(4 if kind == "describe" else 10)):
        sweep.round(f"{kind} {number}", one, number)
    sweep.end()
