"""Memory that two tensors of a receiver share in part: written through one, it would go wrong in the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.local import LocalTensors

__all__ = ["refuse_overlaps"]


def refuse_overlaps(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Refuse contiguous tensors that share part of their memory, and different views that start at one address.

    Tensors that are the same memory seen the same way are ties, which the plan looks at. Strided views that interleave, such as the
    columns of a fused tensor, are let through.

    Args:
        names: of the slots.
        tensors: the local tensors, one for each name.

    Raises:
        LayoutMismatch: names the first pair.

    Example:
        >>> buffer = torch.zeros(9)
        >>> refuse_overlaps(["a", "b"], [buffer[:4], buffer[4:]])
    """
    if _are_apart(tensors):
        return
    held = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    held.sort(key=lambda index: tensors[index].data_ptr())
    last = -1
    for index in held:
        if last >= 0 and _clash(tensors[last], tensors[index]):
            fix = "give them memory of their own, or tie them whole on sources and receivers"
            what = f"a receiver keeps {names[last]} and {names[index]} in memory that overlaps"
            raise LayoutMismatch(what, slot=names[last], fix=fix)
        if last < 0 or (tensors[index].is_contiguous() and _end(tensors[index]) > _end(tensors[last])):
            last = index


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are contiguous and none begins before another ends, which is so for nearly every module."""
    local = LocalTensors.of(tensors)
    order = np.argsort(local.addresses, kind="stable")
    begins = local.addresses[order]
    ends = begins + (local.numels * np.fromiter(map(Tensor.element_size, tensors), np.int64, len(tensors)))[order]
    return bool(local.contiguous.all() and (ends[:-1] <= begins[1:]).all())


def _clash(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors overlap but are not the same view; `second` starts at or behind `first`."""
    same_start = first.data_ptr() == second.data_ptr()
    if same_start and (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype):
        return False
    overlap = second.data_ptr() < _end(first)
    return overlap and (same_start or (first.is_contiguous() and second.is_contiguous()))


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
