"""Tensors that no training step reaches: copies, which a source would send as they are for ever.

1. Of some it is known: FSDP1 marks what it cloned for a full state dict, and the shard of a ShardedTensor
   that it made shares its memory with no other tensor (`is_clone`). Whoever asked for them may hold them.
2. Of others it follows from their references: nobody but the layout holds the tensor, nor another tensor over
   its memory (`only_here`).
3. Of others again it can only be guessed: nobody has written to them, and for several syncs nothing changed.

Neither of the first two is a fault by itself: a copy may be sent once, and whoever holds it may write to it.
It is one where a source syncs again and no version counter has moved. References are compared with those of a
probe that is held in the same way, since what an interpreter adds to them differs. Memory that torch did not
allocate itself (numpy, DLPack, another process) may have holders that cannot be counted, and counts as held.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dte_dist._torch_compat import base_of, local_tensor, use_count, use_counts
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import fsdp1
from dte_dist.tensors.live import LiveTensors

__all__ = ["CopyCheck", "Counted", "is_clone", "only_here"]

Counted = tuple[np.ndarray, np.ndarray]
"""int64[tensors] twice: elements of some tensors, and their version counters."""

_QUIET: Final = 8
"""Syncs in a row without a change, after which tensors that nobody wrote to are taken for copies."""


class CopyCheck:
    """Look whether anybody writes to the tensors that a caller gave to a layout.

    Args:
        made: the tensors when the layout was made.
        clones: indices of those that are known to be clones.

    Attributes:
        is_settled: whether `refuse` has found nothing to refuse: it need not be asked again.
    """

    def __init__(self, made: LiveTensors, clones: Sequence[int]) -> None:
        self._versions = made.versions()
        self._clones = frozenset(index for index in clones if made.numels[index])
        self.is_settled = False
        self._quiet = 0

    def refuse(self, names: Sequence[str], items: Sequence[Any], counted: Counted) -> None:
        """Refuse copies that nobody wrote to.

        Args:
            names: of the slots.
            items: the tensors and DTensors, each held by this sequence and once more.
            counted: elements and version counters of their local tensors.

        Raises:
            LayoutMismatch: all clones are such copies, or all tensors are; names the first.
        """
        idle, (numels, _) = self._idle(counted), counted
        if self._clones and self._clones <= set(idle):
            first = min(self._clones)
            raise LayoutMismatch(
                "torch cloned the tensor for a state dict, so no training step reaches it",
                tensor=names[first],
                got=f"{len(self._clones)} such tensors, none of them written to since the Layout was made",
                hint="pass the module itself, to the call or to Layout.from_module",
            )
        alone = [index for index in idle if only_here(items, index)]
        if alone and len(alone) == np.count_nonzero(numels):
            raise LayoutMismatch(
                "nobody holds the tensor but the Layout, so no training step reaches it",
                tensor=names[alone[0]],
                got=f"{len(alone)} such tensors, none of them written to since the Layout was made",
                hint="build the Layout of the tensors that the optimizer writes to, or pass the module; "
                "hold tensors that are to stay as they are",
            )
        if alone:
            what = f"nobody holds {len(alone)} of {len(names)} tensors of a Layout but itself"
            _warn(f"{what}, so no training step reaches them", names[alone[0]])
        self.is_settled = True

    def is_suspicious(self, count: int) -> bool:
        """Note how many changes a source found; return True, once, if it has been none for long."""
        self._quiet = self._quiet + 1 if count == 0 and self._quiet >= 0 else -1
        return self._quiet == _QUIET

    def warn(self, names: Sequence[str], counted: Counted) -> None:
        """Warn if nobody wrote to any of the tensors since the layout was made."""
        idle, (numels, _) = self._idle(counted), counted
        if idle and len(idle) == np.count_nonzero(numels):
            what = f"in {_QUIET} syncs nothing changed, and nobody has written to the tensors of a Layout"
            _warn(f"{what} since it was made", names[idle[0]])

    def _idle(self, counted: Counted) -> list[int]:
        """Return the tensors with elements whose version counters stand where they stood."""
        numels, versions = counted
        return np.flatnonzero((versions == self._versions) & (numels > 0)).tolist()


def _warn(what: str, name: str) -> None:
    hint = "give the module, or the tensors that the optimizer writes to"
    warnings.warn(f"{what} [tensor {name!r}]. If they are trained, they are copies: {hint}.", stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Box:
    """Holds a tensor as a DTensor holds its local tensor."""

    _local_tensor: Tensor


def is_clone(tensor: Tensor, *, is_shard: bool = False) -> bool:
    """Return whether a tensor is known to be a clone that torch made for a state dict.

    Args:
        tensor: as a caller gave it.
        is_shard: it is the local shard of a ShardedTensor.

    Example:
        >>> is_clone(torch.zeros(3)), is_clone(torch.zeros(3), is_shard=True)
        (False, True)
    """
    if fsdp1.is_cloned(tensor):
        return True
    if not is_shard or not tensor.numel():
        return False
    return _memory(tensor) == _memory(_probe(is_view=base_of(tensor) is not None))


def only_here(items: Sequence[Any], index: int) -> bool:
    """Return whether nobody else holds one of several tensors, nor another tensor over its memory.

    Args:
        items: tensors and DTensors; this sequence holds each, and so does one more object, such as a dict.
        index: which of them.

    Example:
        >>> items = [torch.zeros(3), held := torch.zeros(3)]
        >>> also = dict(enumerate(items))
        >>> only_here(items, 0), only_here(items, 1)
        (True, False)
    """
    boxed = isinstance(items[index], DTensor)
    is_view = base_of(local_tensor(items[index]) if boxed else items[index]) is not None
    probes: list[Any] = [_Box(_probe(is_view=is_view)) if boxed else _probe(is_view=is_view)]
    also = {0: probes[0]}
    found = _references(items, index) == _references(probes, 0)
    del also
    return found


def _probe(*, is_view: bool) -> Tensor:
    return torch.empty(2).view(1, 2) if is_view else torch.empty(2)


def _references(items: Sequence[Any], index: int) -> tuple[Any, ...]:
    """Return all that can be counted of who holds an item; no name here may hold it."""
    if isinstance(items[index], DTensor | _Box):
        inner = sys.getrefcount(local_tensor(items[index])), _memory(local_tensor(items[index]))
        return sys.getrefcount(items[index]), inner
    return sys.getrefcount(items[index]), _memory(items[index])


def _memory(tensor: Any) -> Any:
    """Return how many hold the tensor below Python, its memory, and what it is a view of.

    Where that cannot be counted, return something that equals nothing else.
    """
    storage, base = tensor.untyped_storage(), base_of(tensor)
    is_own = storage.resizable() and not (tensor.is_cpu and storage.is_shared())
    counts = use_counts(tensor, storage) if is_own else None
    if counts is None:
        return object()
    above = (use_count(base), sys.getrefcount(base)) if base is not None else None
    return counts, above
