"""Rounds: all ranks sync until they have ended well together, whatever happened to one of them.

Each rank calls again by itself after an error. A rank whose call ended well is idle, and one that was
interrupted when the others were through would wait for them. So whoever is idle while another rank calls is
told to make its next step, as a training loop would. In the end all are idle after a sync of one version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos.oracle import Full, differences, whole
from tests.chaos.runner import Message, WentWrong, World

__all__ = ["Round", "check_bits", "settle"]

GRACE: Final = 0.15
"""Seconds that an idle rank lets the others finish before it makes its next step; longer each time."""

MOST: Final = 8
"""Steps that a rank may make in a round."""


@dataclass
class Round:
    """What became of a round.

    Attributes:
        answers: by rank, what its last step returned.
        failures: (rank, message) of calls that failed or were interrupted.
        seconds: that it took.
    """

    answers: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def interrupted(self) -> list[str]:
        """Where a rank was interrupted; empty if none was."""
        return [message["where"] for _, message in self.failures if message["said"] == "interrupted"]

    def story(self) -> str:
        """Tell what happened, for the text of an error."""
        lines = [
            f"rank {rank}: {' '.join(f'{key}={value}' for key, value in message.items())}"
            for rank, message in self.failures
        ]
        kept = ("version", "base", "kind", "reason", "seeded", "tries")
        lines += [
            f"rank {rank}: " + ", ".join(f"{key} {answer[key]}" for key in kept)
            for rank, answer in enumerate(self.answers)
        ]
        return "\n".join(lines)


def settle(
    world: World,
    how: Mapping[str, Any],
    seed: str,
    *,
    special: Mapping[int, Mapping[str, Any]] | None = None,
    seconds: float = 90.0,
    watch: Callable[[int, Message], None] | None = None,
    idle: Callable[[], None] | None = None,
    **common: Any,
) -> Round:
    """Let all members sync until they have done so together.

    Args:
        world: its members have a model.
        how, seed, common: for the program `step`.
        special: by rank, further parameters of the first step.
        seconds: that this may take.
        watch: is called with each message and the rank that it comes from.
        idle: is called between messages, every now and then.

    Raises:
        WentWrong: a process died, hung, or made too many steps.
    """
    ranks = {number: rank for rank, number in enumerate(world.members)}
    done, steps, result, begin = (
        dict[int, dict[str, Any]](),
        dict.fromkeys(ranks.values(), 0),
        Round(),
        time.monotonic(),
    )

    def tell(rank: int, parameters: Mapping[str, Any]) -> None:
        done.pop(rank, None)
        steps[rank] += 1
        if steps[rank] > MOST:
            world.sound = False
            raise WentWrong(
                f"rank {rank} made {MOST} steps, and the ranks did not come together\n{result.story()}"
            )
        world.tell(world.members[rank], "step", how=how, seed=f"{seed} {steps[rank]}", **parameters)

    for rank in ranks.values():
        tell(rank, {**common, **(special or {}).get(rank, {})})
    while len(done) < len(ranks):
        if time.monotonic() - begin > seconds:
            result.answers = [done[rank] for rank in sorted(done)]
            raise WentWrong(f"{world.hang(world.busy(), seconds)}\n{result.story()}")
        found = world.read(GRACE * max(steps.values()), world.members)
        if idle is not None:
            idle()
        if found is None:
            for rank in list(done):
                tell(rank, common)
            continue
        rank, message = ranks[found[0]], found[1]
        if watch is not None:
            watch(rank, message)
        if "done" in message:
            done[rank] = message["done"]
        elif "raised" in message:
            world.sound = False
            raise WentWrong(
                f"rank {rank} raised {message['raised']}: {message['text']}\n{message['trace']}\n"
                f"{result.story()}"
            )
        elif message["said"] in ("failed", "interrupted"):
            result.failures.append((rank, message))
    result.answers, result.seconds = [done[rank] for rank in sorted(done)], time.monotonic() - begin
    return result


def check_bits(result: Round, sources: int, cut: str = "whole") -> Full:
    """Compare the copies of all receivers with what the sources had; return the latter.

    Raises:
        WentWrong: they differ, or the ranks say that they are at different versions.
    """
    versions = [answer["version"] for answer in result.answers]
    if len(set(versions)) > 1:
        raise WentWrong(f"all calls ended well, at versions {versions}\n{result.story()}")
    parts = [answer["bits"] for answer in result.answers]
    copies = [answer["copy"] for answer in result.answers if answer["copy"] is not None]
    truth = whole(parts[:sources])
    wrong = differences(truth, copies or parts[sources:], cut)
    if wrong:
        raise WentWrong("all calls ended well, and bits are wrong:\n" + "\n".join([*wrong, result.story()]))
    return truth
