"""Many tensors seen as one flat array of elements: what the kernels read and write.

A model is thousands of tensors, each with a storage of its own. Looping over them in Python costs more than
the bytes they hold, so the kernels get one table instead: where each tensor starts in the flat array and
where it lies in memory. The table is built anew at every sync (storages move: `module.to`, `reshard`), which
is one pass over the list at C speed and keeps no address from one sync to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import ne
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.kernels import BITS
from dte_dist.kernels.table import PLAIN, Table
from dte_dist.tensors.live import LiveTensors

__all__ = ["BITS", "FlatTensors", "starts_of"]

_ROUNDED: Final = (torch.float32, torch.bfloat16)


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
        tensors: tensors of one device; any shape, dtype and strides.
        width: bytes of one element (1, 2, 4 or 8), as it lies or, after `read_as`, as it is read.
        starts: position of each tensor's first element, if known.
        known: the same tensors as a layout has read them, if it has.

    Attributes:
        tensors: the tensors, as given.
        starts: int64[len(tensors) + 1], position of each tensor's first element; the last is the total.
        table: where they lie, for the loops over CPU memory.
        dtypes: of each tensor as it is read, where some are cast; None if the bits are read as they lie.
        cast: bool[len(tensors)], whether torch must cast a tensor first; the loops themselves round fp32 to
            bf16.
        writes: int64[len(tensors)], how often a kernel wrote to each and moved its version counter by 1.

    Example:
        >>> flat = FlatTensors([torch.zeros(2, 3), torch.ones(4)], 4)
        >>> flat.starts.tolist(), [column.tolist() for column in flat.spans(4, 8)]
        ([0, 6, 10], [[0, 1], [4, 0], [6, 2]])
    """

    __slots__ = (
        "_own",
        "cast",
        "device",
        "dtypes",
        "starts",
        "table",
        "tensors",
        "width",
        "writes",
    )

    def __init__(
        self,
        tensors: Sequence[Tensor],
        width: int,
        starts: np.ndarray | None = None,
        known: LiveTensors | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.width = width
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.starts = starts_of([t.numel() for t in self.tensors]) if starts is None else starts
        known = LiveTensors.of(self.tensors) if known is None else known
        self._own = list(known.dtypes)
        self.table = Table(self.tensors, self.starts, known.addresses, known.contiguous)
        self.dtypes: tuple[torch.dtype, ...] | None = None
        self.cast = np.zeros(len(self.tensors), np.bool_)
        self.writes = np.zeros(len(self.tensors), np.int64)

    @classmethod
    def part(cls, local: LiveTensors, entries: np.ndarray, width: int, starts: np.ndarray) -> FlatTensors:
        """Lay out some of a layout's tensors, by their indices, without asking each of them again."""
        some = local.some(entries)
        return cls(some.tensors, width, starts, some)

    def read_as(self, dtypes: Sequence[torch.dtype]) -> FlatTensors:
        """Return the same tensors to be read as these dtypes, each of `width` bytes; they are not to be
        written if one is cast.

        Example:
            >>> flat = FlatTensors([torch.ones(2), torch.ones(3, dtype=torch.float16)],
            ...     2).read_as([torch.bfloat16, torch.float16])
            >>> kernels.on("cpu").read(flat, 0, bits := torch.zeros(5, dtype=torch.int16))
            >>> bits[:2].view(torch.bfloat16).tolist()
            [1.0, 1.0]
        """
        own = self._own
        if own == list(dtypes):
            return self
        whole = self.table.kinds == PLAIN
        cast = np.fromiter(map(ne, own, dtypes), np.bool_, len(own))
        rounded = np.zeros(len(own), np.bool_)
        if self.device.type == "cpu" and kernels.rounds_as_torch():
            rounded = whole & np.fromiter(
                [pair == _ROUNDED for pair in zip(own, dtypes, strict=True)],
                np.bool_,
                len(own),
            )
        flat = copy(self)
        flat.dtypes, flat.cast = tuple(dtypes), cast & ~rounded
        flat.table = Table(self.tensors, self.starts, self.table.addresses, whole, rounded)
        return flat

    def __len__(self) -> int:
        return int(self.starts[-1])

    def is_aliased(self) -> bool:
        """Whether two tensors begin at one address, as those of a tied name that has several regions do."""
        addresses = np.sort(self.table.addresses[np.diff(self.starts) > 0])
        return bool((addresses[1:] == addresses[:-1]).any())

    def view(self, index: int) -> Tensor:
        """Return tensor `index` as integers of this width: same shape and strides, no copy, no autograd."""
        return self.tensors[index].detach().view(BITS[self.width])

    def spans(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which tensors overlap [begin, end), and the part [low, high) of each, counted from its own
        start.

        Returns:
            int64 indices, low and high, ascending; empty parts are left out.
        """
        first = int(np.searchsorted(self.starts, begin, side="right")) - 1
        last = max(first, int(np.searchsorted(self.starts, end, side="left")))
        starts = self.starts[first : last + 1]
        low = np.maximum(starts[:-1], begin) - starts[:-1]
        high = np.minimum(starts[1:], end) - starts[:-1]
        some = np.flatnonzero(high > low)
        return first + some, low[some], high[some]
