"""The whole model as all ranks agree on it, from what every rank says of its own module.

Every rank builds the same `ModelMap` from the same descriptions, without further talk:

1. Slots: the union of what the sources hold, tied names being one slot.
2. Receivers are held against the slots: missing, extra, other shape, other dtype.
3. Contributors: of all sources that hold the same block of a slot, the one of lowest rank sends it. That is coordinate 0
   on every replicated axis of a mesh, and stays the same for the life of the channel (replicas drift apart in
   the last bit, so another choice next time would send the drift).
4. Coverage: the contributed blocks of a slot must be disjoint and together be the whole slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NoReturn

import torch

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Block, Entry, Manifest
from dte_dist.plan.overlap import overlap_of
from dte_dist.plan.space import FlatSpace, Piece, spaces_of

__all__ = ["Holding", "ModelMap", "Slot", "WireTypes"]

WireTypes = Mapping[str, str] | Literal["receiver"] | None
"""Dtypes on the wire: by name; the dtype that receivers hold; or None for the dtype that sources hold."""

_BUILD = "build the same model on both sides, or pass rename= or select="


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What one rank says of one of its modules.

    Attributes:
        manifest: its entries; ranks with equal manifests should share one object.
        coordinates: this rank's coordinates on the meshes of the manifest.
        wire: on a source, the dtypes to send.
        partial: on a receiver, True if it asks for some of the slots only (`select=`).
    """

    manifest: Manifest
    coordinates: tuple[tuple[int, ...] | None, ...]
    wire: WireTypes = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of the model: name, full shape, and dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype on the wire."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize


class ModelMap:
    """Slots, and the flat spaces of every rank.

    Args:
        sources: by group rank, what each source holds.
        receivers: by group rank, what each receiver holds; a colocated rank is in both.

    Attributes:
        slots: sorted by name.
        numel, nbytes: elements, and bytes on the wire, of all slots.
        source_spaces: by group rank, by width: the blocks this rank contributes.
        receiver_spaces: by group rank, by width: the blocks this rank holds.

    Raises:
        LayoutMismatch: the descriptions do not fit together; equal on every rank.
    """

    def __init__(self, sources: Mapping[int, Holding], receivers: Mapping[int, Holding]) -> None:
        self._names = _Ties(holding.manifest for holding in sources.values())
        self._index: dict[str, int] = {}
        self.slots = self._slots_of(sources, receivers)
        self._index = {slot.name: index for index, slot in enumerate(self.slots)}
        self.numel = sum(prod(slot.shape) for slot in self.slots)
        self.nbytes = sum(prod(slot.shape) * slot.width for slot in self.slots)
        for ranks, holding in _distinct(receivers):
            self._check_receiver(ranks, holding)
        widths = {index: slot.width for index, slot in enumerate(self.slots)}
        self.source_spaces: dict[int, dict[int, FlatSpace]] = {
            rank: spaces_of(pieces, widths) for rank, pieces in self._contributions(sources).items()
        }
        self.receiver_spaces: dict[int, dict[int, FlatSpace]] = {
            rank: spaces_of(self._pieces(holding), widths) for rank, holding in receivers.items()
        }

    def slot_of(self, name: str) -> int:
        """Return the index of the slot that a name, tied or not, belongs to."""
        return self._index[self._names.canonical(name)]

    def _slots_of(self, sources: Mapping[int, Holding], receivers: Mapping[int, Holding]) -> tuple[Slot, ...]:
        held = {
            self._names.canonical(entry.name): entry for _, holding in _distinct(receivers) for entry in holding.manifest.entries
        }
        slots: dict[str, Slot] = {}
        for ranks, holding in _distinct(sources):
            for entry in holding.manifest.entries:
                name = self._names.canonical(entry.name)
                slot = Slot(name, entry.shape, _wire_dtype(entry, held.get(name), holding.wire, ranks))
                other = slots.setdefault(name, slot)
                if other != slot:
                    _differ("sources differ", ranks, entry.name, (other.shape, other.dtype), (slot.shape, slot.dtype))
        return tuple(slots[name] for name in sorted(slots))

    def _check_receiver(self, ranks: Sequence[int], holding: Holding) -> None:
        seen = set()
        for entry in holding.manifest.entries:
            index = self._index.get(self._names.canonical(entry.name))
            if index is None:
                raise LayoutMismatch("a receiver has a tensor that no source has", slot=entry.name, ranks=ranks, fix=_BUILD)
            slot = self.slots[index]
            if entry.shape != slot.shape:
                _differ("shapes differ", ranks, entry.name, slot.shape, entry.shape)
            if entry.dtype != slot.dtype:
                fix = 'pass wire_dtype= (a dtype, a mapping by name, or "receiver") so that sources cast, or give both sides one dtype'
                raise LayoutMismatch("dtypes differ", slot=entry.name, ranks=ranks, expected=slot.dtype, got=entry.dtype, fix=fix)
            seen.add(index)
        for group in holding.manifest.ties:
            if len({self._names.canonical(name) for name in group}) > 1:
                fix = "tie them on the sources too, or untie them here"
                raise LayoutMismatch(f"a receiver ties {' and '.join(group)}, the sources do not", slot=group[0], ranks=ranks, fix=fix)
        if not holding.partial and len(seen) < len(self.slots):
            missing = [slot.name for index, slot in enumerate(self.slots) if index not in seen]
            what = "a receiver lacks a tensor that the sources have" + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
            raise LayoutMismatch(what, slot=missing[0], ranks=ranks, fix=_BUILD)

    def _pieces(self, holding: Holding) -> list[Piece]:
        """Return the non-empty blocks that a rank holds, in slot order."""
        pieces = []
        for index, entry in enumerate(holding.manifest.entries):
            block = holding.manifest.block(entry, holding.coordinates)
            if block is not None and block.numel:
                pieces.append(Piece(self.slot_of(entry.name), index, block))
        return sorted(pieces, key=lambda piece: piece.slot)

    def _contributions(self, sources: Mapping[int, Holding]) -> dict[int, list[Piece]]:
        """Choose the contributor of every block, and check that the blocks of a slot tile it."""
        chosen: dict[int, list[Piece]] = {rank: [] for rank in sources}
        blocks: dict[int, dict[Block, int]] = {index: {} for index in range(len(self.slots))}
        for rank in sorted(sources):
            for piece in self._pieces(sources[rank]):
                if blocks[piece.slot].setdefault(piece.block, rank) == rank:
                    chosen[rank].append(piece)
        for index, holders in blocks.items():
            self._check_coverage(self.slots[index], holders)
        return {rank: _without_twins(pieces) for rank, pieces in chosen.items()}

    @staticmethod
    def _check_coverage(slot: Slot, holders: Mapping[Block, int]) -> None:
        full = prod(slot.shape)
        if tiles(full, tuple(holders)):
            return
        covered = sum(block.numel for block in holders)
        for (a, rank_a), (b, rank_b) in itertools.combinations(holders.items(), 2):
            if overlap_of(a, b) is not None:
                fix = "let every element have one owner, or equal blocks on all its owners"
                raise LayoutMismatch("sources hold overlapping parts", slot=slot.name, ranks=sorted({rank_a, rank_b}), fix=fix)
        fix = "let src= name every rank that owns a part"
        raise LayoutMismatch(
            "the sources do not hold the whole tensor", slot=slot.name, ranks=sorted(set(holders.values())),
            expected=f"{full} elements", got=f"{covered} elements", fix=fix,
        )  # fmt: skip


class _Ties:
    """Names that share storage on some source; the first in order stands for all."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self._parent: dict[str, str] = {}
        for manifest in {id(manifest): manifest for manifest in manifests}.values():
            for group in manifest.ties:
                for name in group[1:]:
                    self._join(group[0], name)

    def _join(self, a: str, b: str) -> None:
        a, b = sorted((self.canonical(a), self.canonical(b)))
        if a != b:
            self._parent[b] = a

    def canonical(self, name: str) -> str:
        """Return the name that stands for all names tied to `name`."""
        while name in self._parent:
            name = self._parent[name]
        return name


def _distinct(holdings: Mapping[int, Holding]) -> list[tuple[list[int], Holding]]:
    """Group ranks whose manifests and wire dtypes are the same objects: their names need one check."""
    groups: dict[tuple[int, int, bool], tuple[list[int], Holding]] = {}
    for rank, holding in sorted(holdings.items()):
        key = (id(holding.manifest), id(holding.wire), holding.partial)
        groups.setdefault(key, ([], holding))[0].append(rank)
    return list(groups.values())


def _without_twins(pieces: list[Piece]) -> list[Piece]:
    """Drop the further names of a tied tensor: same slot, same block, same rank."""
    return list({(piece.slot, piece.block): piece for piece in reversed(pieces)}.values())[::-1]


@lru_cache(maxsize=4096)
def tiles(numel: int, blocks: tuple[Block, ...]) -> bool:
    """Return True if the blocks are disjoint and have `numel` elements together.

    Example:
        >>> tiles(5, (Block((((0, 3),),)), Block((((3, 2),),))))
        True
    """
    if sum(block.numel for block in blocks) != numel:
        return False
    spans = [[(runs[0][0], runs[-1][0] + runs[-1][1]) for runs in block.runs] for block in blocks]
    for dimension in zip(*spans, strict=True):
        if all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(dimension))):
            return True
    return all(overlap_of(a, b) is None for a, b in itertools.combinations(blocks, 2))


def _wire_dtype(entry: Entry, held: Entry | None, wire: WireTypes, ranks: Sequence[int]) -> str:
    """Return the dtype in which a source's entry travels, and refuse casts that would make no sense."""
    if wire is None:
        return entry.dtype
    explicit = not isinstance(wire, str)
    chosen = wire.get(entry.name, entry.dtype) if explicit else (held.dtype if held else entry.dtype)  # type: ignore[union-attr]
    if chosen == entry.dtype:
        return chosen
    source, target = getattr(torch, entry.dtype), getattr(torch, chosen)
    if not (source.is_floating_point and target.is_floating_point) or (target.itemsize == 1 and not explicit):
        fix = "cast it in the trainer and sync the result, or give both sides one dtype"
        raise LayoutMismatch("this cast is not made on the wire", slot=entry.name, ranks=ranks, expected=entry.dtype, got=chosen, fix=fix)
    return chosen


def _differ(what: str, ranks: Sequence[int], slot: str, expected: object, got: object) -> NoReturn:
    raise LayoutMismatch(what, slot=slot, ranks=ranks, expected=expected, got=got, fix=_BUILD)
