"""Notes that ranks leave for each other in the store of the group, where no exchange reaches them.

A channel ends with one `Verdict`, that of the rank that comes first: why it ended, and which ranks that is
about. All others read it and raise the same. It is written before the rank that found it drops its groups, so
whoever sees them drop finds the reason.

The store lives on a rank too, perhaps on the one that is gone, and its client may block for ever. So what is
asked in the thread of the user has an end; what "may block" is for threads of our own.
"""

from __future__ import annotations

import json
import logging
import secrets
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeVar, cast, get_args

import torch.distributed as dist

from dte_dist.errors import DeltaError, FrameError, OrderMismatch, PeerLost
from dte_dist.liveness.deadline import Deadline, within
from dte_dist.liveness.notes import checked, number, read_note

__all__ = ["GRACE", "Board", "Verdict", "late", "names"]

GRACE: Final = 0.5
"""Seconds for the store after a deadline."""

_PATIENCE: Final = 5.0
"""Seconds for the store at any other time."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Kind = Literal["died", "late", "failed", "left", "order"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a channel ended.

    Attributes:
        kind: "died": ranks are gone; "late": ranks did not answer in time; "failed": a rank raised; "left":
            ranks closed the channel on purpose; "order": ranks wait for each other in different channels.
        ranks: of the group that it is about.
        text: what all raise.
        channels: of "order", by number.
        token: tells it from others of the same text.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str
    channels: tuple[int, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Verdict:
        """Return the verdict of a rank on what it met: a lost peer, or an error of its own.

        Example:
            >>> Verdict.of(MemoryError("no room"), 1).text
            'rank 1 failed: MemoryError: no room'
        """
        if isinstance(error, PeerLost):
            return cls("late" if error.late else "died", error.lost, str(error))
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        return cls("failed", (rank,), f"rank {rank} failed: {said}")

    @classmethod
    def parse(cls, data: bytes) -> Verdict:
        """Read what `pack` wrote; if it is damaged, that is the verdict."""
        try:
            return read_note("the verdict on a channel", data, cls._read)
        except FrameError as error:
            return cls("failed", (), str(error), token=f"{zlib.crc32(data):x}")

    @classmethod
    def _read(cls, said: Any) -> Verdict:
        ranks, channels = (tuple(map(number, said[name])) for name in ("ranks", "channels"))
        kind, text, token = (checked(said[name], str) for name in ("kind", "text", "token"))
        if kind not in get_args(Kind):
            raise ValueError(f"{kind[:40]} is no reason")
        return cls(cast(Kind, kind), ranks, text, channels, token)

    def pack(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self))

    def error(self) -> DeltaError:
        """Return the error that a rank raises."""
        if self.kind == "order":
            return OrderMismatch(self.text)
        return PeerLost(
            self.text, lost=self.ranks if self.kind in ("died", "late") else (), late=self.kind == "late"
        )


class Board:
    """The verdict on one channel, and what else concerns it alone.

    Args:
        store: of the channel.
        size: of the group.

    Attributes:
        found: the verdict, once this rank knows it.
        until: when the wait of this rank would have ended; None if it was not waiting. The store may use what
            is left.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = dist.PrefixStore("board", store)
        self._size = size
        self.found: Verdict | None = None
        self.until: Deadline | None = None
        self._asked: Deadline | None = None
        self._has_parted = False

    def settle(self, mine: Verdict, decide: Callable[[], Verdict] | None = None) -> Verdict:
        """Return the verdict of the first rank that called; `mine` if the store cannot be reached in time.

        Args:
            mine: of this rank.
            decide: what to call instead of `decide(mine)`.
        """
        if self.found is None:
            self.found = self._ask(decide or (lambda: self.decide(mine))) or mine
        return self.found

    def decide(self, mine: Verdict) -> Verdict:
        """Return the verdict of the first rank that called, or that ranks closed the channel; may block."""
        if not self._store.check(["verdict"]) and (left := self._left()):
            mine = Verdict("left", tuple(left), f"{names(left)} closed the channel")
        return Verdict.parse(self._store.compare_set("verdict", "", mine.pack()))

    def is_settled(self) -> bool:
        """Return whether there is a verdict, or a rank has closed the channel on purpose; may block."""
        return self._store.check(["verdict"]) or self._store.check(["left"])

    def read(self) -> Verdict | None:
        """Return the verdict, if there is one; may block."""
        self._asked = Deadline(_PATIENCE)
        found = Verdict.parse(self._store.get("verdict")) if self._store.check(["verdict"]) else None
        self._asked = None
        return found

    def leave(self, rank: int) -> None:
        """Say that this rank closes the channel on purpose."""

        def say() -> None:
            self._store.set(f"left/{rank}", "")
            self._store.set("left", "")

        self._ask(say)

    def part(self) -> None:
        """Say that this rank asks no more; the last one of all deletes what is here. Nobody waits for it."""

        def say() -> None:
            if self._store.add("gone", 1) == self._size:
                left = [f"left/{rank}" for rank in range(self._size)]
                for key in ("verdict", "left", *left, "busy", "gone"):
                    self._store.delete_key(key)

        if not self._has_parted:
            self._has_parted = True
            with suppress(RuntimeError, TimeoutError):
                within(Deadline(0), say)

    def tidy(self, delete: Callable[[], object]) -> None:
        """Call what deletes keys of the store; a store that cannot keeps them."""
        self._ask(delete)

    def say_busy(self, is_busy: bool) -> None:
        """Say that this rank compiles, or no longer does: others do not count the time."""
        self._ask(lambda: self._store.add("busy", 1 if is_busy else -1))

    def is_busy(self) -> bool:
        """Return whether a rank compiles; may block."""
        return self._store.check(["busy"]) and self._store.add("busy", 0) > 0

    def _left(self) -> list[int]:
        if not self._store.check(["left"]):
            return []
        return [rank for rank in range(self._size) if self._store.check([f"left/{rank}"])]

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        """Ask the store; None, in bounded time, if it cannot answer."""
        try:
            return within(Deadline(self._patience()), call)
        except (RuntimeError, TimeoutError) as error:
            _log.debug("the store cannot be reached: %s", error)
            return None

    def _patience(self) -> float:
        """Return how long the store may take: what is left of this rank's wait, and a short grace.

        A store that has answered all along is given a little more: it is busy, not gone.
        """
        left = _PATIENCE if self.until is None else self.until.left
        is_silent = self._asked is not None and self._asked.left < _PATIENCE - 1
        return min(_PATIENCE, max(left, GRACE if is_silent else 4 * GRACE))


def names(ranks: Iterable[int]) -> str:
    """Name ranks in a text.

    Example:
        >>> names([3, 1]), names([2])
        ('ranks 1 and 3', 'rank 2')
    """
    *most, last = sorted(ranks)
    return f"ranks {', '.join(map(str, most))} and {last}" if most else f"rank {last}"


def late(ranks: Iterable[int], verb: str, seconds: float) -> PeerLost:
    """Return the error of a wait that was too long.

    Example:
        >>> print(str(late([2], "answer", 60.0)).partition(".")[0])
        rank 2 did not answer within 60 s
    """
    missing = tuple(sorted(ranks))
    hint = (
        "call again on all ranks, with a longer timeout= if they may take so long, "
        "or with a group of the rest"
    )
    return PeerLost(
        f"{names(missing)} did not {verb} within {seconds:g} s", lost=missing, late=True, hint=hint
    )
