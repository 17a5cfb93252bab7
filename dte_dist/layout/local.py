"""The local tensors of a layout at one moment, and what the hot path wants to know of all of them.

Asking a tensor for one thing costs a fraction of a microsecond, which for 20,000 tensors is as long as finding the changes in
them. So each thing is asked once a sync, here, and kept as a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.errors import LayoutMismatch

__all__ = ["LocalTensors", "one_device"]

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensors:
    """Local tensors in the order of a manifest's entries.

    Attributes:
        tensors: the tensors.
        addresses, numels: int64[tensors], memory address and number of elements of each.
        contiguous: bool[tensors], whether each is row-major without gaps.
        device: that all are on; `of` does not ask, see `one_device`.

    Example:
        >>> local = LocalTensors.of([torch.zeros(2, 3), torch.zeros(2, 3).t()])
        >>> local.numels.tolist(), local.contiguous.tolist()
        ([6, 6], [True, False])
    """

    tensors: Sequence[Tensor]
    addresses: np.ndarray
    numels: np.ndarray
    contiguous: np.ndarray
    device: torch.device = _CPU

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> LocalTensors:
        """Ask each tensor all but its device."""
        count = len(tensors)
        addresses, numels = (np.fromiter(map(what, tensors), np.int64, count) for what in (Tensor.data_ptr, Tensor.numel))
        return cls(tensors, addresses, numels, np.fromiter(map(Tensor.is_contiguous, tensors), np.bool_, count))

    def forget(self) -> LocalTensors:
        """Return the columns alone: what is kept between syncs must not keep memory alive."""
        return replace(self, tensors=())

    def moved(self, before: LocalTensors) -> np.ndarray:
        """Return the indices of tensors that are not where, or not as, they were before; both have the same number."""
        same = (self.addresses == before.addresses) & (self.numels == before.numels) & (self.contiguous == before.contiguous)
        return np.flatnonzero(~same)

    def marks(self) -> tuple[bytes, list[int]]:
        """Return what changes when somebody writes to a tensor or replaces it; inference tensors count no writes."""
        try:
            versions = [tensor._version for tensor in self.tensors]
        except RuntimeError:
            versions = [tensor._version for tensor in self.tensors if not tensor.is_inference()]
        return self.addresses.tobytes(), versions


def one_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device that all tensors are on.

    Raises:
        LayoutMismatch: they are on several.
    """
    if len(set(map(Tensor.get_device, tensors))) > 1:
        devices = sorted({str(tensor.device) for tensor in tensors})
        fix = "move the module to one device, or leave tensors out with select="
        raise LayoutMismatch("the tensors of a module are on several devices", got=devices, fix=fix)
    return tensors[0].device if tensors else _CPU
