"""A channel: one module, one group, and the protocol that moves the module's changes over it.

A sync, in numbered phases; those with a ring (o) are exchanges that every rank takes part in:

1.   Prepare, in the caller's thread: sources look at their live tensors, once, and encode what changed; receivers find theirs.
     An error here is kept, not raised: a rank that left now would leave the others waiting.
2. o Control: one row per rank, with the sizes of the first round's frames. All ranks take the same decision
     (`engine.control.decide`), or raise the same error.
3. o Delta: round by round, frames go from the sources over the root to the receivers that follow, and are staged there.
4. o Vote: has every rank everything, and is it sound? If not, all raise, and nothing has moved.
5.   Apply and commit: receivers write what is staged, sources move their snapshot.
6. o Seed, if a receiver has no version (the first sync, a dirty or a new receiver): the snapshot itself, straight into place.
7. o Acknowledge: a receiver that failed while writing is known to all, marked dirty, and is seeded by the next sync.

A lost peer (`PeerLost`) breaks the channel: its groups are closed, which wakes the others, and what this rank holds is kept
for the next channel of the module. Everything else leaves the channel usable.
"""

from __future__ import annotations

import logging
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from dte_dist.codec import FrameHead
from dte_dist.collectives.opening import Agreement, raise_together
from dte_dist.collectives.options import Options
from dte_dist.collectives.work import DeltaWork
from dte_dist.engine.control import NONE, REASONS, ControlRow, Decision, decide
from dte_dist.engine.receiver import ReceiverState
from dte_dist.engine.source import SourceState
from dte_dist.errors import ApplyFailed, ChannelClosed, DeltaError, PeerLost
from dte_dist.plan.schedule import Parcel, Schedule
from dte_dist.report import Phases, SyncReport
from dte_dist.transport.groups import LossBoard, Wire
from dte_dist.transport.relay import Relay

__all__ = ["Channel", "Prepared"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True)
class Prepared:
    """A sync after phase 1.

    Attributes:
        row: what this rank says in the control round.
        error: what went wrong so far, to be told to all.
        phases: seconds so far.
        begin: when the call began, `time.perf_counter`.
    """

    row: ControlRow
    error: Exception | None
    phases: Phases
    begin: float


class Channel:
    """The state of one module over one group on this rank.

    Args:
        options: as agreed by all ranks.
        agreement: what all ranks know.
        control, relay, board: the channel's own groups, and what is left when they break.
        schedule: how flat spaces are cut.
        source, receiver: what this rank is; may be both.
    """

    def __init__(
        self, options: Options, agreement: Agreement, control: Wire, relay: Relay, board: LossBoard, schedule: Schedule,
        source: SourceState | None, receiver: ReceiverState | None,
    ) -> None:  # fmt: skip
        self.options, self.agreement = options, agreement
        self.source, self.receiver = source, receiver
        self._control, self._relay, self._board, self._schedule = control, relay, board, schedule
        self.rank = control.rank
        self.broken: str | None = None
        self._work: DeltaWork | None = None

    def close(self, why: str = "it was closed") -> None:
        """Drop the groups; peers that wait on them fail."""
        if self.broken is None:
            self.broken = why
            self._control.close()
            self._relay.close()

    def start(self, prepared: Prepared) -> DeltaWork:
        """Run the rest of a sync in the background."""
        self._work = DeltaWork(lambda: self.run(prepared))
        return self._work

    # Phase 1 ---------------------------------------------------------------------------------------------------------

    def prepare(self, version: int | None, mode: str, check: Callable[[], None]) -> Prepared:
        """Look at the live tensors; `check` raises if the call's arguments make no sense. Raises nothing itself."""
        phases, begin = Phases(), time.perf_counter()
        if self._work is not None:
            with phases("wait"):
                self._work.join()
        error: Exception | None = None
        reason = self._full_reason(mode)
        try:
            check()
            if self.source is not None:
                self.source.prepare(version or self.source.chain.version + 1, bool(reason), phases)
            if self.receiver is not None:
                self.receiver.begin()
        except Exception as caught:  # told to all ranks in the control round
            error = caught
        return Prepared(self._row(error, version, reason), error, phases, begin)

    def _full_reason(self, mode: str) -> int:
        """Return why this source prepares a full sync, as a number of `REASONS`; 0 for a delta."""
        if self.source is None:
            return 0
        chain, anchor = self.source.chain, self.options.anchor_interval
        if chain.version == NONE:
            return REASONS.index("first sync")
        if mode == "full":
            return REASONS.index("mode")
        return REASONS.index("anchor") if anchor is not None and chain.deltas >= anchor else 0

    def _row(self, error: Exception | None, version: int | None, reason: int) -> ControlRow:
        source, receiver = self.source, self.receiver
        return ControlRow(
            failed=int(error is not None), is_source=int(source is not None), is_receiver=int(receiver is not None),
            source_version=source.chain.version if source else NONE, source_stream=source.chain.stream if source else 0,
            receiver_version=receiver.chain.version if receiver else NONE, receiver_stream=receiver.chain.stream if receiver else 0,
            wanted=NONE if version is None else version, full=int(reason > 0), reason=reason, proposal=secrets.randbits(62) + 1,
            changed=source.changed if source else 0,
        )  # fmt: skip

    # Phases 2 to 7 ---------------------------------------------------------------------------------------------------

    def run(self, prepared: Prepared) -> SyncReport:
        """Run the rest of a sync; all ranks of the group must call.

        Raises:
            DeltaError: the same on every rank.
            PeerLost: on every surviving rank; the channel is closed.
        """
        if self.broken is not None:
            raise ChannelClosed(f"the channel is closed: {self.broken}", fix="call again; a new channel opens")
        try:
            return self._run(prepared)
        except _Agreed as agreed:
            raise agreed.error from agreed.error.__cause__
        except PeerLost as error:
            raise self._break(error) from error
        except BaseException as error:
            self._break(error)
            raise
        finally:
            if self.source is not None:
                self.source.rollback()
            if self.receiver is not None:
                self.receiver.rollback()

    def _break(self, error: BaseException) -> PeerLost:
        """Close the channel and return the error that all survivors raise."""
        _forget_frames(error)  # they hold operations, which hold connections: peers would not learn that we left
        self.close(f"{type(error).__name__} in an earlier call: {error}")
        return PeerLost(self._board.agree(str(error)))

    def _run(self, prepared: Prepared) -> SyncReport:
        phases = prepared.phases
        rows, sizes = self._exchange(prepared)
        decision = self._agreed(lambda: decide(rows, self.agreement.root))
        traffic = _Traffic()
        if decision.followers:
            self._stream_delta(decision, sizes, traffic, phases)
            self._vote(phases)
        elif self.source is not None:
            self.source.detach()
        error = self._apply(decision, phases) if decision.followers else None
        if decision.seeded:
            self._stream_seed(decision, traffic, phases)
        self._acknowledge(decision, error, phases)
        return self._report(prepared, decision, rows, traffic)

    def _exchange(self, prepared: Prepared) -> tuple[list[ControlRow], np.ndarray]:
        """Phase 2: return the rows of all ranks and the sizes of the first round's frames."""
        frames = self.source.frames(0) if self.source is not None and prepared.error is None else []
        with prepared.phases("wait"):
            table = self._control.rows(prepared.row.pack([len(frame) for frame in frames], self._schedule.per_round))
        rows = [ControlRow.unpack(row) for row in table]
        if any(row.failed for row, _ in rows):
            self._agreed(lambda: raise_together(self._control, prepared.error))
        return [row for row, _ in rows], np.array([sizes for _, sizes in rows], np.int64)

    def _stream_delta(self, decision: Decision, sizes: np.ndarray, traffic: _Traffic, phases: Phases) -> None:
        """Phase 3."""
        for number in range(self._schedule.rounds):
            frames = self.source.frames(number) if self.source is not None else []
            if number:
                sizes = self._sizes(frames, phases)
            self._move(number, decision, frames, sizes, decision.followers, traffic, phases, seed=False)

    def _stream_seed(self, decision: Decision, traffic: _Traffic, phases: Phases) -> None:
        """Phase 6."""
        for number in range(self._schedule.rounds):
            with phases("encode"):
                frames = self.source.seed_frames(number, decision.version, decision.stream) if self.source is not None else []
            sizes = self._sizes(frames, phases)
            self._move(number, decision, frames, sizes, decision.seeded, traffic, phases, seed=True)

    def _sizes(self, frames: Sequence[Tensor], phases: Phases) -> np.ndarray:
        row = np.zeros(self._schedule.per_round, np.int64)
        row[: len(frames)] = [len(frame) for frame in frames]
        with phases("wait"):
            return self._control.rows(row)

    def _move(
        self, number: int, decision: Decision, frames: Sequence[Tensor], sizes: np.ndarray, targets: Sequence[int],
        traffic: _Traffic, phases: Phases, *, seed: bool,
    ) -> None:  # fmt: skip
        by_source = {source: sizes[source].tolist() for source in self.agreement.sources}
        heads = {source: self._heads(source, number, decision, seed=seed) for source in self.agreement.sources}
        receiver = self.receiver

        def take(parcel: Parcel, frame: Tensor) -> None:
            if receiver is not None:
                receiver.take(frame, heads[parcel.source][parcel.chunk])

        traffic.add(by_source, self.agreement.root)
        self._relay.round(by_source, frames, targets, take if receiver is not None else None, phases)

    def _heads(self, source: int, number: int, decision: Decision, *, seed: bool) -> list[FrameHead]:
        """Return what the frames of one round of a source must say."""
        count, base = self._schedule.count(source), NONE if seed else decision.base
        return [
            FrameHead(
                schema=self.agreement.schema, stream=decision.stream, base=base, version=decision.version, source=source,
                number=chunk.number, count=count, width=chunk.width, first=chunk.first, length=chunk.length, seed=seed,
            )
            for chunk in self._schedule.round(source, number)
        ]  # fmt: skip

    def _vote(self, phases: Phases) -> None:
        """Phase 4: raise the same error on every rank if any rank has one."""
        error = self.receiver.error if self.receiver is not None else None
        with phases("wait"):
            table = self._control.rows(np.array([error is not None], np.int64))
        if table.any():
            self._agreed(lambda: raise_together(self._control, error))

    def _apply(self, decision: Decision, phases: Phases) -> Exception | None:
        """Phase 5, for the ranks of a delta; return what went wrong while writing."""
        error: Exception | None = None
        if self.receiver is not None and self._is_in(decision.followers):
            with phases("apply"):
                try:
                    self.receiver.apply()
                    self.receiver.commit(decision.version, decision.stream)
                except Exception as caught:  # told to all ranks when they acknowledge
                    error = caught
        if self.source is not None:
            with phases("commit"):
                self.source.commit(decision.version, decision.stream, full=False)
        return error

    def _acknowledge(self, decision: Decision, error: Exception | None, phases: Phases) -> None:
        """Phase 7."""
        seeded = self.receiver is not None and self._is_in(decision.seeded)
        if seeded and self.receiver is not None:
            error = error or self.receiver.error
        if error is not None and not isinstance(error, DeltaError):
            fix = "sync again: this receiver is seeded, the others go on with deltas"
            cause, error = error, ApplyFailed(f"a receiver failed while writing and is dirty: {type(error).__name__}: {error}", fix=fix)
            error.__cause__ = cause
        with phases("wait"):
            table = self._control.rows(np.array([error is not None], np.int64))
        if table.any():
            self._agreed(lambda: raise_together(self._control, error))
        with phases("commit"):
            if seeded and self.receiver is not None:
                self.receiver.commit(decision.version, decision.stream)
            if self.source is not None and decision.is_full:
                self.source.commit(decision.version, decision.stream, full=True)

    def _is_in(self, ranks: Sequence[int]) -> bool:
        return self.rank in ranks

    def _agreed(self, call: Callable[[], _T]) -> _T:
        """Call something that raises on every rank or on none; mark its error as one that leaves the channel usable."""
        try:
            return call()
        except PeerLost:
            raise
        except Exception as error:
            raise _Agreed(error) from None

    def _report(self, prepared: Prepared, decision: Decision, rows: Sequence[ControlRow], traffic: _Traffic) -> SyncReport:
        model = self.agreement.model
        report = SyncReport(
            version=decision.version, base_version=None if decision.base == NONE else decision.base,
            kind="full" if decision.is_full else "delta", reason=decision.reason,
            changed=model.numel if decision.is_full else sum(row.changed for row in rows), total=model.numel,
            wire_bytes=traffic.wire, gather_bytes=traffic.gather, dense_bytes=model.nbytes,
            frames=traffic.frames, seeded=decision.seeded, seconds=time.perf_counter() - prepared.begin, phases=dict(prepared.phases.seconds),
            codecs=dict(self.source.codecs) if self.source is not None else {},
        )  # fmt: skip
        _log.info("%s", report)
        return report


def _forget_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


class _Agreed(Exception):
    """Carries an error that every rank raises: the ranks are in step and the channel stays open."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Traffic:
    """Bytes and frames of one sync, the same on all ranks."""

    wire: int = 0
    gather: int = 0
    frames: int = 0

    def add(self, sizes: dict[int, list[int]], root: int) -> None:
        self.wire += sum(map(sum, sizes.values()))
        self.gather += sum(sum(row) for source, row in sizes.items() if source != root)
        self.frames += sum(size > 0 for row in sizes.values() for size in row)
