"""Frames on their way, the buffers they travel in, and a rank that has no memory for them.

A receiver stages views of the frames of a delta, so these come in memory of their own. The frames of a seed
are written into place as they come: two buffers serve for all of them, one of which fills or travels while
the other is worked on.

Memory may be short on one rank while the others go on, and what is on the wire has to be received all the
same, or the ranks are out of step for good. So the pair of buffers is reserved when a route is first used,
where an error is told to all ranks before anything moves. Where memory for a delta cannot be had after that,
its frames come into this pair, and are passed on from there to whom they are meant for: the rank says in the
vote that it could not keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeGuard

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.errors import SyncFailed

__all__ = ["Buffers", "Frame", "explain_memory", "lies_on", "write"]

Frame = Tensor | Callable[[Tensor], None]
"""A frame, or a function that writes it into a buffer of its size: dense frames are made only when they
travel.
"""

_LESS: Final = (
    'free memory on this rank, or call with mode="full", which needs no more than two buckets of '
    "bucket_bytes= at a time"
)


class Buffers:
    """Two byte buffers that take turns and are kept: a large buffer made anew each time costs page faults,
    and the memory stays.

    Or, for what is to be kept, a new one each time.

    Attributes:
        error: why there was no new one since `begin`; None while there was.

    Example:
        >>> buffers = Buffers()
        >>> len(buffers.get(0, 100, torch.device("cpu"))), len(buffers.get(1, 7, torch.device("cpu")))
        (100, 7)
    """

    __slots__ = ("_pair", "error")

    def __init__(self) -> None:
        self._pair = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self.error: Exception | None = None

    def reserve(self, size: int, device: torch.device) -> None:
        """Make both buffers as large as `get` will ever need; to call where an error is told to all ranks."""
        for which in range(2):
            self._grow(which, size, device)

    def begin(self) -> None:
        """Forget the error of the sync before."""
        self.error = None

    def get(self, number: int, size: int, device: torch.device, *, keep: bool = False) -> Tensor:
        """Return `size` bytes of buffer `number % 2`, what it held being lost; new ones if they are kept.

        Where new ones cannot be had, `error` says why, and the buffer serves for this and all that follow.
        """
        if keep and self.error is None:
            try:
                return kernels.empty(size, torch.uint8, device)
            except Exception as error:  # told to all ranks in the vote
                self.error = error
        return self._grow(number % 2, size, device)[:size]

    def _grow(self, which: int, size: int, device: torch.device) -> Tensor:
        if len(self._pair[which]) < size:
            self._pair[which] = kernels.empty(size, torch.uint8, device)
        return self._pair[which]


def lies_on(frame: Frame, device: torch.device) -> TypeGuard[Tensor]:
    """Tell whether a frame is there, and can be sent from where it is.

    Example:
        >>> cpu = torch.device("cpu")
        >>> lies_on(torch.zeros(8, dtype=torch.uint8), cpu), lies_on(Tensor.zero_, cpu)
        (True, False)
    """
    return not callable(frame) and frame.device == device


def write(frame: Frame, place: Tensor) -> None:
    """Write a frame into room of its size, on any device.

    Example:
        >>> room = torch.ones(2, dtype=torch.uint8)
        >>> write(Tensor.zero_, room)
        >>> room
        tensor([0, 0], dtype=torch.uint8)
    """
    if callable(frame):
        frame(place)
    else:
        place.copy_(frame)


def explain_memory(error: Exception | None, nbytes: int = 0, *, hint: str = _LESS) -> Exception | None:
    """Return what to tell the ranks of an error: if memory was short, how much was needed and what to do.

    Args:
        error: None for none.
        nbytes: of all frames of the sync that come to this rank, as far as they are known.
        hint: what the user can do.

    Example:
        >>> str(explain_memory(MemoryError(), 4096)).partition(" [")[0], explain_memory(ValueError("no"))
        ('a rank ran out of memory: MemoryError', ValueError('no'))
    """
    if error is None or not _is_memory(error):
        return error
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    needed = f"room for {nbytes} bytes of frames" if nbytes else None
    told = SyncFailed(f"a rank ran out of memory: {text}", expected=needed, hint=hint)
    told.__cause__ = error
    return told


def _is_memory(error: Exception) -> bool:
    """Tell an error of an allocator; that of torch for the CPU has no class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "alloc" in str(error) and "memory" in str(error)
    )
