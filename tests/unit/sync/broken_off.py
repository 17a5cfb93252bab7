"""States that are interrupted at every line, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dte_dist.codec import CodecSelector
from dte_dist.detect.detector import Detector
from dte_dist.report import Phases
from dte_dist.sync.version import NONE
from tests.unit.interrupts import at_every_line
from tests.unit.sync.pair import STREAM, Pair, same_bits

FILES = (
    "detect/snapshot.py",
    "sync/source.py",
    "sync/versioned_snapshot.py",
    "sync/version.py",
    "codec/previous_delta.py",
    "sync/receiver.py",
    "sync/versioned_copy.py",
    "sync/staging.py",
    "sync/tracker.py",
)
"""All that holds something between syncs."""

OLD = {"a": torch.arange(60.0), "b": torch.arange(20).bfloat16()}
LATER = {"a": [3, 9, 15, 40, 55], "b": [0, 10]}
"""Elements that change first after version 1; each step changes those after them."""


class Line(Pair):
    """A pair at version 1, its trainer a step further; `follows` brings the copy on, as the protocol would,
    and says how.
    """

    def __init__(self, detector: Detector | None = None, codec: str = "fast") -> None:
        super().__init__(
            {name: tensor.clone() for name, tensor in OLD.items()}, bucket_bytes=128, detector=detector
        )
        self.selector, self.steps = CodecSelector(codec), 0
        self.step()

    def step(self) -> None:
        """Change elements that no other step changes: what is lost of one is not made good by the next."""
        for name, places in LATER.items():
            self.trained[name][torch.tensor(places) + self.steps] += 1
        self.steps += 1

    def sends(self, version: int = 2) -> None:
        self.source.prepare(version, False, Phases(), self.detector, selector=self.selector)

    def follows(self) -> str:
        """Sync as the next call would; only what both sides say of themselves counts."""
        self.source.rollback()
        full, newest = (
            self.source.state.version == NONE,
            max(self.source.state.newest, self.receiver.state.newest, 1),
        )
        self.receiver.begin()
        ours, theirs = self.source.state, self.receiver.state
        if full:
            self.source.prepare(newest + 1, True, Phases())
        else:
            self.sends(newest + 1)
        if (
            not full
            and theirs.version == ours.version
            and theirs.lineage == ours.lineage
            and not theirs.seed_reason
        ):
            for chunk, frame in zip(self.chunks, self.source.frames(), strict=True):
                if len(frame):
                    self.receiver.take(frame, self.head(chunk, version=newest + 1))
            assert self.receiver.error is None
            self.receiver.apply()
            self.receiver.commit(newest + 1, ours.lineage)
            self.source.commit(newest + 1, ours.lineage, full=False)
            return "delta"
        if not full:
            self.source.detach()
        self.place(newest + 1, STREAM + 1)
        return "seed"

    def is_right(self) -> bool:
        """Whether the copy holds what the trainer has, and a step more does after one sync more, by delta."""
        if not same_bits(self.trained, self.copy):
            return False
        self.step()
        return self.follows() == "delta" and same_bits(self.trained, self.copy)


def every_line(start: Callable[[], tuple[Any, Callable[[], object]]]) -> Iterator[tuple[str, Any]]:
    """Interrupt a call at each of its lines; yield where, and what it was called on."""
    kept: list[Any] = []

    def begin() -> Callable[[], object]:
        thing, call = start()
        kept[:] = [thing]
        return call

    for where in at_every_line(begin, *FILES):
        yield where, kept[0]


def begin(pair: Line) -> Callable[[], object]:
    return pair.receiver.begin
