"""One sync, from the control round to the acknowledgement, on one rank.

The phases; those with a ring (o) are exchanges that every rank takes part in:

1.   Prepare, in the caller's thread (`Channel.prepare`): sources look at their live tensors, once, and encode what changed; receivers
     find theirs. An error here is kept, not raised: a rank that left now would leave the others waiting.
2. o Control: one row per rank, with the sizes of the first round's frames. All ranks take the same decision
     (`engine.control.decide`), or raise the same error.
3. o Delta: round by round, frames go from the sources over the root to the receivers that follow, and are staged there.
4. o Vote: has every rank everything, and is it sound? If not, all raise, and nothing has moved.
5.   Apply and commit: receivers write what is staged, sources move their snapshot.
6. o Seed, if a receiver has no version (the first sync, a dirty or a new receiver): the snapshot itself, straight into place.
7. o Acknowledge: a receiver that failed while writing is known to all, marked dirty, and is seeded by the next sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from dte_dist.codec import FrameHead
from dte_dist.collectives.opening import Agreement, raise_together
from dte_dist.engine.chain import NONE
from dte_dist.engine.control import ControlRow, Decision, decide
from dte_dist.engine.receiver import ReceiverState
from dte_dist.engine.source import SourceState
from dte_dist.errors import ApplyFailed, DeltaError, PeerLost
from dte_dist.plan.schedule import Parcel, Schedule
from dte_dist.report import Phases, SyncReport
from dte_dist.transport.groups import Wire
from dte_dist.transport.relay import Frame, Relay

__all__ = ["Agreed", "Parts", "Prepared", "Sync"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a channel is made of on this rank.

    Attributes:
        agreement: what all ranks know.
        schedule: how flat spaces are cut.
        control, relay: the channel's own groups.
        source, receiver: what this rank is; may be both.
    """

    agreement: Agreement
    schedule: Schedule
    control: Wire
    relay: Relay
    source: SourceState | None
    receiver: ReceiverState | None


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


class Agreed(Exception):
    """Carries an error that every rank raises: the ranks are in step, so the channel stays usable."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Traffic:
    """Bytes and frames of one sync, the same on all ranks."""

    wire: int = 0
    gather: int = 0
    frames: int = 0

    def add(self, sizes: dict[int, list[int]], root: int, *, aside: bool) -> None:
        """Count the frames of one round; `aside` are those that seed some receivers beside a delta."""
        self.wire += 0 if aside else sum(map(sum, sizes.values()))
        self.gather += sum(sum(row) for source, row in sizes.items() if source != root)
        self.frames += sum(size > 0 for row in sizes.values() for size in row)


class Sync:
    """Phases 2 to 7 of one sync.

    Args:
        parts: of the channel.
        prepared: what came of phase 1.

    Attributes:
        begun: True once all ranks have met in the control round.
    """

    def __init__(self, parts: Parts, prepared: Prepared) -> None:
        self._parts, self._prepared = parts, prepared
        self._source, self._receiver = parts.source, parts.receiver
        self._phases = prepared.phases
        self._traffic = _Traffic()
        self.begun = False

    def run(self) -> SyncReport:
        """Run the phases; all ranks of the group must call.

        Raises:
            Agreed: with the error that every rank raises.
            PeerLost: a peer died or did not answer.
        """
        rows, sizes = self._exchange()
        decision = _agreed(lambda: decide(rows, self._parts.agreement.root))
        error: Exception | None = None
        if decision.followers:
            self._stream_delta(decision, sizes)
            self._vote()
            error = self._apply(decision)
        elif self._source is not None:
            self._source.detach()
        if decision.seeded:
            self._stream_seed(decision)
        self._acknowledge(decision, error)
        return self._report(decision, rows)

    def _exchange(self) -> tuple[list[ControlRow], np.ndarray]:
        """Phase 2: return the rows of all ranks and the sizes of the first round's frames."""
        prepared = self._prepared
        frames = self._source.frames(0) if self._source is not None and prepared.error is None else []
        table = self._rows(prepared.row.pack([len(frame) for frame in frames], self._parts.schedule.per_round))
        self.begun = True
        rows = [ControlRow.unpack(row) for row in table]
        if any(row.failed for row, _ in rows):
            self._raise_together(prepared.error)
        return [row for row, _ in rows], np.array([sizes for _, sizes in rows], np.int64)

    def _stream_delta(self, decision: Decision, sizes: np.ndarray) -> None:
        """Phase 3."""
        for number in range(self._parts.schedule.rounds):
            frames = self._source.frames(number) if self._source is not None else []
            if number:
                sizes = self._sizes([len(frame) for frame in frames])
            self._move(decision, number, frames, sizes, seed=False)

    def _vote(self) -> None:
        """Phase 4: raise the same error on every rank if any rank has one."""
        self._raise_if_any(self._receiver.error if self._receiver is not None else None)

    def _apply(self, decision: Decision) -> Exception | None:
        """Phase 5; return what went wrong while writing."""
        error: Exception | None = None
        if self._receiver is not None and self._is_in(decision.followers):
            with self._phases("apply"):
                try:
                    self._receiver.apply()
                    self._receiver.commit(decision.version, decision.onward)
                except Exception as caught:  # told to all ranks when they acknowledge
                    error = caught
        if self._source is not None:
            with self._phases("commit"):
                self._source.commit(decision.version, decision.onward, full=False)
        return error

    def _stream_seed(self, decision: Decision) -> None:
        """Phase 6."""
        for number in range(self._parts.schedule.rounds):
            source = self._source
            sizes = self._sizes(source.seed_sizes(number) if source is not None else [])
            frames = source.seed_frames(number, decision.version, decision.onward) if source is not None else []
            self._move(decision, number, frames, sizes, seed=True)

    def _acknowledge(self, decision: Decision, error: Exception | None) -> None:
        """Phase 7."""
        seeded = self._receiver if self._is_in(decision.seeded) else None
        if error is None and seeded is not None:
            error = seeded.error
        self._raise_if_any(_as_apply_failed(error))
        with self._phases("commit"):
            if seeded is not None:
                seeded.commit(decision.version, decision.onward, full=True)
            if self._source is not None and decision.is_full:
                self._source.commit(decision.version, decision.onward, full=True)

    def _move(self, decision: Decision, number: int, frames: Sequence[Frame], sizes: np.ndarray, *, seed: bool) -> None:
        """Move the frames of one round to the receivers that are seeded, or to those that follow."""
        agreement, receiver = self._parts.agreement, self._receiver
        by_source = {source: sizes[source].tolist() for source in agreement.sources}
        heads = {source: self._heads(decision, source, number, seed=seed) for source in agreement.sources}

        def take(parcel: Parcel, frame: Tensor) -> None:
            if receiver is not None:
                receiver.take(frame, heads[parcel.source][parcel.chunk])

        self._traffic.add(by_source, agreement.root, aside=seed and not decision.is_full)
        targets = decision.seeded if seed else decision.followers
        self._parts.relay.round(by_source, frames, targets, take, self._phases)

    def _heads(self, decision: Decision, source: int, number: int, *, seed: bool) -> list[FrameHead]:
        """Return what the frames of one round of a source must say."""
        schedule = self._parts.schedule
        base, stream = (NONE, decision.onward) if seed else (decision.base, decision.stream)
        return [
            FrameHead(
                schema=self._parts.agreement.schema, stream=stream, base=base, version=decision.version, source=source,
                number=chunk.number, count=schedule.count(source), width=chunk.width, first=chunk.first, length=chunk.length, seed=seed,
            )
            for chunk in schedule.round(source, number)
        ]  # fmt: skip

    def _sizes(self, mine: Sequence[int]) -> np.ndarray:
        """Tell all ranks the sizes of this rank's frames of a round; return those of all."""
        row = np.zeros(self._parts.schedule.per_round, np.int64)
        row[: len(mine)] = mine
        return self._rows(row)

    def _rows(self, row: np.ndarray) -> np.ndarray:
        with self._phases("wait"):
            return self._parts.control.rows(row)

    def _raise_if_any(self, error: Exception | None) -> None:
        if self._rows(np.array([error is not None], np.int64)).any():
            self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        _agreed(lambda: raise_together(self._parts.control, error))

    def _is_in(self, ranks: Sequence[int]) -> bool:
        return self._parts.control.rank in ranks

    def _report(self, decision: Decision, rows: Sequence[ControlRow]) -> SyncReport:
        model, traffic = self._parts.agreement.model, self._traffic
        base = max([decision.base] if decision.base != NONE else [row.receiver_version for row in rows if row.is_receiver])
        return SyncReport(
            version=decision.version, base_version=None if base == NONE else base,
            kind="full" if decision.is_full else "delta", reason=decision.reason,
            changed=model.numel if decision.is_full else sum(row.changed for row in rows), total=model.numel,
            wire_bytes=traffic.wire, gather_bytes=traffic.gather, dense_bytes=model.nbytes, frames=traffic.frames,
            seeded=decision.seeded, seconds=time.perf_counter() - self._prepared.begin, phases=dict(self._phases.seconds),
            codecs=dict(self._source.codecs) if self._source is not None else {},
        )  # fmt: skip


def _agreed(call: Callable[[], _T]) -> _T:
    """Call something that raises on every rank or on none, and mark its error so."""
    try:
        return call()
    except PeerLost:
        raise
    except Exception as error:
        raise Agreed(error) from None


def _as_apply_failed(error: Exception | None) -> Exception | None:
    """Say of an error from outside the family what it means for the receiver."""
    if error is None or isinstance(error, DeltaError):
        return error
    fix = "sync again: this receiver is seeded, the others go on with deltas"
    failed = ApplyFailed(f"a receiver failed while writing and is dirty: {type(error).__name__}: {error}", fix=fix)
    failed.__cause__ = error
    return failed
