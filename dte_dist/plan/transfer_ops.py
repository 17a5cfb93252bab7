"""The copies that bring every receiver up to date, as a sequence that makes each one only when it is looked
at.

A model has thousands of slots but few different ways in which its blocks meet. Slots whose ops differ in
nothing but their entries are one `Group`: its ops are columns, and the ops of one slot are those columns
under that slot's name.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import overload

import numpy as np

from dte_dist.plan.model_map import Slot

__all__ = [
    "Box",
    "Boxes",
    "Ends",
    "Group",
    "Slices",
    "TransferOp",
    "TransferOps",
]

Slices = tuple[slice, ...]
"""One slice of step 1 per dimension."""

Box = tuple[Slices, Slices]
"""Slices that are read from a sender's local tensor, and where they go in a receiver's."""


@dataclass(frozen=True, slots=True)
class TransferOp:
    """Say one copy: `receiver_tensor[inf_slices] = sender_tensor[train_slices]`.

    Attributes:
        send_rank, recv_rank: group ranks; equal where a colocated rank copies from itself.
        slot: name of the slot; of tied names the first.
        train_slices, inf_slices: one slice per dimension of the two local tensors; `()` for 0-dim tensors.
        send_entry, recv_entry: which of a rank's local tensors, as an index into the entries of its manifest,
            and so into `Layout.tensors()`: a rank may hold several regions of one slot.

    Example:
        >>> op = dte_dist.TransferOp(0, 2, "w", (slice(0, 2), slice(1, 4)), (slice(3, 5), slice(0, 3)))
        >>> sent, received = torch.ones(2, 4), torch.zeros(5, 3)
        >>> received[op.inf_slices] = sent[op.train_slices]
    """

    send_rank: int
    recv_rank: int
    slot: str
    train_slices: Slices
    inf_slices: Slices
    send_entry: int = 0
    recv_entry: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements that are copied, per dimension.

        Example:
            >>> dte_dist.TransferOp(0, 2, "w", (slice(0, 2), slice(1, 4)), (slice(3, 5), slice(0, 3))).shape
            (2, 3)
        """
        return _lengths(self.train_slices)

    @property
    def numel(self) -> int:
        """Number of elements that are copied.

        Example:
            >>> dte_dist.TransferOp(0, 2, "w", (slice(0, 2), slice(1, 4)), (slice(3, 5), slice(0, 3))).numel
            6
        """
        return prod(self.shape)


@dataclass(slots=True)
class Boxes:
    """Pairs of slices, numbered.

    Attributes:
        boxes: by number.
    """

    boxes: list[Box] = field(default_factory=list)
    _numels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, boxes: Iterable[Box]) -> range:
        """Number some pairs of slices."""
        first = len(self.boxes)
        self.boxes.extend(boxes)
        return range(first, len(self.boxes))

    def numels(self) -> np.ndarray:
        """Return int64[boxes]: the elements that each reads."""
        if len(self._numels) < len(self.boxes):
            self._numels = np.array([prod(_lengths(train)) for train, _ in self.boxes], np.int64)
        return self._numels


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The tensors at one end of the ops of a group.

    Attributes:
        ranks: int64[rows], ascending.
        entries: int64[slots, rows]: which tensor of the rank it is, for each slot of the group.
        row: int64[ops]: the row of each op.
    """

    ranks: np.ndarray
    entries: np.ndarray
    row: np.ndarray

    def used(self) -> Ends:
        """Return the same without rows that no op has."""
        used, row = np.unique(self.row, return_inverse=True)
        return Ends(self.ranks[used], self.entries[:, used], row)

    def columns(self, slot: int) -> tuple[list[int], list[int]]:
        """Return rank and entry of each op, for one slot of the group."""
        return self.ranks[self.row].tolist(), self.entries[slot, self.row].tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The ops of several slots that differ in nothing but the slot and the entries.

    Attributes:
        slots: int64[slots], ascending indices.
        send, recv: both ends.
        box: int64[ops]: the slices of each op, by number.
    """

    slots: np.ndarray
    send: Ends
    recv: Ends
    box: np.ndarray

    def where(self, wanted: np.ndarray) -> Group:
        """Return the ops for which a truth value is True."""
        send, recv = (Ends(ends.ranks, ends.entries, ends.row[wanted]) for ends in (self.send, self.recv))
        return Group(self.slots, send, recv, self.box[wanted])


class TransferOps(Sequence[TransferOp]):
    """Ops in order of slot, sender and receiver; each is made when it is asked for.

    Args:
        slots: of the model.
        groups: each slot in at most one.
        boxes: what the groups number.
    """

    def __init__(self, slots: Sequence[Slot], groups: Iterable[Group], boxes: Boxes) -> None:
        self.slots = slots
        self.boxes = boxes
        self.groups = [group for group in groups if len(group.box)]
        places = ((slot, group, at) for group in self.groups for at, slot in enumerate(group.slots.tolist()))
        self._places = sorted(places, key=lambda place: place[0])
        self._starts = list(accumulate((len(group.box) for _, group, _ in self._places), initial=0))

    @classmethod
    def of(cls, ops: Iterable[TransferOp], slots: Sequence[Slot]) -> TransferOps:
        """Sort ops into columns, keeping doubled ones.

        Raises:
            ValueError: an op names no slot of the model.
        """
        index = {slot.name: number for number, slot in enumerate(slots)}
        by_slot: dict[int, list[TransferOp]] = {}
        for op in ops:
            if op.slot not in index:
                raise ValueError(f"{op} is for a slot that the model does not have")
            by_slot.setdefault(index[op.slot], []).append(op)
        boxes = Boxes()
        groups = [_group(slot, mine, boxes) for slot, mine in by_slot.items()]
        return cls(slots, groups, boxes)

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[TransferOp]:
        for place in self._places:
            yield from self._ops(*place)

    @overload
    def __getitem__(self, index: int) -> TransferOp: ...
    @overload
    def __getitem__(self, index: slice) -> list[TransferOp]: ...
    def __getitem__(self, index: int | slice) -> TransferOp | list[TransferOp]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} ops, no number {index}")
        place = bisect_right(self._starts, number) - 1
        slot, group, at = self._places[place]
        wanted = np.array([number - self._starts[place]])
        return next(self._ops(slot, group.where(wanted), at))

    def _ops(self, slot: int, group: Group, at: int) -> Iterator[TransferOp]:
        name = self.slots[slot].name
        boxes = self.boxes.boxes
        for sender, entry, receiver, home, box in zip(
            *group.send.columns(at),
            *group.recv.columns(at),
            group.box.tolist(),
            strict=True,
        ):
            train, inf = boxes[box]
            yield TransferOp(sender, receiver, name, train, inf, entry, home)

    def where(self, send_rank: int | None, recv_rank: int | None) -> TransferOps:
        """Return the ops between these ranks, None for any."""
        groups = []
        for group in self.groups:
            wanted = np.ones(len(group.box), np.bool_)
            for rank, ends in (
                (send_rank, group.send),
                (recv_rank, group.recv),
            ):
                if rank is not None:
                    wanted &= ends.ranks[ends.row] == rank
            groups.append(group.where(wanted))
        return TransferOps(self.slots, groups, self.boxes)

    def traffic(self) -> dict[tuple[int, int], int]:
        """Return the bytes from rank to rank, by (sender, receiver)."""
        ends = [np.zeros((2, 0), np.int64)]
        sizes = [np.zeros(0, np.int64)]
        widths = np.array([slot.width for slot in self.slots], np.int64)
        for group in self.groups:
            senders = group.send.ranks[group.send.row]
            receivers = group.recv.ranks[group.recv.row]
            bytes_of_element = widths[group.slots].sum()
            ends.append(np.stack([senders, receivers]))
            sizes.append(self.boxes.numels()[group.box] * bytes_of_element)
        pairs, which = np.unique(np.concatenate(ends, 1), axis=1, return_inverse=True)
        totals = np.zeros(pairs.shape[1], np.int64)
        np.add.at(totals, which.reshape(-1), np.concatenate(sizes))
        between = zip(*pairs.tolist(), strict=True)
        return dict(zip(between, totals.tolist(), strict=True))

    def digest(self) -> bytes:
        """Return 16 bytes that differ when the slots or the ops differ, however the ops are grouped."""
        total = hashlib.blake2b(digest_size=16)
        known = {id(group): self._content(group) for group in self.groups}
        total.update(repr([(slot.name, slot.shape, slot.dtype) for slot in self.slots]).encode())
        for slot, group, at in self._places:
            content, *entries = known[id(group)]
            total.update(b"%d:" % slot + content)
            for each in entries:
                total.update(each[at].tobytes())
        return total.digest()

    def _content(self, group: Group) -> tuple[bytes, np.ndarray, np.ndarray]:
        """Return the digest of what the slots of a group have in common, and their entries."""
        send = group.send.used()
        recv = group.recv.used()
        columns = [send.ranks, recv.ranks, send.row, recv.row]
        boxes = [
            [(each.start, each.stop) for part in self.boxes.boxes[box] for each in part]
            for box in group.box.tolist()
        ]
        text = repr(([column.tolist() for column in columns], boxes)).encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        entries = [np.ascontiguousarray(ends.entries) for ends in (send, recv)]
        return digest, entries[0], entries[1]


def _group(slot: int, ops: list[TransferOp], boxes: Boxes) -> Group:
    """Write the ops of one slot as columns, in order of sender, receiver and what they read."""
    ops = sorted(ops, key=_order)
    ends = []
    for tensors in (
        [(op.send_rank, op.send_entry) for op in ops],
        [(op.recv_rank, op.recv_entry) for op in ops],
    ):
        rows = sorted(set(tensors))
        number = {row: at for at, row in enumerate(rows)}
        ranks, entries = np.array(rows, np.int64).T
        row = np.array([number[tensor] for tensor in tensors], np.int64)
        ends.append(Ends(ranks, entries[None], row))
    box = boxes.add((op.train_slices, op.inf_slices) for op in ops)
    return Group(
        np.array([slot], np.int64),
        ends[0],
        ends[1],
        np.array(box, np.int64),
    )


def _order(op: TransferOp) -> tuple[object, ...]:
    starts = (
        tuple(each.start for each in op.train_slices),
        tuple(each.start for each in op.inf_slices),
    )
    return op.send_rank, op.send_entry, op.recv_rank, op.recv_entry, *starts


def _lengths(slices: Slices) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in slices)
