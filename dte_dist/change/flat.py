"""Many tensors seen as one flat array of elements: what the kernels read and write.

A model is thousands of tensors, each with a storage of its own. Looping over them in Python costs more than
the bytes they hold, so the kernels get one table instead: where each tensor starts in the flat array and
where it lies in memory. The table is built anew at every sync (storages move: `module.to`, `reshard`), which is
one pass over the list at C speed and keeps no address from one sync to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.layout import LocalTensors

__all__ = ["BITS", "FlatTensors", "starts_of"]

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype that bits of one width are looked at through."""


def starts_of(numels: Sequence[int]) -> np.ndarray:
    """Return int64[len + 1]: where each of several arrays starts when laid end to end, and the total.

    Example:
        >>> starts_of([3, 0, 2]).tolist()
        [0, 3, 3, 5]
    """
    starts = np.zeros(len(numels) + 1, np.int64)
    np.cumsum(np.asarray(numels, np.int64), out=starts[1:])
    return starts


class FlatTensors:
    """Tensors of one element width, laid end to end in row-major order, without moving them.

    Args:
        tensors: tensors of one device whose elements all have `width` bytes; any shape, dtype and strides.
        width: bytes of one element (1, 2, 4 or 8).
        starts: position of each tensor's first element, if known.
        known: addresses, and whether each is contiguous, if known.

    Attributes:
        tensors: the tensors, as given.
        starts: int64[len(tensors) + 1], position of each tensor's first element; the last is the total.
        addresses: int64[len(tensors)], memory address of each tensor; 0 for one that is empty or not contiguous.
        strided: indices of the tensors that are not contiguous, whose elements must be reached through `view`.

    Example:
        >>> flat = FlatTensors([torch.zeros(2, 3), torch.ones(4)], 4)
        >>> flat.starts.tolist(), list(flat.spans(4, 8))
        ([0, 6, 10], [(0, 4, 6), (1, 0, 2)])
    """

    __slots__ = ("addresses", "device", "starts", "strided", "tensors", "width")

    def __init__(
        self, tensors: Sequence[Tensor], width: int, starts: np.ndarray | None = None, known: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self.tensors = tuple(tensors)
        self.width = width
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.starts = starts_of([t.numel() for t in self.tensors]) if starts is None else starts
        if known is None:
            local = LocalTensors.of(self.tensors)
            known = local.addresses, local.contiguous
        self.addresses, contiguous = known
        self.addresses[~contiguous] = 0
        self.strided = tuple(np.flatnonzero(~contiguous).tolist())

    @classmethod
    def part(cls, local: LocalTensors, entries: np.ndarray, width: int, starts: np.ndarray) -> FlatTensors:
        """Lay out some of a layout's tensors, by their indices, without asking each of them again."""
        tensors = local.tensors
        return cls([tensors[entry] for entry in entries.tolist()], width, starts, (local.addresses[entries], local.contiguous[entries]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def view(self, index: int) -> Tensor:
        """Return tensor `index` as integers of this width: same shape and strides, no copy, no autograd."""
        return self.tensors[index].detach().view(BITS[self.width])

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index, low, high) for each tensor that overlaps [begin, end); low and high count from its own start."""
        index = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while begin < end:
            start, stop = int(self.starts[index]), int(self.starts[index + 1])
            high = min(end, stop)
            if high > begin:
                yield index, begin - start, high - start
                begin = high
            index += 1
