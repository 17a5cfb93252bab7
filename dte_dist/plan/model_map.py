"""The whole model as all ranks agree on it, from what every rank says of its own module.

Every rank builds the same `ModelMap` from the same descriptions, without further talk:

1. Slots: the union of what the sources hold, tied names being one slot.
2. Receivers are held against the slots: missing, extra, other shape, other dtype.
3. Contributors: of all sources that hold the same block of a slot, one sends it (`plan.ownership`), the same
   for the life of the channel.
4. Contested pieces: several sources hold them, though no mesh makes these replicas (`plan.contested`). Their
   bits are compared when a channel opens.
5. Coverage: the contributed blocks of a slot must be disjoint and together be the whole slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NoReturn

import numpy as np
import torch

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Coordinates, Entry, Manifest, MeshSpec
from dte_dist.plan.aliases import Aliases
from dte_dist.plan.block_table import Inventory
from dte_dist.plan.contested import Claims, Contested
from dte_dist.plan.coverage import first_gap, refuse_gap
from dte_dist.plan.flat_space import FlatSpace, Pieces, spaces_of
from dte_dist.plan.hints import OF_COLLECTIVES, Hints
from dte_dist.plan.ownership import choose_contributors

__all__ = ["ModelMap", "RankLayout", "Slot", "WireTypes"]

WireTypes = Mapping[str, str] | Literal["receiver"] | None
"""Dtypes on the wire: by name; the dtype that receivers hold; or None for the dtype that sources hold."""


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """The description of one module on one rank.

    Attributes:
        manifest: its entries; ranks with equal manifests should share one object.
        coordinates: this rank's coordinates on the meshes of the manifest.
        wire: on a source, the dtypes to send.
        partial: on a receiver, True if it asks for some of the slots only (`select=`).

    Example:
        >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4)})
        >>> dte_dist.RankLayout(layout.manifest, layout.coordinates, partial=True).partial
        True
    """

    manifest: Manifest
    coordinates: Coordinates
    wire: WireTypes = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of the model: name, full shape, and dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype on the wire."""
        return getattr(torch, self.dtype)

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize


class ModelMap:
    """Slots, and the flat spaces of every rank.

    Args:
        sources: by group rank, what each source holds; at least one.
        receivers: by group rank, what each receiver holds; a colocated rank is in both.
        hints: for whoever called.

    Attributes:
        slots: sorted by name.
        numel, nbytes: elements, and bytes on the wire, of all slots.
        contested: the pieces that several sources hold which are not all replicas of each other.
        source_spaces: by group rank, by width: the blocks this rank contributes.
        receiver_spaces: by group rank, by width: the blocks this rank holds.

    Raises:
        LayoutMismatch: the descriptions do not fit together; equal on every rank.
    """

    def __init__(
        self,
        sources: Mapping[int, RankLayout],
        receivers: Mapping[int, RankLayout],
        *,
        hints: Hints = OF_COLLECTIVES,
    ) -> None:
        self._hints = hints
        self._names = Aliases(holding.manifest for holding in sources.values())
        self._index: dict[str, int] = {}
        self.slots = self._slots_of(sources, receivers)
        self._index = {slot.name: index for index, slot in enumerate(self.slots)}
        widths = np.array([slot.width for slot in self.slots], np.int64)
        self.numel = sum(slot.numel for slot in self.slots)
        self.nbytes = sum(slot.numel * slot.width for slot in self.slots)
        for ranks, holding in _distinct(receivers):
            self._check_receiver(ranks, holding)
        inventory = Inventory(self.slot_of)
        held = {rank: _owned(inventory, rank, holding) for rank, holding in sorted(sources.items())}
        claims = _claims(sources, held)
        self.contested = Contested.of(claims)
        contributed = self._contributions(held, claims)
        self.source_spaces = {rank: spaces_of(pieces, widths) for rank, pieces in contributed.items()}
        self.receiver_spaces = _receiver_spaces(inventory, receivers, widths)

    def digest(self) -> bytes:
        """Return 16 bytes that differ when the slots, or what any rank contributes or holds, differ."""
        hashed = hashlib.blake2b(repr(self.slots).encode(), digest_size=16)
        tables: dict[int, bytes] = {}  # of blocks; ranks share them
        for side in (self.source_spaces, self.receiver_spaces):
            for rank, spaces in side.items():
                for width, space in spaces.items():
                    pieces = space.pieces
                    table = space.pieces.table
                    if id(table) not in tables:
                        tables[id(table)] = hashlib.blake2b(
                            repr(table.blocks).encode(), digest_size=16
                        ).digest()
                    hashed.update(b"%d %d %d " % (rank, width, len(pieces)) + tables[id(table)])
                    for column in (pieces.slot, pieces.entry, pieces.block):
                        hashed.update(column.tobytes())
        return hashed.digest()

    def slot_of(self, name: str) -> int:
        """Return the index of the slot that a name, tied or not, belongs to."""
        return self._index[self._names.canonical(name)]

    def _slots_of(
        self,
        sources: Mapping[int, RankLayout],
        receivers: Mapping[int, RankLayout],
    ) -> tuple[Slot, ...]:
        received = {
            self._names.canonical(entry.name): entry
            for _, holding in _distinct(receivers)
            for entry in holding.manifest.entries
        }
        slots: dict[str, tuple[Slot, list[int]]] = {}
        for ranks, holding in _distinct(sources):
            chosen = self._chosen(ranks, holding.wire)
            for entry in holding.manifest.entries:
                name = self._names.canonical(entry.name)
                wanted = (
                    received[name].dtype
                    if holding.wire == "receiver" and name in received
                    else chosen.get(name, entry.dtype)
                )
                slot = Slot(
                    name,
                    entry.shape,
                    _castable(entry, wanted, holding.wire != "receiver", ranks),
                )
                other, theirs = slots.setdefault(name, (slot, ranks))
                if other != slot:
                    found = (
                        (other.shape, other.dtype),
                        (slot.shape, slot.dtype),
                    )
                    self._differ(
                        "sources differ",
                        sorted({*theirs, *ranks}),
                        entry.name,
                        *found,
                    )
        return tuple(slots[name][0] for name in sorted(slots))

    def _chosen(self, ranks: Sequence[int], wire: WireTypes) -> dict[str, str]:
        """Return the wire dtypes that a source names, by slot: naming one of several tied names is enough."""
        chosen: dict[str, str] = {}
        for name, dtype in {} if wire is None or isinstance(wire, str) else wire.items():
            other = chosen.setdefault(self._names.canonical(name), dtype)
            if other != dtype:
                what = "tied names cannot travel in different dtypes"
                raise LayoutMismatch(
                    what,
                    tensor=name,
                    ranks=ranks,
                    expected=other,
                    got=dtype,
                    hint="give them one wire dtype",
                )
        return chosen

    def _check_receiver(self, ranks: Sequence[int], holding: RankLayout) -> None:
        seen = set()
        for entry in holding.manifest.entries:
            index = self._index.get(self._names.canonical(entry.name))
            if index is None:
                what = "a receiver has a tensor that no source has"
                raise LayoutMismatch(
                    what,
                    tensor=entry.name,
                    ranks=ranks,
                    hint=self._hints.names,
                )
            slot = self.slots[index]
            if entry.shape != slot.shape:
                self._differ(
                    "shapes differ",
                    ranks,
                    entry.name,
                    slot.shape,
                    entry.shape,
                )
            if entry.dtype != slot.dtype:
                raise LayoutMismatch(
                    "dtypes differ",
                    tensor=entry.name,
                    ranks=ranks,
                    expected=slot.dtype,
                    got=entry.dtype,
                    hint=self._hints.dtypes,
                )
            seen.add(index)
        for group in holding.manifest.ties:
            if len({self._names.canonical(name) for name in group}) > 1:
                hint = "tie them on the sources too, or untie them here"
                raise LayoutMismatch(
                    f"a receiver ties {' and '.join(group)}, the sources do not",
                    tensor=group[0],
                    ranks=ranks,
                    hint=hint,
                )
        if not holding.partial and len(seen) < len(self.slots):
            missing = [slot.name for index, slot in enumerate(self.slots) if index not in seen]
            what = "a receiver lacks a tensor that the sources have" + (
                f" (and {len(missing) - 1} more)" if missing[1:] else ""
            )
            raise LayoutMismatch(what, tensor=missing[0], ranks=ranks, hint=self._hints.names)

    def _differ(
        self,
        what: str,
        ranks: Sequence[int],
        slot: str,
        expected: object,
        got: object,
    ) -> NoReturn:
        hint = self._hints.names
        raise LayoutMismatch(
            what,
            tensor=slot,
            ranks=ranks,
            expected=expected,
            got=got,
            hint=hint,
        )

    def _contributions(self, held: Mapping[int, Pieces], claims: Claims) -> dict[int, Pieces]:
        """Choose the contributor of every block, of what each source (ascending) holds; check that the blocks
        of a slot tile it.
        """
        slot = claims.slot
        block = claims.block
        rank = claims.rank
        first = choose_contributors(slot, block, claims.mesh >= 0)
        table = next(iter(held.values())).table
        gap = first_gap(
            [slot.numel for slot in self.slots],
            slot[first],
            block[first],
            table,
        )
        if gap is not None:
            here = first[slot[first] == gap]
            holders = {
                table.blocks[number]: rank
                for number, rank in zip(block[here].tolist(), rank[here].tolist(), strict=True)
            }
            refuse_gap(
                self.slots[gap].name,
                self.slots[gap].numel,
                holders,
                self._hints.owners,
            )
        chosen = np.zeros(len(slot), np.bool_)
        chosen[first] = True
        parts = np.split(
            chosen,
            np.cumsum([len(pieces) for pieces in held.values()])[:-1],
        )
        return {rank: held[rank].take(mine) for rank, mine in zip(held, parts, strict=True)}


def _owned(inventory: Inventory, rank: int, holding: RankLayout) -> Pieces:
    """Return the pieces of a source; refuse names that another source ties and this one does not: they may
    differ.
    """
    pieces = inventory.pieces(holding.manifest, holding.coordinates)
    rivals = inventory.rivals(holding.manifest, pieces)
    if rivals is not None:
        what = f"another source ties {rivals[0]} and {rivals[1]}, this one does not"
        raise LayoutMismatch(
            what,
            tensor=rivals[0],
            ranks=[rank],
            hint="tie them on every source, or on none",
        )
    return pieces


def _claims(sources: Mapping[int, RankLayout], held: Mapping[int, Pieces]) -> Claims:
    """Write what each source (ascending) holds as columns, and number the meshes that it lies on."""
    in_mesh: dict[MeshSpec, list[int]] = {}
    for rank in held:
        for spec, place in zip(
            sources[rank].manifest.meshes,
            sources[rank].coordinates,
            strict=False,
        ):
            if place is not None:
                in_mesh.setdefault(spec, []).append(rank)
    numbers = {spec: number for number, spec in enumerate(in_mesh)}
    of_entries = {id(each.manifest): _meshes_of(each.manifest, numbers) for _, each in _distinct(sources)}
    mesh = {rank: of_entries[id(sources[rank].manifest)][pieces.entry] for rank, pieces in held.items()}
    return Claims.of(held, mesh, in_mesh)


def _meshes_of(manifest: Manifest, numbers: Mapping[MeshSpec, int]) -> np.ndarray:
    """Return the number of the mesh of each entry, -1 where it is on none, or on one that no source is in."""
    known = [numbers.get(mesh, -1) for mesh in manifest.meshes]
    placed = [entry.placement.mesh for entry in manifest.entries]
    return np.array([-1 if mesh is None else known[mesh] for mesh in placed], np.int64)


def _receiver_spaces(
    inventory: Inventory,
    receivers: Mapping[int, RankLayout],
    widths: np.ndarray,
) -> dict[int, dict[int, FlatSpace]]:
    """Lay out what the receivers hold; those placed alike share it."""
    known: dict[tuple[int, Coordinates], dict[int, FlatSpace]] = {}
    for holding in receivers.values():
        key = id(holding.manifest), tuple(holding.coordinates)
        if key not in known:
            known[key] = spaces_of(
                inventory.pieces(holding.manifest, holding.coordinates),
                widths,
            )
    return {
        rank: known[id(holding.manifest), tuple(holding.coordinates)] for rank, holding in receivers.items()
    }


def _distinct(
    holdings: Mapping[int, RankLayout],
) -> list[tuple[list[int], RankLayout]]:
    """Group ranks whose manifests and wire dtypes are the same objects: their names need one check."""
    groups: dict[tuple[int, int, bool], tuple[list[int], RankLayout]] = {}
    for rank, holding in sorted(holdings.items()):
        key = (id(holding.manifest), id(holding.wire), holding.partial)
        groups.setdefault(key, ([], holding))[0].append(rank)
    return list(groups.values())


def _castable(entry: Entry, wanted: str, named: bool, ranks: Sequence[int]) -> str:
    """Return the dtype in which a source's entry shall travel; refuse casts that would make no sense, or
    surprise unless named.
    """
    source = getattr(torch, entry.dtype)
    target = getattr(torch, wanted)
    sensible = source.is_floating_point and target.is_floating_point and (target.itemsize > 1 or named)
    if wanted != entry.dtype and not sensible:
        hint = "cast it in the trainer and sync the result, or give both sides one dtype"
        raise LayoutMismatch(
            "this cast is not made on the wire",
            tensor=entry.name,
            ranks=ranks,
            expected=entry.dtype,
            got=wanted,
            hint=hint,
        )
    return wanted
