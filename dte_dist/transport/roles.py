"""Who sends payloads to whom in a process group, and how frames get there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dte_dist.codec.payload_bytes import PIECE, piece_sizes
from dte_dist.plan.transfer_plan import Plan
from dte_dist.report import Phases
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.buffers import Frame
from dte_dist.transport.communicator import Communicator
from dte_dist.transport.p2p import PairwiseExchange

__all__ = ["Move", "Roles", "Take", "mover"]

Take = Callable[[int, int, Tensor], None]
"""The function that is called with each frame: (sender, number, bytes); it must not raise, and the tensor
does not outlive the call.
"""

Move = Callable[[Mapping[int, Sequence[int]], Sequence[tuple[int, Frame]], Take], None]
"""Moves frames: their sizes by sender, this rank's own with their sizes, and what is done with each that
comes.
"""


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

    def digest(self) -> bytes:
        """Return 16 bytes that differ when roles differ."""
        return hashlib.blake2b(
            repr((self.contributors, sorted(self.needs.items()), self.plan)).encode(), digest_size=16
        ).digest()


def mover(wire: Communicator, rank: int, roles: Roles) -> Move:
    """Return what moves frames over a group of the members; all of them call it with the same sizes."""
    phases, largest = Phases(), max(piece_sizes(PIECE))
    if len(roles.senders) == 1:
        root, targets = roles.senders[0], roles.receivers(roles.senders[0])
        relay = BucketedBroadcast(None, wire, rank=rank, root=root, bucket_bytes=largest)
        relay.reserve({root: [largest]}, receiver=rank in targets)

        def stream(sizes: Mapping[int, Sequence[int]], mine: Sequence[tuple[int, Frame]], take: Take) -> None:
            relay.move(
                sizes,
                [frame for _, frame in mine],
                targets,
                lambda parcel, frame: take(parcel.source, parcel.chunk, frame),
                phases,
            )

        return stream
    exchange = PairwiseExchange(wire, rank=rank, sources=roles.senders)
    sources = [sender for sender in roles.senders if rank in roles.receivers(sender)]
    everyone = sorted({receiver for sender in roles.senders for receiver in roles.receivers(sender)})
    exchange.reserve({sender: [largest] for sender in roles.senders}, receiver=rank in everyone)

    def swap(sizes: Mapping[int, Sequence[int]], mine: Sequence[tuple[int, Frame]], take: Take) -> None:
        outgoing: dict[int, Sequence[tuple[int, Frame]]] = dict.fromkeys(roles.receivers(rank), mine)
        exchange.move(
            {**outgoing, rank: ()}, {source: sizes[source] for source in sources}, everyone, take, phases
        )

    return swap
