"""Sizes of the streams of the codecs, to the byte, and the choices that follow from them; worked out on the
host for every device.

The formulas are those of docs/protocol.md. The numba loops use the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numba.extending import register_jitable
from torch import Tensor

__all__ = [
    "CLASSES",
    "MOST_LOW",
    "Classes",
    "Planes",
    "best_low",
    "bitmap_nbytes",
    "choose_planes",
    "ef_size",
    "low_size",
    "padded",
]

MOST_LOW: Final = 24
"""Most low bits of a position in a stream of Elias and Fano."""

CLASSES: Final = 33
"""Classes of distances: by the bits of |distance| - 1, from 0 to 32."""


@dataclass(slots=True, eq=False)
class Classes:
    """Distances of one segment, and how many there are of each size.

    Attributes:
        wide: the distances as int32; encoding them may overwrite them.
        count: how many.
        numbers: int64; [b] is how many have |distance| - 1 modulo 2^32 of b bits, b up to 32.
    """

    wide: Tensor
    count: int
    numbers: np.ndarray


class Planes(NamedTuple):
    """How distances of w bits are written as planes of bits. With m = |distance| - 1 modulo 2^w and h = m >>
    shift:

    Attributes:
        shift: low bits of every m that are written as they are.
        spread: 1 more than the low bits of the positions of those with h > 0, the far ones; 0 if these are a
            plane.
        far: how many have h > 0.
        unary: the bits of all h together.
        size: bytes in all.
    """

    shift: int
    spread: int
    far: int
    unary: int
    size: int


@register_jitable
def padded(size: int) -> int:
    """Return a size in bytes rounded up to whole words of 8."""
    return (size + 7) & -8


@register_jitable
def bitmap_nbytes(count: int) -> int:
    """Return the bytes of one bit for each of `count` elements, in whole words."""
    return ((count + 63) >> 6) << 3


@register_jitable
def low_size(count: int, low: int) -> int:
    """Return the bytes of the `low` lowest bits of `count` integers: whole bytes first, then planes."""
    return padded(count) * (low >> 3) + bitmap_nbytes(count) * (low & 7)


@register_jitable
def ef_size(count: int, length: int, low: int) -> int:
    """Return the bytes of `count` positions below `length`, `low` bits of each as they are, the rest in
    unary.
    """
    return low_size(count, low) + bitmap_nbytes(count + ((length - 1) >> low))


def best_low(count: int, length: int) -> tuple[int, int]:
    """Return the number of low bits that makes the stream of `count` positions below `length` smallest, and
    its bytes.

    Example:
        >>> best_low(10_000, 1 << 20)
        (6, 10840)
    """
    return _best_low()(count, length)


def choose_planes(classes: Classes, width: int, zeros: int = 0) -> Planes:
    """Choose how distances are written in the fewest bytes; `zeros` more distances are 0."""
    numbers, chosen = classes.numbers.copy(), np.empty(5, np.int64)
    numbers[-1] += zeros
    _choose_planes()(numbers.ctypes.data, classes.count + zeros, width, chosen.ctypes.data)
    return Planes(*chosen.tolist())


@cache
def _best_low() -> Callable[[int, int], tuple[int, int]]:
    """Return the loop; it uses the formulas above, so it cannot be imported before them."""
    from dte_dist.kernels.cpu import index_codec_loops

    return index_codec_loops.best_low


@cache
def _choose_planes() -> Callable[[int, int, int, int], None]:
    from dte_dist.kernels.cpu import value_codec_loops

    return value_codec_loops.choose_planes
