"""What one sender of named tensors sends, as flat spaces: the parts as it holds them, and as whole tensors.

A part is one local tensor of a sender that some receiver needs. It is named after its slot; where a sender
holds several regions of one slot, each is named after its entry too (`numbered_name`). Both ends find the
same parts from the plan alone. Positions in a payload count in the whole slot, so that one payload means the
same to every receiver; positions in a source's snapshot count in what the source holds. `PartSpace` has the
tables between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from dte_dist.layout import Block
from dte_dist.layout.named import Slots
from dte_dist.layout.names import numbered_name
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import IndexMap, build_index_maps
from dte_dist.plan.model_map import Slot
from dte_dist.plan.transfer_ops import TransferOps
from dte_dist.plan.transfer_plan import Plan
from dte_dist.tensors.dtypes import dtype_name

__all__ = ["Part", "PartSpace", "SenderSpace"]


@dataclass(frozen=True, slots=True)
class Part:
    """One local tensor of a sender.

    Attributes:
        name: in payloads.
        slot: that it is a part of.
        number: of the slot in the model.
        entry: which of the sender's tensors it is, as in `TransferOp.send_entry`.
        block: what the sender holds of the slot.
    """

    name: str
    slot: Slot
    number: int
    entry: int
    block: Block


@dataclass(frozen=True, eq=False)
class PartSpace:
    """Parts of one width, none of them empty.

    Attributes:
        parts: in order.
        held: what the sender holds of them, end to end; entries are places among all parts.
        whole: their slots, end to end; a slot comes once for each of its parts.
    """

    parts: Sequence[Part]
    held: FlatSpace
    whole: FlatSpace

    @classmethod
    def of(cls, width: int, parts: Mapping[int, Part]) -> PartSpace:
        """Lay parts end to end, given by their places among all parts; each has a slot of its own."""
        held = []
        whole = []
        for slot, (place, part) in enumerate(parts.items()):
            held.append(Piece(slot, place, part.block))
            whole.append(Piece(slot, place, Block.whole(part.slot.shape)))
        spaces = [FlatSpace.of(width, Pieces.of(pieces)) for pieces in (held, whole)]
        return cls(list(parts.values()), *spaces)

    @cached_property
    def places(self) -> dict[str, int]:
        """By name, the number of each part."""
        return {part.name: number for number, part in enumerate(self.parts)}

    @cached_property
    def is_whole(self) -> bool:
        """Whether the sender holds all slots whole, so that both spaces are one."""
        return all(part.block == Block.whole(part.slot.shape) for part in self.parts)

    @cached_property
    def outward(self) -> Sequence[IndexMap]:
        """Tables from what is held into whole slots."""
        return build_index_maps(self.held, self.whole)

    @cached_property
    def inward(self) -> Sequence[IndexMap]:
        """Tables from whole slots into what is held."""
        return build_index_maps(self.whole, self.held)

    def in_model(self) -> FlatSpace:
        """Return what is held, by slots of the model, as other ranks' spaces are."""
        pieces = self.held.pieces
        slot = np.array([part.number for part in self.parts], np.int64)
        return FlatSpace(
            self.held.width,
            Pieces(pieces.table, slot, pieces.entry, pieces.block),
            self.held.starts,
        )


class SenderSpace:
    """The parts of one sender.

    Args:
        parts: in the order in which payloads name them.

    Attributes:
        parts: by name.
        widths: by bytes of an element, the parts that have elements.

    Example:
        >>> space = SenderSpace.of_whole({"w": ((2, 3), torch.float32), "b": ((0,), torch.float32)})
        >>> list(space.parts), space.widths[4].held.numel
        (['w', 'b'], 6)
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.name: part for part in parts}
        widths: dict[int, dict[int, Part]] = {}
        for place, part in enumerate(self.parts.values()):
            found = widths.setdefault(part.slot.width, {})  # widths come in the order of all parts
            if part.block.numel:
                found[place] = part
        self.widths: Mapping[int, PartSpace] = {
            width: PartSpace.of(width, found) for width, found in widths.items() if found
        }

    @classmethod
    def of_whole(cls, slots: Slots) -> SenderSpace:
        """Return the parts of a sender that holds every slot whole; entries and slots are numbered alike.

        Raises:
            LayoutMismatch: elements of a dtype cannot be sent; names the tensor.
        """
        return cls(
            Part(
                name,
                Slot(name, shape, dtype_name(name, dtype)),
                number,
                number,
                Block.whole(shape),
            )
            for number, (name, (shape, dtype)) in enumerate(slots.items())
        )

    @classmethod
    def of_plan(cls, plan: Plan, sender: int) -> SenderSpace:
        """Return the parts that a sender of a plan sends: of each of its tensors that some receiver needs.

        Example:
            >>> layout = Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> list(SenderSpace.of_plan(Plan.between({0: layout}, {1: layout}), 0).parts)
            ['w']
        """
        blocks = plan.sent.blocks_of(sender)
        taken = {slot.name for slot in plan.slots}
        parts = []
        for number, entries in sorted(_needed(plan, sender).items()):
            slot = plan.slots[number]
            for entry in sorted(entries):
                name = slot.name if len(entries) == 1 else numbered_name(slot.name, entry, taken)
                parts.append(Part(name, slot, number, entry, blocks[number, entry]))
        return cls(parts)

    @cached_property
    def slots(self) -> Slots:
        """Shape and dtype of each part as the sender holds it."""
        return {name: (part.block.shape, part.slot.torch_dtype) for name, part in self.parts.items()}

    def dtypes(self) -> dict[int, list[torch.dtype]]:
        """Return by width the dtype of each part that has elements."""
        return {width: [part.slot.torch_dtype for part in held.parts] for width, held in self.widths.items()}

    def in_model(self) -> dict[int, FlatSpace]:
        """Return by width what the sender holds, by slots of the model, as other ranks' spaces are."""
        return {width: held.in_model() for width, held in self.widths.items()}

    def needed_by(self, plan: Plan, sender: int, receiver: int) -> list[str]:
        """Return the names of the parts of which a receiver holds something."""
        needed = _needed(plan, sender, receiver)
        return [name for name, part in self.parts.items() if part.entry in needed.get(part.number, ())]


def _needed(plan: Plan, sender: int, receiver: int | None = None) -> dict[int, set[int]]:
    """Return, by number of the slot, the entries of a sender that a receiver needs, or any (None)."""
    ops = cast(TransferOps, plan.ops_for(sender, receiver))
    entries: dict[int, set[int]] = {}
    for group in ops.groups:
        send = group.send.used()
        for at, slot in enumerate(group.slots.tolist()):
            entries.setdefault(slot, set()).update(send.entries[at].tolist())
    return entries
