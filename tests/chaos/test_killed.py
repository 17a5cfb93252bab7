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
SOON = 8.0
"""Seconds in which survivors learn of a death, well below the timeout; most of it is for busy machines."""

ALONE = TIMEOUT + 10.0
"""Seconds in which they learn of the death of a rank that had the store of their group."""

LARGE = {"scale": 600, "options": {"bucket_bytes": 1 << 16}, "change": 0.4}
"""Of a model of a megabyte, of which so much changes that buckets go through a chain."""


class Killed:
    """One round.

    Args:
        world: four ranks, in step.
        what: "a sync", "a large sync" or "the first call": when the rank is killed.
        choose: of the round.
    """

    def __init__(self, world: World, what: str, choose: random.Random) -> None:
        self.world, self.choose, self.opening = world, choose, what == "the first call"
        self.members, self.victim = list(world.members), choose.randrange(SIZE)
        self.between = not self.opening and choose.random() < 0.25
        self.seed, self.scale, self.change = str(choose.getrandbits(40)), 1, 0.05
        self.how: dict[str, Any] = {"p2p": choose.random() < 0.5, "background": choose.random() < 0.25}
        if what == "a large sync":
            self.scale, self.change, self.how["options"] = LARGE["scale"], LARGE["change"], LARGE["options"]
        self.alone = world.store == "rank" and self.victim == 0

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
            pause = 0.0 if self.opening else 0.01
            world.tell(
                number, "syncs", how=self.how, seed=self.seed, most=most, pause=pause, change=self.change
            )
        answers, took, patience = dict[int, Message](), [0.1], ALONE + 30
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
        if len({text for _, text, _ in told.values() if text}) > 1 and not self.alone:
            raise WentWrong(
                f"rank {self.victim} was killed, and the survivors were told different things:\n{story}"
            )
        if any(seconds > (ALONE if self.alone else SOON) for _, _, seconds in told.values()):
            raise WentWrong(f"rank {self.victim} was killed, and survivors learnt of it too late:\n{story}")

    def _go_on(self, members: list[int], sources: int, truth: Full | None) -> Full:
        """Phases 3 and 4: form a group and sync twice; return what the sources hold then."""
        world, newcomer = self.world, truth is not None
        world.begin(members, store=self.choose.choice(["parent", "file", "rank"]))
        world.run("build", sources=sources, fill=self.choose.getrandbits(30), scale=self.scale, keep=True)
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


@pytest.mark.parametrize(("what", "short"), [("a sync", 5), ("a large sync", 3), ("the first call", 3)])
def test_survivors_of_a_kill_go_on(pool: Pool, what: str, short: int) -> None:
    scale, options = (LARGE["scale"], LARGE["options"]) if what == "a large sync" else (1, {})

    def prepare(world: World) -> None:
        world.run("build", sources=SOURCES, fill=1, scale=scale)
        check_bits(settle(world, {"options": options}, "prepare"), SOURCES)

    def one(world: World, choose: random.Random) -> bool:
        if what == "the first call":
            world.run("build", sources=SOURCES, fill=choose.getrandbits(30))
        return Killed(world, what, choose).run()

    sweep = Sweep(pool, SIZE, prepare)
    for number in range(rounds(short)):
        sweep.round(f"{what}: kill {number}", one, pick("kill", what, number))
    sweep.end()
