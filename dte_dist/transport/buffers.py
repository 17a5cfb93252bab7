"""Frames on their way, and the buffers they travel in.

What a receiver stages are views of the frames of a delta, so these come in memory of their own. The frames of a seed are written into
place as they come: two buffers serve for all of them, one of which fills or travels while the other is worked on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dte_dist import kernels

__all__ = ["Buffers", "Frame"]

Frame = Tensor | Callable[[Tensor], None]
"""A frame, or a function that writes it into a buffer of its size: dense frames are made only when they travel."""


class Buffers:
    """Two byte buffers that take turns and are kept: a large buffer made anew each time costs page faults, and the memory stays.

    Or, for what is to be kept, a new one each time.

    Example:
        >>> buffers = Buffers()
        >>> len(buffers.get(0, 100, torch.device("cpu"))), len(buffers.get(1, 7, torch.device("cpu")))
        (100, 7)
    """

    __slots__ = ("_pair",)

    def __init__(self) -> None:
        self._pair = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def get(self, number: int, size: int, device: torch.device, *, keep: bool = False) -> Tensor:
        """Return `size` bytes of buffer `number % 2`, what it held before being lost; or, if they are to be kept, new ones."""
        if keep:
            return kernels.empty(size, torch.uint8, device)
        which = number % 2
        if len(self._pair[which]) < size:
            self._pair[which] = kernels.empty(size, torch.uint8, device)
        return self._pair[which][:size]
