"""Control rows: one per rank, from which every rank takes the same decision.

A row says who the rank is, what it holds and what it wants. `decide` is a pure function of all rows, so no
rank has to be told what the others do. A rank that has failed says so in its row, and takes part in the round
all the same: that is how its error reaches everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dte_dist.errors import LayoutMismatch, VersionError, VersionReplay
from dte_dist.plan.transfer_plan import ROUTES
from dte_dist.sync.version import NONE

__all__ = [
    "ASKED",
    "CALLS",
    "DIFFERENT",
    "INVALIDATED",
    "NO_REASON",
    "OTHER_CHANNEL",
    "REASONS",
    "SEED_REASONS",
    "SYNC",
    "VERIFY",
    "WRITTEN",
    "ControlRow",
    "Decision",
    "check_calls",
    "common_version",
    "decide",
]


@dataclass(frozen=True, slots=True)
class ControlRow:
    """The row of one rank at the start of a sync; int64 each.

    Attributes:
        failed: 1 if an error is waiting to be told.
        is_source, is_receiver: roles.
        source_version: version of the snapshot, or NONE if there is none yet.
        source_lineage: lineage of the snapshot; a random number that its first seed was given.
        receiver_version: version of the live copy, or NONE: never seeded, or dirty.
        receiver_lineage: lineage that the copy follows.
        newest: highest version this rank ever held, dirty since or not.
        aborted: 1 on a source whose last sync broke off, see `VersionState`.
        seed_reason: why a receiver gave up its version, a number of `SEED_REASONS`; 0 if there is nothing to
            say.
        requested_version: version that the caller asked for, or NONE.
        full: 1 if the source has prepared a full sync.
        reason: why it is full, a number of `REASONS`.
        proposed_lineage: lineage to start if one is needed; that of the root is taken.
        changed: elements that the source found changed.
        route: number of the route that the caller asked for.
        call: number of what was called, `SYNC` or `VERIFY`.
    """

    failed: int = 0
    is_source: int = 0
    is_receiver: int = 0
    source_version: int = NONE
    source_lineage: int = 0
    receiver_version: int = NONE
    receiver_lineage: int = 0
    newest: int = NONE
    aborted: int = 0
    seed_reason: int = 0
    requested_version: int = NONE
    full: int = 0
    reason: int = 0
    proposed_lineage: int = 0
    changed: int = 0
    route: int = 0
    call: int = 0

    def pack(self, sizes: Sequence[int], room: int) -> np.ndarray:
        """Return the row as int64, followed by frame sizes, padded with zeros to `room` of them."""
        said = [getattr(self, name) for name in self.__slots__]
        return np.array([*said, *sizes, *[0] * (room - len(sizes))], np.int64)

    @classmethod
    def columns(cls) -> int:
        """Return how many columns of a packed row come before the sizes."""
        return len(cls.__slots__)

    @classmethod
    def unpack(cls, table: np.ndarray) -> tuple[list[ControlRow], np.ndarray]:
        """Read packed rows, one of each rank; return them, and the sizes behind them."""
        columns = len(cls.__slots__)
        return [cls(*row) for row in table[:, :columns].tolist()], table[:, columns:]


SYNC, VERIFY = range(2)
CALLS: Final = ("a sync", "dte_dist.verify")
"""Calls that ranks may make on a channel."""

NO_REASON: Final = 0

REASONS: Final = ("", "first sync", "mode", "anchor", "no version since a sync broke off")
"""Why a source prepares a full sync."""

WRITTEN, OTHER_CHANNEL, INVALIDATED, ASKED, DIFFERENT = range(1, 6)
SEED_REASONS: Final = (
    "",
    "its weights were written to by others",
    "another channel wrote to its weights",
    "dte_dist.invalidate was called for it",
    'it asked for mode="full"',
    "a verification found other bits",
)
"""Why a receiver gave up its version."""


def check_calls(rows: Sequence[ControlRow]) -> None:
    """Refuse to go on where ranks called different things."""
    for asked, names, hint in (
        (
            {row.call: rank for rank, row in enumerate(rows)},
            CALLS,
            "make the same calls in the same order on every rank",
        ),
        (
            {row.route: rank for rank, row in enumerate(rows)},
            ROUTES,
            "call the same collective, with the same route=, on every rank",
        ),
    ):
        if len(asked) > 1:
            said = ", ".join(f"{names[number]} on rank {rank}" for number, rank in sorted(asked.items()))
            what = "ranks ask for different routes" if names is ROUTES else "ranks make different calls"
            raise LayoutMismatch(what, ranks=sorted(asked.values()), got=said, hint=hint)


def common_version(rows: Sequence[ControlRow]) -> tuple[int, tuple[int, ...]]:
    """Return the version that all sources hold, NONE if there is none, and the group ranks of the receivers
    that hold it too.
    """
    states = {(row.source_version, row.source_lineage) for row in rows if row.is_source}
    version, lineage = states.pop() if len(states) == 1 else (NONE, 0)
    return version, tuple(
        rank for rank, row in enumerate(rows) if row.is_receiver and _follows(row, version, lineage)
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """The course of this sync, the same on all ranks.

    Attributes:
        version: the version that it makes.
        base: the version that the delta starts from, or NONE.
        lineage: lineage that the delta continues.
        next_lineage: lineage from now on: the same, or a new one.
        followers: group ranks of the receivers that get the delta.
        seeded: group ranks of the receivers that get everything.
        reason: for the report.
    """

    version: int
    base: int
    lineage: int
    next_lineage: int
    followers: tuple[int, ...]
    seeded: tuple[int, ...]
    reason: str

    def seed_written(self, written: Sequence[int]) -> Decision:
        """Return what all do if somebody wrote to the copies of some followers meanwhile: these are seeded in
        this sync.
        """
        gone = [rank for rank in self.followers if rank in written]
        if not gone:
            return self
        said = [f"rank {rank} seeded: {SEED_REASONS[WRITTEN]}" for rank in gone]
        followers = tuple(rank for rank in self.followers if rank not in written)
        reason = "; ".join([self.reason, *said] if self.reason else said)
        return replace(self, followers=followers, seeded=tuple(sorted([*self.seeded, *gone])), reason=reason)

    @property
    def is_full(self) -> bool:
        """True if no receiver gets a delta."""
        return not self.followers


def decide(rows: Sequence[ControlRow], root: int) -> Decision:
    """Decide what the sync does, from the rows of all ranks in group order.

    Raises:
        VersionReplay: the version asked for is not newer than what is held.
        VersionError: ranks asked for different versions, or one that is too large.
    """
    sources = [rank for rank, row in enumerate(rows) if row.is_source]
    receivers = [rank for rank, row in enumerate(rows) if row.is_receiver]
    # A source that was asked for mode="full" has given up its version on purpose: the others say which one
    # they hold.
    asked = REASONS.index("mode")
    states = {
        (rows[rank].source_version, rows[rank].source_lineage)
        for rank in sources
        if rows[rank].reason != asked
    } or {(NONE, 0)}
    full = len(states) > 1 or any(rows[rank].full for rank in sources)
    base, lineage = (NONE, 0) if len(states) > 1 else next(iter(states))
    followers = () if full else tuple(r for r in receivers if _follows(rows[r], base, lineage))
    seeded = tuple(rank for rank in receivers if rank not in followers)
    newest = (
        base if followers else max(max(row.newest, row.source_version, row.receiver_version) for row in rows)
    )
    version = _version(rows, newest)
    is_new = (not followers and base == NONE) or any(rows[rank].aborted for rank in sources)
    next_lineage = rows[root].proposed_lineage if is_new else lineage
    reason = (
        "sources hold different versions"
        if len(states) > 1
        else _reason(rows, followers, seeded, base, lineage)
    )
    return Decision(version, base, lineage, next_lineage, followers, seeded, reason)


def _follows(row: ControlRow, base: int, lineage: int) -> bool:
    return (
        base != NONE
        and not row.seed_reason
        and row.receiver_version == base
        and row.receiver_lineage == lineage
    )


def _version(rows: Sequence[ControlRow], newest: int) -> int:
    sources = {row.requested_version: rank for rank, row in enumerate(rows) if row.is_source}
    wanted = sources | {
        row.requested_version: rank for rank, row in enumerate(rows) if row.requested_version != NONE
    }
    if len(sources) > 1 or len(wanted) > 1:
        said = ", ".join(f"{'none' if v == NONE else v} on rank {r}" for v, r in sorted(wanted.items()))
        hint = "pass the same version= on every source; receivers may leave it out"
        raise VersionError(
            "version= differs between ranks", ranks=sorted(wanted.values()), got=said, hint=hint
        )
    version = next(iter(wanted))
    newest = max(newest, 0)  # versions count from 1
    if version == NONE:
        version = newest + 1
    if version <= newest:
        hint = f"leave version= out, or pass a version above {newest}"
        raise VersionReplay(
            "the version is not newer than the one that is held",
            expected=f"> {newest}",
            got=version,
            hint=hint,
        )
    if version >= 1 << 62:
        raise VersionError(
            "the version does not fit", expected="< 2^62", got=version, hint="count versions from 1"
        )
    return version


def _reason(
    rows: Sequence[ControlRow], followers: Sequence[int], seeded: Sequence[int], base: int, lineage: int
) -> str:
    """Say why receivers are seeded."""
    if not seeded:
        return ""
    said = REASONS[max(row.reason for row in rows)]
    if not followers and said:
        known = max(rows[rank].receiver_version for rank in seeded)
        return f"sources restarted, receivers held v{known}" if said == REASONS[1] and known != NONE else said
    return "; ".join(f"rank {rank} seeded: {_why(rows[rank], base, lineage)}" for rank in seeded)


def _why(row: ControlRow, base: int, lineage: int) -> str:
    if row.seed_reason:
        return SEED_REASONS[row.seed_reason]
    if row.receiver_version == NONE:
        return "it had no version"
    if row.receiver_lineage != lineage:
        return "it followed another run"
    kind = "gap" if row.receiver_version < base else "replay"
    return f"{kind}, it held v{row.receiver_version}, sources v{base}"
