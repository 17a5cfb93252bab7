"""The ends of an engine along a plan: several senders and receivers, each with its own part of each tensor.

1. A sender sends, of each of its local tensors that some receiver needs, what changed, under the name of the
   slot. The plan says which sender of a replicated tensor that is.
2. Its positions count in the whole slot, so that one payload means the same to every receiver, however that
   one is cut. A tensor that is sent whole is all that the sender holds of it, in the shape in which it holds
   it.
3. A receiver translates positions into its own tensors, and copies whole parts by the slices of the plan's
   ops. Elements that a sender has no right to write, by the plan, are refused.

Positions are translated in one go for all tensors of a width, with the tables that `remap_delta_indices` uses
for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from dte_dist.engine.ends import Bundle, Given, Landed, Outgoing
from dte_dist.engine.payload import INDEX, Change, flat_bits, index_dtype, last_positions
from dte_dist.errors import FrameError, LayoutMismatch
from dte_dist.layout import Block, Entry, Layout, one_device
from dte_dist.plan import Plan
from dte_dist.plan.batched_index_map import BatchedIndexMap, repeat_per_part
from dte_dist.plan.model_map import Slot
from dte_dist.plan.parts import Landing, Part, blocks_of, elements, landings_of, parts_of
from dte_dist.tensors.flat import FlatTensors
from dte_dist.transport.base import Payload

__all__ = ["SharedEnds"]

_PLANNED: Final = "give the layout that the plan was made from"
_AGAIN: Final = "nothing of it was applied; push again, in full if it stays"


class SharedEnds:
    """Several senders and receivers, along a plan.

    Args:
        plan: equal on all ranks.
        rank: of this process in it.

    Attributes:
        senders: those that hold something of what this rank receives, itself included.

    Raises:
        LayoutMismatch: the plan does not fill its receivers.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        plan.validate()
        self._plan, self._rank, self._digest = plan, rank, plan.digest()
        self._slots = {slot.name: slot for slot in plan.slots}
        self.senders: Sequence[int] = tuple(
            sender for sender in plan.contributed if plan.bytes_between(sender, rank)
        )
        self._parts = parts_of(plan, rank)
        self._held = blocks_of(plan, rank)
        self._incoming = {sender: _Incoming(plan, sender, rank) for sender in self.senders}
        self._outward: Mapping[int, _Outward] = {}
        self._source: Layout | None = None
        self._target: Layout | None = None

    def outgoing(self, given: Given) -> Outgoing:
        """Return this rank's parts.

        Raises:
            ValueError: this rank is no sender of the plan.
            LayoutMismatch: the tensors are not those of the plan; names one.
        """
        if self._rank not in self._plan.contributed:
            raise ValueError(
                f"rank {self._rank} is no sender of the plan, these are: "
                f"{', '.join(map(str, self._plan.contributed))}"
            )
        layout = _layout(given)
        if layout is self._source:
            layout.refuse_copies()
        tensors = layout.tensors()
        if layout is not self._source:
            self._outward, self._source = self._check_source(layout), layout
        parts = self._parts.values()
        return Outgoing(
            {part.name: tensors[part.entry] for part in parts},
            {part.name: part.slot.torch_dtype for part in parts},
        )

    def address(self, payload: Payload) -> Payload:
        """Return a payload whose positions count in whole slots."""
        tensors = dict(payload.tensors)
        for outward in self._outward.values():
            tensors |= outward.positions(tensors)
        return replace(payload, tensors=MappingProxyType(tensors), sender=self._rank, plan=self._digest)

    def targets(self, given: Given) -> dict[str, Tensor]:
        """Return all local tensors of this rank, in the order of its entries.

        Raises:
            LayoutMismatch: they are not those of the plan, or on several devices; names one.
        """
        layout = _layout(given)
        tensors = layout.tensors()
        if layout is not self._target:
            for (name, number), block in self._held.items():
                self._check_entry(layout, self._slots[name], number, block)
            self._target = layout
        named = dict(zip(_names(layout.manifest.entries), tensors, strict=True))
        one_device(tensors, list(named))
        return named

    def land(self, payload: Payload, changes: Sequence[Change], targets: Mapping[str, Tensor]) -> Landed:
        """Translate one sender's changes into this rank's tensors.

        Raises:
            LayoutMismatch: the payload follows another plan, or a part is missing, not expected, or of
                another shape or dtype.
            FrameError: a position is outside of the slot, or of what the sender sends.
        """
        if payload.plan != self._digest:
            got = payload.plan.hex() or "no plan"
            hint = "compute the plan from the same layouts on all ranks, and compare plan.digest()"
            raise LayoutMismatch(
                "a payload follows another plan",
                ranks=[payload.sender],
                expected=self._digest.hex(),
                got=got,
                hint=hint,
            )
        return self._incoming[payload.sender].land(changes, list(targets.values()), full=payload.full)

    def _check_source(self, layout: Layout) -> dict[int, _Outward]:
        """Check that this rank holds what the plan says that it sends; return how its positions are
        translated, by width.
        """
        blocks = {
            part.name: self._check_entry(layout, part.slot, part.entry) for part in self._parts.values()
        }
        receivers = sorted(set(self._plan.held.rank.tolist()))
        for receiver in (each for each in receivers if self._plan.bytes_between(self._rank, each)):
            for landing in landings_of(self._plan, self._rank, receiver, self._parts):
                block = blocks[landing.part.name]
                if any(
                    elements(block, train) != elements(landing.block, inf) for train, inf in landing.boxes
                ):
                    what = "this rank does not hold what the plan says that it sends"
                    raise LayoutMismatch(
                        what,
                        tensor=landing.part.slot.name,
                        ranks=[self._rank, receiver],
                        got=block.runs,
                        hint=_PLANNED,
                    )
        return {
            width: _Outward(width, parts, blocks) for width, parts in _by_width(self._parts.values()).items()
        }

    def _check_entry(self, layout: Layout, slot: Slot, number: int, expected: Block | None = None) -> Block:
        """Check that an entry of a layout is a part of a slot, or just the part that is expected; return the
        part.
        """
        entries = layout.manifest.entries
        entry = entries[number] if number < len(entries) else None
        if entry is None or (entry.name != slot.name and entry.name in self._slots):
            got = f"{len(entries)} tensors" if entry is None else entry.name
            raise LayoutMismatch(
                "the tensors are not those of the plan",
                tensor=slot.name,
                expected=f"at {number}",
                got=got,
                hint=_PLANNED,
            )
        block = layout.manifest.block(entry, layout.coordinates)
        if entry.shape != slot.shape or block is None or expected not in (None, block):
            want, got = (
                f"{shape}, {'nothing of it' if part is None else part.runs}"
                for shape, part in (
                    (slot.shape, expected or Block.whole(slot.shape)),
                    (entry.shape, block),
                )
            )
            raise LayoutMismatch(
                "this rank holds something else than the plan says",
                tensor=slot.name,
                expected=want,
                got=got,
                hint=_PLANNED,
            )
        held, sent = getattr(torch, entry.dtype), slot.torch_dtype
        if held != sent and (expected is not None or not (held.is_floating_point and sent.is_floating_point)):
            raise LayoutMismatch(
                "this rank holds another dtype than the plan says",
                tensor=slot.name,
                expected=sent,
                got=held,
                hint=_PLANNED,
            )
        return block


class _Outward:
    """Translate a sender's positions in its parts of one width into positions in the slots.

    Args:
        width: bytes of an element.
        parts: of that width.
        blocks: by name, what the sender holds of each.
    """

    def __init__(self, width: int, parts: Sequence[Part], blocks: Mapping[str, Block]) -> None:
        self._parts = parts
        wholes = [Block.whole(part.slot.shape) for part in parts]
        self._is_same = all(blocks[part.name] == whole for part, whole in zip(parts, wholes, strict=True))
        self._crossing = BatchedIndexMap(width, [blocks[part.name] for part in parts], enumerate(wholes))

    def positions(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the positions of all pairs of this width, translated."""
        numbers = [number for number, part in enumerate(self._parts) if part.name + INDEX in tensors]
        if self._is_same or not numbers:
            return {}
        names = [self._parts[number].name for number in numbers]
        here = [tensors[name + INDEX] for name in names]
        flat = torch.cat(here)
        moved = torch.cat([positions for positions, _ in self._crossing.translate(numbers, here, flat)])
        moved -= repeat_per_part(torch.from_numpy(self._crossing.starts[numbers]), here)
        in_slots = {
            dtype: moved.to(dtype).split([len(each) for each in here]) for dtype in (torch.int32, torch.int64)
        }
        wanted = [index_dtype(self._parts[number].slot.numel) for number in numbers]
        return {
            name + INDEX: in_slots[dtype][place]
            for place, (name, dtype) in enumerate(zip(names, wanted, strict=True))
        }


class _Inward:
    """Translate a sender's positions in slots of one width into positions in a receiver's tensors.

    Args:
        width: bytes of an element.
        landings: of the parts of that width, by name.
    """

    def __init__(self, width: int, landings: Mapping[str, Sequence[Landing]]) -> None:
        self.numbers = {name: number for number, name in enumerate(landings)}
        self._width = width
        wholes = [Block.whole(found[0].part.slot.shape) for found in landings.values()]
        homes = [(number, landing) for number, found in enumerate(landings.values()) for landing in found]
        self._entries = [landing.entry for _, landing in homes]
        self._crossing = BatchedIndexMap(
            width, wholes, ((number, landing.block) for number, landing in homes)
        )
        self._share: BatchedIndexMap | None = None
        if not all(landing.is_whole for _, landing in homes):
            shares = (
                (number, elements(landing.block, inf))
                for number, landing in homes
                for _, inf in landing.boxes
            )
            self._share = BatchedIndexMap(
                width, wholes, ((number, block) for number, block in shares if block is not None)
            )

    def bundles(self, changes: Sequence[Change], tensors: Sequence[Tensor]) -> list[Bundle]:
        """Return the changed elements of the receiver's tensors; all must be what the sender sends there.

        Args:
            changes: pairs of parts of this width.
            tensors: all of the receiver.
        """
        changes = sorted(changes, key=lambda change: self.numbers[change.name])
        pairs = [(change, change.positions) for change in changes if change.positions is not None]
        if not pairs:
            return []
        numbers, positions = (
            [self.numbers[change.name] for change, _ in pairs],
            [positions for _, positions in pairs],
        )
        bits = torch.cat([flat_bits(change.values) for change, _ in pairs])
        found = list(self._crossing.translate(numbers, positions, bits))
        if self._share is not None:
            inside = sum(len(kept) for kept, _ in self._share.translate(numbers, positions, bits))
            if inside != sum(len(kept) for kept, _ in found):
                raise _bad(
                    "a sender writes elements that it does not send by the plan",
                    changes[0],
                    f"{inside} positions",
                    "more",
                )
        flat = FlatTensors([tensors[entry] for entry in self._entries], self._width, self._crossing.starts)
        return [Bundle(flat, kept, its) for kept, its in found]


class _Incoming:
    """The elements that one receiver gets from one sender.

    Args:
        plan, sender, receiver: of both.
    """

    def __init__(self, plan: Plan, sender: int, receiver: int) -> None:
        parts = parts_of(plan, sender)
        self._sender = sender
        self._parts = {part.name: part for part in parts.values()}
        self._landings: dict[str, list[Landing]] = {}
        for landing in landings_of(plan, sender, receiver, parts):
            self._landings.setdefault(landing.part.name, []).append(landing)
        widths = _by_width(self._parts[name] for name in self._landings)
        self._inward = {
            width: _Inward(width, {part.name: self._landings[part.name] for part in found})
            for width, found in widths.items()
        }

    def land(self, changes: Sequence[Change], tensors: Sequence[Tensor], *, full: bool) -> Landed:
        """Return what to write to which of the receiver's tensors; parts that are for other receivers are
        left out.
        """
        self._check(changes, full=full)
        landed: list[tuple[Change, Tensor]] = []
        pairs: dict[int, list[Change]] = {width: [] for width in self._inward}
        for change in changes:
            for landing in self._landings.get(change.name, ()) if change.positions is None else ():
                landed += _copied(change, landing, tensors[landing.entry])
            if change.positions is not None and change.name in self._landings:
                pairs[change.values.element_size()].append(change)
        return Landed(
            landed,
            [
                bundle
                for width, found in pairs.items()
                for bundle in self._inward[width].bundles(found, tensors)
            ],
        )

    def _check(self, changes: Sequence[Change], *, full: bool) -> None:
        said = {change.name for change in changes}
        for fault, names in (
            ("missing", self._landings.keys() - said if full else ()),
            ("not expected", said - self._parts.keys()),
        ):
            if names:
                what = f"in the payload of a sender, {fault} is"
                raise LayoutMismatch(
                    what, tensor=min(names), ranks=[self._sender], hint="push what the plan was made from"
                )
        for change in changes:
            slot, got = self._parts[change.name].slot, change.values.dtype
            if got != slot.torch_dtype:
                raise LayoutMismatch(
                    "a part has another dtype",
                    tensor=change.name,
                    expected=slot.torch_dtype,
                    got=got,
                    hint=_PLANNED,
                )
            if change.positions is not None and change.positions.dtype != index_dtype(slot.numel):
                raise _bad(
                    "positions of another dtype", change, index_dtype(slot.numel), change.positions.dtype
                )
        for change, last in last_positions(changes):
            slot = self._parts[change.name].slot
            if last >= slot.numel:
                raise _bad("a position is outside its slot", change, f"below {slot.numel}", last)


def _copied(change: Change, landing: Landing, tensor: Tensor) -> list[tuple[Change, Tensor]]:
    """Cut a whole part, and the receiver's tensor, into the elements that both have."""
    shape = change.values.shape
    landed = []
    for train, inf in landing.boxes:
        if len(shape) != len(train) or any(
            along.stop > size for along, size in zip(train, shape, strict=True)
        ):
            expected = f"at least {[along.stop for along in train]}"
            raise LayoutMismatch(
                "a part has another shape",
                tensor=change.name,
                expected=expected,
                got=list(shape),
                hint=_PLANNED,
            )
        landed.append((Change(change.name, None, change.values[train]), tensor.detach()[inf]))
    return landed


def _layout(given: Given) -> Layout:
    return given if isinstance(given, Layout) else Layout.from_tensors(given)


def _names(entries: Sequence[Entry]) -> Iterable[str]:
    """Return a name for each entry; regions of one tensor are numbered."""
    names = [entry.name for entry in entries]
    repeated = {name for name, after in pairwise(names) if name == after}
    return [f"{name}[{number}]" if name in repeated else name for number, name in enumerate(names)]


def _by_width(parts: Iterable[Part]) -> dict[int, list[Part]]:
    widths: dict[int, list[Part]] = {}
    for part in parts:
        widths.setdefault(part.slot.width, []).append(part)
    return widths


def _bad(what: str, change: Change, expected: object, got: object) -> FrameError:
    return FrameError(what, tensor=change.name, expected=expected, got=got, hint=_AGAIN)
