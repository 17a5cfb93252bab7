"""Distributed tier, two ranks over gloo: how many files one steady delta enters, and how often.

An entry is a call from one file of the package into another, returns into a file that was left included. The
bounds are what is reached; they may only come down.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import dte_dist
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT

PACKAGE = os.path.dirname(dte_dist.__file__) + os.sep

FILES, SOURCE, RECEIVER = 53, 191, 181
"""Most files on either side; most entries on a source, on a receiver."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def file_of(frame: FrameType | None) -> str | None:
    """Return the file of the package that a frame runs, or the nearest caller's that does."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename.removeprefix(PACKAGE)


def traced(rank: int, world: int) -> dict[str, int]:
    """Sync four times; return how often the last sync entered each file."""
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    module = torch.nn.Sequential(*layers).bfloat16()
    entries: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            here = file_of(frame)
            if here is not None and here != file_of(frame.f_back):
                entries[here] += 1

    for step in range(5):
        if rank == 0 and step:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.view(-1)[::7] += 1
        if step == 4:
            sys.setprofile(enter)
        report = dte_dist.delta_broadcast(module, timeout=TIMEOUT)
        sys.setprofile(None)
    assert report.kind == "delta" and report.version == 5
    return dict(entries)


def test_a_steady_delta_enters_few_files_few_times(ranks: Ranks) -> None:
    source, receiver = ranks.run(traced)
    assert len(source) <= FILES and len(receiver) <= FILES, (sorted(source), sorted(receiver))
    assert sum(source.values()) <= SOURCE, Counter(source).most_common(12)
    assert sum(receiver.values()) <= RECEIVER, Counter(receiver).most_common(12)
