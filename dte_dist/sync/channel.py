"""A channel: one module over one group on this rank, and what it holds between syncs.

A call prepares a sync in the caller's thread and runs the rest there too, or in the background. Errors that
all ranks share leave the channel as it was. A lost peer (`PeerLost`) breaks it: its groups are closed, which
wakes the others, and what this rank holds is kept for the next channel of the module.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from dte_dist.errors import ChannelClosed, DeltaError, PeerLost
from dte_dist.liveness.board import Verdict
from dte_dist.liveness.watch import Watch
from dte_dist.options import SyncOptions, selector_of
from dte_dist.plan.transfer_plan import ROUTES
from dte_dist.report import Phases, SyncReport, VerifyReport
from dte_dist.sync.channel_state import ChannelState
from dte_dist.sync.control import ASKED, NO_REASON, REASONS, VERIFY, ControlRow
from dte_dist.sync.protocol import PreparedSync, Sync
from dte_dist.sync.routes import Chosen
from dte_dist.sync.version import NONE
from dte_dist.transport.all_or_none import AgreedError, capture_error, end_together, forget_frames
from dte_dist.transport.communicator import Communicator

__all__ = ["Abandoned", "Channel"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Abandoned(Exception):
    """The others had left the channel before this sync began: on purpose, or because this rank was late.

    Args:
        verdict: why they had.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict

    def error(self) -> DeltaError:
        """Return what is raised where the sync cannot be made in a new channel: its bits are gone."""
        hint = "call again; a new channel opens"
        if self.verdict.kind == "left":
            return ChannelClosed(self.verdict.text, ranks=self.verdict.ranks, hint=hint)
        lost = self.verdict.ranks
        is_late = self.verdict.kind == "late"
        return PeerLost(f"the other ranks had left the channel: {self}", lost=lost, late=is_late, hint=hint)


class Channel:
    """The state of one module over one group on this rank.

    Args:
        options: of the call that opened it.
        parts: what it is made of.
        watch: of its waits.
        wires: all its groups.
        devices: of the tensors on this rank.

    Attributes:
        rank: in the group.
        watch: of its waits.
        broken: why it can no longer be used; None while it can.
        in_step: False from the beginning of a sync until it ended on all ranks alike. Where an interrupt left
            it False, this rank no longer knows what the others wait for, and the channel is broken by
            `abort`.
    """

    def __init__(
        self,
        options: SyncOptions,
        parts: ChannelState,
        watch: Watch,
        wires: Sequence[Communicator],
        devices: Collection[torch.device],
    ) -> None:
        self.options = options
        self.parts = parts
        self.devices = devices
        self.rank = parts.control.rank
        self.broken: str | None = None
        self.in_step = True
        self._pid = os.getpid()
        self.watch = watch
        self._wires = wires

    def into(self) -> Any:
        """Return the module that this rank receives into, if it is not the channel's own; None if it is
        gone.
        """
        into: Any = self.options["into"]
        return into() if isinstance(into, weakref.ref) else None

    def close(self, why: str = "it was closed") -> None:
        """Leave the channel on purpose; the other ranks open a new one when they sync next."""
        # A forked child has the connections, but they are its parent's.
        if self.broken is None and os.getpid() == self._pid:
            self.watch.board.leave(self.rank)
            self.drop(why)

    def drop(self, why: str) -> None:
        """Drop the groups without a word."""
        if self.broken is None:
            self.broken = why
            self.watch.close()
            self.watch.board.part()
            for wire in self._wires:
                wire.close()

    def leave_halfway(self, why: str) -> None:
        """Drop the groups as the process exits; where a sync is left halfway, the others are told why."""
        if self.broken is None and not self.in_step:
            self.watch.say_last(RuntimeError(why))
        self.drop(why)

    def prepare(
        self, options: SyncOptions, begin: float, *, check: Callable[[], None], background: bool = False
    ) -> PreparedSync:
        """Phase 1: choose the route; a source finds, takes over and encodes what changed, a receiver finds
        its live tensors. Raises nothing: errors are told to all ranks in phase 2.

        Args:
            options: of the call.
            begin: when it began, `time.perf_counter`.
            check: raises if the arguments of the call make no sense.
            background: the caller goes on before the sync ends.
        """
        self.in_step = False
        phases = Phases()
        self.watch.call()
        source = self.parts.source
        receiver = self.parts.receiver
        reason = NO_REASON
        error = None
        chosen: Chosen = "broadcast", ""
        try:
            if source is not None:
                source.rollback()  # of what an interrupt may have left; it may cost the version
            reason = self._full_reason(options["mode"])
            check()
            chosen = self.parts.routes.choose(options["route"])
            route = self.parts.routes[chosen[0]]
            if source is not None:
                version = options["version"] or source.state.version + 1
                selector = selector_of(options, self.parts.speed.bytes_per_second)
                source.prepare(
                    version,
                    reason != NO_REASON,
                    phases,
                    options["detector"],
                    route.lanes,
                    selector=selector,
                )
            if receiver is not None:
                receiver.begin(route.index_maps)
        except Exception as caught:  # told to all ranks in phase 2
            error = caught
        row = self._row(error, options["version"], reason, options["mode"] == "full")
        return PreparedSync(
            replace(row, route=ROUTES.index(chosen[0])), error, phases, begin, chosen, background
        )

    def verify(self) -> VerifyReport:
        """Compare what receivers hold with what sources believe they hold; all ranks of the group must call.

        Raises:
            DeltaError: the same on every rank; `PeerLost` on every surviving one, and the channel is broken.
            Abandoned: a rank had closed the channel.
        """
        self.in_step = False
        self.watch.call()
        error = None
        if self.parts.source is not None:
            error = capture_error(self.parts.source.rollback)
        row = replace(self._row(error, None, NO_REASON, asked=False), call=VERIFY)
        meeting = Sync(self.parts, PreparedSync(row, error, Phases(), time.perf_counter(), ("broadcast", "")))
        report = self._meet(meeting, meeting.verify)
        _log.info("%s", report)
        return report

    def run(self, prepared: PreparedSync) -> SyncReport:
        """Run the rest of a sync; all ranks of the group must call.

        Raises:
            DeltaError, ValueError: the same on every rank.
            PeerLost: on every surviving rank; the channel is broken.
            Abandoned: the others had left the channel; nothing was done.
        """
        sync = Sync(self.parts, prepared)
        report = self._meet(sync, sync.run)
        _log.info("%s", report)
        return report

    def _meet(self, sync: Sync, call: Callable[[], _T]) -> _T:
        """Run a meeting of all ranks, and see to what it leaves behind."""
        if self.broken is not None:
            raise ChannelClosed(
                f"the channel is closed: {self.broken}", hint="call again; a new channel opens"
            )
        try:
            with self.watch:
                report = call()
        except AgreedError as agreed:
            # Of something else; but whoever gets one takes the channel for broken.
            if isinstance(agreed.error, PeerLost):
                raise self._break(agreed.error) from agreed.error
            self.in_step = True
            raise agreed.error from agreed.error.__cause__
        except PeerLost as error:
            if not sync.begun and not self.watch.ends_here(verdict := self.watch.settle(error)):
                forget_frames(error)
                self.drop(verdict.text)
                raise Abandoned(verdict) from error
            raise self._break(error) from error
        except Exception as error:  # the machine failed, not the protocol: the others lose this rank
            raise self._break(error) from error
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._forget()
        self.in_step = True
        return report

    def refuse_forked(self) -> None:
        """Refuse a call in a forked child, which has copies of the connections of its parent.

        Raises:
            ChannelClosed: on this process alone, which is no rank.
        """
        if os.getpid() != self._pid:
            hint = (
                "sync in the process that opened the channel; start workers that are to "
                "sync by spawn, not fork"
            )
            raise ChannelClosed("the channel belongs to the process that this one was forked from", hint=hint)

    def abort(self, error: BaseException | None = None) -> None:
        """Break the channel if a sync on this rank was left halfway, so that the others do not wait for
        it.
        """
        if not self.in_step and self.broken is None:
            self._break(error or RuntimeError("an earlier call was interrupted"))

    def _full_reason(self, mode: str) -> int:
        """Return why this source prepares a full sync, as a number of `REASONS`; `NO_REASON` for a delta."""
        if self.parts.source is None:
            return NO_REASON
        state = self.parts.source.state
        anchor = self.options["anchor_interval"]
        if state.version == NONE:
            return REASONS.index(
                "first sync" if state.newest == NONE else "no version since a sync broke off"
            )
        if mode == "full":
            return REASONS.index("mode")
        return REASONS.index("anchor") if anchor is not None and state.deltas >= anchor else NO_REASON

    def _seed_reason(self, asked: bool) -> int:
        """Return why this receiver is to be seeded, as a number of `SEED_REASONS`; 0 if its version tells all
        there is to say.
        """
        receiver = self.parts.receiver
        if receiver is None or (receiver.state.version != NONE and not asked):
            return 0
        return receiver.state.seed_reason if receiver.state.version == NONE else ASKED

    def _row(self, error: Exception | None, version: int | None, reason: int, asked: bool) -> ControlRow:
        source = self.parts.source
        receiver = self.parts.receiver
        return ControlRow(
            failed=int(error is not None),
            is_source=int(source is not None),
            is_receiver=int(receiver is not None),
            source_version=source.state.version if source else NONE,
            source_lineage=source.state.lineage if source else 0,
            receiver_version=receiver.state.version if receiver else NONE,
            receiver_lineage=receiver.state.lineage if receiver else 0,
            newest=max(end.state.newest for end in (source, receiver) if end is not None),
            aborted=int(source is not None and source.state.aborted),
            seed_reason=self._seed_reason(asked),
            requested_version=version if error is None and version is not None else NONE,
            full=int(reason != NO_REASON),
            reason=reason,
            proposed_lineage=secrets.randbits(62) + 1,
            changed=source.changed if source else 0,
        )

    def _forget(self) -> None:
        """Forget what was prepared and staged; committed or not, it is of no more use."""
        if self.parts.receiver is not None:
            self.parts.receiver.rollback()
        if self.parts.source is not None:
            try:
                self.parts.source.rollback()
            except Exception:
                # All ranks raise the same, and this is one rank alone. The next sync says why it is full.
                _log.exception(
                    "the snapshot cannot be put back to what the receivers hold: the next sync is full"
                )

    def _break(self, error: BaseException) -> DeltaError:
        """Close the channel and return the error that all survivors raise."""
        if self.parts.source is not None:
            self.parts.source.state.aborted = True
        return end_together(error, self.watch, self.drop)
