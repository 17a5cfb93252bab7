"""The local tensors of a layout at one moment, and what the hot path wants to know of all of them.

Asking a tensor for one thing costs about 50 ns, which for 20,000 tensors is as long as finding the changes in
them. So each thing is asked once a sync, here, and kept as a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dte_dist._torch_compat import versions
from dte_dist.tensors.devices import StandIns

__all__ = ["LiveTensors"]

_CPU: Final = torch.device("cpu")

_TOGETHER: Final = 256
"""Tensors that are asked one thing after the other, while they are in the cache. All 20,000 of a large model
are not: to go through all of them for each thing takes half as long again.
"""


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensors:
    """Local tensors in the order of a manifest's entries.

    Attributes:
        tensors: the tensors.
        addresses, numels: int64[tensors], memory address and number of elements of each.
        contiguous: bool[tensors], whether each is row-major without gaps.
        dtypes: of each.
        device: that all are on; `of` does not ask, see `tensors.devices`.
        stand_ins: those among the tensors that stand for one on another device; None if none does.
        twins: further tensors over the same memory that count writes on their own, each with the index of
            the tensor that it stands beside.
        counters: int64[tensors], the version counter of each at the same moment, -1 for an inference tensor;
            None if that was not asked.

    Example:
        >>> local = LiveTensors.of([torch.zeros(2, 3), torch.zeros(2, 3).t()])
        >>> local.numels.tolist(), local.contiguous.tolist()
        ([6, 6], [True, False])
    """

    tensors: Sequence[Tensor]
    addresses: np.ndarray
    numels: np.ndarray
    contiguous: np.ndarray
    dtypes: Sequence[torch.dtype]
    device: torch.device = _CPU
    stand_ins: StandIns | None = None
    twins: Sequence[tuple[int, Tensor]] = ()
    counters: np.ndarray | None = None
    _live: LiveTensors | None = None

    @classmethod
    def of(
        cls,
        objects: Sequence[Any],
        unwrap: Callable[[Sequence[Any]], list[Tensor]] = list,
        *,
        watch: bool = False,
    ) -> LiveTensors:
        """Ask each tensor all but its device.

        Args:
            objects: the tensors, or what they are in.
            unwrap: returns the tensors in some of these.
            watch: also ask for `counters`, as who writes to the tensors must.
        """
        count = len(objects)
        counters = np.empty(count, np.int64) if watch else None
        addresses = np.empty(count, np.int64)
        numels = np.empty(count, np.int64)
        contiguous = np.empty(count, np.bool_)
        tensors: list[Tensor] = []
        dtypes: list[torch.dtype] = []
        for first in range(0, count, _TOGETHER):
            here = slice(first, first + _TOGETHER)
            some = unwrap(objects[here])
            addresses[here] = list(map(Tensor.data_ptr, some))
            numels[here] = list(map(Tensor.numel, some))
            contiguous[here] = list(map(Tensor.is_contiguous, some))
            dtypes += [tensor.dtype for tensor in some]
            tensors += some
            if counters is not None:
                counters[here] = versions(some)
        return cls(tensors, addresses, numels, contiguous, dtypes, counters=counters)

    def again(self) -> LiveTensors:
        """Return the same tensors, asked anew; there are no stand-ins among them."""
        asked = LiveTensors.of(self.tensors, watch=self.counters is not None)
        return replace(asked, device=self.device, twins=self.twins)

    def now(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where each tensor is and its version counter, as they are now."""
        count = len(self.tensors)
        addresses = np.empty(count, np.int64)
        counters = np.empty(count, np.int64)
        for first in range(0, count, _TOGETHER):
            here = slice(first, first + _TOGETHER)
            some = self.tensors[here]
            addresses[here] = list(map(Tensor.data_ptr, some))
            counters[here] = versions(some)
        return addresses, counters

    def some(self, indices: np.ndarray) -> LiveTensors:
        """Return some of them, by their indices, without asking them again."""
        if len(indices) == len(self.tensors) and (indices == np.arange(len(indices))).all():
            return self
        tensors, dtypes = (
            [column[index] for index in indices.tolist()] for column in (self.tensors, self.dtypes)
        )
        addresses, numels, contiguous = (
            column[indices] for column in (self.addresses, self.numels, self.contiguous)
        )
        return LiveTensors(tensors, addresses, numels, contiguous, dtypes, self.device)

    @property
    def live(self) -> LiveTensors:
        """The tensors themselves, not what stands for some of them: what a caller holds, and may write to."""
        return self if self._live is None else self._live

    def at_home(self, away: Sequence[int]) -> LiveTensors:
        """Return them with stand-ins for those that are not on `device`, by their indices."""
        stand_ins = StandIns.of(self.tensors, away, self.device)
        tensors = list(self.tensors)
        addresses = self.addresses.copy()
        contiguous = self.contiguous.copy()
        for index, place in zip(away, stand_ins.places.tolist(), strict=True):
            copy = stand_ins.copies[place]
            tensors[index] = copy
            addresses[index] = copy.data_ptr()
            contiguous[index] = True
        read = replace(self, tensors=tensors, addresses=addresses, contiguous=contiguous)
        return replace(read, stand_ins=stand_ins, _live=self)

    def write_back(self) -> None:
        """Put what was written to stand-ins into the tensors that they stand for."""
        if self.stand_ins is not None:
            self.stand_ins.write_back()

    def own_writes(self, writes: np.ndarray) -> np.ndarray:
        """Return how often this rank wrote to the `live` tensors, where it wrote to these so often."""
        return writes if self.stand_ins is None else self.stand_ins.own_writes(writes)

    def forget(self) -> LiveTensors:
        """Return the columns alone: what is kept between syncs must not keep memory alive."""
        return replace(self, tensors=(), twins=(), counters=None)

    def changed_since(self, before: LiveTensors) -> np.ndarray:
        """Return the indices of tensors that are not where, or not as, they were before; both have the same
        number.
        """
        same = (
            (self.addresses == before.addresses)
            & (self.numels == before.numels)
            & (self.contiguous == before.contiguous)
        )
        if self.dtypes != before.dtypes:
            same &= np.fromiter(map(eq, self.dtypes, before.dtypes), np.bool_, len(same))
        return np.flatnonzero(~same)

    def versions(self) -> np.ndarray:
        """Return int64[tensors]: the version counter of each; -1 for an inference tensor, which has none."""
        return np.array(versions(self.tensors), np.int64)

    def twin_versions(self) -> dict[tuple[int, int], int]:
        """Return the version counters of twins that somebody wrote to, by tensor and place beside it."""
        found: dict[tuple[int, int], int] = {}
        beside: dict[int, int] = {}
        for (index, _), count in zip(self.twins, versions([twin for _, twin in self.twins]), strict=True):
            place = beside[index] = beside.get(index, -1) + 1
            if count > 0:
                found[index, place] = count
        return found
