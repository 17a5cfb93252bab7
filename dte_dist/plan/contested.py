"""Find the pieces that several sources hold without a mesh that makes them replicas of each other.

One name then stands either for copies of one tensor, as with DDP, or for several tensors, as where each stage
of a pipeline counts its layers from 0. The layouts cannot tell these apart. The bits can, see
`sync.replica_check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dte_dist.layout import MeshSpec
from dte_dist.plan.flat_space import Pieces

__all__ = ["Claims", "Contested"]


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """The pieces of all sources as columns, in ascending order of ranks.

    Attributes:
        slot, block, rank, entry: int64[pieces]; see `Pieces`.
        mesh: int64[pieces], the number of the mesh that each lies on, -1 for a plain tensor. Equal meshes
            have one number.
        members: by number of a mesh, bool[ranks], which ranks are in it.
    """

    slot: np.ndarray
    block: np.ndarray
    rank: np.ndarray
    entry: np.ndarray
    mesh: np.ndarray
    members: tuple[np.ndarray, ...] = ()

    @classmethod
    def of(
        cls,
        held: Mapping[int, Pieces],
        mesh: Mapping[int, np.ndarray],
        in_mesh: Mapping[MeshSpec, list[int]],
    ) -> Claims:
        """Lay the pieces of sources end to end.

        Args:
            held: by ascending rank, its pieces.
            mesh: by rank, the number of the mesh of each piece; meshes count in the order of `in_mesh`.
            in_mesh: the ranks in each mesh.
        """
        members = []
        for ranks in in_mesh.values():
            here = np.zeros(1 + max(held), np.bool_)
            here[ranks] = True
            members.append(here)
        slot, block, entry = (
            np.concatenate([getattr(pieces, name) for pieces in held.values()])
            for name in ("slot", "block", "entry")
        )
        rank = np.repeat(list(held), [len(pieces) for pieces in held.values()])
        return cls(
            slot,
            block,
            rank,
            entry,
            np.concatenate([mesh[each] for each in held]),
            tuple(members),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Contested:
    """Pieces that several sources hold which are not all replicas of each other.

    Two sources of a piece are replicas of each other if it lies on the same mesh on both. Of the replicas on
    one mesh the lowest rank speaks for all.

    Attributes:
        slot: int64[pieces], the slot of each piece, ascending.
        may_differ: bool[pieces], whether buffers may differ there. They may where all speakers hold a plain
            tensor, and either one mesh has all of these ranks, or no source has a mesh.
        piece, rank, entry: int64[speakers], which piece each rank holds, and as which entry of its manifest;
            sorted by piece, then by rank.

    Example:
        >>> zero = np.zeros(2, np.int64)
        >>> claims = Claims(slot=zero, block=zero, rank=np.array([0, 3]), entry=zero, mesh=zero - 1)
        >>> found = Contested.of(claims)
        >>> found.slot.tolist(), found.piece.tolist(), found.rank.tolist(), found.may_differ.tolist()
        ([0], [0, 0], [0, 3], [True])
    """

    slot: np.ndarray
    may_differ: np.ndarray
    piece: np.ndarray
    rank: np.ndarray
    entry: np.ndarray

    def __len__(self) -> int:
        return len(self.slot)

    @classmethod
    def of(cls, claims: Claims) -> Contested:
        """Find them among the claims of all sources."""
        speaker, piece = _speakers(claims)
        first = np.flatnonzero(np.diff(piece, prepend=-1))
        rank = claims.rank[speaker]
        is_plain = claims.mesh[speaker] < 0
        may_differ = np.full(len(first), not claims.members)
        if len(first):
            for here in claims.members:
                may_differ |= np.logical_and.reduceat(here[rank], first)
            may_differ &= np.logical_and.reduceat(is_plain, first)
        return cls(
            claims.slot[speaker[first]],
            may_differ,
            piece,
            rank,
            claims.entry[speaker],
        )

    def held_by(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the pieces for which a rank speaks, and their entries in its manifest."""
        mine = self.rank == rank
        return self.piece[mine], self.entry[mine]


def _speakers(claims: Claims) -> tuple[np.ndarray, np.ndarray]:
    """Return which claims speak for contested pieces, and the number of the piece of each."""
    key = claims.slot * (1 + claims.block.max(initial=0)) + claims.block
    order = np.argsort(key, kind="stable")
    order = order[_repeated(key[order])]
    if len(order):
        alone = (
            claims.mesh.max() + 1 + claims.rank
        )  # a plain tensor is on no mesh, so each is a place of its own
        place = np.where(claims.mesh < 0, alone, claims.mesh)[order]
        by_place = np.lexsort((place, key[order]))
        new_key = np.diff(key[order][by_place], prepend=-1) != 0
        new_place = np.diff(place[by_place], prepend=-1) != 0
        is_first = new_key | new_place
        order = order[np.sort(by_place[is_first])]
        order = order[_repeated(key[order])]
    return order, np.cumsum(np.diff(key[order], prepend=-1) != 0) - 1


def _repeated(ordered: np.ndarray) -> np.ndarray:
    """Return which of some ascending numbers occur more than once."""
    same = np.zeros(len(ordered) + 1, np.bool_)
    same[1:-1] = ordered[1:] == ordered[:-1]
    return same[1:] | same[:-1]
