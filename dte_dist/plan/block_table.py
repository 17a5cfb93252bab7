"""The pieces that each rank holds: a manifest and a rank's coordinates turned into columns, once per
geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dte_dist.layout import Coordinates, Entry, Manifest, Placement
from dte_dist.plan.aliases import aliased_entries
from dte_dist.plan.flat_space import BlockTable, Pieces

__all__ = ["Inventory"]


class Inventory:
    """Turn manifests into pieces, whose blocks it numbers in one table.

    Args:
        slot_of: from the name of an entry to its slot.

    Attributes:
        table: all blocks so far.

    Example:
        >>> inventory = Inventory({"w": 0}.__getitem__)
        >>> inventory.pieces(Manifest.build([Entry("w", (2, 3), "float32", Placement())]), ()).block.tolist()
        [0]
    """

    def __init__(self, slot_of: Callable[[str], int]) -> None:
        self.table = BlockTable()
        self._slot_of = slot_of
        self._known: dict[int, tuple[Manifest, _Columns]] = {}

    def pieces(self, manifest: Manifest, coordinates: Coordinates) -> Pieces:
        """Return the non-empty blocks that a rank holds, in slot order; of tied names only the first."""
        columns = self._columns(manifest)
        numbers = np.array(
            [self.table.number(manifest.block(entry, coordinates)) for entry in columns.examples],
            np.int64,
        )
        block = numbers[columns.geometry]
        return Pieces(self.table, columns.slot, columns.entry, block).take(block >= 0)

    def rivals(self, manifest: Manifest, pieces: Pieces) -> tuple[str, str] | None:
        """Return two names that share a slot because another rank ties them, though this rank holds something
        of each.
        """
        names: dict[int, str] = {}
        if self._columns(manifest).are_apart:
            for slot, entry in zip(pieces.slot.tolist(), pieces.entry.tolist(), strict=True):
                name = manifest.entries[entry].name
                if names.setdefault(slot, name) != name:
                    return names[slot], name
        return None

    def _columns(self, manifest: Manifest) -> _Columns:
        if id(manifest) not in self._known:
            self._known[id(manifest)] = (
                manifest,
                _Columns(
                    manifest,
                    [self._slot_of(entry.name) for entry in manifest.entries],
                ),
            )
        return self._known[id(manifest)][1]


class _Columns:
    """The entries of one manifest as columns in slot order, without the further names of tied tensors.

    Attributes:
        slot, entry: of each; an entry by its index in the manifest.
        geometry: of each, index into `examples`: entries of one geometry have equal blocks on every rank.
        examples: one entry of each geometry.
        are_apart: True if a slot has entries of several names, which are tied on another rank only.
    """

    def __init__(self, manifest: Manifest, slots: Sequence[int]) -> None:
        tied = aliased_entries(manifest)
        order = sorted(
            (index for index in range(len(slots)) if tied[index] == index),
            key=slots.__getitem__,
        )
        geometries: dict[tuple[tuple[int, ...], Placement], int] = {}
        self.examples: list[Entry] = []
        numbers = []
        for entry in (manifest.entries[index] for index in order):
            number = geometries.setdefault((entry.shape, entry.placement), len(self.examples))
            if number == len(self.examples):
                self.examples.append(entry)
            numbers.append(number)
        self.slot = np.array([slots[index] for index in order], np.int64)
        self.entry = np.array(order, np.int64)
        self.geometry = np.array(numbers, np.int64)
        self.are_apart = len(set(self.slot.tolist())) < len({manifest.entries[index].name for index in order})
