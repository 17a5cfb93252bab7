"""`DeltaEngine` over a `ProcessGroupTransport`: interrupts, and flipped bits, on one of three ranks.

All ranks try in lock step, each time a new version, until all are well: in full after a try that failed, as
an application would that cannot know how far the others came.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.conftest import Pool
from tests.chaos.interrupts import spread
from tests.chaos.oracle import differences, whole
from tests.chaos.runner import WentWrong, World, pick, rounds
from tests.chaos.sweep import Sweep

SIZE, SENDER, RECEIVER, LAST = 3, 0, 1, 2
TRIES = 6


class Deliveries:
    """The versions of a world, one after the other."""

    def __init__(self) -> None:
        self.version = 0

    def until_well(
        self, world: World, seed: str, special: dict[int, dict[str, Any]], *, full: bool = False
    ) -> list[str]:
        """Try until all ranks are well, compare the bits, and return what went wrong before."""
        story: list[str] = []
        for number in range(TRIES):
            self.version += 1
            common = {"version": self.version, "full": full, "seed": f"{seed} {number}"}
            for rank, process in enumerate(world.members):
                world.tell(process, "deliver", **common, **(special.get(rank, {}) if number == 0 else {}))
            answers = world.results(world.members, 60.0)
            story += [
                f"try {number}, rank {rank}: {said}"
                for rank, answer in enumerate(answers)
                for said in answer["said"]
            ]
            if all(answer["ok"] for answer in answers):
                parts = [answer["bits"] for answer in answers]
                if wrong := differences(whole(parts[:1]), parts[1:], "whole"):
                    raise WentWrong(
                        "all calls ended well, and bits are wrong:\n" + "\n".join([*wrong, *story])
                    )
                return story
            full = True
        raise WentWrong(f"the ranks did not come together in {TRIES} tries:\n" + "\n".join(story))


def interrupt(world: World, deliveries: Deliveries, seed: str, special: dict[int, dict[str, Any]]) -> bool:
    story = deliveries.until_well(world, seed, special)
    after = deliveries.until_well(world, f"{seed} after", {})
    if after:
        raise WentWrong(
            "a try failed that nobody had disturbed:\n" + "\n".join([*after, "before it:", *story])
        )
    return bool(story)


@pytest.mark.parametrize("opening", [False, True], ids=["a meeting", "the first meeting"])
@pytest.mark.parametrize(
    ("victim", "unit", "error"),
    [(SENDER, "line", "Interrupt"), (RECEIVER, "signal", "Interrupt"), (LAST, "line", "MemoryError")],
)
def test_a_meeting_is_interrupted(pool: Pool, victim: int, unit: str, error: str, opening: bool) -> None:
    deliveries = Deliveries()

    def prepare(world: World) -> None:
        world.run("forsake")
        world.run("build", sources=1, fill=1)
        deliveries.until_well(world, "prepare", {})

    def one(world: World, at: int) -> bool:
        if opening:
            world.run("forsake")
        fault = {"kind": "point", "at": at, "unit": unit, "error": error}
        return interrupt(world, deliveries, f"{victim} {at}", {victim: {"fault": fault}})

    sweep = Sweep(pool, SIZE, prepare)
    points = sweep.world.run("points_of_delivery", version=1000, opening=opening, unit=unit)[victim]
    deliveries.version = 1000
    for at in spread(points, rounds(5, len(points)), pick("transport", victim, unit, error, opening)):
        sweep.round(f"rank {victim}, {error} at {unit} {at}: {points[at]}", one, at)
    sweep.end(hits=0.4)


@pytest.mark.parametrize("opening", [False, True], ids=["a meeting", "the first meeting"])
def test_a_bit_is_flipped_in_a_meeting(pool: Pool, opening: bool) -> None:
    deliveries = Deliveries()

    def prepare(world: World) -> None:
        world.run("forsake")
        world.run("build", sources=1, fill=1)
        deliveries.until_well(world, "prepare", {})

    def one(world: World, number: int, special: dict[int, dict[str, Any]]) -> bool:
        if opening:
            world.run("forsake")
        return interrupt(world, deliveries, f"flip {number}", special)

    sweep = Sweep(pool, SIZE, prepare)
    for number in range(rounds(10)):
        choose = pick("transport flip", opening, number)
        victim = choose.randrange(SIZE)
        fault = {"kind": "flip", "at": choose.randrange(20), "where": choose.random()}
        sweep.round(f"rank {victim}: {fault}", one, number, {victim: {"fault": fault}})
    sweep.end(hits=0.3)
