"""The fewest bytes that an update can take, if nothing is known about it but counts: an entropy.

Positions: within each segment of 2^20 elements any element is as likely to have changed as any other, so k
changes of n elements take n * H(k / n) bits, with H the binary entropy. Values: the signed distance between
old and new bits, counted in steps between neighbouring floats, takes the entropy of its histogram over the
whole update. Both sides know the old bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["SEGMENT", "Limit", "limit_of", "ordered"]

SEGMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """What one update is made of.

    Attributes:
        changed: elements.
        bits: the limit, for all of them.
    """

    changed: int = 0
    bits: float = 0.0

    def __add__(self, other: Limit) -> Limit:
        return Limit(self.changed + other.changed, self.bits + other.bits)

    @property
    def bytes_per_change(self) -> float | None:
        return self.bits / 8 / self.changed if self.changed else None


def ordered(bits: Tensor) -> Tensor:
    """Map bf16 bits (int16) to integers (int16) in the order of the floats, -0.0 below +0.0; applied twice it
    is undone.

    Example:
        >>> ordered(torch.tensor([-0.0, 0.0, 1e-40], dtype=torch.bfloat16).view(torch.int16)).tolist()
        [-1, 0, 1]
    """
    return bits ^ ((bits >> 15) & 0x7FFF)


def limit_of(before: Tensor, after: Tensor) -> Limit:
    """Return the limit of an update of bf16 weights, given as two flat int16 tensors of bits."""
    changed, bits = 0, 0.0
    histogram = np.zeros(1 << 16, np.int64)
    for old, new in zip(before.split(SEGMENT), after.split(SEGMENT), strict=True):
        where = np.flatnonzero(old.numpy() != new.numpy())
        changed += len(where)
        bits += len(old) * _binary_entropy(len(where) / len(old)) if len(old) else 0.0
        at = torch.from_numpy(where)
        steps = (ordered(new[at]) - ordered(old[at])).numpy().view(np.uint16)
        histogram += np.bincount(steps, minlength=1 << 16)
    counts = histogram[histogram > 0]
    return Limit(changed, bits + float((counts * np.log2(changed / counts)).sum()) if changed else 0.0)


def _binary_entropy(share: float) -> float:
    if share in (0.0, 1.0):
        return 0.0
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)
