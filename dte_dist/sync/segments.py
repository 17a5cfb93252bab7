"""Neighbouring segments of like density are written as one, so that what a segment costs, whatever is in it,
is paid less often.

Changes are found in segments of a fixed length. With few changes in each, calls and table entries would cost
more than coding them; with many, or with densities that differ, a segment is better coded by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["merge_segments"]

_MOST: Final = 1 << 17
"""Changes that are worth a segment of their own: the work on them stays within a core's cache."""

_FEW: Final = 256
"""Changes too few for their density to matter."""

_MAX_ELEMENTS: Final = 1 << 26
"""Elements of what is joined."""


def is_alike(total: int, parts: int, count: int) -> bool:
    """Return whether a segment with `count` changes may join `parts` segments with `total` changes together.

    Example:
        >>> is_alike(20_000, 2, 15_000), is_alike(20_000, 2, 30_000), is_alike(20, 2, 200)
        (True, False, True)
    """
    alike = 2 * count * parts >= total and count * parts <= 2 * total
    return total + count <= _MOST and (alike or max(total, count) <= _FEW)


def merge_segments(
    segments: Iterable[tuple[int, int]], counts: Iterable[int]
) -> Iterator[tuple[int, int, int]]:
    """Join neighbouring segments, given as (first, length) and how many changes are in each.

    Yields:
        (first, length, changes) of what is to be written as one.

    Example:
        >>> list(merge_segments([(0, 10), (10, 10), (20, 5)], [300, 400, 5000]))
        [(0, 20, 700), (20, 5, 5000)]
    """
    first, end, total, parts = 0, 0, 0, 0
    for (start, length), count in zip(segments, counts, strict=True):
        if parts and not (start + length - first <= _MAX_ELEMENTS and is_alike(total, parts, count)):
            yield first, end - first, total
            parts = 0
        if not parts:
            first, total = start, 0
        end, total, parts = start + length, total + count, parts + 1
    if parts:
        yield first, end - first, total
