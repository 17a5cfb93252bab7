"""The process groups of a channel, made for it alone, so that its traffic never meets the user's.

Two threads on one gloo group deliver each other's data, so a channel that may run in the background cannot share a
group with the user. `dist.new_group` does not serve: it must be called by the whole world, and its name for a
group that only members know (`use_local_synchronization`) counts the groups each rank happens to have, which
differs between trainers and rollout ranks. Backends are therefore built directly on the store of the user's
group, under a prefix that all its members count up together. They belong to nobody else and vanish with the channel.

Everything travels as uint8 or int64. Sizes are agreed before a receive is posted: gloo ends the process on a
message that is too long and takes a short one in silence. Sizes are themselves numbers in a row, so each row carries a
guard: what is damaged on its way, short or out of turn is a `DamagedRow` on the rank that got it. The other ranks cannot
know of it. So it is not agreed, and whoever raises it leaves its text on the `LossBoard` and drops its groups.

NCCL runs what was started on it one after the other, so a send and a receive between the same two ranks would wait for each other for
ever unless they are started as one (`Wire.swap`). It connects at the first operation, and then all members have to be there: so a
wire does one as soon as it is made.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dte_dist.errors import FrameError, PeerLost

__all__ = ["DamagedRow", "Group", "LossBoard", "Membership", "Pending", "Wire", "group_of"]

Group = dist.ProcessGroup | DeviceMesh
"""A process group as a caller names it: itself, or a mesh of one dimension."""

_BOARD_PATIENCE = timedelta(seconds=5)
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOST = "start the lost rank again or form a group of the survivors, and call again with that group"
_DAMAGED = "call again on every rank, which opens new connections; if it stays, look for bad memory or a bad network card"
_WORD = 8


class DamagedRow(FrameError):
    """A row or a description came damaged to this rank alone, so that the others have to be told by way of the `LossBoard`."""


def group_of(group: Group | None) -> dist.ProcessGroup | None:
    """Return the process group that a caller means. None is the world; that is None where nothing is
    initialised.

    Raises:
        ValueError: it is a mesh of several dimensions, or one that has no group on this rank.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "shard"))
        >>> group_of(mesh["shard"]) is mesh.get_group("shard")
        True
    """
    if not isinstance(group, DeviceMesh):
        return dist.group.WORLD if group is None else group
    if group.ndim != 1:
        dims = group.mesh_dim_names or range(group.ndim)
        ways = " or ".join(f"mesh.get_group({dim!r})" for dim in dims)
        what = f"a mesh of {group.ndim} dimensions has a group for each of them"
        raise ValueError(f"{what}: pass {ways}, or a group of all its ranks")
    if group.get_coordinate() is None:
        raise ValueError("this rank is not in the mesh: call on its ranks only")
    try:
        return group.get_group()
    except RuntimeError as error:
        raise ValueError(f"the mesh has no process group: {error}; pass the group itself") from error


@dataclass(frozen=True, slots=True)
class Membership:
    """This rank's place in the user's group.

    Attributes:
        rank, size: in the group.
        global_ranks: of its members, in group order.
        store: the store of the group, under a prefix that no other channel has.
        backends: the backends of the user's group by device, such as "cpu:gloo,cuda:nccl".
        timeout: how long any one wait may take.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]
    store: dist.Store
    backends: str
    timeout: timedelta

    @classmethod
    def join(cls, group: Group | None, timeout: timedelta) -> Membership:
        """Take the next channel number of `group`, leaving out those under which ranks have lost each other before.

        Every member counts for itself. A member that was not there when the others tried to open a channel finds what they left
        on the `LossBoard` of that number, and so comes to the number of their next try.

        Raises:
            ValueError: this rank is not a member of the group, or it is a mesh of several dimensions.
            PeerLost: the store of the group is gone.
        """
        pg = group_of(group)
        if pg is None or not isinstance(pg, dist.ProcessGroup) or dist.get_rank(pg) < 0:
            raise ValueError("this rank is not a member of the group: call on the members only (after init_process_group)")
        store, counter = pg.get_group_store(), f"dte_dist/opened_by/{pg.rank()}"

        def take_number() -> int:
            number = store.add(counter, 1)
            while store.check([f"dte_dist/{number}/lost/writers"]):
                number = store.add(counter, 1)
            return number

        try:
            number = within(timeout, take_number)
        except (RuntimeError, TimeoutError) as error:
            raise PeerLost(f"the store of the group cannot be reached: {error}", fix=_LOST) from error
        ranks = tuple(dist.get_process_group_ranks(pg))
        backends = str(dist.get_backend_config(pg))
        return cls(pg.rank(), pg.size(), ranks, dist.PrefixStore(f"dte_dist/{number}", store), backends, timeout)


@dataclass(frozen=True, slots=True)
class Pending:
    """An operation on its way."""

    wire: Wire
    what: str
    ranks: tuple[int, ...]
    work: Any

    def wait(self) -> None:
        """Wait until it is done, at most the timeout of the channel.

        Raises:
            PeerLost: a peer died, closed its connections, or did not answer in time.
        """
        # no lambda: its frame would keep the operation, and so the connections, for as long as somebody keeps the error
        self.wire._guard(self.what, self.ranks, partial(self.work.wait, self.wire.timeout))


class LossBoard:
    """What ranks leave for each other to read when the groups of a channel are gone.

    The first rank that loses a peer leaves its error, so that all survivors raise the same text. A rank that closes the channel on
    purpose says so, so that the others can tell it from a death.

    Args:
        membership: of this rank.
    """

    def __init__(self, membership: Membership) -> None:
        self._store = dist.PrefixStore("lost", membership.store)
        self._rank, self._size = membership.rank, membership.size

    def leave(self) -> None:
        """Say that this rank closes the channel on purpose."""
        self._ask(lambda: self._store.set(f"left/{self._rank}", ""))

    def left(self) -> list[int]:
        """Return the ranks that closed the channel on purpose."""
        found = self._ask(lambda: [rank for rank in range(self._size) if self._store.check([f"left/{rank}"])])
        return found or []

    def agree(self, text: str) -> str:
        """Return the text of the first rank that called, or `text` itself if the store cannot be reached any more."""

        def exchange() -> str:
            if self._store.add("writers", 1) == 1:
                self._store.set("text", text)
            self._store.wait(["text"], _BOARD_PATIENCE)
            return self._store.get("text").decode()

        return self._ask(exchange) or text

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        """Ask the store; None, in bounded time, if it cannot answer: it lives on a rank too, perhaps on the one that is gone."""
        try:
            return within(_BOARD_PATIENCE, call)
        except (RuntimeError, TimeoutError) as error:
            _log.debug("the store cannot be reached: %s", error)
            return None


def within(patience: timedelta, call: Callable[[], _T]) -> _T:
    """Call something that may block for ever, in a thread of its own.

    Raises:
        TimeoutError: it has not returned in this time; the thread is left behind.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=ask, name="dte_dist store", daemon=True)
    thread.start()
    thread.join(patience.total_seconds())
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {patience.total_seconds()} s")
    return answers[0]


class Wire:
    """One backend over some ranks of the group; ranks are always named by their number in the user's group.

    Args:
        name: unique within the channel, the same on all members.
        members: group ranks, the same order on all members.
        membership: this rank in the user's group; must be one of the members.
        backend: "gloo" or "nccl".
        device: for NCCL, the GPU of this rank; None for the current one.

    Attributes:
        device: where tensors must lie to travel on it.

    Raises:
        PeerLost: not all members came in time.
    """

    def __init__(self, name: str, members: Sequence[int], membership: Membership, backend: str, device: torch.device | None = None) -> None:
        self.name = name
        self.members = tuple(members)
        self.rank = membership.rank
        self.timeout = membership.timeout
        self._closed = False
        self._turn = 0
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device()) if device is None or device.type != "cuda" else device
        self._place = {rank: place for place, rank in enumerate(self.members)}
        store = dist.PrefixStore(name, membership.store)
        place, size = self._place[self.rank], len(self.members)
        self._backend: Any = self._guard("connect", self.members, lambda: _make(backend, store, place, size, self.timeout))
        if backend == "nccl":
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), self.members[0]).wait()

    def close(self) -> None:
        """Drop the backend; peers that wait on it fail at once or at their timeout."""
        self._closed = True
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def rows(self, row: np.ndarray) -> np.ndarray:
        """Gather one int64 row of the same length from every member; return int64[members, len(row)].

        Raises:
            DamagedRow: a row came to this rank other than it was sent.
            PeerLost: a rank did not answer.
        """
        return self.rows_with_letters(row, dict.fromkeys(self.members, 0))[0]

    def rows_with_letters(
        self, row: np.ndarray, rooms: Mapping[int, int], write: Callable[[Tensor], object] | None = None
    ) -> tuple[np.ndarray, dict[int, Tensor]]:
        """Gather a row as `rows` does, and with it a letter from every member: bytes that have a checksum of their own.

        Args:
            row: int64, of the same length on all ranks.
            rooms: by rank, the bytes of its letter, a multiple of 8; the same on all ranks.
            write: writes this rank's letter into zeros of its size.

        Returns:
            int64[members, len(row)]; and by rank the letters, uint8.

        Raises:
            DamagedRow: a row came to this rank other than it was sent.
            PeerLost: a rank did not answer.
        """
        self._turn += 1
        words = len(row) + 1
        parts = {rank: torch.zeros(words + rooms[rank] // _WORD, dtype=torch.int64, device="cpu") for rank in self.members}
        rows = {rank: part[:words].numpy() for rank, part in parts.items()}
        letters = {rank: part[words:].view(torch.uint8) for rank, part in parts.items()}
        mine = rows[self.rank]
        mine[:-1] = row
        mine[-1] = self._guard_of(mine[:-1], self.rank)
        if write is not None:
            write(letters[self.rank])
        self.swap_all(parts)
        self._refuse_damage("a row", [rank for rank, each in rows.items() if self._guard_of(each[:-1], rank) != each[-1]])
        return np.stack([each[:-1] for each in rows.values()]), letters

    def _guard_of(self, row: np.ndarray, sender: int) -> int:
        """Return a word that tells whether a row is sound: of its length, its bytes, its sender, and how many exchanges came before."""
        begin = zlib.crc32(b"%d %d" % (sender, self._turn))
        return (row.nbytes & 0x7FFFFFFF) << 32 | zlib.crc32(row.data, begin)

    def _refuse_damage(self, what: str, ranks: Sequence[int]) -> None:
        if ranks:
            got = f"another checksum, in exchange {self._turn}"
            raise DamagedRow(f"{what} came damaged, short or out of turn to rank {self.rank}", ranks=ranks, got=got, fix=_DAMAGED)

    def swap_all(self, parts: Mapping[int, Tensor]) -> None:
        """Send this rank's part to all other members, and receive theirs; gloo only.

        Straight from each to each: one round trip, where gloo's allgather passes rows around in a ring. And it is known who does not
        answer.

        Args:
            parts: by rank, this one's filled; each of one size on all ranks, those of different ranks may differ.
        """
        at = self.members.index(self.rank)
        others = [*self.members[at + 1 :], *self.members[:at]]
        pending = [self.receive(parts[rank], rank) for rank in reversed(others)]
        pending += [self.send(parts[self.rank], rank) for rank in others]
        for each in pending:
            each.wait()

    def texts(self, text: bytes) -> list[bytes]:
        """Gather bytes of the same length from every member.

        Raises:
            DamagedRow, PeerLost: as `rows`.
        """
        padded = np.frombuffer(text.ljust(-(-len(text) // _WORD) * _WORD, b"\0"), np.int64)
        return [row.tobytes()[: len(text)] for row in self.rows(padded)]

    def share(self, owner: int, data: bytes, size: int) -> bytes:
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
            buffer[-1] = self._guard_of(buffer[:-1], owner)
        self.broadcast(torch.from_numpy(buffer).view(torch.uint8), owner).wait()
        self._refuse_damage("a description", [owner] if self._guard_of(buffer[:-1], owner) != buffer[-1] else [])
        return buffer[:words].tobytes()[:size]

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start a broadcast from `root` into `tensor`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._place[root], 0
        return self._start("broadcast", [root], lambda: self._backend.broadcast([tensor], options))

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start to send `tensor`; it must stay as it is until waited for."""
        return self._start("send", [to], lambda: self._as_one(lambda: self._backend.send([tensor], self._place[to], 0)))

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start to receive into `tensor`, whose size is the size agreed with the sender."""
        return self._start("receive", [source], lambda: self._as_one(lambda: self._backend.recv([tensor], self._place[source], 0)))

    def swap(self, outgoing: tuple[Tensor, int] | None, incoming: tuple[Tensor, int] | None) -> tuple[Pending | None, Pending | None]:
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
        """Start operations; on NCCL those between two ranks as one, on the connections that all members have."""
        if self.device.type == "cpu":
            return begin()
        self._backend._start_coalescing()
        try:
            begin()
        finally:
            work = self._backend._end_coalescing()
        return work

    def _start(self, what: str, ranks: Sequence[int], begin: Callable[[], Any]) -> Pending:
        return Pending(self, what, tuple(ranks), self._guard(what, ranks, begin))

    def _guard(self, what: str, ranks: Sequence[int], call: Callable[[], Any]) -> Any:
        if self._closed:
            raise PeerLost(f"could not {what} on the {self.name} group: it was closed here", ranks=ranks, fix=_LOST)
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerLost(f"could not {what} on the {self.name} group: {reason}", ranks=ranks, fix=_LOST) from error


def _make(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
