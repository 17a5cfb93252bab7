"""Where tensors lie, as columns of numbers: what the numba loops know of them.

Thousands of tensors are one table, and a call of a loop costs microseconds whatever it touches: it gets one
address, that of the addresses of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from torch import Tensor

__all__ = ["ADDRESSES", "COUNT", "KINDS", "PLAIN", "ROUNDED", "SHAPES", "STARTS", "Table", "addresses_of"]

STARTS, ADDRESSES, KINDS, SHAPES, COUNT = range(5)
"""Places in a table: addresses of its columns, and the number of tensors."""

PLAIN: Final = 0
"""Kind of a contiguous tensor that is read as it lies."""

ROUNDED: Final = -1
"""Kind of a contiguous fp32 tensor that is read as bf16."""


def addresses_of(*columns: np.ndarray) -> np.ndarray:
    """Return the addresses of arrays of int64, which must be kept alive for as long as they are used."""
    if any(column.dtype != np.int64 or not column.flags.c_contiguous for column in columns):
        raise ValueError("columns are contiguous arrays of int64")
    return np.array([column.ctypes.data for column in columns], np.int64)


class Table:
    """Tensors of one element width, laid end to end in row-major order.

    Args:
        tensors: the tensors.
        starts: int64[tensors + 1], position of each tensor's first element; the last is the total.
        addresses: int64[tensors], of each tensor's first element; that of an empty one means nothing.
        contiguous: bool[tensors], whether each is row-major without gaps.
        rounded: bool[tensors], whether each is contiguous fp32 that is read as bf16; None is none.

    Attributes:
        starts, addresses: as given.
        kinds: int64[tensors], PLAIN, ROUNDED, or 1 + where in `shapes` a strided tensor is described.
        shapes: int64, for each strided tensor its number of dimensions, then for each length and bytes from
            one to the next.
        address: where the loops find all this.

    Example:
        >>> two = [torch.zeros(2, 3), torch.zeros(2, 4).t()]
        >>> table = Table(two, np.array([0, 6, 14]), np.array([t.data_ptr() for t in two]), np.array([True,
        ...     False]))
        >>> table.kinds.tolist(), table.shapes.tolist()
        ([0, 1], [2, 4, 4, 2, 16])
    """

    __slots__ = ("_columns", "address", "addresses", "kinds", "shapes", "starts")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        starts: np.ndarray,
        addresses: np.ndarray,
        contiguous: np.ndarray,
        rounded: np.ndarray | None = None,
    ) -> None:
        self.starts = starts
        self.kinds = (
            np.zeros(len(tensors), np.int64) if rounded is None else np.where(rounded, ROUNDED, PLAIN)
        )
        shapes: list[int] = []
        for index in np.flatnonzero(~contiguous).tolist():
            tensor = tensors[index]
            self.kinds[index] = 1 + len(shapes)
            steps = [step * tensor.element_size() for step in tensor.stride()]
            shapes += [
                tensor.dim(),
                *(number for pair in zip(tensor.shape, steps, strict=True) for number in pair),
            ]
        self.shapes = np.array(shapes, np.int64)
        self._point(addresses)

    def _point(self, addresses: np.ndarray) -> None:
        self.addresses = addresses
        self._columns = np.append(
            addresses_of(self.starts, addresses, self.kinds, self.shapes), len(addresses)
        )
        self.address = int(self._columns.ctypes.data)

    def relocated(self, indices: np.ndarray, addresses: np.ndarray) -> Table:
        """Return the same table, but for some tensors that are plain and lie elsewhere."""
        table = Table.__new__(Table)
        table.starts, table.shapes, table.kinds = self.starts, self.shapes, self.kinds.copy()
        table.kinds[indices] = PLAIN
        everywhere = self.addresses.copy()
        everywhere[indices] = addresses
        table._point(everywhere)
        return table
