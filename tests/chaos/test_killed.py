"""A rank is killed at a random moment of a sync, or of the first call; the survivors go on in a new group.

1. All four sync in a loop. The parent learns how long a sync takes, and kills a rank within that time of the
   start of one, or between two.
2. All survivors raise `PeerLost`, in time and with one text.
3. They form a group of their own and sync twice. If a source is gone, the others take over its part of the
   truth, as from a checkpoint.
4. A new process takes the place of the one that was killed, and all four sync again.
"""

from __future__ import annotations

import random
import signal
import time
from statistics import median
from typing import Any

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.oracle import Full, pack
from tests.chaos.programs import TIMEOUT
from tests.chaos.rounds import check_bits, settle
from tests.chaos.runner import Message, WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SOURCES = 4, 2
SLACK = 12.0
"""Seconds that a call may take beyond its timeout: the store is asked as well, and machines are busy."""


class Killed:
    """One round.

    Args:
        world: four ranks, in step.
        how: the collective.
        opening: whether the rank is killed in the first call rather than in a later one.
        choose: of the round.
    """

    def __init__(self, world: World, how: dict[str, Any], opening: bool, choose: random.Random) -> None:
        self.world, self.choose, self.opening = world, choose, opening
        self.how = how
        self.members, self.victim = list(world.members), choose.randrange(SIZE)
        self.between = not opening and choose.random() < 0.25
        self.seed = str(choose.getrandbits(40))

    def run(self) -> bool:
        """Go through all of it; returns True."""
        spare = self.world.add()
        answers = self._kill()
        self._check_survivors(answers)
        survivors = [rank for rank in range(SIZE) if rank != self.victim]
        sources = SOURCES - (self.victim < SOURCES)
        truth = self._go_on([self.members[rank] for rank in survivors], sources, None)
        place = [*self.members]
        place[self.victim] = spare
        self._go_on(place, SOURCES, truth)
        return True

    def _kill(self) -> dict[int, Message]:
        """Phase 1: return what the survivors answer, by rank."""
        world, victim = self.world, self.members[self.victim]
        most, at = (1, 0) if self.opening else (40, self.choose.randrange(3, 6))
        for number in self.members:
            world.tell(
                number, "syncs", how=self.how, seed=self.seed, most=most, pause=0.0 if self.opening else 0.01
            )
        answers, took, patience = dict[int, Message](), [0.1], TIMEOUT + SLACK + 30
        deadline = time.monotonic() + patience
        while len(answers) < SIZE - 1 or victim in world.living:
            found = world.read(deadline - time.monotonic())
            if found is None:
                raise world.hang([number for number in world.busy() if number in world.living], patience)
            if found[0] not in self.members:
                continue
            rank, message = self.members.index(found[0]), found[1]
            if "done" in message:
                answers[rank] = message["done"]
            elif "raised" in message:
                raise WentWrong(
                    f"rank {rank} raised {message['raised']}: {message['text']}\n{message['trace']}"
                )
            elif message["said"] == "called":
                took.append(message["seconds"])
            if "done" in message and victim in world.living and not self.opening:
                raise WentWrong(f"rank {rank} failed before anyone was killed: {message}")
            if (
                rank == self.victim
                and message.get("number") == at
                and message.get("said") == ("called" if self.between else "calling")
            ):
                time.sleep(0.0 if self.between else self.choose.random() * 1.2 * median(took[-8:]))
                world.hit(victim, signal.SIGKILL)
        return answers

    def _check_survivors(self, answers: dict[int, Message]) -> None:
        """Phase 2."""
        told = {
            rank: (answer["error"], answer["text"], answer["seconds"]) for rank, answer in answers.items()
        }
        story = "\n".join(f"rank {rank}: {said}" for rank, said in told.items())
        if any(error not in ("PeerLost", "") for error, _, _ in told.values()):
            raise WentWrong(
                f"rank {self.victim} was killed, and the survivors did not all raise PeerLost:\n{story}"
            )
        if not self.opening and any(not error for error, _, _ in told.values()):
            raise WentWrong(f"rank {self.victim} was killed, and survivors went on without it:\n{story}")
        if len({text for _, text, _ in told.values() if text}) > 1:
            raise WentWrong(
                f"rank {self.victim} was killed, and the survivors were told different things:\n{story}"
            )
        if any(seconds > TIMEOUT + SLACK for _, _, seconds in told.values()):
            raise WentWrong(f"rank {self.victim} was killed, and survivors learnt of it too late:\n{story}")

    def _go_on(self, members: list[int], sources: int, truth: Full | None) -> Full:
        """Phases 3 and 4: form a group and sync twice; return what the sources hold then."""
        world, newcomer = self.world, truth is not None
        world.begin(members, store=self.choose.choice(["parent", "file"]))
        world.run("build", sources=sources, fill=self.choose.getrandbits(30), keep=True)
        if truth is not None:
            world.run("refill", full=pack(truth))
        for number in range(2):
            result = settle(world, self.how, f"{self.seed} {newcomer} {number}", again=False)
            truth = check_bits(result, sources)
            if result.failures:
                raise WentWrong(
                    f"a sync of {'all' if newcomer else 'the survivors'} failed\n{result.story()}"
                )
            answer = result.answers[0]
            if (
                number == 0
                and self.between
                and self.victim >= SOURCES
                and not newcomer
                and (answer["kind"] != "delta" or answer["seeded"])
            ):
                raise WentWrong(
                    f"a receiver was killed between syncs, and others were seeded for it:\n{result.story()}"
                )
            if number == 1 and answer["kind"] != "delta":
                raise WentWrong(f"the second sync after the loss was full\n{result.story()}")
        assert truth is not None
        return truth


def prepare(world: World) -> None:
    world.run("build", sources=SOURCES, fill=1)
    check_bits(settle(world, {}, "prepare"), SOURCES)


@pytest.mark.parametrize(("opening", "short"), [(False, 6), (True, 3)], ids=["a sync", "the first call"])
def test_survivors_of_a_kill_go_on(pool: Pool, opening: bool, short: int) -> None:
    sweep = Sweep(pool, SIZE, prepare)

    def one(world: World, choose: random.Random) -> bool:
        if opening:
            world.run("build", sources=SOURCES, fill=choose.getrandbits(30))
        return Killed(world, {"p2p": choose.random() < 0.5}, opening, choose).run()

    for number in range(rounds(short)):
        sweep.round(f"kill {number}", one, pick("kill", opening, number))
    sweep.end()
