"""The process groups of a channel, made for it alone, so that its traffic never meets the user's.

Two threads on one gloo group deliver each other's data, so a channel that may run in the background cannot
share a group with the user. `dist.new_group` does not serve: it must be called by the whole world, and its
name for a group that only members know (`use_local_synchronization`) counts the groups each rank happens to
have, which differs between trainers and rollout ranks. Backends are therefore built directly on the store of
the user's group, under a prefix that all its members count up together. They belong to nobody else and vanish
with the channel.

Everything travels as uint8 or int64. Sizes are agreed before a receive is posted: gloo ends the process on a
message that is too long and takes a short one in silence. Sizes are themselves numbers in a row, so each row
carries a guard (`transport.guard`): a `DamagedRow` is not agreed, since only the rank that got it knows.

All waits are watched (`liveness.watch`): they end early where it is known that nobody will come.

NCCL runs what was started on it one after the other, so a send and a receive between the same two ranks would
wait for each other for ever unless they are started as one (`Communicator.send_recv`). It connects at the
first operation, and then all members have to be there: so a wire does one as soon as it is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dte_dist._torch_compat import coalesced, nccl_options
from dte_dist.errors import PeerLost
from dte_dist.liveness.board import late
from dte_dist.liveness.groups import Group, group_of
from dte_dist.liveness.rendezvous import Membership, PatientStore
from dte_dist.liveness.watch import Watch
from dte_dist.transport.guard import guard_of, refuse_damage

__all__ = ["Communicator", "Group", "Membership", "Pending", "group_of"]

_PROBE: Final = 1 << 20
"""Tag of messages that are never sent: to receive one tells whether there is a connection."""

_AT_ONCE: Final = timedelta(milliseconds=1)
_WORD: Final = 8


@dataclass(frozen=True, slots=True)
class Pending:
    """An operation on its way."""

    wire: Communicator
    what: str
    ranks: tuple[int, ...]
    work: Any

    def wait(self) -> None:
        """Wait until it is done, at most the timeout of the channel.

        Raises:
            PeerLost: a peer died, closed its connections, or did not answer in time.
        """
        self.wire._wait(self)


class Communicator:
    """One backend over some ranks of the group; ranks are always named by their number in the user's group.

    Args:
        name: unique within the channel, the same on all members.
        members: group ranks, the same order on all members.
        membership: this rank in the user's group; must be one of the members.
        backend: "gloo" or "nccl".
        device: for NCCL, the GPU of this rank; None for the current one.
        watch: of the channel; None for one that nobody looks at.

    Attributes:
        device: where tensors must lie to travel on it.
        watch: of the waits.
        timeout: how long a wait may take.

    Raises:
        PeerLost: not all members came in time.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        membership: Membership,
        backend: str,
        device: torch.device | None = None,
        *,
        watch: Watch | None = None,
    ) -> None:
        self.name = name
        self.watch = watch or Watch(membership)
        self.members = tuple(members)
        self.rank = membership.rank
        self.timeout = membership.timeout
        self._closed = False
        self._pid = os.getpid()
        self._turn = 0
        self._patient: PatientStore | None = None  # with TORCH_GLOO_LAZY_INIT, gloo may go on asking
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = (
                torch.device("cuda", torch.cuda.current_device())
                if device is None or device.type != "cuda"
                else device
            )
        self._place = {rank: place for place, rank in enumerate(self.members)}
        store = dist.PrefixStore(name, membership.store)
        if backend == "nccl":
            self._backend: Any = self._guard("connect", self._others(), lambda: self._make_nccl(store))
            self.watch.add(self)
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), self.members[0]).wait()
        else:
            self._backend = self._connect(store)
            self.watch.add(self)

    def _make_nccl(self, store: dist.Store) -> Any:
        options = nccl_options(self.timeout)
        return dist.ProcessGroupNCCL(store, self._place[self.rank], len(self.members), options)

    def _connect(self, store: dist.Store) -> Any:
        """Connect over gloo, which may take five times the timeout that it is given."""
        patient = PatientStore(store, self.watch)
        began = time.monotonic()
        timeout = self.timeout
        try:
            backend = self.watch.call_aside(timeout, partial(self._make_gloo, patient, timeout))
        except BaseException as error:
            patient.stop()
            if not isinstance(error, RuntimeError | TimeoutError):
                raise
            lost = self.watch.lost(self._others(), timeout, began, error)
            if lost.late or self.watch.board.found is not None or self.watch.broken():
                raise lost from error
            hint = (
                "see the cause on this rank; all ranks must reach each other where gloo "
                "listens (GLOO_SOCKET_IFNAME)"
            )
            raise PeerLost(f"rank {self.rank} could not connect to the other ranks", hint=hint) from error
        patient.limit(timeout.total_seconds())
        self._patient = patient
        return backend

    def _make_gloo(self, store: dist.Store, timeout: timedelta) -> Any:
        """Make a backend with all its connections.

        With TORCH_GLOO_LAZY_INIT two ranks connect when they first exchange something, so all do now. Else to
        ask whether a connection has closed, or to close it, would open it, and wait for the other rank.
        """
        backend: Any = dist.ProcessGroupGloo(store, self._place[self.rank], len(self.members), timeout)
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
            places = [self._place[rank] for rank in self._others()]
            word = torch.zeros(1, dtype=torch.uint8, device="cpu")
            works = [backend.recv([torch.empty_like(word)], place, _PROBE + 1) for place in places]
            for work in [*works, *(backend.send([word], place, _PROBE + 1) for place in places)]:
                work.wait(timeout)
        return backend

    def tidy(self) -> None:
        """Delete the addresses of this rank from the store, once all members have connected; may block."""
        if self._patient is not None:
            self._patient.tidy()

    def close(self) -> None:
        """Drop the backend; peers that wait on it fail at once."""
        self._closed = True
        self.kill()
        self._backend = None

    def kill(self) -> None:
        """Close all connections: whoever waits on them fails at once, here and elsewhere; from any thread.

        gloo closes all connections of a group in which a wait was too long, but does not close any when it is
        told to abort.
        """
        backend = self._backend
        if backend is None or os.getpid() != self._pid:  # in a forked child they are its parent's
            return
        if self._patient is not None:
            self._patient.stop()
        if self.device.type == "cpu":
            for rank in self._others():
                # As it should: the first is too short, and closes those of all others.
                with suppress(RuntimeError):
                    self._probe(backend, rank).wait(_AT_ONCE)
        backend.abort()

    def telling(self) -> list[int]:
        """Return the ranks of which `closed` can tell; none over NCCL. From any thread."""
        return self._others() if self._backend is not None and self.device.type == "cpu" else []

    def closed(self, ranks: Iterable[int]) -> set[int]:
        """Return which of these ranks have closed their connection; none over NCCL. From any thread.

        Each question leaves a receive behind that is never completed, about 80 bytes: ask now and then only.
        """
        backend = self._backend
        found = set()
        if backend is not None and self.device.type == "cpu":
            for rank in ranks:
                if rank in self._place and rank != self.rank:
                    try:
                        self._probe(backend, rank)
                    except RuntimeError:
                        found.add(rank)
        return found

    def _probe(self, backend: Any, rank: int) -> Any:
        """Start to receive what is never sent: that alone fails if the connection has closed."""
        return backend.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], self._place[rank], _PROBE)

    def _others(self) -> list[int]:
        return [rank for rank in self.members if rank != self.rank]

    def all_gather_rows(self, row: np.ndarray) -> np.ndarray:
        """Gather one int64 row of the same length from every member; return int64[members, len(row)].

        Raises:
            DamagedRow: a row came to this rank other than it was sent.
            PeerLost: a rank did not answer.
        """
        return self.all_gather_rows_inline(row, dict.fromkeys(self.members, 0))[0]

    def all_gather_rows_inline(
        self, row: np.ndarray, rooms: Mapping[int, int], write: Callable[[Tensor], object] | None = None
    ) -> tuple[np.ndarray, dict[int, Tensor]]:
        """Gather a row as `all_gather_rows` does, and with it from every member an inline payload, which has
        its own checksums.

        Args:
            row: int64, of the same length on all ranks.
            rooms: by rank, the bytes of its inline payload, a multiple of 8; the same on all ranks.
            write: writes this rank's inline payload into zeros of its size.

        Returns:
            int64[members, len(row)]; and by rank the inline frames, uint8.

        Raises:
            DamagedRow: a row came to this rank other than it was sent.
            PeerLost: a rank did not answer.
        """
        self._turn += 1
        words = len(row) + 1
        sizes = {rank: words + rooms[rank] // _WORD for rank in self.members}
        parts = {rank: torch.zeros(size, dtype=torch.int64, device="cpu") for rank, size in sizes.items()}
        rows = {rank: part[:words].numpy() for rank, part in parts.items()}
        payloads = {rank: part[words:].view(torch.uint8) for rank, part in parts.items()}
        mine = rows[self.rank]
        mine[:-1] = row
        mine[-1] = guard_of(mine[:-1], self.rank, self._turn)
        if write is not None:
            write(payloads[self.rank])
        self.all_gather(parts)
        refuse_damage("a row", self.rank, rows, self._turn)
        return np.stack([each[:-1] for each in rows.values()]), payloads

    def all_gather(self, parts: Mapping[int, Tensor]) -> None:
        """Send this rank's part to all other members, and receive theirs; gloo only.

        Straight from each to each: one round trip, where gloo's allgather passes rows around in a ring. And
        it is known who does not answer.

        Args:
            parts: by rank, this one's filled; each of one size on all ranks, those of different ranks may
                differ.
        """
        at = self.members.index(self.rank)
        others = [*self.members[at + 1 :], *self.members[:at]]
        pending = [self.receive(parts[rank], rank) for rank in reversed(others)]
        pending += [self.send(parts[self.rank], rank) for rank in others]
        for number, each in enumerate(pending):
            try:
                each.wait()
            except PeerLost as lost:
                raise self._name_all(lost, pending[number + 1 : len(others)]) from lost.__cause__

    def _name_all(self, lost: PeerLost, receives: Sequence[Pending]) -> PeerLost:
        """Return an error that names all ranks which have not sent by the time that one was too late."""
        if not lost.late:
            return lost
        missing = set(lost.lost)
        for each in receives:
            try:
                each.work.wait(_AT_ONCE)
            except RuntimeError:
                missing.update(each.ranks)
        return late(missing, "answer", self.timeout.total_seconds())

    def all_gather_bytes(self, text: bytes) -> list[bytes]:
        """Gather bytes of the same length from every member.

        Raises:
            DamagedRow, PeerLost: as `rows`.
        """
        padded = np.frombuffer(text.ljust(-(-len(text) // _WORD) * _WORD, b"\0"), np.int64)
        return [row.tobytes()[: len(text)] for row in self.all_gather_rows(padded)]

    def broadcast_bytes(self, owner: int, data: bytes, size: int) -> bytes:
        """Send `size` bytes from `owner` to all members; every member returns them.

        Raises:
            DamagedRow: they came to this rank other than they were sent.
            PeerLost: a rank did not answer.
        """
        self._turn += 1
        words = -(-size // _WORD)
        buffer = np.zeros(words + 1, np.int64)
        if self.rank == owner:
            buffer[:words].view(np.uint8)[:size] = np.frombuffer(data, np.uint8)
            buffer[-1] = guard_of(buffer[:-1], owner, self._turn)
        self.broadcast(torch.from_numpy(buffer).view(torch.uint8), owner).wait()
        refuse_damage("a description", self.rank, {owner: buffer}, self._turn)
        return buffer[:words].tobytes()[:size]

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start a broadcast from `root` into `tensor`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._place[root], 0
        return self._start("broadcast", [root], lambda: self._backend.broadcast([tensor], options))

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start to send `tensor`; it must stay as it is until waited for."""
        return self._start(
            "send", [to], lambda: self._as_one(lambda: self._backend.send([tensor], self._place[to], 0))
        )

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start to receive into `tensor`, whose size is the size agreed with the sender."""
        return self._start(
            "receive",
            [source],
            lambda: self._as_one(lambda: self._backend.recv([tensor], self._place[source], 0)),
        )

    def send_recv(
        self, outgoing: tuple[Tensor, int] | None, incoming: tuple[Tensor, int] | None
    ) -> tuple[Pending | None, Pending | None]:
        """Start a send and a receive, perhaps between the same two ranks; either may be missing.

        Args:
            outgoing: a tensor, and the rank that it goes to.
            incoming: a tensor, and the rank that it comes from.
        """
        if self.device.type == "cpu" or outgoing is None or incoming is None:
            return self.send(*outgoing) if outgoing else None, self.receive(*incoming) if incoming else None
        (sent, to), (received, source) = outgoing, incoming

        def begin() -> None:
            self._backend.send([sent], self._place[to], 0)
            self._backend.recv([received], self._place[source], 0)

        both = self._start("exchange frames", [to, source], lambda: self._as_one(begin))
        return both, both

    def _as_one(self, begin: Callable[[], Any]) -> Any:
        """Start operations; on NCCL those between two ranks as one, on the connections that all members
        have.
        """
        if self.device.type == "cpu":
            return begin()
        return coalesced(self._backend, begin)

    def _start(self, what: str, ranks: Sequence[int], begin: Callable[[], Any]) -> Pending:
        return Pending(self, what, tuple(ranks), self._guard(what, ranks, begin))

    def _guard(self, what: str, ranks: Sequence[int], call: Callable[[], Any]) -> Any:
        if self._closed:
            raise PeerLost("the channel was closed on this rank", hint="call again; a new one opens")
        began = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(what, ranks, began, error) from error

    def _wait(self, pending: Pending) -> None:
        limit = self.watch.begin(self.timeout, pending.ranks)
        began = time.monotonic()
        try:
            pending.work.wait(limit)
        except RuntimeError as error:
            raise self._lost(pending.what, pending.ranks, began, error) from error
        finally:
            self.watch.end()

    def _lost(self, what: str, ranks: Sequence[int], began: float, error: BaseException) -> PeerLost:
        others = ", ".join(map(str, ranks))
        error.add_note(f"(on rank {self.rank}, to {what} on the {self.name} group, with ranks {others})")
        return self.watch.lost(ranks, self.timeout, began, error)
