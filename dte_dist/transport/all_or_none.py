"""Every rank or no rank: an error on one rank reaches all, with the same text.

A rank that raised at once would leave the others waiting for it until their timeout. So it stays, and:

1.   A call that can fail on one rank alone is made by `capture_error` or `capture`, which keep the error. The
     rank goes on with nothing to give.
2. o The next row that the ranks exchange begins with whether this rank failed (`raise_if_any`). If none did,
     all go on.
3. o If one did, all exchange the text of their errors, and raise that of the lowest rank (`raise_together`).
4.   An error that every rank raises is marked: it comes as `AgreedError`. So is the error in what all ranks
     have seen alike, and judge alike (`agreed`). The ranks are in step then, and may go on with the same
     groups.
5.   After any other error they are not: a peer is lost, or this rank is about to be, because what it got is
     damaged (`DamagedRow`), say. It says so on the `Board` of the channel, unless another rank has, and drops
     its groups, which wakes the others. All raise what the first one said (`end_together`).

Steps with a ring (o) are exchanges. Errors travel as `errors.to_wire` writes them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeVar

import numpy as np

from dte_dist.errors import ChannelClosed, DeltaError, FrameError, PeerLost, from_wire, to_wire
from dte_dist.liveness.watch import Watch
from dte_dist.transport.communicator import Communicator
from dte_dist.transport.guard import DamagedRow

__all__ = [
    "AgreedError",
    "agreed",
    "capture",
    "capture_error",
    "end_together",
    "forget_frames",
    "raise_if_any",
    "raise_together",
]

_TEXT_BYTES: Final = 4096
_OWN, _FOUND = 1, 2

_T = TypeVar("_T")


class AgreedError(Exception):
    """Carries an error that every rank raises: the ranks are in step, so what they have open stays usable.

    Attributes:
        error: to be raised; its cause, if it has one, is what went wrong on this rank.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def agreed(call: Callable[[], _T]) -> _T:
    """Call something that raises on every rank or on none, and mark its error so.

    Raises:
        AgreedError: with the error of the family, or the ValueError, that it raises.
        Exception: anything else, a `PeerLost` and a `DamagedRow` as they are: no other rank need have seen
            it.

    Example:
        >>> agreed(lambda: max([1, 2]))
        2
        >>> agreed(lambda: max([]))
        Traceback (most recent call last):
            ...
        dte_dist.transport.all_or_none.Agreed...
    """
    try:
        return call()
    except (PeerLost, DamagedRow):
        raise
    except (DeltaError, ValueError) as error:
        raise AgreedError(error) from None


def capture(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what a call returns, or the error that it raises: it is told to all ranks in the next row.

    Example:
        >>> capture(lambda: 3)
        (3, None)
    """
    try:
        return call(), None
    except Exception as error:
        return None, error


def capture_error(call: Callable[[], object]) -> Exception | None:
    """Call something; return what it raises: it is told to all ranks in the next row.

    Example:
        >>> capture_error(lambda: int("one"))
        ValueError("invalid literal for int() with base 10: 'one'")
    """
    return capture(call)[1]


def raise_if_any(
    wire: Communicator,
    error: Exception | None,
    said: Sequence[int] | np.ndarray = (),
    *,
    unsaid: Exception | None = None,
) -> np.ndarray:
    """Exchange a row, and raise the same error on every rank if any rank has one; all members must call.

    A rank that could not send what it should makes others find damaged frames: a `FrameError` counts only if
    no rank has another error.

    Args:
        wire: a group of the ranks concerned; over gloo.
        error: of this rank, None if all is well.
        said: numbers to tell the others, on every rank as many.
        unsaid: as for `raise_together`.

    Returns:
        What all members say, int64[members, len(said)].

    Raises:
        AgreedError: with the error of the lowest rank that has one.
        PeerLost: a rank did not answer.

    Example:
        >>> from datetime import timedelta
        >>> from dte_dist.transport.communicator import Membership
        >>> alone = Membership(0, 1, (0,), dist.HashStore(), "cpu:gloo", timedelta(seconds=60))
        >>> raise_if_any(Communicator("control", [0], alone, "gloo"), None, [7]).tolist()
        [[7]]
    """
    rows = wire.all_gather_rows(np.array([_mark(error), *said], np.int64))
    if rows[:, 0].any():
        counts = rows[:, 0] == (_OWN if (rows[:, 0] == _OWN).any() else _FOUND)
        among = [rank for rank, counted in zip(wire.members, counts, strict=True) if counted]
        raise_together(wire, error, unsaid=unsaid, among=among)
    return rows[:, 1:]


def _mark(error: Exception | None) -> int:
    """Return what to say of an error: none, one of this rank's own, or one in what came from others."""
    if error is None:
        return 0
    return _FOUND if isinstance(error, FrameError) or isinstance(error.__cause__, FrameError) else _OWN


def raise_together(
    wire: Communicator,
    error: Exception | None,
    *,
    unsaid: Exception | None = None,
    among: Sequence[int] | None = None,
) -> NoReturn:
    """Raise, on every rank, the error of the lowest rank that has one; all members must call, at least one
    with an error.

    The text says on which ranks it was raised, unless all raise the same. On these ranks the original error
    is the cause.

    Args:
        wire: a group of the ranks concerned; over gloo.
        error: of this rank, None if it has none.
        unsaid: raised instead if, against the rule, no rank has one; by default a `FrameError`, which is
            agreed, too.
        among: ranks whose errors count, the same on all members; None for all.

    Raises:
        AgreedError: with that error.
        PeerLost: a rank did not answer.
    """
    texts = wire.all_gather_bytes(to_wire(error, _TEXT_BYTES) if error is not None else bytes(_TEXT_BYTES))
    said = zip(wire.members, texts, strict=True)
    failed = {rank: text for rank, text in said if text.strip(b"\0") and (among is None or rank in among)}
    told = from_wire(next(iter(failed.values()))) if failed else None
    if told is None:
        what, expected = "a rank said that it failed, but not how", "the text of an error"
        raise unsaid or AgreedError(FrameError(what, expected=expected, got="nothing", hint="call again"))
    is_common = len(failed) == len(wire.members) and len(set(failed.values())) == 1
    where = f" (raised on rank {', '.join(map(str, failed))} of the group)"
    text = str(told) if is_common else f"{told}{where}"
    facts = {"lost": told.lost, "late": told.late} if isinstance(told, PeerLost) else {}
    marked = AgreedError(type(told)(text, **facts))
    marked.error.__cause__ = error
    raise marked


def end_together(
    error: BaseException,
    watch: Watch,
    drop: Callable[[str], None],
    *,
    left: Callable[[Sequence[int]], ChannelClosed] | None = None,
) -> DeltaError:
    """Drop what was open after an error that is not agreed, and return the error that all survivors raise.

    Args:
        error: that ended it: a `PeerLost`, or what failed on this rank, of which the others only see that
            they lose it.
        watch: of the channel.
        drop: closes the groups of this rank, and notes why.
        left: makes the error to raise if the ranks it is given closed theirs on purpose; None if that makes
            no difference.
    """
    forget_frames(error)
    verdict = watch.settle(error)  # before the groups drop: the others are to raise it, not that they lose us
    drop(f"{type(error).__name__} in an earlier call: {error}")
    if verdict.kind == "left" and left is not None:
        return left(verdict.ranks)
    return watch.raised(verdict).error()


def forget_frames(error: BaseException | None) -> None:
    """Drop what an error's frames hold: operations hold connections, and peers would not learn that we
    left.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
