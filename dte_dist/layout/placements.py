"""Placements as plain numbers: what a rank must know to compute the blocks of every other rank.

A placement on a mesh is a list of cuts, the same on all ranks of the mesh; a rank finds its own block with
its own coordinate. Global ranks only tell meshes apart: they are never looked up, because ranks can be
renumbered after a failure while coordinates stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dte_dist.layout.blocks import Block, Cut

__all__ = ["WHOLE", "Coordinates", "Entry", "MeshSpec", "Placement"]

Coordinates = Sequence[Sequence[int] | None]
"""Of one rank: per mesh of a manifest its coordinate, or None where it is not in the mesh."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Name a device mesh: its shape, and its global ranks in row-major order to tell it from others."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Say how a tensor lies on ranks: cut along a mesh, whole, or a block that the user stated.

    Args:
        mesh: index of the mesh in the manifest; None for a tensor that is on no mesh. With a block, the mesh
            whose ranks all hold that block, as replicas.
        cuts: how the mesh divides the tensor, in order of application; none if it is replicated.
        block: the block that this rank holds, where it follows from no mesh.

    Example:
        >>> Placement(mesh=0, cuts=(Cut(0, 1),)).is_explicit, Placement().is_explicit
        (False, False)
    """

    mesh: int | None = None
    cuts: tuple[Cut, ...] = ()
    block: Block | None = None

    @property
    def is_explicit(self) -> bool:
        """True if the block is stated, by the user or by a flattened parameter."""
        return self.block is not None


WHOLE: Final = Placement()
"""All of the tensor on this rank, without a mesh: a plain tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Describe one tensor of a rank, or one region of it.

    Args:
        name: name of the slot.
        shape: shape of the full tensor; complex128 has a last dimension of 2 more and dtype float64.
        dtype: name of the element type, such as "bfloat16".
        placement: how it lies on ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement

    @property
    def order(self) -> tuple[str, tuple[Any, ...]]:
        """Sort key: by name, then by region."""
        return self.name, () if self.placement.block is None else self.placement.block.runs
