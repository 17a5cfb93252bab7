"""A plan as its two ends need it: the parts that a sender sends, and where they land on a receiver.

A part is one local tensor of a sender that some receiver needs. It is named after its slot; where a sender
holds several regions of one slot, each is named after its entry too. Both ends find the same names from the
plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import cast

from dte_dist.layout import Block, Runs
from dte_dist.plan.model_map import Slot
from dte_dist.plan.transfer_ops import Box, Slices, TransferOps
from dte_dist.plan.transfer_plan import Plan

__all__ = ["Landing", "Part", "blocks_of", "elements", "landings_of", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """One local tensor of a sender.

    Attributes:
        name: in payloads.
        slot: that it is a part of.
        entry: which of the sender's tensors it is, as in `TransferOp.send_entry`.
    """

    name: str
    slot: Slot
    entry: int


@dataclass(frozen=True, slots=True)
class Landing:
    """Where one part goes in one local tensor of a receiver.

    Attributes:
        part: of the sender.
        entry: which of the receiver's tensors it is, as in `TransferOp.recv_entry`.
        block: what the receiver holds in that tensor.
        boxes: slices of the part, and of the receiver's tensor, that are the same elements.
    """

    part: Part
    entry: int
    block: Block
    boxes: tuple[Box, ...]

    @property
    def is_whole(self) -> bool:
        """True if the receiver's tensor comes from this part alone."""
        return (
            sum(prod(along.stop - along.start for along in train) for train, _ in self.boxes)
            == self.block.numel
        )


def parts_of(plan: Plan, sender: int) -> dict[tuple[str, int], Part]:
    """Return the parts that a sender sends, by slot and entry.

    Example:
        >>> layout = Layout.from_tensors({"w": torch.zeros(4, 3)})
        >>> [part.name for part in parts_of(Plan.between({0: layout}, {1: layout}), 0).values()]
        ['w']
    """
    slots = {slot.name: slot for slot in plan.slots}
    ops = cast(TransferOps, plan.ops_for(send_rank=sender))
    entries: dict[str, set[int]] = {}
    for group in ops.groups:
        send = group.send.used()
        for at, slot in enumerate(group.slots.tolist()):
            entries.setdefault(ops.slots[slot].name, set()).update(send.entries[at].tolist())
    parts = {}
    for name, found in entries.items():
        for entry in sorted(found):
            parts[name, entry] = Part(name if len(found) == 1 else f"{name}[{entry}]", slots[name], entry)
    return parts


def blocks_of(plan: Plan, receiver: int) -> dict[tuple[str, int], Block]:
    """Return what a receiver holds, by slot and entry.

    Example:
        >>> layout = Layout.from_tensors({"w": torch.zeros(4, 3)})
        >>> blocks_of(Plan.between({0: layout}, {1: layout}), 1)["w", 0].shape
        (4, 3)
    """
    held = plan.held
    mine = held.rank == receiver
    columns = (held.slot[mine].tolist(), held.entry[mine].tolist(), held.block[mine].tolist())
    return {
        (plan.slots[slot].name, entry): held.table.blocks[block]
        for slot, entry, block in zip(*columns, strict=True)
    }


def landings_of(
    plan: Plan, sender: int, receiver: int, parts: Mapping[tuple[str, int], Part]
) -> list[Landing]:
    """Return where the parts of a sender go on a receiver.

    Args:
        plan: computed by both.
        sender, receiver: their ranks in it.
        parts: of the sender, see `parts_of`.

    Example:
        >>> layout = Layout.from_tensors({"w": torch.zeros(4, 3)})
        >>> plan = Plan.between({0: layout}, {1: layout})
        >>> [landing.is_whole for landing in landings_of(plan, 0, 1, parts_of(plan, 0))]
        [True]
    """
    blocks = blocks_of(plan, receiver)
    boxes: dict[tuple[str, int, int], list[Box]] = {}
    for op in plan.ops_for(sender, receiver):
        boxes.setdefault((op.slot, op.send_entry, op.recv_entry), []).append((op.train_slices, op.inf_slices))
    return [
        Landing(parts[slot, entry], home, blocks[slot, home], tuple(found))
        for (slot, entry, home), found in boxes.items()
    ]


def elements(block: Block, part: Slices) -> Block | None:
    """Return what slices of a tensor that holds `block` hold of its slot, as a block; None if there are no
    such slices.

    Example:
        >>> elements(Block.rectangle((2, 0), (4, 3)), (slice(1, 3), slice(0, 3))).runs
        (((3, 2),), ((0, 3),))
    """
    if len(part) != len(block.runs):
        return None
    runs = [_cut(each, along.start, along.stop) for each, along in zip(block.runs, part, strict=True)]
    return None if None in runs else Block(tuple(each for each in runs if each is not None))


@lru_cache(maxsize=65536)
def _cut(runs: Runs, begin: int, end: int) -> Runs | None:
    """Return the indices that places [begin, end) of `runs` list; None if there are no such places."""
    cut, passed = [], 0
    for start, length in runs:
        low, high = max(begin, passed), min(end, passed + length)
        if high > low:
            cut.append((start + low - passed, high - low))
        passed += length
    return tuple(cut) if 0 <= begin < end <= passed else None
