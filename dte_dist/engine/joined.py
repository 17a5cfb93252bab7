"""Neighbouring segments of like density are written as one, so that what a segment costs, whatever is in it, is paid less often.

Changes are found in segments of a fixed length. With few changes in each, calls and table entries would cost more than coding
them; with many, or with densities that differ, a segment is better coded by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import Chooser, FrameWriter

__all__ = ["Joiner", "join_alike"]

_MOST: Final = 1 << 16
"""Changes that are worth a segment of their own: the work on them stays within a core's cache."""

_FEW: Final = 256
"""Changes too few for their density to matter."""

_LONGEST: Final = 1 << 26
"""Elements of what is joined."""


def is_alike(total: int, parts: int, count: int) -> bool:
    """Return whether a segment with `count` changes may join `parts` segments with `total` changes together.

    Example:
        >>> is_alike(20_000, 2, 15_000), is_alike(20_000, 2, 30_000), is_alike(20, 2, 200)
        (True, False, True)
    """
    alike = 2 * count * parts >= total and count * parts <= 2 * total
    return total + count <= _MOST and (alike or max(total, count) <= _FEW)


def join_alike(segments: Iterable[tuple[int, int]], counts: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Join neighbouring segments, given as (first, length) and how many changes are in each.

    Yields:
        (first, length, changes) of what is to be written as one.

    Example:
        >>> list(join_alike([(0, 10), (10, 10), (20, 5)], [300, 400, 5000]))
        [(0, 20, 700), (20, 5, 5000)]
    """
    first, end, total, parts = 0, 0, 0, 0
    for (start, length), count in zip(segments, counts, strict=True):
        if parts and not (start + length - first <= _LONGEST and is_alike(total, parts, count)):
            yield first, end - first, total
            parts = 0
        if not parts:
            first, total = start, 0
        end, total, parts = start + length, total + count, parts + 1
    if parts:
        yield first, end - first, total


class Joiner:
    """Adds segments to a writer, which may change from one to the next; it is to be flushed before.

    Args:
        chooser: says whether the writer gets bits or distances.
        device: of positions and bits.
    """

    def __init__(self, chooser: Chooser, device: torch.device) -> None:
        self._chooser, self._device = chooser, device
        self._positions = torch.empty(0, dtype=torch.int32, device=device)
        self._values = self._positions
        self._first = self._end = self._total = self._parts = 0

    def add(self, writer: FrameWriter, known: Tensor, first: int, length: int, found: tuple[Tensor, Tensor]) -> None:
        """Add the changes of elements [first, first + length).

        Args:
            writer: of the chunk.
            known: the known bits of the whole space.
            found: int32 positions counted from `first`, and bits; they are copied.
        """
        positions, bits = found
        count, segment = positions.numel(), known[first : first + length]
        if self._parts and not (first + length - self._first <= _LONGEST and is_alike(self._total, self._parts, count)):
            self.flush(writer, known)
        relative = self._chooser.relative(bits.element_size())
        if not count:
            return
        if 2 * count > _MOST:
            self.flush(writer, known)
            values = kernels.codecs_on(self._device).distances(segment, positions, bits) if relative else bits
            writer.add(first, length, positions, values, relative=relative, known=segment.clone)
            return
        self._make_room(torch.int32 if relative else bits.dtype)
        if not self._parts:
            self._first = first
        here, shift = slice(self._total, self._total + count), first - self._first
        if relative:
            shifted = shift, self._positions[here]
            kernels.codecs_on(self._device).distances(segment, positions, bits, self._values[here], shifted=shifted)
        else:
            torch.add(positions, shift, out=self._positions[here])
            self._values[here] = bits
        self._end, self._total, self._parts = first + length, self._total + count, self._parts + 1

    def flush(self, writer: FrameWriter, known: Tensor) -> None:
        """Give the writer what has been joined so far."""
        if self._parts:
            positions, values, length = self._positions[: self._total], self._values[: self._total], self._end - self._first
            relative = self._chooser.relative(known.element_size())
            writer.add(self._first, length, positions, values, relative=relative, known=known[self._first : self._end].clone)
        self._total = self._parts = 0

    def _make_room(self, dtype: torch.dtype) -> None:
        if not self._positions.numel():
            self._positions = torch.empty(_MOST, dtype=torch.int32, device=self._device)
        if self._values.dtype != dtype or not self._values.numel():
            self._values = torch.empty(_MOST, dtype=dtype, device=self._device)
