"""The inner loops of dte_dist: what is done to every element, one backend for each kind of device.

A backend is one folder whose package satisfies `interface.Kernels`: `cpu` (numba loops over CPU memory) and
`torch` (plain torch ops, any device). `on(device)` returns the one for a device:

    kernels.on(positions.device).encode_u16(positions, length)

`interface.py` says what each kernel does. `sizes.py` says how many bytes a stream takes, which is worked out
on the host. Another backend is another folder and a line in `on`.

This file does not `import torch`: importing the backend of that name binds the name `torch` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from torch import device as Device

from dte_dist.kernels.allocation import empty
from dte_dist.kernels.identity import Identity
from dte_dist.kernels.interface import BITS, Flat, Kernels, Tables

__all__ = ["BITS", "Flat", "Identity", "Kernels", "Tables", "empty", "on", "precompile", "rounds_as_torch"]


@cache
def on(device: Device | str) -> Kernels:
    """Return the kernels for tensors of a device.

    The numba loops are imported at the first call for the CPU.

    Example:
        >>> on("cpu").__name__
        'dte_dist.kernels.cpu'
    """
    if Device(device).type == "cpu":
        from dte_dist.kernels import cpu

        return cpu
    from dte_dist.kernels import torch

    return torch


def precompile(widths: Iterable[int], say: Callable[[], None] | None = None) -> None:
    """Compile the CPU kernels for elements of these widths (bytes: 1, 2, 4, 8), or load them from numba's
    cache on disk.

    Without it the first sync pays: seconds where nothing is cached, a fraction of one where it is.

    Args:
        widths: of elements.
        say: called when it turns out that something has to be compiled, here or by another process that this
            one waits for.

    Example:
        >>> precompile([2, 4])
    """
    from dte_dist.kernels.cpu import jit

    jit.precompile(widths, say)


def rounds_as_torch() -> bool:
    """Return whether the CPU loops cast fp32 to bf16 as torch does on this processor; `advance` and `read` do
    it themselves then.
    """
    from dte_dist.kernels.cpu import arguments

    return arguments.rounds_as_torch()
