"""Long waits are watched from another thread, so that they end as soon as it is known that nobody will come.

A wait for a rank is one call into C++. It can neither be cut into slices (gloo takes a wait that was too
short
for a lost peer) nor be told anything. So:

1. Whoever waits notes when it began, which is all that a wait costs that ends soon.
2. A thread of the process, the clock, wakes up a few times a second while channels are open. A wait of more
   than a second gets a thread of its own that looks around once a second (`liveness.lookout`), until the
   wait ends.
3. If the wait is hopeless, the verdict is written on the board, and the connections of the channel are
   closed: the wait fails at once, here and on the ranks that wait for this one, and all raise the verdict.

While a channel opens, a rank that compiles is waited for: its time does not count. So the end of such a wait
is up to the clock.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from dte_dist.errors import PeerLost
from dte_dist.liveness import lookout
from dte_dist.liveness.board import Board, Verdict, late, names
from dte_dist.liveness.deadline import Deadline, within
from dte_dist.liveness.presence import Process
from dte_dist.liveness.threads import Latch, start

if TYPE_CHECKING:
    from dte_dist.liveness.rendezvous import Membership

__all__ = ["Watch"]

_TICK: Final = 0.25
"""Seconds between two ticks of the clock."""

_EVERY: Final = 1.0
"""Seconds of a wait before the first look, and between two of them; less if the timeout is short."""

_MANY: Final = 128
"""Ranks of a group from which on looks become fewer: each asks the store about all of them."""

_PROBED: Final = 64
"""Connections that a look probes: those to the ranks behind this one, so each is probed by as many."""

_LAST: Final = 2.0
"""Seconds that a process which exits gives the store."""

_COMPILING: Final = 600.0
"""Seconds that ranks may compile while a channel opens, in all."""

_TIMED_OUT: Final = re.compile(r"tim(e|ed)[ -]?out", re.IGNORECASE)
"""How gloo, NCCL and the store say that a wait was too long."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_watches: dict[int, weakref.ref[Watch]] = {}
"""Of the channels of this process that are open, or opening."""

_raised: set[str] = set()
"""Tokens of the verdicts that this process has raised."""

_starting = threading.Lock()
_clock: threading.Thread | None = None


def _forget_parent() -> None:
    """Begin anew in a forked child: channels and clock are the parent's, and the lock may be held."""
    global _starting, _clock
    _watches.clear()
    _starting, _clock = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_parent)


class Watched(Protocol):
    """The part of a channel's groups that a watch needs (`transport.communicator.Communicator`)."""

    def kill(self) -> None:
        """Close all connections."""

    def telling(self) -> Iterable[int]:
        """Return the ranks of which `closed` can tell."""

    def closed(self, ranks: Iterable[int]) -> set[int]:
        """Return which of these ranks have closed their connection."""


class Watch:
    """The waits of a channel on this rank.

    Args:
        membership: of this rank.
        name: of the channel, as the user calls it.

    Attributes:
        membership, name, board: of the channel.
        members: the ranks that are waited for: all of the group, until it is known who takes part.
        waited: those of them that the present wait is for.
        absent: while ranks come together, returns those that have not come; may block.
        processes: of the other ranks, as far as known.
        origin: number under which the modules of the channel first met.
        calls: how many calls of the channel this rank has made.
        owner: the thread of the user that made the last one.
        is_shared: not all of them came from the same thread.
        runner: the thread that runs the present one, perhaps in the background.
        is_opening: the channel is not open yet.
        is_ending: of the present call only the last exchange is left. A rank that has it all may end.
        since: when the present wait began; None between waits.
        pause: seconds of a wait before the first look, and between two of them.
        missed: what ranks did not do within how many seconds, where a wait was too long.
    """

    def __init__(self, membership: Membership, name: str | None = None) -> None:
        self.membership, self.name = membership, name
        self.board = Board(membership.store, membership.size)
        self.members: Sequence[int] = range(membership.size)
        self.waited: Sequence[int] = self.members
        self.absent: Callable[[], Sequence[int]] | None = None
        self.processes: Mapping[int, Process] = {}
        self.origin: int | None = None
        self.calls = 0
        self.owner = self.runner = threading.current_thread()
        self.is_shared = self.is_opening = self.is_ending = False
        self.since: float | None = None
        self.missed = "answer", 0.0
        often = min(_EVERY, max(_TICK, membership.timeout.total_seconds() / 4))
        self.pause = often * max(1.0, membership.size / _MANY)
        self._wires: list[weakref.ref[Watched]] = []
        self._read = 0.0
        self._deadline: Deadline | None = None
        self._is_overdue = self._is_looked_at = False
        self._compiling = _COMPILING
        self._last: Verdict | None = None
        self._has_said = Latch()

    # The channel --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to open: long waits are watched from now on."""
        self.is_opening, key = True, id(self)
        lookout.note_opening(self.membership)
        _watches[key] = weakref.ref(self, lambda _: _watches.pop(key, None))
        _start_clock()

    def close(self) -> None:
        """Watch no longer."""
        _watches.pop(id(self), None)

    def add(self, wire: Watched) -> None:
        """Add a group of the channel."""
        self._wires.append(weakref.ref(wire))

    def call(self) -> None:
        """Count a call of the channel; in the thread of the user that makes it."""
        thread = threading.current_thread()
        self.is_shared = self.is_shared or self.owner is not thread
        self.owner, self.calls = thread, self.calls + 1

    def __enter__(self) -> Watch:
        """Begin to meet the other ranks, perhaps in the background."""
        self.runner, self.is_ending = threading.current_thread(), False
        return self

    def __exit__(self, *_: object) -> None:
        """Have met them, or not."""

    def siblings(self) -> list[Watch]:
        """Return the watches of all channels that this rank has over the group."""
        watches = [watch for reference in list(_watches.values()) if (watch := reference()) is not None]
        return [watch for watch in watches if watch.membership.group == self.membership.group]

    @contextmanager
    def compiling(self) -> Iterator[Callable[[], None]]:
        """Give something to call once this rank begins to compile: others do not count that time."""
        said: list[bool] = []

        def say() -> None:
            if not said:
                said.append(True)
                self.board.say_busy(True)

        try:
            yield say
        finally:
            if said:
                self.board.say_busy(False)

    # A wait -------------------------------------------------------------------------------------------------

    def begin(self, timeout: timedelta, ranks: Sequence[int] | None = None) -> timedelta:
        """Begin a wait of so long; return when it must end by itself, should the clock not end it.

        Args:
            timeout: of the wait.
            ranks: that it is for; None for all members.
        """
        self._is_overdue, self.board.until = False, None
        self.waited = self.members if ranks is None else ranks
        if self.is_opening:
            self._deadline = Deadline(timeout.total_seconds())
            timeout += timedelta(seconds=2 * _COMPILING)
        self.since = time.monotonic()
        return timeout

    def end(self) -> None:
        """End a wait, well or not."""
        self.since = self._deadline = None

    def call_aside(self, timeout: timedelta, call: Callable[[], _T]) -> _T:
        """Call something that waits for other ranks, and may block for ever, in a thread of its own.

        Raises:
            TimeoutError: it has not returned in time, or there is a verdict; the thread is left behind.
        """
        self.begin(timeout)
        deadline = self._deadline = self._deadline or Deadline(timeout.total_seconds())
        try:
            return within(deadline, call, stop=lambda: self.board.found is not None)
        finally:
            self._is_overdue = deadline.passed
            self.end()

    def is_over(self) -> bool:
        """Return whether there is a verdict, to those who ask often; may block."""
        if self.board.found is None and time.monotonic() - self._read > _TICK:
            self.board.found, self._read = self.board.read(), time.monotonic()
        return self.board.found is not None

    def lost(
        self,
        ranks: Iterable[int],
        timeout: timedelta,
        began: float,
        error: BaseException,
        *,
        verb: str = "answer",
    ) -> PeerLost:
        """Return what is raised where a wait has failed, and note how long the store may be asked about it.

        Args:
            ranks: that were waited for.
            timeout, began: of the wait.
            error: how it failed.
            verb: for what ranks did not do in time.
        """
        seconds, waited = timeout.total_seconds(), time.monotonic() - began
        self.missed, self.board.until = (verb, seconds), Deadline(seconds - waited)
        if self.board.found is not None:
            return PeerLost(self.board.found.text)
        if self._is_overdue or waited >= seconds or _TIMED_OUT.search(str(error)):
            return late(ranks, verb, seconds)
        return self.died(self.broken() or ranks)

    def settle(self, error: BaseException) -> Verdict:
        """Return why the channel ends, as all say it: because of `error`, unless another rank came first."""
        mine = Verdict.of(error, self.membership.rank)
        return self.board.settle(mine, lambda: self.board.decide(lookout.put_right(self, mine)))

    def say_last(self, error: BaseException) -> None:
        """Have the clock settle why the channel ends: a process that exits may start no thread for it."""
        self._last = Verdict.of(error, self.membership.rank)
        self._has_said.wait(_LAST)

    def ends_here(self, verdict: Verdict) -> bool:
        """Return whether a rank that had not begun the call has to raise a verdict, too.

        It has not if the others gave it up because it was late, or if it has raised the verdict before: all
        it has to do is to meet them in a new channel.
        """
        is_meant = verdict.kind == "late" and self.membership.rank in verdict.ranks
        return verdict.kind != "left" and not is_meant and verdict.token not in _raised

    def raised(self, verdict: Verdict) -> Verdict:
        """Note that this process raises a verdict, and return it.

        It need not raise it again in the other channel that the verdict is about, and must not use that one:
        its other ranks need not have heard of it yet.
        """
        _raised.add(verdict.token)
        for watch in self.siblings():
            if watch is not self and watch.membership.channel in verdict.channels:
                watch.board.found = watch.board.found or verdict
                watch.kill()
        return verdict

    def ended(self) -> set[int]:
        """Return the members whose processes are known to have ended."""
        processes = self.processes
        others = [rank for rank in self.members if rank != self.membership.rank and rank in processes]
        return {rank for rank in others if processes[rank].is_dead()}

    def broken(self) -> set[int]:
        """Return the members whose connections have closed, or whose processes are known to have ended.

        A rank that leaves closes all its connections, so for each rank one of them is asked.
        """
        rank, size = self.membership.rank, self.membership.size
        behind = sorted({*self.members} - {rank}, key=lambda other: (other - rank) % size)
        unseen, found = set(behind[:_PROBED]), self.ended()
        for wire in self._alive():
            there = unseen.intersection(wire.telling())
            found |= wire.closed(there)
            unseen -= there
        return found

    def died(self, ranks: Iterable[int]) -> PeerLost:
        """Return the error of ranks that are gone."""
        gone = tuple(sorted(ranks))
        one, several = "its connection closed", "their connections closed"
        if self.ended().issuperset(gone):
            one, several = "its process has ended", "their processes have ended"
        hint = "start what died again or form a group of the survivors, and call again with that group"
        return PeerLost(f"{names(gone)} died ({one if len(gone) == 1 else several})", lost=gone, hint=hint)

    def kill(self) -> None:
        """Close the connections of the channel: whoever waits on them fails, here and on other ranks."""
        for wire in self._alive():
            wire.kill()

    def _alive(self) -> list[Watched]:
        return [wire for reference in self._wires if (wire := reference()) is not None]

    # From other threads -------------------------------------------------------------------------------------

    def postpone(self, seconds: float) -> None:
        """Give the present wait of an opening more time, within bounds."""
        if (deadline := self._deadline) is not None and self._compiling > 0:
            self._compiling -= seconds
            deadline.postpone(seconds)

    def tick(self) -> None:
        """End the present wait if its time is up, and have it looked at if it is long."""
        if (last := self._last) is not None:
            self._last = None
            try:
                self.board.found = self.board.decide(last)
            finally:
                self._has_said.set()
        since, deadline = self.since, self._deadline
        if since is None:
            return
        if deadline is not None and deadline.passed:
            self._is_overdue = True
            self.kill()
        elif not self._is_looked_at and time.monotonic() - since >= self.pause - _TICK:
            self._is_looked_at = True
            look_on = partial(self._look_on, since)
            try:
                threading.Thread(target=look_on, name="dte_dist lookout", daemon=True).start()
            except BaseException:
                self._is_looked_at = False
                raise

    def _look_on(self, since: float) -> None:
        """Look around until a wait ends, or has to."""
        try:
            for verdict in lookout.looks(self, lambda: self.since == since):
                self.board.found = verdict
                self.kill()
        finally:
            self._is_looked_at = False


def _start_clock() -> None:
    global _clock  # noqa: PLW0603
    with _starting:
        if _clock is None or not _clock.is_alive():
            _clock = threading.Thread(target=_tick, name="dte_dist clock", daemon=True)
            start(_clock)


def _tick() -> None:
    """Run the clock while there are watches."""
    global _clock  # noqa: PLW0603
    while True:
        time.sleep(_TICK)
        for reference in list(_watches.values()):
            if (watch := reference()) is not None:
                try:
                    watch.tick()
                except Exception:  # such as no room for a thread: the next tick tries again
                    _log.warning("a long wait cannot be looked at now", exc_info=True)
            del watch
        with _starting:
            if not _watches:
                _clock = None
                return
