"""How ranks come together before a channel has groups of its own: over the store of the user's group.

1. Each rank takes the next channel number of the group (`Membership.join`).
2. It comes to the roll call of that number (`call_roll`), and waits until all have come. Who does not come is
   known by name.
3. They connect (`transport.communicator.Communicator`). gloo asks the store for the addresses of the others,
   through a `PatientStore`.

A client of the store answers one question at a time. One that waited in it for a key would keep all other
threads of the process from the store, those of the user, too. So nothing here waits within the store: it is
asked again and again.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from dte_dist.errors import PeerLost
from dte_dist.liveness.board import GRACE, Board
from dte_dist.liveness.deadline import Deadline, within
from dte_dist.liveness.groups import Group, address_of, group_of, place_of, world_of
from dte_dist.liveness.notes import number, read_note
from dte_dist.liveness.presence import Process

if TYPE_CHECKING:
    from dte_dist.liveness.watch import Watch
    from dte_dist.transport.communicator import Communicator

__all__ = ["Membership", "PatientStore", "call_roll", "forget_meeting"]

_PAUSE: Final = 0.02
"""Seconds between two questions to the store, at most, in a group of up to 64 ranks."""


@dataclass(frozen=True, slots=True)
class Membership:
    """This rank's place in the user's group, for one channel.

    Attributes:
        rank, size: in the group.
        global_ranks: of its members, in group order.
        store: the store of the group, under a prefix that no other channel has.
        backends: the backends of the user's group by device, such as "cpu:gloo,cuda:nccl".
        timeout: how long any one wait may take.
        channel: its number, counted in the group.
        group: a name that no other group has; the same on all its ranks.
        root: the store of the group, under a prefix that all channels share.
        world: name of the default world of this process, see `groups.world_of`.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]
    store: dist.Store
    backends: str
    timeout: timedelta
    channel: int = 0
    group: str = ""
    root: dist.Store | None = None
    world: str = ""

    @classmethod
    def join(cls, group: Group | None, timeout: timedelta) -> Membership:
        """Take the next channel number of `group`, leaving out those under which it was given up as late.

        Every member counts for itself. A member that was not there when the others tried to open a channel
        finds their verdict on the `Board` of that number, and so comes to the number of their next try.

        Raises:
            ValueError: this rank is not a member of the group, or it is a mesh of several dimensions.
            PeerLost: the store of the group is gone.
            ChannelClosed: this process was forked from the one that is the rank.
        """
        place = place_of(group_of(group))
        root = dist.PrefixStore("dte_dist", place.store)
        counter = f"opened_by/{place.rank}"

        def take_number() -> tuple[int, str, str]:
            root.set(f"process/{place.rank}", json.dumps(asdict(Process.this())))
            number = root.add(counter, 1)
            while (verdict := Board(dist.PrefixStore(str(number), root), place.size).read()) is not None:
                if verdict.kind != "late" or place.rank not in verdict.ranks:
                    break  # it is raised at the roll call
                number = root.add(counter, 1)
            name = root.compare_set("group", "", secrets.token_hex(8)).decode("utf-8", "replace")
            return number, name, world_of()

        try:
            number, name, world = within(Deadline(timeout.total_seconds()), take_number)
        except (RuntimeError, TimeoutError) as error:
            raise _no_store(root) from error
        store = dist.PrefixStore(str(number), root)
        return cls(
            place.rank,
            place.size,
            place.global_ranks,
            store,
            place.backends(),
            timeout,
            number,
            name,
            root,
            world,
        )

    @property
    def group_store(self) -> dist.Store:
        """The store that all channels of the group share."""
        return self.store if self.root is None else self.root

    def board_of(self, channel: int) -> Board:
        """Return the board of another channel of the group."""
        return Board(dist.PrefixStore(str(channel), self.group_store), self.size)

    def processes(self, ranks: Iterable[int]) -> dict[int, Process]:
        """Return the processes of those of some ranks that have ever called to open a channel; may block."""
        there = [rank for rank in ranks if self.group_store.check([f"process/{rank}"])]
        notes = {rank: self.group_store.get(f"process/{rank}") for rank in there}
        return {
            rank: read_note(f"the process of rank {rank}", note, Process.read) for rank, note in notes.items()
        }


def call_roll(watch: Watch) -> dict[int, int | None]:
    """Wait until all ranks of the group have come to open a channel, and learn which processes they are.

    Returns:
        By rank, under which number the modules that it brings have met before; None for a rank whose modules
        have not.

    Raises:
        PeerLost: ranks did not come, or there is a verdict on the channel.
    """
    mine = watch.membership
    store = dist.PrefixStore("roll", mine.store)
    is_off = False
    began = time.monotonic()

    def come() -> Sequence[bytes]:
        if watch.is_over():
            raise RuntimeError("the others came and went")
        store.set(str(mine.rank), json.dumps({"origin": watch.origin, "process": asdict(Process.this())}))
        if store.add("count", 1) == mine.size:
            store.set("all", "")
        _await(store, ["all"], mine.size, lambda: is_off or watch.is_over())
        return store.multi_get([str(rank) for rank in range(mine.size)])

    watch.absent = partial(_absent, store, [*watch.members])
    try:
        notes = watch.call_aside(mine.timeout, come)
    except (RuntimeError, TimeoutError) as error:
        missing = _missing(store, mine)
        if watch.board.found is None and (missing is None or not isinstance(error, TimeoutError)):
            gone = watch.ended()
            raise (watch.died(gone) if gone else _no_store(store)) from error
        raise watch.lost(missing or [mine.rank], mine.timeout, began, error, verb="come") from error
    finally:
        is_off, watch.absent = True, None
    said = [read_note(f"the note of rank {rank}", note, _said) for rank, note in enumerate(notes)]
    watch.processes = {rank: process for rank, (_, process) in enumerate(said)}
    return {rank: origin for rank, (origin, _) in enumerate(said)}


def forget_meeting(watch: Watch, wires: Iterable[Communicator]) -> None:
    """Delete what this rank wrote to the store so that all could come together.

    Args:
        watch: of the channel.
        wires: groups that all their members have connected, and have exchanged a row since.
    """
    mine = watch.membership
    store = dist.PrefixStore("roll", mine.store)

    def delete() -> None:
        for key in (str(mine.rank), *(("all", "count") if mine.rank == 0 else ())):
            store.delete_key(key)
        for wire in wires:
            wire.tidy()

    watch.board.tidy(delete)


def _said(note: Any) -> tuple[int | None, Process]:
    """Return what a rank says at the roll call: under which number its modules have met before, and its
    process.
    """
    return None if note["origin"] is None else number(note["origin"]), Process.read(note["process"])


def _absent(store: dist.Store, ranks: list[int]) -> list[int]:
    """Leave of some ranks only those that have not come to the roll call, and return them; may block."""
    ranks[:] = [rank for rank in ranks if not store.check([str(rank)])]
    return ranks


def _missing(store: dist.Store, mine: Membership) -> list[int] | None:
    """Return the ranks that have not come; None if the store does not say."""
    others = [rank for rank in range(mine.size) if rank != mine.rank]
    try:
        return within(Deadline(GRACE), partial(_absent, store, others))
    except (RuntimeError, TimeoutError):
        return None


def _no_store(store: dist.Store) -> PeerLost:
    """Return why a group whose store is gone cannot meet: it must outlive all that sync over it."""
    hint = "if the process that hosts it is gone, form a group of the others, and call with that group"
    where = address_of(store)
    got = None if where is None else f"nobody at {where}"
    return PeerLost("the store of the group cannot be reached", got=got, hint=hint)


class PatientStore(dist.Store):
    """A store that asks for keys again and again instead of waiting for them within.

    It does so until it is stopped, there is a verdict on the channel, or `limit` is over.

    Args:
        store: where the keys are.
        watch: of the channel.
    """

    def __init__(self, store: dist.Store, watch: Watch) -> None:
        super().__init__()
        self._store = store
        self._watch = watch
        self._is_stopped = False
        self._limit = math.inf
        self._written: list[str] = []

    def stop(self) -> None:
        """Let whoever waits for a key fail."""
        self._is_stopped = True

    def limit(self, seconds: float) -> None:
        """Let each wait from now on take at most so many seconds; who connects has a limit of its own."""
        self._limit = seconds

    def tidy(self) -> None:
        """Delete the keys that were written; may block."""
        while self._written:
            self._store.delete_key(self._written.pop())

    def set(self, key: str, value: Any) -> None:
        """Write a key."""
        self._written.append(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, whatever `timeout` says: as long as the class allows."""
        size = self._watch.membership.size
        end = Deadline(self._limit)
        _await(self._store, keys, size, lambda: self._is_stopped or end.passed or self._watch.is_over())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether keys are there."""
        return self._store.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._store.add(key, amount)


def _await(store: dist.Store, keys: Sequence[str], size: int, is_off: Callable[[], bool]) -> None:
    """Wait until keys are there.

    Raises:
        RuntimeError: it was called off.
    """
    pause = 0.0005
    most = _PAUSE * max(1.0, size / 64)
    while not store.check(list(keys)):
        if is_off():
            raise RuntimeError("nobody waits any more")
        time.sleep(pause)
        pause = min(2 * pause, most)
