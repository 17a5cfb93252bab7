"""Memory that is shared: by elements of one tensor, by two tensors of a receiver, or by what a rank trains
and what it receives into.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dte_dist.errors import LayoutMismatch
from dte_dist.tensors.live import LiveTensors

__all__ = ["overlaps_itself", "refuse_overlaps", "refuse_shared"]


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor are the same memory, as in what `unfold` returns.

    Strides of which each steps over all that the smaller ones reach are seen to be sound at once; others cost
    8 bytes an element.

    Example:
        >>> overlaps_itself(torch.zeros(6).unfold(0, 4, 1)), overlaps_itself(torch.zeros(3, 2).t())
        (True, False)
    """
    if not tensor.numel():
        return False
    dims = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    is_nested = True
    for step, size in dims:
        is_nested = is_nested and step > reach
        reach += step * (size - 1)
    if is_nested or reach + 1 < tensor.numel():
        return not is_nested
    places = np.zeros(1, np.int64)
    for step, size in dims:
        places = np.add.outer(places, step * np.arange(size, dtype=np.int64)).reshape(-1)
    return len(np.unique(places)) < len(places)


def refuse_overlaps(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Refuse contiguous tensors that share part of their memory, and different views that start at one
    address.

    Tensors that are the same memory seen the same way are ties, which the plan looks at. Strided views that
    interleave, such as the columns of a fused tensor, are let through.

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
            hint = "give them memory of their own, or tie them whole on sources and receivers"
            what = f"a receiver keeps {names[last]} and {names[index]} in memory that overlaps"
            raise LayoutMismatch(what, tensor=names[last], hint=hint)
        if last < 0 or (tensors[index].is_contiguous() and _end(tensors[index]) > _end(tensors[last])):
            last = index


def refuse_shared(names: Sequence[str], trained: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Refuse memory that one rank both sends and receives: a change would be written onto itself.

    Args:
        names: of the slots that are received.
        trained, received: the local tensors of the two modules.

    Raises:
        LayoutMismatch: names the first slot.

    Example:
        >>> weight = torch.zeros(4)
        >>> refuse_shared(["w"], [weight], [weight.clone()])
    """
    spans = sorted(_span(tensor) for tensor in trained if tensor.numel())
    if not spans:
        return
    begins, ends = np.array(spans, np.int64).T
    reach = np.maximum.accumulate(ends)
    for name, tensor in zip(names, received, strict=True):
        begin, end = _span(tensor) if tensor.numel() else (0, 0)
        before = int(np.searchsorted(begins, end)) - 1
        if before >= 0 and reach[before] > begin:
            hint = (
                "give into= memory of its own, or leave what is shared out with "
                "select=: it is in step already"
            )
            raise LayoutMismatch("into= shares memory with the module", tensor=name, hint=hint)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor begins, and where it ends."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in dimensions)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are contiguous and none begins before another ends, which is so for nearly
    every module.
    """
    local = LiveTensors.of(tensors)
    order = np.argsort(local.addresses, kind="stable")
    begins = local.addresses[order]
    ends = (
        begins
        + (local.numels * np.fromiter(map(Tensor.element_size, tensors), np.int64, len(tensors)))[order]
    )
    return bool(local.contiguous.all() and (ends[:-1] <= begins[1:]).all())


def _clash(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors overlap but are not the same view; `second` starts at or behind `first`."""
    same_start = first.data_ptr() == second.data_ptr()
    if same_start and (first.shape, first.stride(), first.dtype) == (
        second.shape,
        second.stride(),
        second.dtype,
    ):
        return False
    overlap = second.data_ptr() < _end(first)
    return overlap and (same_start or (first.is_contiguous() and second.is_contiguous()))


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
