"""Fingerprints of live tensors, by which a receiver notices that somebody else wrote to its copy.

1. `of` takes down where every tensor lies and autograd's version counter, which moves with every write that autograd sees.
2. A sync takes one when it begins and compares it with the one of its last commit.
3. It takes another before it votes and one after it wrote: `foreign_to` says which counters moved further than its own writes did.

Inference tensors have no version counter. They are fingerprinted by a digest of their bits, which costs one read of them. Writes through
`tensor.data` or numpy move no counter and are not noticed: `dte_dist.invalidate` says so, `dte_dist.verify` finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dte_dist.change.digest import own_digests
from dte_dist.layout import LocalTensors

__all__ = ["Fingerprint", "foreign_writes"]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Where some tensors lay at one moment, and how often they had been written to.

    Attributes:
        addresses, versions: int64[tensors], memory address and version counter; the counter is -1 for an inference tensor.
        digests: int64[inference tensors], of their bits.

    Example:
        >>> import torch
        >>> tensors = LocalTensors.of([torch.zeros(3)])
        >>> before = Fingerprint.of(tensors)
        >>> _ = tensors.tensors[0].add_(1)
        >>> before.same(Fingerprint.of(tensors))
        False
    """

    addresses: np.ndarray
    versions: np.ndarray
    digests: np.ndarray

    @classmethod
    def of(cls, local: LocalTensors, *, moved: bool = False) -> Fingerprint:
        """Take the fingerprint of tensors; `moved` asks them for their addresses again."""
        versions = local.versions()
        uncounted = [local.tensors[index] for index in np.flatnonzero(versions < 0).tolist()]
        addresses = local.addresses
        if moved:
            addresses = np.fromiter(map(Tensor.data_ptr, local.tensors), np.int64, len(local.tensors))
        return cls(addresses, versions, own_digests(uncounted))

    def same(self, other: Fingerprint) -> bool:
        """Return whether nothing shows that the tensors were written to or replaced in between."""
        return all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(
                (self.addresses, self.versions, self.digests), (other.addresses, other.versions, other.digests), strict=True
            )
        )


def foreign_writes(before: Fingerprint, now: Fingerprint, own: np.ndarray, tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of tensors that were replaced, or whose counters moved further than this rank's own writes moved them.

    Args:
        before, now: fingerprints of the same tensors; digests do not count, since own writes change them.
        own: int64[tensors], how often this rank wrote to each in between.
        tensors: the tensors. Views of one tensor share a counter, which moves with a write to any of them.

    Example:
        >>> import torch
        >>> tensors = [torch.zeros(3), torch.zeros(3)]
        >>> before = Fingerprint.of(LocalTensors.of(tensors))
        >>> for tensor in tensors:
        ...     _ = tensor.add_(1)
        >>> foreign_writes(before, Fingerprint.of(LocalTensors.of(tensors)), np.array([1, 0]), tensors)
        [1]
    """
    replaced = before.addresses != now.addresses
    moved = now.versions - before.versions
    odd = np.flatnonzero(replaced | ((moved != own) & (now.versions >= 0))).tolist()
    if not odd:
        return []
    totals = _totals(own, tensors)
    return [index for index in odd if replaced[index] or moved[index] != totals[tensors[index].untyped_storage().data_ptr()]]


def _totals(own: np.ndarray, tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the number of own writes to each storage."""
    totals: dict[int, int] = {}
    for count, tensor in zip(own.tolist(), tensors, strict=True):
        key = tensor.untyped_storage().data_ptr()
        totals[key] = totals.get(key, 0) + count
    return totals
