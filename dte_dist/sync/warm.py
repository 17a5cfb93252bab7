"""Compiling ahead of time, as a call of its own."""

from __future__ import annotations

import torch

from dte_dist import kernels
from dte_dist.kernels import BITS

__all__ = ["warm"]


def warm(*dtypes: torch.dtype) -> None:
    """Compile the inner loops for tensors on CPUs now, rather than when the first channel opens.

    Local: each process calls it or not. It takes 10 to 45 s where nothing is cached, and a fraction of a
    second where it is; processes of one user on one machine share the work. Without it opening does the same,
    and the other ranks wait meanwhile.

    Args:
        dtypes: of the weights, as they are held and as they travel; none for all that there are.

    Raises:
        ValueError: something is no dtype.

    Example:
        >>> dte_dist.warm(torch.bfloat16, torch.float32)
        >>> dte_dist.warm("bf16")
        Traceback (most recent call last):
            ...
        ValueError: warm takes dtypes of torch, got 'bf16'
    """
    wrong = [dtype for dtype in dtypes if not isinstance(dtype, torch.dtype)]
    if wrong:
        raise ValueError(f"warm takes dtypes of torch, got {wrong[0]!r}")
    kernels.precompile({min(dtype.itemsize, max(BITS)) for dtype in dtypes} or set(BITS))
