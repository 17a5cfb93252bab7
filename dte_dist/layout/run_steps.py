"""Runs that come again at a step: each second row of a tensor, or the same rows of each head.

A step is a spelling. A block lists every run (`layout.blocks`), so that all geometry is exact without knowing
steps; a user and a manifest write one step in place of many runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Final

from dte_dist.layout.blocks import Run, Runs

__all__ = ["MOST_RUNS", "Step", "pack_runs", "step_runs", "unpack_runs"]

Step = int | tuple[int, int]
"""Which indices of a dimension: `n` takes every n-th, `(length, n)` the first `length` of every n."""

MOST_RUNS: Final = 1 << 20
"""Runs that steps of one dimension, and of one manifest, may stand for: they take some 100 bytes each."""

_LEAST: Final = 3
"""Runs that are worth a step in a manifest."""


def step_runs(start: int, size: int, step: Step = 1) -> Runs:
    """Return the runs of `size` indices from `start` on.

    Raises:
        ValueError: it is no step, or stands for more than 2^20 runs.

    Example:
        >>> step_runs(0, 3, 2), step_runs(4, 5, (2, 6)), step_runs(4, 5)
        (((0, 1), (2, 1), (4, 1)), ((4, 2), (10, 2), (16, 1)), ((4, 5),))
    """
    length, distance = _step(step)
    if length == distance:
        return ((start, size),) if size else ()
    if size > length * MOST_RUNS:
        raise ValueError(f"a step stands for at most {MOST_RUNS:,} runs, not for those of {size:,} indices")
    firsts = range(0, size, length)
    return tuple((start + at // length * distance, min(length, size - at)) for at in firsts)


def _step(step: Step) -> tuple[int, int]:
    """Return how many indices are taken, of how many."""
    pair = step if isinstance(step, tuple | list) else (1, step)
    if len(pair) != 2 or any(isinstance(number, bool) or not hasattr(number, "__index__") for number in pair):
        raise ValueError(f"a step is n, or (length, n), of ints, not {step!r}")
    length, distance = map(index, pair)
    if not 1 <= length <= distance:
        raise ValueError(f"a step takes 1 to n indices of every n, not {length} of {distance}")
    return length, distance


def pack_runs(runs: Runs) -> list[tuple[int, ...]]:
    """Return runs with (start, length, step, count) in place of 3 or more that come at a step.

    Example:
        >>> pack_runs(((0, 1), (2, 1), (4, 1), (6, 1), (9, 3)))
        [(0, 1, 2, 4), (9, 3)]
    """
    packed: list[tuple[int, ...]] = []
    at = 0
    while at < len(runs):
        count = _alike(runs, at)
        if count < _LEAST:
            count = 1
            packed.append(runs[at])
        else:
            packed.append((*runs[at], runs[at + 1][0] - runs[at][0], count))
        at += count
    return packed


def _alike(runs: Runs, at: int) -> int:
    """Return how many runs from `at` on have one length, and one distance from each to the next."""
    start, length = runs[at]
    step = runs[at + 1][0] - start if at + 1 < len(runs) else 0
    count = 1
    while at + count < len(runs) and runs[at + count] == (start + count * step, length):
        count += 1
    return count


def unpack_runs(items: Iterable[Sequence[int]]) -> Iterator[Run]:
    """Yield the runs that `pack_runs` wrote; their order is the caller's to check.

    Raises:
        ValueError: an item has neither 2 nor 4 numbers.

    Example:
        >>> list(unpack_runs([(0, 1, 2, 4), (9, 3)]))
        [(0, 1), (2, 1), (4, 1), (6, 1), (9, 3)]
    """
    for start, length, *rest in items:
        if not rest:
            yield start, length
            continue
        step, count = rest
        if count < _LEAST:
            raise ValueError(f"a step of {count} runs")
        yield from ((start + number * step, length) for number in range(count))
