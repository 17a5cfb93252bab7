"""What a sender and a receiver of named tensors hold: all of every tensor, or parts along a plan.

`WholeTensors` is for one sender and receivers that have the same tensors. `PlannedTensors` is for several
senders and receivers, each with its own part of each tensor:

1. A sender sends, of each of its local tensors that some receiver needs, what changed, under the name of the
   slot. The plan says which sender of a replicated tensor that is.
2. Its positions count in the whole slot, so that one payload means the same to every receiver, however that
   one is cut. A tensor that is sent whole is all that the sender holds of it, in the shape in which it holds
   it.
3. A receiver translates what comes into its own tensors. Elements that a sender has no right to write, by the
   plan, are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.codec.named_tensors import Change, Payload, flat_bits, refuse_reserved
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Block, Layout, LiveTensors, one_device
from dte_dist.layout.named import NamedTensors, Slots, named, slots_of
from dte_dist.layout.names import numbered_name
from dte_dist.plan import Plan
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces, spaces_of
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.model_map import Slot
from dte_dist.plan.sender_space import SenderSpace
from dte_dist.sync.named_changes import check_changes
from dte_dist.sync.tracker import DeltaTracker
from dte_dist.sync.versioned_copy import IndexMaps
from dte_dist.tensors.overlaps import refuse_overlaps

__all__ = ["Given", "Incoming", "PlannedTensors", "WholeTensors", "side_of"]

Given = NamedTensors | Layout
"""Tensors as a caller hands them over: pairs or a mapping; with a plan also a `Layout`."""

_PLANNED: Final = "give the layout that the plan was made from"


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """What a receiver holds, and where what its senders send goes.

    Attributes:
        slots: names, shapes and dtypes of its tensors, in order.
        spaces: flat spaces of its tensors by a number: each of one width and device.
        senders: by rank, what is sent.
        needed: by sender, the names that a full payload must have.
        index_maps: by number of the space and by sender, tables between the two.
        names: of its tensors, in order; regions of one tensor have the same.
        ties: groups of names that are one tensor, of which the spaces have one.
    """

    slots: Slots
    spaces: Mapping[int, FlatSpace]
    senders: Mapping[int, SenderSpace]
    needed: Mapping[int, Collection[str]]
    index_maps: IndexMaps
    names: Sequence[str]
    ties: Sequence[Sequence[str]] = ()

    @classmethod
    def of(
        cls,
        slots: Slots,
        spaces: Mapping[int, FlatSpace],
        senders: Mapping[int, SenderSpace],
        needed: Mapping[int, Collection[str]],
    ) -> Incoming:
        """Build the tables."""
        held = {sender: space.in_model() for sender, space in senders.items()}
        maps = {
            number: {
                sender: build_index_maps(widths[space.width], space)
                for sender, widths in held.items()
                if space.width in widths
            }
            for number, space in spaces.items()
        }
        return cls(slots, spaces, senders, needed, maps, list(slots))


class WholeTensors:
    """One sender, and receivers that have the same tensors.

    Attributes:
        senders: those whose payloads a receiver waits for.
    """

    senders: Sequence[int] = (0,)

    def __init__(self) -> None:
        self._incoming: Incoming | None = None
        self._devices: Sequence[torch.device] = ()

    def payload(self, tracker: DeltaTracker, given: Given, version: int, *, full: bool) -> Payload:
        """Return what leads to `version`.

        Raises:
            ValueError: a layout was given.
            VersionReplay, LayoutMismatch: see `DeltaTracker.diff`.
        """
        return tracker.diff(_no_layout(given), version, full=full)

    def targets(self, given: Given) -> tuple[LiveTensors, Incoming]:
        """Return a receiver's tensors, and where what comes goes in them.

        Raises:
            LayoutMismatch, ValueError: see `named`; or tensors overlap.
        """
        tensors = named(_no_layout(given))
        slots = slots_of(tensors)
        if self._incoming is not None and self._incoming.slots == slots:
            tensors = {name: tensors[name] for name in self._incoming.slots}  # in one order
        devices = [tensor.device for tensor in tensors.values()]
        refuse_overlaps(list(tensors), list(tensors.values()))
        if self._incoming is None or self._incoming.slots != slots or devices != self._devices:
            self._incoming, self._devices = _whole(slots, devices), devices
        return LiveTensors.of(list(tensors.values()), watch=True), self._incoming

    def check(
        self, payload: Payload, changes: Sequence[Change], incoming: Incoming, tensors: Sequence[Tensor]
    ) -> None:
        """Check a payload against a receiver's tensors.

        Raises:
            LayoutMismatch, FrameError: see `check_changes`; or names that share memory get different values.
        """
        if payload.plan:
            what = "the payload is the share of one of several senders"
            hint = "give the engine the plan=, and its rank= in it"
            raise LayoutMismatch(what, ranks=[payload.sender], hint=hint)
        needed = incoming.slots if payload.full else ()
        what = "the payload and the tensors of the receiver"
        check_changes(changes, incoming.senders[0], needed=needed, what=what)
        _check_aliases(changes, dict(zip(incoming.slots, tensors, strict=True)))


def _no_layout(given: Given) -> NamedTensors:
    if isinstance(given, Layout):
        raise ValueError(
            "a Layout says which part of each tensor this rank holds: give the engine "
            "a plan=, or named tensors"
        )
    return given


def _whole(slots: Slots, devices: Sequence[torch.device]) -> Incoming:
    """Return where whole tensors go that lie on these devices."""
    sender = SenderSpace.of_whole(slots)
    groups: dict[tuple[int, torch.device], list[Piece]] = {}
    for number, (part, device) in enumerate(zip(sender.parts.values(), devices, strict=True)):
        groups.setdefault((part.slot.width, device), []).append(Piece(number, number, part.block))
    spaces = {
        number: FlatSpace.of(width, Pieces.of(pieces))
        for number, ((width, _), pieces) in enumerate(groups.items())
    }
    return Incoming.of(slots, spaces, {0: sender}, {0: list(slots)})


def _check_aliases(changes: Sequence[Change], targets: Mapping[str, Tensor]) -> None:
    """Check that names of one memory get one change."""
    by_name = {change.name: change for change in changes}
    first: dict[object, str] = {}
    for name, tensor in targets.items():
        alias = first.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        if alias != name and not _equal(by_name.get(alias), by_name.get(name)):
            hint = "tie them on the side of the sender too, or give them memory of their own"
            raise LayoutMismatch(
                f"{alias} and {name} share memory but get different values", tensor=name, hint=hint
            )


def _equal(one: Change | None, other: Change | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.positions is None or other.positions is None:
        same_positions = one.positions is other.positions
    else:
        same_positions = torch.equal(one.positions, other.positions)
    return same_positions and torch.equal(flat_bits(one.values), flat_bits(other.values))


class PlannedTensors:
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
        plan.refuse_other_ops()
        refuse_reserved(slot.name for slot in plan.slots)
        self._plan = plan
        self._rank = rank
        self._digest = plan.digest()
        self._numbers = {slot.name: number for number, slot in enumerate(plan.slots)}
        self.senders: Sequence[int] = tuple(
            sender for sender in plan.contributed if plan.bytes_between(sender, rank)
        )
        self._outgoing = SenderSpace.of_plan(plan, rank)
        self._held = plan.held.blocks_of(rank)
        spaces = spaces_of(plan.held.of_rank(rank), [slot.width for slot in plan.slots])
        senders = {sender: SenderSpace.of_plan(plan, sender) for sender in self.senders}
        needed = {sender: space.needed_by(plan, sender, rank) for sender, space in senders.items()}
        self._incoming = Incoming.of({}, spaces, senders, needed)
        self._source: Layout | None = None
        self._target: Layout | None = None

    def payload(self, tracker: DeltaTracker, given: Given, version: int, *, full: bool) -> Payload:
        """Return what leads from this rank's parts to `version`.

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
        local = layout.read()
        if layout is not self._source:
            for part in self._outgoing.parts.values():
                self._check_entry(layout, part.slot, part.entry, part.block, sends=True)
            self._source = layout
        entries = np.array([part.entry for part in self._outgoing.parts.values()], np.int64)
        payload = tracker.diff_space(local.some(entries), self._outgoing, version, full=full)
        return replace(payload, sender=self._rank, plan=self._digest)

    def targets(self, given: Given) -> tuple[LiveTensors, Incoming]:
        """Return all local tensors of this rank, in the order of its entries, and where what comes goes in
        them.

        Raises:
            LayoutMismatch: they are not those of the plan, or on several devices, or overlap; names one.
        """
        layout = _layout(given)
        local = layout.read(watch=True)
        names = [entry.name for entry in layout.manifest.entries]
        numbered = _names(names)
        one_device(local.live.tensors, numbered)
        refuse_overlaps(numbered, local.live.tensors)
        if layout is not self._target:
            for (number, entry), block in self._held.items():
                self._check_entry(layout, self._plan.slots[number], entry, block, sends=False)
            slots = slots_of(dict(zip(numbered, local.live.tensors, strict=True)))
            said = replace(self._incoming, slots=slots, names=names, ties=layout.manifest.ties)
            self._target, self._incoming = layout, said
        return local, self._incoming

    def check(
        self, payload: Payload, changes: Sequence[Change], incoming: Incoming, tensors: Sequence[Tensor]
    ) -> None:
        """Check a payload against what its sender sends by the plan.

        Raises:
            LayoutMismatch: the payload follows another plan, or a part is missing, not expected, or of
                another shape or dtype.
            FrameError: a position is outside of the tensor.
        """
        sender = payload.sender
        if payload.plan != self._digest:
            hint = "compute the plan from the same layouts on all ranks, and compare plan.digest()"
            raise LayoutMismatch(
                "a payload follows another plan",
                ranks=[sender],
                expected=self._digest.hex(),
                got=payload.plan.hex() or "no plan",
                hint=hint,
            )
        needed = incoming.needed[sender] if payload.full else ()
        what = "the payload of a sender and the plan"
        check_changes(changes, incoming.senders[sender], needed=needed, what=what, ranks=[sender])

    def _check_entry(self, layout: Layout, slot: Slot, number: int, expected: Block, *, sends: bool) -> None:
        """Check that an entry of a layout is the part of a slot that the plan says."""
        entries = layout.manifest.entries
        entry = entries[number] if number < len(entries) else None
        if entry is None or (entry.name != slot.name and entry.name in self._numbers):
            got = f"{len(entries)} tensors" if entry is None else entry.name
            what = "the tensors are not those of the plan"
            raise LayoutMismatch(what, tensor=slot.name, expected=f"at {number}", got=got, hint=_PLANNED)
        block = layout.manifest.block(entry, layout.coordinates)
        if entry.shape != slot.shape or block != expected:
            what = "this rank holds something else than the plan says"
            if sends and entry.shape == slot.shape:
                what = "this rank does not hold what the plan says that it sends"
            want, got = (
                f"{shape}, {'nothing of it' if part is None else part.runs}"
                for shape, part in ((slot.shape, expected), (entry.shape, block))
            )
            raise LayoutMismatch(what, tensor=slot.name, expected=want, got=got, hint=_PLANNED)
        held = getattr(torch, entry.dtype)
        sent = slot.torch_dtype
        if held != sent and not (sends and held.is_floating_point and sent.is_floating_point):
            what = "this rank holds another dtype than the plan says"
            raise LayoutMismatch(what, tensor=slot.name, expected=sent, got=held, hint=_PLANNED)


def side_of(plan: Plan | None, rank: int | None) -> WholeTensors | PlannedTensors:
    """Return what a rank holds: along a plan, or without one all of every tensor.

    Raises:
        ValueError: they are no plan and no rank in it.
        LayoutMismatch: the plan does not fill its receivers.
    """
    if plan is None:
        if rank is not None:
            raise ValueError("rank= is a rank in a plan: pass plan= too")
        return WholeTensors()
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is a Plan, not a {type(plan).__name__}")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"rank is this process's rank in the plan, not {rank!r}")
    return PlannedTensors(plan, rank)


def _layout(given: Given) -> Layout:
    return given if isinstance(given, Layout) else Layout.from_tensors(given)


def _names(names: Sequence[str]) -> list[str]:
    """Return a name for each entry; regions of one tensor are numbered."""
    repeated = {name for name, after in pairwise(names) if name == after}
    taken = set(names)
    return [
        numbered_name(name, number, taken) if name in repeated else name for number, name in enumerate(names)
    ]
