"""The two ends of an engine: which of the caller's tensors a payload is made of, and where what it says is written.

`WholeEnds` is for one sender that has every tensor whole: payloads name the caller's own tensors. `SharedEnds` is for several senders
and receivers, each with its own part of each tensor, along a `Plan`:

1. A sender sends, of each of its local tensors that some receiver needs, what changed, under the name of the slot. The plan says which
   sender of a replicated tensor that is.
2. Its positions count in the whole slot, so that one payload means the same to every receiver, however that one is cut. A tensor that is
   sent whole is all that the sender holds of it, in the shape in which it holds it.
3. A receiver translates positions into its own block, and copies whole parts by the slices of the plan's ops. What a sender has no
   right to write, by the plan, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch import Tensor

from dte_dist.engine.named import NamedTensors, named
from dte_dist.engine.payload import INDEX, Change, check_changes, index_dtype, last_positions
from dte_dist.errors import FrameError, LayoutMismatch
from dte_dist.layout import Block, Entry, Layout
from dte_dist.plan import Plan, remap_delta_indices
from dte_dist.plan.model_map import Slot
from dte_dist.plan.parts import Landing, blocks_of, landings_of, parts_of, same_elements
from dte_dist.transport.base import Payload

__all__ = ["Ends", "Given", "Outgoing", "SharedEnds", "WholeEnds"]

Given = NamedTensors | Layout
"""What a caller hands over: pairs or a mapping; with a plan also a `Layout`."""

Landed = list[tuple[Change, Tensor]]
"""Changes, each with the tensor it is written to."""

_PLANNED: Final = "give the layout that the plan was made from"
_AGAIN: Final = "nothing of it was applied; push again, in full if it stays"


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What a sender looks for changes in.

    Attributes:
        tensors: by their names in payloads.
        wire: by name, the dtypes to send; None for the tensors' own.
    """

    tensors: NamedTensors
    wire: Mapping[str, torch.dtype] | None = None


class Ends(Protocol):
    """What an engine asks of its ends."""

    @property
    def senders(self) -> Sequence[int]:
        """Those whose payloads a receiver waits for."""

    def outgoing(self, given: Given) -> Outgoing:
        """Return what to look for changes in."""

    def address(self, payload: Payload) -> Payload:
        """Return a payload as it is sent."""

    def targets(self, given: Given) -> dict[str, Tensor]:
        """Return a receiver's tensors by name."""

    def land(self, payload: Payload, changes: Sequence[Change], targets: Mapping[str, Tensor]) -> Landed:
        """Check a payload against the targets and return what to write where; nothing is written yet."""


class WholeEnds:
    """One sender, and receivers that have the same tensors."""

    senders: Sequence[int] = (0,)

    def outgoing(self, given: Given) -> Outgoing:
        """Return the tensors as they are."""
        return Outgoing(_no_layout(given))

    def address(self, payload: Payload) -> Payload:
        """Return the payload as it is."""
        return payload

    def targets(self, given: Given) -> dict[str, Tensor]:
        """Return the tensors by name.

        Raises:
            LayoutMismatch, ValueError: see `named`.
        """
        return named(_no_layout(given))

    def land(self, payload: Payload, changes: Sequence[Change], targets: Mapping[str, Tensor]) -> Landed:
        """Check the changes against the targets.

        Raises:
            LayoutMismatch, FrameError: see `check_changes`.
        """
        if payload.plan:
            what = "the payload is the share of one of several senders"
            raise LayoutMismatch(what, ranks=[payload.sender], fix="give the engine the plan=, and its rank= in it")
        check_changes(changes, targets, full=payload.full)
        return [(change, targets[change.name]) for change in changes]


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
        self.senders: Sequence[int] = tuple(sender for sender in plan.contributed if plan.bytes_between(sender, rank))
        self._parts = parts_of(plan, rank)
        self._blocks: dict[str, tuple[Block, Block]] = {}
        self._held = blocks_of(plan, rank)
        self._incoming = {sender: _Incoming(plan, sender, rank) for sender in self.senders}
        self._source: Layout | None = None
        self._target: Layout | None = None

    def outgoing(self, given: Given) -> Outgoing:
        """Return this rank's parts.

        Raises:
            ValueError: this rank is no sender of the plan.
            LayoutMismatch: the tensors are not those of the plan; names one.
        """
        if self._rank not in self._plan.contributed:
            raise ValueError(f"rank {self._rank} is no sender of the plan, these are: {', '.join(map(str, self._plan.contributed))}")
        layout = _layout(given)
        tensors = layout.tensors()
        if layout is not self._source:
            self._blocks, self._source = self._check_source(layout), layout
        parts = self._parts.values()
        return Outgoing({part.name: tensors[part.entry] for part in parts}, {part.name: part.slot.torch_dtype for part in parts})

    def address(self, payload: Payload) -> Payload:
        """Return a payload whose positions count in whole slots."""
        tensors = dict(payload.tensors)
        for name, (block, whole) in self._blocks.items():
            if name + INDEX in tensors and block != whole:
                positions, _ = remap_delta_indices(tensors[name + INDEX], block, whole)
                tensors[name + INDEX] = positions.to(index_dtype(whole.numel))
        return replace(payload, tensors=MappingProxyType(tensors), sender=self._rank, plan=self._digest)

    def targets(self, given: Given) -> dict[str, Tensor]:
        """Return all local tensors of this rank, in the order of its entries.

        Raises:
            LayoutMismatch: they are not those of the plan; names one.
        """
        layout = _layout(given)
        tensors = layout.tensors()
        if layout is not self._target:
            for (name, number), block in self._held.items():
                self._check_entry(layout, self._slots[name], number, block)
            self._target = layout
        return dict(zip(_names(layout.manifest.entries), tensors, strict=True))

    def land(self, payload: Payload, changes: Sequence[Change], targets: Mapping[str, Tensor]) -> Landed:
        """Translate one sender's changes into this rank's tensors.

        Raises:
            LayoutMismatch: the payload follows another plan, or a part is missing, not expected, or of another shape or dtype.
            FrameError: a position is outside of the slot, or of what the sender sends.
        """
        if payload.plan != self._digest:
            got = payload.plan.hex() or "no plan"
            fix = "compute the plan from the same layouts on all ranks, and compare plan.digest()"
            raise LayoutMismatch("a payload follows another plan", ranks=[payload.sender], expected=self._digest.hex(), got=got, fix=fix)
        return self._incoming[payload.sender].land(changes, list(targets.values()), full=payload.full)

    def _check_source(self, layout: Layout) -> dict[str, tuple[Block, Block]]:
        """Check that this rank holds what the plan says that it sends; return what each part holds, and its slot, as blocks."""
        blocks = {}
        for part in self._parts.values():
            blocks[part.name] = self._check_entry(layout, part.slot, part.entry), Block.whole(part.slot.shape)
        receivers = sorted(set(self._plan.held.rank.tolist()))
        for receiver in (each for each in receivers if self._plan.bytes_between(self._rank, each)):
            for landing in landings_of(self._plan, self._rank, receiver, self._parts):
                block, _ = blocks[landing.part.name]
                if not all(same_elements(block, box, landing.block) for box in landing.boxes):
                    what = "this rank does not hold what the plan says that it sends"
                    raise LayoutMismatch(what, slot=landing.part.slot.name, ranks=[self._rank, receiver], got=block.runs, fix=_PLANNED)
        return blocks

    def _check_entry(self, layout: Layout, slot: Slot, number: int, expected: Block | None = None) -> Block:
        """Check that an entry of a layout is a part of a slot, or just the part that is expected; return the part."""
        entries = layout.manifest.entries
        entry = entries[number] if number < len(entries) else None
        if entry is None or (entry.name != slot.name and entry.name in self._slots):
            got = f"{len(entries)} tensors" if entry is None else entry.name
            raise LayoutMismatch("the tensors are not those of the plan", slot=slot.name, expected=f"at {number}", got=got, fix=_PLANNED)
        block = layout.manifest.block(entry, layout.coordinates)
        if entry.shape != slot.shape or block is None or expected not in (None, block):
            want, got = (f"{shape}, {'nothing of it' if part is None else part.runs}" for shape, part in (
                (slot.shape, expected or Block.whole(slot.shape)), (entry.shape, block),
            ))  # fmt: skip
            raise LayoutMismatch("this rank holds something else than the plan says", slot=slot.name, expected=want, got=got, fix=_PLANNED)
        held, sent = getattr(torch, entry.dtype), slot.torch_dtype
        if held != sent and (expected is not None or not (held.is_floating_point and sent.is_floating_point)):
            raise LayoutMismatch("this rank holds another dtype than the plan says", slot=slot.name, expected=sent, got=held, fix=_PLANNED)
        return block


class _Incoming:
    """What one receiver gets from one sender.

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

    def land(self, changes: Sequence[Change], tensors: Sequence[Tensor], *, full: bool) -> Landed:
        """Return what to write to which of the receiver's tensors; parts that are for other receivers are left out."""
        self._check(changes, full=full)
        landed: Landed = []
        for change in changes:
            for landing in self._landings.get(change.name, ()):
                tensor = tensors[landing.entry]
                if change.positions is None:
                    landed += _copied(change, landing, tensor)
                else:
                    landed.append((_translated(change, change.positions, landing), tensor))
        return landed

    def _check(self, changes: Sequence[Change], *, full: bool) -> None:
        said = {change.name for change in changes}
        for fault, names in (("missing", self._landings.keys() - said if full else ()), ("not expected", said - self._parts.keys())):
            if names:
                what = f"in the payload of a sender, {fault} is"
                raise LayoutMismatch(what, slot=min(names), ranks=[self._sender], fix="push what the plan was made from")
        for change in changes:
            slot, got = self._parts[change.name].slot, change.values.dtype
            if got != slot.torch_dtype:
                raise LayoutMismatch("a part has another dtype", slot=change.name, expected=slot.torch_dtype, got=got, fix=_PLANNED)
            if change.positions is not None and change.positions.dtype != index_dtype(slot.numel):
                raise _bad("positions of another dtype", change, index_dtype(slot.numel), change.positions.dtype)
        for change, last in last_positions(changes):
            slot = self._parts[change.name].slot
            if last >= slot.numel:
                raise _bad("a position is outside its slot", change, f"below {slot.numel}", last)


def _translated(change: Change, positions: Tensor, landing: Landing) -> Change:
    """Translate positions in the slot into positions in the receiver's tensor; all must be in what the sender sends there."""
    here, kept = remap_delta_indices(positions, Block.whole(landing.part.slot.shape), landing.block)
    if not landing.is_whole:
        own = Block.whole(landing.block.shape)
        inside = sum(len(remap_delta_indices(here, own, _rectangle(inf))[0]) for _, inf in landing.boxes)
        if inside != len(here):
            raise _bad("a sender writes elements that it does not send by the plan", change, f"{inside} positions", len(here))
    return Change(change.name, here, change.values[kept])


def _copied(change: Change, landing: Landing, tensor: Tensor) -> Landed:
    """Cut a whole part, and the receiver's tensor, into the elements that both have."""
    shape = change.values.shape
    landed = []
    for train, inf in landing.boxes:
        if len(shape) != len(train) or any(along.stop > size for along, size in zip(train, shape, strict=True)):
            expected = f"at least {[along.stop for along in train]}"
            raise LayoutMismatch("a part has another shape", slot=change.name, expected=expected, got=list(shape), fix=_PLANNED)
        landed.append((Change(change.name, None, change.values[train]), tensor.detach()[inf]))
    return landed


def _no_layout(given: Given) -> NamedTensors:
    if isinstance(given, Layout):
        raise ValueError("a Layout says which part of each tensor this rank holds: give the engine a plan=, or named tensors")
    return given


def _layout(given: Given) -> Layout:
    return given if isinstance(given, Layout) else Layout.from_tensors(given)


def _names(entries: Sequence[Entry]) -> Iterable[str]:
    """Return a name for each entry; regions of one tensor are numbered."""
    names = [entry.name for entry in entries]
    repeated = {name for name, after in pairwise(names) if name == after}
    return [f"{name}[{number}]" if name in repeated else name for number, name in enumerate(names)]


def _rectangle(part: Sequence[slice]) -> Block:
    return Block.rectangle([along.start for along in part], [along.stop - along.start for along in part])


def _bad(what: str, change: Change, expected: object, got: object) -> FrameError:
    return FrameError(what, slot=change.name, expected=expected, got=got, fix=_AGAIN)
