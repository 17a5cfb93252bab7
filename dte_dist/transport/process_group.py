"""A transport over a process group: the ranks of the group meet once for every version.

A version is one meeting of all ranks that have to do with it (`Roles.members`). A sender comes to it with its
first `send` of that version and takes what it needs from other senders along; a rank that only receives comes
with its first `receive`. `transport.meeting` says what is exchanged there. Only when every rank has
everything `send` returns, and `receive` gives out the payloads, each once.

An error that all ranks share leaves the transport as it was: the next meeting may follow. A rank that is
lost, or does not come in time, ends it: its groups are closed, which wakes the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NoReturn, TypeVar

import numpy as np
import torch

from dte_dist import kernels
from dte_dist.codec.named_tensors import Payload, check_version
from dte_dist.errors import ChannelClosed, DeltaError, LayoutMismatch, PeerLost, VersionReplay
from dte_dist.liveness.rendezvous import call_roll, forget_meeting
from dte_dist.liveness.watch import Watch
from dte_dist.plan.transfer_plan import Plan
from dte_dist.tensors.flat import BITS
from dte_dist.transport.all_or_none import AgreedError, capture, capture_error, end_together
from dte_dist.transport.base import TIMEOUT, Check, Transport, check_timeout
from dte_dist.transport.communicator import Communicator, Group, Membership
from dte_dist.transport.meeting import Meeting, Roles, exchange_rows

__all__ = ["ProcessGroupTransport"]

_NONE: Final = -1
_NEW: Final = "make a new transport on every rank of the group"

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ProcessGroupTransport(Transport):
    """Carry payloads between the ranks of a process group; every member makes one, at the same time, like a
    group.

    It has groups of its own on the store of the user's group, so its traffic never meets the user's; all
    ranks open their transports and channels over one group in the same order. Nothing is pickled. It keeps no
    history: sender and receivers meet.

    * `send` waits for its receivers, and returns once all of them have the payload, checked to the last bit;
      or raises on all ranks.
    * `receive` waits for the sender. Every receiver must receive every version that is sent, each payload
      once; to leave one out, receive it and drop it. On a rank that sends, too, `send` comes first and takes
      along what this rank then receives.
    * If ranks send or ask for different versions, all of them raise the same `VersionError`; likewise any
      other error of one rank. The transport stays usable, and the sender's next delta contains the one that
      failed.
    * To send a version that all have got, or to ask for it again, is a `VersionReplay` at once.
    * A rank that dies, or does not come within the timeout, is a `PeerLost` on all others, with the same
      text. The transport is closed then; make one on a group of the survivors.
    * Once a rank has closed its transport, the others get `ChannelClosed`. A rank outside the plan, which
      neither sends to another rank nor receives from one, may close its transport or end once it was made.

    Tensors may be on any device: they travel over NCCL if the group has it and every rank has a GPU, else
    over gloo, and arrive on the device on which they travelled; the engine writes them to any. One thread per
    rank may use it.

    Args:
        group: process group, or a mesh of one dimension; None for the world.
        src: group rank of the one sender, 0 if nothing is given; all other members receive.
        plan: for several senders: who sends to whom, in group ranks; each payload goes only to the ranks that
            need it.
        timeout: seconds, or a timedelta, that any wait for another rank may take; `send` and `receive` may
            ask for less.

    Raises:
        ValueError, LayoutMismatch: on all ranks, if a call makes no sense or the ranks do not agree.
        PeerLost: a rank did not come.

    Example:
        >>> layer = torch.nn.Linear(3, 2)  # other bits on every rank
        >>> transport = dte_dist.ProcessGroupTransport(group)
        >>> engine = dte_dist.DeltaEngine(transport)
        >>> if rank == 0:
        ...     engine.push(layer.named_parameters(), version=1)
        ... else:
        ...     engine.pull(layer.named_parameters(), version=1)
        >>> engine.version == (-1 if rank == 0 else 1)
        True
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        src: int | None = None,
        plan: Plan | None = None,
        timeout: timedelta | float = TIMEOUT,
    ) -> None:
        patience, error = capture(lambda: check_timeout(timeout))
        self._patience = patience or check_timeout(TIMEOUT)
        self._pid = os.getpid()
        self._kept: dict[int, Payload] = {}
        self._own: Payload | None = None
        self._met: int | None = None
        while not self._has_opened(group, src, plan, error):
            _log.info("the other ranks tried to open a transport before this one came: trying again")

    def _has_opened(
        self, group: Group | None, src: int | None, plan: Plan | None, error: Exception | None
    ) -> bool:
        """Open the transport; return False if the others had given this rank up before it came."""
        membership = Membership.join(group, timedelta(seconds=self._patience))
        self._rank, self._watch = membership.rank, Watch(membership)
        self._wires: list[Communicator] = []
        self._why: str | None = None
        roles, wrong = capture(lambda: Roles.of(membership.size, src, plan))
        control: Communicator | None = None
        try:
            self._watch.open()
            try:
                control = self._come(membership)
            except PeerLost as lost:
                if not self._watch.ends_here(self._watch.settle(lost)):
                    self._drop("it could not be opened")
                    return False
                raise self._break(lost) from lost
            self._guarded(lambda: self._open(control, membership, roles, error or wrong))
        except BaseException:
            self._drop("it could not be opened")
            raise
        self._watch.is_opening = False
        return True

    def _come(self, membership: Membership) -> Communicator:
        """Come together with the other ranks."""
        with self._watch.compiling() as say:
            # Of all widths, and now: at the first payload others would be waiting.
            kernels.precompile(BITS, say)
        call_roll(self._watch)
        return self._wire("control", range(membership.size), membership, "gloo")

    def _open(
        self, control: Communicator, membership: Membership, roles: Roles | None, error: Exception | None
    ) -> None:
        """Agree on the roles, and make the groups; all members of the group must call."""
        can_nccl = "nccl" in membership.backends and torch.cuda.is_available()
        digest = np.frombuffer(roles.digest() if roles is not None else bytes(16), np.int64)
        self._watch.is_ending = True  # a rank that is no member may go once it has all rows
        rows = exchange_rows(control, error, [can_nccl, *digest])
        if roles is None or (rows[:, 1:] != digest).any():
            others = [rank for rank, row in enumerate(rows[:, 1:].tolist()) if row != rows[0, 1:].tolist()]
            what = "the ranks disagree on who sends to whom"
            hint = "pass the same src= or plan= on every rank"
            raise AgreedError(LayoutMismatch(what, ranks=[0, *others], hint=hint))
        forget_meeting(self._watch, [control])
        self._roles, members = roles, roles.members
        self._watch.members, self._watch.is_ending, self._control = members, False, control
        if self._rank in members and len(members) < membership.size:
            self._control = self._wire("members", members, membership, "gloo")
        if len(members) < membership.size:
            self._wires.remove(control)
            control.close()  # the ranks outside the plan go when they like
        if self._rank not in members:
            return
        data = self._wire("data", members, membership, "nccl") if rows[:, 0].all() else self._control
        self._meeting = Meeting(self._control, data, self._rank, roles)

    def _wire(self, name: str, members: Sequence[int], membership: Membership, backend: str) -> Communicator:
        self._wires.append(Communicator(name, members, membership, backend, watch=self._watch))
        return self._wires[-1]

    def send(self, payload: Payload, *, timeout: timedelta | float) -> None:
        """Send this rank's payload to all ranks that need it, and wait until they have it.

        Raises:
            VersionReplay: all have got a payload of this version.
            VersionError, FrameError, LayoutMismatch, ValueError, SyncFailed: on all ranks; nobody has got it.
            PeerLost: a rank was lost, or did not come in time.
            ChannelClosed: the transport is closed, here or on another rank.

        Example:
            >>> transport = dte_dist.ProcessGroupTransport(group)
            >>> if rank == 0:
            ...     transport.send(dte_dist.payload_of({"w": torch.ones(3)}, version=1), timeout=60)
            ... else:
            ...     payload = transport.receive(1, timeout=60)
        """
        self._refuse_closed()
        version = getattr(payload, "version", _NONE)
        error = capture_error(lambda: self._check_payload(payload))
        if error is not None:
            self._refuse(error, version, timeout)
        self._own = None
        if self._rank in self._roles.senders:
            self._meet(version, payload, None, timeout)
        self._own = payload

    def receive(self, version: int, *, sender: int = 0, timeout: timedelta | float) -> Payload:
        """Return the payload of a sender, once; the first call for a version waits for all senders that this
        rank needs.

        Args:
            version: that is being sent.
            sender: group rank; without a plan, where there is one sender, it is not looked at.
            timeout: seconds, or a timedelta.

        Raises:
            VersionReplay: this rank has received it.
            VersionError, FrameError, ValueError, SyncFailed: on all ranks; nobody has got anything.
            VersionGap: on a rank that sends, too: it has not sent this version.
            PeerLost: a rank was lost, or did not come in time.
            ChannelClosed: the transport is closed, here or on another rank.

        Example:
            >>> transport = dte_dist.ProcessGroupTransport(group)
            >>> payload = dte_dist.payload_of({"w": torch.ones(3)}, version=1)
            >>> if rank == 0:
            ...     transport.send(payload, timeout=60)
            ... else:
            ...     payload = transport.receive(1, timeout=60)
            >>> payload.tensors["w"]
            tensor([1., 1., 1.])
        """
        return self.receive_checked(version, lambda _: None, sender=sender, timeout=timeout)

    def receive_checked(
        self, version: int, check: Check, *, sender: int = 0, timeout: timedelta | float
    ) -> Payload:
        """Do what `receive` does, and check what comes for this rank before any rank has got anything: what
        `check` raises is raised on all ranks.

        On a rank that sends, too, the payloads came along with `send`: there it raises on this rank alone.

        Example:
            >>> transport = dte_dist.ProcessGroupTransport(group)
            >>> if rank == 0:
            ...     transport.send(dte_dist.payload_of({"w": torch.ones(3)}, version=1), timeout=60)
            ... else:
            ...     payload = transport.receive_checked(1, dte_dist.payload_to_frames, timeout=60)
        """
        self._refuse_closed()
        source = sender if self._roles.plan else self._roles.contributors[0]
        found = self._take(version, source)
        if found is not None:
            check(found)
            return found
        error = capture_error(lambda: self._check_request(version, source))
        if error is not None:
            self._refuse(error, version, timeout)
        self._meet(version, None, None, timeout, check)
        return self._kept.pop(source)

    def fail(self, error: Exception, *, timeout: timedelta | float, version: int | None = None) -> None:
        """Meet the others, who are waiting, with an error; all ranks raise it.

        Raises:
            VersionReplay: all have got a payload of `version`, so nobody waits.
            DeltaError, ValueError: the error, on all ranks.
            PeerLost: a rank was lost, or did not come in time.
            ChannelClosed: another rank has closed the transport.

        Example:
            >>> transport = dte_dist.ProcessGroupTransport(group)
            >>> try:
            ...     if rank == 0:
            ...         transport.fail(ValueError("no weights to send"), timeout=60)
            ...     else:
            ...         transport.receive(1, timeout=60)
            ... except ValueError as error:  # on every rank
            ...     print(error)
            no weights to send (raised on rank 0 of the group)
        """
        if self._why is None and os.getpid() == self._pid and self._rank in self._roles.members:
            self._refuse_met(version)
            self._meet(_NONE, None, error, timeout)

    def check_plan(self, plan: bytes, rank: int | None) -> None:
        """Refuse an engine whose plan is not that of the transport, or whose rank is not this one.

        Raises:
            LayoutMismatch: plan or rank differ.

        Example:
            >>> transport = dte_dist.ProcessGroupTransport(group)
            >>> transport.check_plan(b"", None)  # of an engine without a plan
        """
        self._roles.check_plan(self._rank, plan, rank)

    def close(self) -> None:
        """Close the transport on this rank; the others are told when they call next.

        Example:
            >>> transport = dte_dist.ProcessGroupTransport(group)
            >>> transport.close()
            >>> transport.receive(1, timeout=60)
            Traceback (most recent call last):
                ...
            dte_dist.errors.ChannelClosed: the transport is closed: it was closed. Hint: make a new transport
            on every rank of the group.
        """
        # A forked child has the connections, but they are its parent's.
        if self._why is None and os.getpid() == self._pid:
            if self._rank in self._roles.members:
                self._watch.board.leave(self._rank)
            if self._met is not None:  # all members have connected
                forget_meeting(self._watch, self._wires)
            self._drop("it was closed")

    def _check_payload(self, payload: Payload) -> None:
        self._roles.check_payload(self._rank, payload)
        if self._rank in self._roles.senders:
            self._refuse_met(payload.version)

    def _check_request(self, version: int, source: int) -> None:
        """Check that this rank may wait for a payload that is not here."""
        check_version(version)
        self._refuse_met(version)
        self._roles.check_request(self._rank, source, version, self._met)

    def _refuse_met(self, version: object) -> None:
        if self._met is not None and version == self._met:
            what = "all ranks have got this version already"
            raise VersionReplay(what, expected="another", got=version, hint="go on with the next version")

    def _take(self, version: int, source: int) -> Payload | None:
        """Give out a payload that is here."""
        if source != self._rank:
            return self._kept.pop(source, None) if version == self._met else None
        found = self._own
        if found is None or found.version != version:
            return None
        self._own = None
        return found

    def _refuse(self, error: Exception, version: int, timeout: timedelta | float) -> NoReturn:
        """Raise an error of this call, on all ranks if they may be waiting for this one."""
        if self._rank in self._roles.members and version != self._met:
            self._meet(version, None, error, timeout)
        raise error

    def _meet(
        self,
        version: int,
        payload: Payload | None,
        error: Exception | None,
        timeout: timedelta | float,
        check: Check | None = None,
    ) -> None:
        """Meet all members, and keep what comes for this rank."""
        seconds, wrong = capture(lambda: check_timeout(timeout))
        for wire in self._wires:
            wire.timeout = timedelta(seconds=min(seconds or self._patience, self._patience))
        self._kept, self._met = {}, None
        self._watch.call()
        with self._watch:
            self._kept = self._guarded(lambda: self._meeting.run(version, payload, error or wrong, check))
        self._met = version

    def _guarded(self, steps: Callable[[], _T]) -> _T:
        """Run steps that all members run; close the transport unless all of them end alike."""
        try:
            return steps()
        except AgreedError as agreed:
            raise agreed.error from agreed.error.__cause__
        except Exception as caught:
            raise self._break(caught) from caught
        except BaseException as caught:
            self._break(caught)
            raise

    def _refuse_closed(self) -> None:
        if os.getpid() != self._pid:
            what = "the transport belongs to the process that this one was forked from"
            hint = "use it in the process that made it; start workers by spawn, not fork"
            raise ChannelClosed(what, hint=hint)
        if self._why is not None:
            raise ChannelClosed(f"the transport is closed: {self._why}", hint=_NEW)

    def _drop(self, why: str) -> None:
        self._why = self._why or why
        self._watch.close()
        for wire in self._wires:
            wire.close()
        if not self._watch.is_opening:
            self._watch.board.part()
        self._kept, self._own = {}, None

    def _break(self, error: BaseException) -> DeltaError:
        """Close the transport after a fault, and return the error that all survivors raise."""
        return end_together(error, self._watch, self._drop, left=_closed)


def _closed(ranks: Sequence[int]) -> ChannelClosed:
    return ChannelClosed("a rank closed the transport", ranks=ranks, hint=_NEW)
