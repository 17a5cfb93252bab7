"""`DeltaEngine.push` and `pull` are interrupted wherever they can be, one point after the other.

All in one process, over a `LoopbackTransport`. Whatever a push did not deliver is in the next one, wherever
it was interrupted; a pull that broke off is noticed at the latest by the next pull.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dte_dist
from dte_dist import DeltaError
from tests.chaos.interrupts import Interrupt, Unit, broken_at, points_of, spread
from tests.chaos.runner import WentWrong, pick, rounds

WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class Pair:
    """A sender and a receiver, and the engines of both."""

    def __init__(self) -> None:
        self.weights = {"a": torch.arange(300.0).bfloat16(), "b": torch.ones(50), "c": torch.zeros(4, 6).t()}
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        transport = dte_dist.LoopbackTransport(history=8)
        self.sender = dte_dist.DeltaEngine(transport=transport, timeout=5.0)
        self.receiver = dte_dist.DeltaEngine(transport=transport, timeout=5.0)
        self.version = 0

    def train(self) -> None:
        """Change some elements, other ones each time."""
        self.version += 1
        self.weights["a"][self.version : self.version + 9] += 1
        self.weights["b"][self.version] = -float(self.version)
        self.weights["c"][self.version % 6, 0] += 1

    def push(self, **options: Any) -> None:
        self.sender.push(((name, tensor) for name, tensor in self.weights.items()), self.version, **options)

    def pull(self) -> None:
        self.receiver.pull(((name, tensor) for name, tensor in self.copies.items()), self.version)

    def begin(self, count: int) -> None:
        """Make some versions."""
        for _ in range(count):
            self.train()
            self.push()
            self.pull()

    def go_on(self) -> None:
        """Make the next version as an application does: if the receiver cannot follow, in full."""
        self.train()
        self.push()
        try:
            self.pull()
        except DeltaError:
            self.version += 1
            self.push(full=True)
            self.pull()

    def wrong(self) -> list[str]:
        """Return the names of the tensors that differ."""
        return [
            name
            for name, tensor in self.weights.items()
            if not np.array_equal(_bits(tensor), _bits(self.copies[name]))
        ]


def _bits(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.view(WORDS[tensor.dtype]).numpy())


def prepare(side: str, versions: int) -> tuple[Pair, Callable[[], None]]:
    """Return a pair that has come so far, and the call to be interrupted."""
    pair = Pair()
    pair.begin(versions)
    pair.train()
    if side == "pull":
        pair.push()
        return pair, pair.pull
    return pair, pair.push


def attempt(side: str, versions: int, at: int, unit: Unit, error: str) -> tuple[bool, str]:
    """Interrupt a call; return whether that came to pass, and what is wrong afterwards."""
    pair, call = prepare(side, versions)
    try:
        where = broken_at(call, at, unit, error)
    except (DeltaError, Interrupt) as told:  # the engine may say what it made of it
        where = str(told)
    for number in range(2):
        try:
            pair.go_on()
        except DeltaError as unexpected:
            return bool(where), f"step {number} after it raised {type(unexpected).__name__}: {unexpected}"
        if wrong := pair.wrong():
            return bool(where), f"step {number} after it left wrong bits in {wrong}"
    return bool(where), ""


@pytest.mark.parametrize("versions", [0, 2], ids=["the first version", "a delta"])
@pytest.mark.parametrize("side", ["push", "pull"])
@pytest.mark.parametrize(
    ("unit", "error"), [("line", "Interrupt"), ("signal", "Interrupt"), ("line", "MemoryError")]
)
def test_an_interrupted_call_of_the_engine_loses_nothing(
    side: str, versions: int, unit: Unit, error: str
) -> None:
    prepare(side, versions)[1]()  # what is done once in a process, done
    _, call = prepare(side, versions)
    points = points_of(call, unit)
    assert len(points) > 50
    hits, wrong = 0, []
    chosen = spread(points, rounds(200, len(points)), pick(side, versions, unit, error))
    for at in chosen:
        hit, problem = attempt(side, versions, at, unit, error)
        hits += hit
        if problem:
            wrong.append(f"{error} at {unit} {at}, {points[at]}: {problem}")
    if wrong:
        raise WentWrong(f"{len(wrong)} of {len(chosen)} interrupts went wrong:\n" + "\n".join(wrong))
    assert hits > 0.9 * len(chosen)
