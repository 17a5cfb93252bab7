"""Fingerprints of live tensors, by which a receiver notices that somebody else wrote to its copy.

1. `of` takes down where every tensor lies and autograd's version counter, which moves with every write that
   autograd sees.
2. A sync takes one when it begins and compares it with the one of its last commit.
3. It takes another before it votes and one after it wrote: `external_writes` says which counters moved
   further than its own writes did.
4. The one that a commit keeps watches the memory (`watching`): where it was freed, another tensor may lie at
   the same address, with the same counter.

Inference tensors have no version counter. They are fingerprinted by a digest of their bits, which costs one
read of them. Writes through `tensor.data` or numpy move no counter and are not noticed: `dte_dist.invalidate`
says so, `dte_dist.verify` finds out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from torch import Tensor, UntypedStorage

from dte_dist.detect.digest import own_digests
from dte_dist.layout import LiveTensors

__all__ = ["Fingerprint", "external_writes"]

_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """Notices that memory is freed, and keeps none alive.

    Attributes:
        storages: a reference to each, which dies with the memory.
        ended: the references that died.
    """

    storages: Sequence[weakref.ref[UntypedStorage]] = ()
    ended: Sequence[Any] = ()

    @classmethod
    def of(cls, storages: Iterable[UntypedStorage]) -> Lifetimes:
        """Watch memory from now on."""
        ended: list[Any] = []
        return cls([weakref.ref(storage, ended.append) for storage in storages], ended)


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Where some tensors lay at one moment, and how often they had been written to.

    Attributes:
        addresses, versions: int64[tensors], memory address and version counter; the counter is -1 for an
            inference tensor.
        digests: int64[inference tensors], of their bits.
        twins: version counters of further tensors over the same memory; see `LiveTensors.twin_versions`.
        memory: of the tensors, if it is watched.

    Example:
        >>> import torch
        >>> tensors = LiveTensors.of([torch.zeros(3)])
        >>> before = Fingerprint.of(tensors)
        >>> _ = tensors.tensors[0].add_(1)
        >>> before.same(Fingerprint.of(tensors))
        False
    """

    addresses: np.ndarray
    versions: np.ndarray
    digests: np.ndarray
    twins: Mapping[tuple[int, int], int] = field(default_factory=dict)
    memory: Lifetimes = Lifetimes()

    @classmethod
    def of(cls, local: LiveTensors, *, moved: bool = False) -> Fingerprint:
        """Take the fingerprint of tensors, of the moment when they were read; `moved` asks them again."""
        addresses = local.addresses
        versions = local.counters
        if versions is None or moved:
            now, versions = local.now()
            addresses = now if moved else addresses
        uncounted = [local.tensors[index] for index in np.flatnonzero(versions < 0).tolist()]
        digests = own_digests(uncounted) if uncounted else _NONE
        return cls(
            addresses,
            versions,
            digests,
            local.twin_versions() if local.twins else {},
        )

    def watching(self, storages: Iterable[UntypedStorage], before: Fingerprint | None) -> Fingerprint:
        """Return this fingerprint, which notices from now on that memory of the tensors is freed.

        Args:
            storages: the memory of each tensor.
            before: one that may watch the same memory already: none of it freed, all at the same addresses.
        """
        is_watched = (
            before is not None
            and not before.memory.ended
            and len(before.memory.storages) == len(self.addresses)
            and np.array_equal(before.addresses, self.addresses)
        )
        return replace(
            self,
            memory=before.memory if before and is_watched else Lifetimes.of(storages),
        )

    def same(self, other: Fingerprint) -> bool:
        """Return whether nothing shows that the tensors were written to or replaced since this fingerprint
        was taken, until the other one was.
        """
        if self.memory.ended or self.twins != other.twins:
            return False
        return all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(
                (self.addresses, self.versions, self.digests),
                (other.addresses, other.versions, other.digests),
                strict=True,
            )
        )

    def differences(self, other: Fingerprint) -> list[int]:
        """Return the indices of tensors that show that they were written to or replaced in between; both are
        of as many tensors.
        """
        odd = (self.addresses != other.addresses) | (self.versions != other.versions)
        uncounted = np.flatnonzero(self.versions < 0)
        if np.array_equal(uncounted, np.flatnonzero(other.versions < 0)):
            odd[uncounted] |= self.digests != other.digests
        if self.memory.ended:
            odd |= np.fromiter(
                (storage() is None for storage in self.memory.storages),
                np.bool_,
                len(odd),
            )
        return np.flatnonzero(odd).tolist()


def external_writes(
    before: Fingerprint,
    now: Fingerprint,
    own: np.ndarray,
    tensors: Sequence[Tensor],
) -> list[int]:
    """Return the indices of tensors that were replaced, or whose counters moved further than this rank's own
    writes moved them.

    Args:
        before, now: fingerprints of the same tensors; digests do not count, since own writes change them.
        own: int64[tensors], how often this rank wrote to each in between.
        tensors: the tensors. Views of one tensor share a counter, which moves with a write to any of them.

    Example:
        >>> import torch
        >>> tensors = [torch.zeros(3), torch.zeros(3)]
        >>> before = Fingerprint.of(LiveTensors.of(tensors))
        >>> for tensor in tensors:
        ...     _ = tensor.add_(1)
        >>> external_writes(before, Fingerprint.of(LiveTensors.of(tensors)), np.array([1, 0]), tensors)
        [1]
    """
    replaced = before.addresses != now.addresses
    moved = now.versions - before.versions
    odd = np.flatnonzero(replaced | ((moved != own) & (now.versions >= 0))).tolist()
    beside = {index for (index, _), _ in before.twins.items() ^ now.twins.items()}  # own writes go to no twin
    if not odd:
        return sorted(beside)
    counters = _counters(before, now, tensors)
    totals: dict[tuple[int, int, int], int] = {}
    for counter, count in zip(counters, own.tolist(), strict=True):
        totals[counter] = totals.get(counter, 0) + count
    further = (index for index in odd if replaced[index] or moved[index] != totals[counters[index]])
    return sorted(beside.union(further))


def _counters(before: Fingerprint, now: Fingerprint, tensors: Iterable[Tensor]) -> list[tuple[int, int, int]]:
    """Return for each tensor what all tensors that share its counter have in common: memory, and where the
    counter began and ended.

    Memory alone does not tell: parts of `weight.data` have counters of their own. Torch does not say who
    shares one, so those of one memory whose counters began and ended alike count as sharing it.
    """
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return list(zip(memory, before.versions.tolist(), now.versions.tolist(), strict=True))
