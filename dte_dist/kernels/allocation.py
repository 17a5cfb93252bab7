"""Room for what the kernels write: one-dimensional tensors that nothing has filled."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["empty"]

_MUCH: Final = 4 << 20
"""Bytes from which numpy asks for huge pages."""

_PAGE: Final = 2 << 20
"""Bytes of a huge page."""


def empty(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return room for `count` elements, in one dimension.

    Much of it on the CPU comes from numpy, which asks Linux for huge pages, as torch does not: else the first
    write to each page of 4 KiB costs several times what is written.

    Example:
        >>> empty(3, torch.int32).shape
        torch.Size([3])
    """
    size = count * dtype.itemsize
    if size < _MUCH or torch.device(device).type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    # So that whole pages can begin and end it; what is not touched costs nothing.
    room = np.empty(size + 2 * _PAGE, np.uint8)
    first = -room.ctypes.data % _PAGE
    return torch.from_numpy(room[first : first + size]).view(dtype)
