"""Manifests: the part of a layout that other ranks need.

A manifest lists slots and placements, not ranks, so ranks that are placed alike have equal manifests, byte
for byte, and one copy serves them all. Together with a rank's own coordinates on the meshes it gives the
block of every slot on that rank. A model has thousands of slots but few geometries, hence blocks are computed
once per geometry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.blocks import Block, cut_block
from dte_dist.layout.manifest_bytes import canonical_text, pack, unpack
from dte_dist.layout.placements import Coordinates, Entry, MeshSpec

__all__ = ["Manifest"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """List what one rank, and every rank placed like it, holds.

    Args:
        entries: the slots in canonical order, see `build`.
        meshes: the meshes that placements refer to.
        ties: groups of names, sorted, whose tensors share one storage.

    Example:
        >>> from dte_dist.layout import WHOLE, Entry
        >>> manifest = Manifest.build([Entry("w", (2, 3), "float32", WHOLE)])
        >>> manifest.block(0, ()).shape, Manifest.from_bytes(manifest.to_bytes()) == manifest
        ((2, 3), True)
    """

    entries: tuple[Entry, ...]
    meshes: tuple[MeshSpec, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    _blocks: dict[Any, Block] = field(init=False, compare=False, repr=False, default_factory=dict)

    @classmethod
    def build(
        cls, entries: Iterable[Entry], meshes: Iterable[MeshSpec] = (), ties: Iterable[Iterable[str]] = ()
    ) -> Manifest:
        """Return the manifest with entries and ties in canonical order."""
        groups = sorted(tuple(sorted(group)) for group in ties)
        return cls(tuple(sorted(entries, key=lambda entry: entry.order)), tuple(meshes), tuple(groups))

    def block(self, entry: int | Entry, coordinates: Coordinates) -> Block | None:
        """Return the block of an entry on the rank with these coordinates; None if the rank is not in its
        mesh.

        Raises:
            LayoutMismatch: the coordinates do not belong to the meshes of this manifest.
        """
        entry = self.entries[entry] if isinstance(entry, int) else entry
        placement = entry.placement
        if placement.block is not None:
            return placement.block
        if placement.mesh is None:
            return self._cached(entry, (), ())
        if len(coordinates) != len(self.meshes):
            raise LayoutMismatch(
                "a rank needs one coordinate per mesh",
                tensor=entry.name,
                expected=len(self.meshes),
                got=len(coordinates),
            )
        coordinate = coordinates[placement.mesh]
        return (
            None
            if coordinate is None
            else self._cached(entry, self.meshes[placement.mesh].shape, tuple(coordinate))
        )

    def _cached(self, entry: Entry, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Block:
        key = (entry.shape, entry.placement, coordinate)
        block = self._blocks.get(key)
        if block is None:
            try:
                block = self._blocks[key] = cut_block(
                    entry.shape, mesh_shape, coordinate, entry.placement.cuts
                )
            except ValueError as error:
                raise LayoutMismatch(str(error), tensor=entry.name) from error
        return block

    def to_bytes(self) -> bytes:
        """Write the manifest as bytes; equal manifests give equal content on every machine."""
        return pack(self.entries, self.meshes, self.ties)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read what `to_bytes` wrote, checking everything.

        Raises:
            LayoutMismatch: the bytes are no manifest.
        """
        return cls(*unpack(data))

    def digest(self) -> bytes:
        """Return 16 bytes that differ when manifests differ."""
        return hashlib.blake2b(canonical_text(self.entries, self.meshes, self.ties), digest_size=16).digest()
