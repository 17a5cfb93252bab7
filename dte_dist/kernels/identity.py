"""Tables of translation that leave every position where it is."""

from __future__ import annotations

import numpy as np

__all__ = ["Identity"]


class Identity:
    """Map the positions of a space of `length` elements to themselves; see `plan.IndexMap` for the tables.

    Example:
        >>> identity = Identity(5)
        >>> identity.begin.tolist(), identity.end.tolist(), identity.shift.tolist()
        ([0], [5], [0])
    """

    def __init__(self, length: int) -> None:
        zero, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
        self.begin, self.end, self.shift, self.origin, self.axis, self.axes = (
            zero,
            zero + length,
            zero,
            zero,
            zero,
            zero,
        )
        self.extent, self.stride, self.segment, self.low, self.high, self.target = (
            none,
            none,
            zero,
            none,
            none,
            none,
        )

    def tables(self) -> tuple[np.ndarray, ...]:
        """Return all arrays, in the order of those of `plan.IndexMap`."""
        return (
            self.begin,
            self.end,
            self.shift,
            self.origin,
            self.axis,
            self.axes,
            self.extent,
            self.stride,
            self.segment,
            self.low,
            self.high,
            self.target,
        )
