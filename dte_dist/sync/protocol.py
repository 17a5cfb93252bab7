"""One sync on one rank, from the exchange of control rows to the acknowledgement.

The phases; those with a ring (o) are exchanges that every rank takes part in:

1.   Prepare, in the caller's thread (`Channel.prepare`): sources look at their live tensors, once, and encode
     what changed; receivers find theirs. An error here is kept, not raised: a rank that left now would leave
     the others waiting.
2. o Control: one row per rank, with the sizes of its frames, and the frames themselves if they are small
     (`sync.inline_frames`). All ranks take the same decision (`sync.control.decide`), or raise the same
     error.
3. o Delta: frames go from the sources on their route to the receivers that follow, and are staged there.
4. o Vote: has every rank everything, and is it sound? If not, all raise, and nothing has moved. A receiver
     whose copy somebody wrote to meanwhile says so: it is seeded instead, in phase 6.
5.   Apply and commit: receivers write what is staged. Sources forget what their snapshot held before: it
     took the changes over in phase 1.
6. o Seed, if a receiver has no version (the first sync, a dirty or a new receiver): the snapshot itself,
     straight into place.
7. o Acknowledge: a receiver that failed while writing is known to all, marked dirty, and is seeded by the
     next sync.
8. o Verify, at every k-th version if the caller asked for it: digests of all copies are compared
     (`sync.verification`). `dte_dist.verify` is phases 2 and 8 alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np
from torch import Tensor

from dte_dist.errors import ApplyFailed, FrameError
from dte_dist.report import ChangedNames, Phases, SyncReport, VerifyReport
from dte_dist.sync.channel_state import ChannelState
from dte_dist.sync.control import ControlRow, Decision, check_calls, common_version, decide
from dte_dist.sync.routes import Chosen, Load, Route, Sizes
from dte_dist.sync.row_bounds import check_rows
from dte_dist.sync.version import NONE, SyncStep
from dte_dist.transport.all_or_none import agreed, capture, capture_error, raise_if_any, raise_together
from dte_dist.transport.buffers import Frame, explain_memory

__all__ = ["ROW_SIZES", "PreparedSync", "Sync"]

_log = logging.getLogger(__name__)

ROW_SIZES: Final = 128
"""Sizes of frames that a control row has room for; more take a row of their own."""


@dataclass(slots=True)
class PreparedSync:
    """A sync after phase 1.

    Attributes:
        row: what this rank says in phase 2.
        error: what went wrong so far, to be told to all.
        phases: seconds so far.
        begin: when the call began, `time.perf_counter`.
        chosen: the route that frames take.
        background: whether the caller goes on meanwhile, so that the live tensors of sources may move.
    """

    row: ControlRow
    error: Exception | None
    phases: Phases
    begin: float
    chosen: Chosen
    background: bool = False


class Sync:
    """Phases 2 to 8 of one sync.

    Args:
        parts: of the channel.
        prepared: what came of phase 1.

    Attributes:
        begun: True once all ranks have met in phase 2.
    """

    def __init__(self, parts: ChannelState, prepared: PreparedSync) -> None:
        self._parts = parts
        self._prepared = prepared
        self._source = parts.source
        self._receiver = parts.receiver
        self._phases = prepared.phases
        source = parts.source
        self._frames = source.frames() if source is not None and prepared.error is None else []
        self._load = Load()
        self._gathered = 0
        self._received: dict[int, Tensor] = {}
        self._memory_error: Exception | None = None
        self.begun = False

    @cached_property
    def _route(self) -> Route:
        """The way of the frames; not there if it was what failed in phase 1."""
        return self._parts.routes[self._prepared.chosen[0]]

    def run(self) -> SyncReport:
        """Run the phases; all ranks of the group must call.

        Raises:
            AgreedError: with the error that every rank raises.
            PeerLost: a peer died or did not answer.
        """
        rows, sizes = self._exchange()
        decision = agreed(lambda: decide(rows, self._parts.agreement.root))
        error: Exception | None = None
        if decision.followers:
            self._stream_delta(decision, sizes)
            decision = self._vote(decision)
        if decision.followers:
            error = self._apply(decision)
        elif self._source is not None:
            error = capture_error(self._source.detach)
        if decision.seeded:
            self._stream_seed(decision)
        self._acknowledge(decision, error)
        self._commit_seeds(decision)
        return self._report(decision, rows, self._verify_if_due(decision))

    def verify(self) -> VerifyReport:
        """Compare what receivers hold with what sources believe; all ranks of the group must call.

        Raises:
            AgreedError: with the error that every rank raises.
            PeerLost: a peer died or did not answer.
        """
        rows, _ = self._exchange()
        self._parts.control.watch.is_ending = True
        return self._parts.verifier.verify(*common_version(rows), live=True)

    def _verify_if_due(self, decision: Decision) -> VerifyReport | None:
        """Phase 8."""
        every = self._parts.verify_interval
        if every is None or decision.version % every:
            return None
        ranks = sorted([*decision.followers, *decision.seeded])
        with self._phases("verify"):
            report = self._parts.verifier.verify(decision.version, ranks, live=not self._prepared.background)
        if not report.equal:
            _log.warning("a verification found other bits: %s", report)
        return report

    def _exchange(self) -> tuple[list[ControlRow], Sizes]:
        """Phase 2: return the rows of all ranks, and the sizes of the frames of all sources."""
        prepared = self._prepared
        mine = [len(frame) for frame in self._frames]
        table = self._swap(prepared.row.pack(mine if len(mine) <= ROW_SIZES else [], ROW_SIZES))
        self.begun = True
        rows, sizes = ControlRow.unpack(table)
        if any(row.failed for row in rows):
            raise_together(self._parts.control, explain_memory(prepared.error))
        agreed(lambda: self._check_rows(table, rows))
        if self._route.max_frames > ROW_SIZES:
            sizes = self._rows(np.array([*mine, *[0] * (self._route.max_frames - len(mine))], np.int64))
        agreed(lambda: self._check_sizes(sizes))
        found = {
            source: sizes[source, : len(most)].tolist() for source, most in self._route.max_bytes.items()
        }
        if mine and found[self._parts.control.rank] != mine:  # to send them would end those who receive
            what = "frames have other sizes than this rank said"
            said = found[self._parts.control.rank]
            hint = "report this as a bug of dte_dist"
            raise FrameError(what, expected=f"{sum(said)} bytes", got=f"{sum(mine)} bytes", hint=hint)
        return rows, found

    def _check_rows(self, table: np.ndarray, rows: Sequence[ControlRow]) -> None:
        """Refuse rows that say what cannot be, and ranks that called different things."""
        check_rows(table, self._parts.agreement.sources, self._parts.agreement.receivers)
        check_calls(rows)

    def _swap(self, row: np.ndarray) -> np.ndarray:
        """Exchange control rows, those of sources with their inline frames; return the rows."""
        inline = self._parts.inline
        wire = self._parts.control
        rooms = {
            rank: inline.capacity if rank in self._parts.agreement.sources else 0 for rank in wire.members
        }
        with self._phases("wait"):
            table, self._received = wire.all_gather_rows_inline(
                row, rooms, partial(inline.write, self._frames)
            )
        return table

    def _check_sizes(self, sizes: np.ndarray) -> None:
        """Refuse sizes that no frame can have, before anyone makes room for them."""
        most = np.zeros_like(sizes)
        for source, largest in self._route.max_bytes.items():
            most[source, : len(largest)] = largest
        wrong = np.argwhere((sizes < 0) | (sizes > most) | (sizes % 8 != 0))
        if len(wrong):
            rank, chunk = wrong[0].tolist()
            raise FrameError(
                "a frame cannot have this size",
                ranks=[rank],
                expected=f"a multiple of 8 up to {most[rank, chunk]}",
                got=int(sizes[rank, chunk]),
                hint="sync again; if it stays, the ranks run different versions of dte_dist",
            )

    def _stream_delta(self, decision: Decision, sizes: Sizes) -> None:
        """Phase 3."""
        inline = self._parts.inline
        step = self._step(decision, seed=False)
        if inline.holds(sizes):
            self._load = self._inline_load(sizes)
            if self._is_in(decision.followers):
                with self._phases("decode"):
                    for source, row in sizes.items():
                        self._route.take_all(step, source, inline.read(self._received[source], row))
        else:
            self._gathered = self._route.gathered(sizes)
            self._load = self._move(step, self._frames, sizes, decision.followers)
        inline.adapt(sizes)

    def _inline_load(self, sizes: Sizes) -> Load:
        load = Load()
        for source, row in sizes.items():
            load.frames += sum(size > 0 for size in row)
            for rank in self._parts.control.members:
                load.add(source, rank, sum(row))
        return load

    def _vote(self, decision: Decision) -> Decision:
        """Phase 4; return what is left to do."""
        error = self._memory_error
        written: bool | None = False
        if self._receiver is not None:
            error = error or self._receiver.error
            if error is None and self._is_in(decision.followers):
                written, error = capture(self._receiver.is_written)
        came = self._load.received[self._parts.control.rank]
        votes = self._raise_if_any(explain_memory(error, came), int(bool(written)))
        return decision.seed_written(
            [self._parts.control.members[place] for place in np.flatnonzero(votes).tolist()]
        )

    def _apply(self, decision: Decision) -> Exception | None:
        """Phase 5; return what went wrong while writing."""
        error: Exception | None = None
        receiver = self._receiver
        source = self._source
        if receiver is not None and self._is_in(decision.followers):
            with self._phases("apply"):
                error = capture_error(receiver.apply)
                if error is None:
                    receiver.commit(decision.version, decision.next_lineage)
        if source is not None:
            with self._phases("commit"):
                follow = not decision.seeded
                error = (
                    capture_error(
                        lambda: source.commit(
                            decision.version, decision.next_lineage, full=False, all_follow=follow
                        )
                    )
                    or error
                )
        return error

    def _stream_seed(self, decision: Decision) -> None:
        """Phase 6."""
        step = self._step(decision, seed=True)
        sizes = self._route.seed_sizes
        frames = self._source.seed_frames(step) if self._source is not None else []
        load = self._move(step, frames, sizes, decision.seeded)
        if decision.is_full:
            self._load, self._gathered = load, self._route.gathered(sizes)

    def _move(self, step: SyncStep, frames: Sequence[Frame], sizes: Sizes, targets: Sequence[int]) -> Load:
        """Move frames on the route; return what it cost each rank, and learn how fast it went."""
        load = self._route.load(sizes, targets)
        rank = self._parts.control.rank
        begin = time.perf_counter()
        coding = self._phases.coding()
        self._memory_error = self._route.move(step, frames, sizes, targets, self._phases)
        seconds = time.perf_counter() - begin - (self._phases.coding() - coding)
        self._parts.speed.measure(max(load.sent[rank], load.received[rank]), seconds)
        return load

    def _acknowledge(self, decision: Decision, error: Exception | None) -> None:
        """Phase 7: the last exchange; `error` is that of phase 5."""
        error = error or self._late_error(decision)
        error = _as_apply_failed(explain_memory(error, self._load.received[self._parts.control.rank]))
        speed = self._parts.speed
        self._parts.control.watch.is_ending = True
        speed.merge(int(self._raise_if_any(error, int(speed.bytes_per_second or 0)).max()))

    def _late_error(self, decision: Decision) -> Exception | None:
        """Return what went wrong in phase 6."""
        seeded = self._receiver if self._is_in(decision.seeded) else None
        error = self._memory_error
        for part in (self._source, seeded):
            error = error or (part.error if part is not None else None)
        if seeded is not None and error is None:
            error = capture_error(seeded.check_own)
        return error

    def _commit_seeds(self, decision: Decision) -> None:
        """Commit what came in phase 6; deltas were committed in phase 5."""
        with self._phases("commit"):
            if self._receiver is not None and self._is_in(decision.seeded):
                self._receiver.commit(decision.version, decision.next_lineage, full=True)
            if self._source is not None and decision.is_full:
                self._source.commit(decision.version, decision.next_lineage, full=True)

    def _step(self, decision: Decision, *, seed: bool) -> SyncStep:
        base, lineage = (NONE, decision.next_lineage) if seed else (decision.base, decision.lineage)
        return SyncStep(self._parts.agreement.schema, lineage, base, decision.version)

    def _rows(self, row: np.ndarray) -> np.ndarray:
        with self._phases("wait"):
            return self._parts.control.all_gather_rows(row)

    def _raise_if_any(self, error: Exception | None, said: int) -> np.ndarray:
        """Raise the same error on every rank if any rank has one; return the number that each rank says,
        int64[ranks].
        """
        with self._phases("wait"):
            said_by_all: np.ndarray = raise_if_any(self._parts.control, error, [said])[:, 0]
            return said_by_all

    def _is_in(self, ranks: Sequence[int]) -> bool:
        return self._parts.control.rank in ranks

    def _report(
        self, decision: Decision, rows: Sequence[ControlRow], verified: VerifyReport | None
    ) -> SyncReport:
        model = self._parts.agreement.model
        load = self._load
        base = max(
            [decision.base]
            if decision.base != NONE
            else [row.receiver_version for row in rows if row.is_receiver]
        )
        return SyncReport(
            version=decision.version,
            base_version=None if base == NONE else base,
            kind="full" if decision.is_full else "delta",
            reason=decision.reason,
            changed=model.numel if decision.is_full else sum(row.changed for row in rows),
            total=model.numel,
            wire_bytes=max(load.received_by(decision.followers or decision.seeded)),
            gather_bytes=self._gathered,
            dense_bytes=model.nbytes,
            busiest_bytes=load.busiest(),
            frames=load.frames,
            route=self._route.name,
            route_reason=self._prepared.chosen[1],
            seeded=decision.seeded,
            seconds=time.perf_counter() - self._prepared.begin,
            phases=dict(self._phases.seconds),
            codecs=dict(self._source.codecs) if self._source is not None and decision.followers else {},
            verified=verified,
            _changed_names=self._changed_names(),
        )

    def _changed_names(self) -> ChangedNames:
        """Return the names of what was written here or, on a source only, of what changed."""
        if self._receiver is not None:
            return self._receiver.changed_names
        return ChangedNames() if self._source is None else self._source.changed_names()


def _as_apply_failed(error: Exception | None) -> Exception | None:
    """Say of an error after the vote what it means."""
    if error is None:
        return None
    hint = "sync again: a rank that failed is seeded, the others go on with deltas"
    failed = ApplyFailed(
        f"a rank failed after the vote, while writing: {type(error).__name__}: {error}", hint=hint
    )
    failed.__cause__ = error
    return failed
