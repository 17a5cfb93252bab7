"""One version of a `ProcessGroupTransport`: what its members exchange when they meet.

1. o Row: version, bytes of the description and of the data, from every rank. Different versions, or an error
     on any rank (a call that makes no sense, a payload that cannot be sent), are raised on all ranks.
2.   Every receiver makes room for what comes. An error is kept: the frames are drained all the same.
3. o Frames go from every sender to the ranks that need its payload, and are checked there, the description
     first (`codec.payload_bytes`).
4. o Vote: has every rank everything, is it sound, and does the receiver take it?

Steps with a ring (o) are exchanges. The payload of one sender goes to its receivers by broadcasts, or if it
is large through a chain of them, so that no rank sends it more than once (`BucketedBroadcast`). Those of
several senders go straight to the ranks that need them, all senders at a time (`PairwiseExchange`). What a
rank sends to itself never touches the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from torch import Tensor

from dte_dist.codec.header import NONE
from dte_dist.codec.named_tensors import Payload, check_version
from dte_dist.codec.payload_bytes import (
    MOST_DATA,
    MOST_TEXT,
    PIECE,
    Arrival,
    Packed,
    frame_sizes,
    piece_sizes,
)
from dte_dist.errors import FrameError, LayoutMismatch, PeerLost, VersionError, VersionGap
from dte_dist.plan.transfer_plan import Plan
from dte_dist.report import Phases
from dte_dist.transport.all_or_none import AgreedError, capture, capture_error, raise_if_any
from dte_dist.transport.base import Check
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.buffers import Frame, explain_memory
from dte_dist.transport.communicator import Communicator
from dte_dist.transport.p2p import Arrived, PairwiseExchange

__all__ = ["Meeting", "Roles", "exchange_rows"]

_FREE: Final = "free memory on this rank, and push again"

_Move = Callable[[Mapping[int, Sequence[int]], Sequence[Frame]], Iterator[Arrived]]
"""Moves frames, given by their sizes by sender, and this rank's own; yields what comes."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Who sends to whom, by group rank.

    Attributes:
        contributors: all who may send.
        needs: by receiver, the senders whose payloads it needs, perhaps itself.
        senders: those whose payloads another rank needs, ascending.
        members: the ranks that meet: these senders and their receivers.
        plan: digest of the plan; empty if there is none.
    """

    contributors: tuple[int, ...]
    needs: Mapping[int, tuple[int, ...]]
    senders: tuple[int, ...]
    members: tuple[int, ...]
    plan: bytes = b""

    @classmethod
    def of(cls, size: int, src: int | None, plan: Plan | None) -> Roles:
        """Return the roles in a group of `size` ranks.

        Raises:
            ValueError: there is no such rank, or both a sender and a plan are given.

        Example:
            >>> Roles.of(3, 1, None).members
            (0, 1, 2)
        """
        if plan is None:
            only = 0 if src is None else src
            if isinstance(only, bool) or not isinstance(only, int) or not 0 <= only < size:
                raise ValueError(f"src is a rank of the group, 0 to {size - 1}, not {src!r}")
            contributors: tuple[int, ...] = (only,)
            needs = dict.fromkeys(range(size), contributors)
        elif src is not None or not isinstance(plan, Plan):
            raise ValueError("pass src= for one sender, or plan= (a Plan), which says who sends")
        else:
            contributors = tuple(plan.contributed)
            receivers = sorted(set(plan.held.rank.tolist()))
            needs = {
                rank: tuple(sender for sender in contributors if plan.bytes_between(sender, rank))
                for rank in receivers
            }
        pairs = [(sender, rank) for rank, senders in needs.items() for sender in senders if sender != rank]
        members = tuple(sorted({rank for pair in pairs for rank in pair}))
        if members and not 0 <= members[0] <= members[-1] < size:
            raise ValueError(
                f"the plan has rank {members[-1]}, the group ends at {size - 1}: a plan for a "
                "transport counts in group ranks"
            )
        senders = tuple(sorted({sender for sender, _ in pairs}))
        return cls(contributors, needs, senders, members, plan.digest() if plan is not None else b"")

    def receivers(self, sender: int) -> tuple[int, ...]:
        """Return the other ranks that need the payload of a sender, ascending."""
        return tuple(rank for rank in self.members if rank != sender and sender in self.needs.get(rank, ()))

    def check_plan(self, rank: int, plan: bytes, role: int | None) -> None:
        """Check that the engine of a rank follows the plan as that rank, if there is a plan.

        Raises:
            LayoutMismatch: it follows another one, or as another rank.
        """
        if self.plan and (role, plan) != (rank, self.plan):
            what = "the engine does not follow the plan of its transport"
            expected = f"rank {rank}, {self.plan.hex()}"
            got = f"rank {role}, {plan.hex()}" if plan else "no plan"
            hint = "give transport and engine the same plan, and the engine this process's rank in the group"
            raise LayoutMismatch(what, ranks=[rank], expected=expected, got=got, hint=hint)

    def check_payload(self, rank: int, payload: Payload) -> None:
        """Check that a rank may send a payload.

        Raises:
            ValueError: the rank is no sender, or it is no payload.
            LayoutMismatch: it is that of another rank or plan.
        """
        if rank not in self.contributors:
            senders = ", ".join(map(str, self.contributors))
            raise ValueError(f"rank {rank} is no sender of this transport, these are: {senders}")
        if not isinstance(payload, Payload):
            raise ValueError(f"a transport sends a Payload, not a {type(payload).__name__}")
        check_version(payload.version)
        if self.plan and (payload.sender, payload.plan) != (rank, self.plan):
            expected = f"rank {rank}, {self.plan.hex()}"
            got = f"rank {payload.sender}, {payload.plan.hex()}"
            what = "a payload of another rank or plan"
            hint = "give transport and engine the same plan, and the engine this process's rank in the group"
            raise LayoutMismatch(what, ranks=[rank], expected=expected, got=got, hint=hint)

    def check_request(self, rank: int, source: int, version: int, met: int | None) -> None:
        """Check that a rank may wait for a payload of `source`.

        Args:
            rank, source: who asks, and for whose payload.
            version: that is asked for.
            met: the version that this rank met the others for last.

        Raises:
            ValueError: it does not get the payloads of that rank.
            VersionGap: it sends, too, and has not sent this version.
        """
        if source not in self.needs.get(rank, ()):
            raise ValueError(f"rank {rank} does not get the payloads of rank {source}")
        if source == rank or rank in self.senders:
            what = "a rank that sends, too, asked for a version that it has not sent"
            got = "none" if met is None else met
            raise VersionGap(what, ranks=[rank], expected=version, got=got, hint="push, then pull once")

    def digest(self) -> bytes:
        """Return 16 bytes that differ when roles differ."""
        return hashlib.blake2b(
            repr((self.contributors, sorted(self.needs.items()), self.plan)).encode(), digest_size=16
        ).digest()


class Meeting:
    """The exchanges of one version after the other.

    Args:
        control, data: groups of the members: for rows over gloo, and for frames.
        rank: of this process.
        roles: who sends to whom.
    """

    def __init__(self, control: Communicator, data: Communicator, rank: int, roles: Roles) -> None:
        self._control = control
        self._data = data
        self._rank = rank
        self._roles = roles
        self._move = _mover(data, rank, roles)

    def run(
        self,
        version: int,
        payload: Payload | None,
        error: Exception | None,
        check: Check | None = None,
    ) -> dict[int, Payload]:
        """Meet for a version; all members must call.

        Args:
            version: that is sent.
            payload: of this rank; None if it sends none.
            error: of this call, to be raised on all ranks.
            check: called with each payload that comes, before the vote.

        Returns:
            By sender, the payloads that this rank needs of others.

        Raises:
            AgreedError: with the error that every rank raises.
            PeerLost: a rank did not answer.
        """
        packed, wrong = capture(lambda: None if payload is None else Packed(payload))
        error = error or explain_memory(wrong)
        sent = (len(packed.text), packed.nbytes) if packed is not None else (0, 0)
        rows = exchange_rows(self._control, error, [NONE if error is not None else version, *sent])
        _check_rows(rows, self._control.members, self._roles.senders)
        said = {
            sender: _pair(rows[self._control.members.index(sender), 1:]) for sender in self._roles.senders
        }
        faults = _Faults()
        arrivals: dict[int, Arrival] = {}
        for sender in self._roles.senders:
            if self._rank in self._roles.receivers(sender):
                faults.keep(partial(self._make_room, arrivals, sender, said[sender]))

        sizes = {sender: frame_sizes(*counts) for sender, counts in said.items()}
        for sender, number, frame in self._move(sizes, faults.frames(packed)):
            faults.keep(partial(_take, arrivals, sender, number, frame))
        payloads: dict[int, Payload] = {}
        self._control.watch.is_ending = True
        faults.keep(lambda: payloads.update(self._payloads(arrivals, version)))
        if check is not None:
            for arrived in payloads.values():
                faults.keep(partial(check, arrived))
        exchange_rows(self._control, explain_memory(faults.first, hint=_FREE))
        return payloads

    def _make_room(self, arrivals: dict[int, Arrival], sender: int, sizes: tuple[int, int]) -> None:
        arrivals[sender] = Arrival(*sizes, self._data.device)

    def _payloads(self, arrivals: Mapping[int, Arrival], version: int) -> dict[int, Payload]:
        """Return what has come, if it is what was announced."""
        payloads = {sender: arrival.payload() for sender, arrival in arrivals.items()}
        for sender, payload in payloads.items():
            said: tuple[object, ...] = (payload.version,)
            expected: tuple[object, ...] = (version,)
            if self._roles.plan:
                said = (*said, payload.sender, payload.plan)
                expected = (*expected, sender, self._roles.plan)
            if said != expected:
                what = "a payload is not the one that was announced"
                raise FrameError(what, ranks=[sender], expected=expected, got=said, hint="push again")
        return payloads


def _take(arrivals: Mapping[int, Arrival], sender: int, number: int, frame: Tensor) -> None:
    arrivals[sender].take(number, frame)


class _Faults:
    """What went wrong on this rank in a meeting, kept until the vote.

    Attributes:
        first: the first error; None while there is none.
    """

    def __init__(self) -> None:
        self.first: Exception | None = None

    def keep(self, call: Callable[[], Any]) -> None:
        """Call something, unless something has failed already; keep what it raises."""
        if self.first is None:
            self.first = capture_error(call)

    def frames(self, packed: Packed | None) -> list[Frame]:
        """Return the frames of a payload; those that cannot be made are zeros, which nobody takes."""
        if packed is None:
            return []
        made, error = capture(packed.frames)
        self.first = self.first or error
        if made is None:
            return [_blank for _ in frame_sizes(len(packed.text), packed.nbytes)]
        return [partial(self._write, write) for _, write in made]

    def _write(self, write: Callable[[Tensor], object], place: Tensor) -> None:
        error = capture_error(lambda: write(place))
        if error is not None:
            self.first = self.first or error
            place.zero_()


def _pair(said: np.ndarray) -> tuple[int, int]:
    return int(said[0]), int(said[1])


def _blank(place: Tensor) -> None:
    place.zero_()


def exchange_rows(wire: Communicator, error: Exception | None, said: Sequence[int] = ()) -> np.ndarray:
    """Exchange a row; if a rank has an error, all raise it."""
    hint = "make a new transport on every rank of the group"
    return raise_if_any(wire, error, said, unsaid=PeerLost("a rank failed and did not say why", hint=hint))


def _check_rows(rows: np.ndarray, members: Sequence[int], senders: Sequence[int]) -> None:
    """Check what all ranks said: one version, and sizes that can be."""
    versions = {int(version): rank for version, rank in zip(rows[:, 0], members, strict=True)}
    if len(versions) > 1:
        got = ", ".join(f"v{version} on rank {rank}" for version, rank in sorted(versions.items()))
        hint = "send and receive the same version on every rank"
        what = "ranks send or ask for different versions"
        ranks = sorted(versions.values())
        raise AgreedError(VersionError(what, ranks=ranks, got=got, hint=hint))
    for rank, (text, data) in zip(members, rows[:, 1:].tolist(), strict=True):
        most, least = ((MOST_TEXT, MOST_DATA), 8) if rank in senders else ((0, 0), 0)
        if not (least <= text <= most[0] and 0 <= data <= most[1] and text % 8 == data % 8 == 0):
            hint = "push again; if it stays, the ranks run different versions of dte_dist"
            what = "a payload cannot have this size"
            got = f"{text} and {data} bytes"
            raise AgreedError(FrameError(what, ranks=[rank], got=got, hint=hint))


def _mover(wire: Communicator, rank: int, roles: Roles) -> _Move:
    """Return what moves frames over a group of the members; all of them call it with the same sizes."""
    largest = max(piece_sizes(PIECE))
    if len(roles.senders) == 1:
        return _broadcast(wire, rank, roles, largest)
    exchange = PairwiseExchange(wire, rank=rank, sources=roles.senders)
    sources = [sender for sender in roles.senders if rank in roles.receivers(sender)]
    everyone = sorted({receiver for sender in roles.senders for receiver in roles.receivers(sender)})
    exchange.reserve({sender: [largest] for sender in roles.senders}, receiver=rank in everyone)

    def move(sizes: Mapping[int, Sequence[int]], frames: Sequence[Frame]) -> Iterator[Arrived]:
        mine = list(zip(sizes.get(rank, ()), frames, strict=True))
        outgoing = {**dict.fromkeys(roles.receivers(rank), mine), rank: []}
        incoming = {source: sizes[source] for source in sources}
        return exchange.move(outgoing, incoming, everyone, Phases())

    return move


def _broadcast(wire: Communicator, rank: int, roles: Roles, largest: int) -> _Move:
    """Return what moves the frames of the one sender."""
    root = roles.senders[0]
    targets = roles.receivers(roles.senders[0])
    relay = BucketedBroadcast(None, wire, rank=rank, root=root, bucket_bytes=largest)
    relay.reserve({root: [largest]}, receiver=rank in targets)

    def move(sizes: Mapping[int, Sequence[int]], frames: Sequence[Frame]) -> Iterator[Arrived]:
        for slot, frame in relay.move(sizes, frames, targets, Phases()):
            yield slot.source, slot.chunk, frame

    return move
