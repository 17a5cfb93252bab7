"""The errors of dte_dist: one family, raised with the same text on every rank of the group.

An error that starts on one rank travels: it is written to bytes with `to_wire`, gathered, and every
rank raises what `from_wire` makes of it. The classes below are therefore rebuilt from their name and
text alone. Wrong arguments stay `ValueError`; everything else is a `DeltaError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "ApplyFailed",
    "ChannelClosed",
    "DeltaError",
    "FrameError",
    "LayoutMismatch",
    "OrderMismatch",
    "PeerLost",
    "SyncFailed",
    "VersionError",
    "VersionGap",
    "VersionReplay",
    "VersionRestart",
    "from_wire",
    "to_wire",
]


class DeltaError(RuntimeError):
    """Base of every error of dte_dist that is not a wrong argument.

    Args:
        what: what is wrong, in one sentence without a full stop.
        tensor: name of the tensor concerned, if there is one.
        ranks: ranks of the group concerned, if known.
        expected: what should have been there.
        got: what was there.
        hint: what the user can do about it.

    Example:
        >>> print(DeltaError("shapes differ", tensor="w", ranks=[2], expected=(4, 4), got=(4, 5),
        ...     hint="build the same model"))
        shapes differ [tensor 'w'; ranks 2; expected (4, 4); got (4, 5)]. Hint: build the same model.
    """

    def __init__(
        self,
        what: str,
        *,
        tensor: str | None = None,
        ranks: Iterable[int] | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        facts = [
            f"tensor {tensor!r}" if tensor is not None else "",
            f"ranks {', '.join(map(str, ranks))}" if ranks is not None else "",
            f"expected {expected}" if expected is not None else "",
            f"got {got}" if got is not None else "",
        ]
        known = "; ".join(fact for fact in facts if fact)
        text = what + (f" [{known}]" if known else "") + (f". Hint: {hint}." if hint else "")
        # half a character, in a name of another rank say, could not be told to others
        super().__init__(text.encode("utf-8", "backslashreplace").decode())


class LayoutMismatch(DeltaError):
    """The ranks do not describe the same model, or a placement cannot be handled.

    Example:
        >>> sent = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 4)})
        >>> held = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 5)})
        >>> try:
        ...     dte_dist.Plan.between({0: sent}, {1: held})
        ... except dte_dist.LayoutMismatch as error:
        ...     print(error)
        shapes differ [tensor 'w'; ranks 1; expected (4, 4); got (4, 5)]. Hint: build the same model on both
        sides, ...
    """


class FrameError(DeltaError):
    """A frame is damaged or does not belong here: nothing of it has been applied.

    Example:
        >>> try:
        ...     dte_dist.payload_of({"w": torch.zeros(2)})
        ... except dte_dist.FrameError as error:
        ...     print(error)
        a payload without a header is a full one, and does not say its version [expected version=; got none].
        Hint: ...
    """


class VersionError(DeltaError):
    """A version does not follow from the one that is held.

    Example:
        >>> try:
        ...     dte_dist.delta_broadcast(model, version=7 if rank == 0 else 8)
        ... except dte_dist.VersionError as error:  # on every rank
        ...     print(error)
        version= differs between ranks [ranks ...; got 7 on rank 0, 8 on rank ...]. Hint: pass the same
        version= on every source; ...
    """


class VersionGap(VersionError):
    """A delta starts from a later version than the receiver holds: one in between was lost.

    Example:
        >>> engine = dte_dist.DeltaEngine(dte_dist.LoopbackTransport())
        >>> weights, copy = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
        >>> for version in (1, 2):
        ...     engine.push(weights, version)
        >>> try:
        ...     engine.pull(copy, version=2)  # a delta from version 1, which this copy never had
        ... except dte_dist.VersionGap:
        ...     engine.push(weights, version=3, full=True)
        ...     engine.pull(copy, version=3)
        >>> engine.version
        3
    """


class VersionReplay(VersionError):
    """A version that the receiver already holds, or an older one, was asked for again.

    Example:
        >>> report = dte_dist.delta_broadcast(model, version=7)
        >>> try:
        ...     report = dte_dist.delta_broadcast(model, version=7)
        ... except dte_dist.VersionReplay:
        ...     report = dte_dist.delta_broadcast(model)  # the next version
        >>> report.version
        8
    """


class VersionRestart(VersionError):
    """A delta comes from another run of the trainer than the one the receiver follows.

    Example:
        >>> transport = dte_dist.LoopbackTransport()
        >>> weights, copy = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
        >>> receiver = dte_dist.DeltaEngine(transport)
        >>> for run in range(2):  # the second run of the trainer counts anew
        ...     sender = dte_dist.DeltaEngine(transport)
        ...     sender.push(weights, version=1)
        ...     try:
        ...         receiver.pull(copy, version=1)
        ...     except dte_dist.VersionRestart:
        ...         sender.push(weights, version=2, full=True)
        ...         receiver.pull(copy, version=2)
        >>> receiver.version
        2
    """


class OrderMismatch(DeltaError):
    """Ranks waited for each other in different channels of one group.

    They made their calls in different orders, or with other modules. Nothing has moved. The channels
    concerned are dropped, and the next calls open new ones, in which no receiver needs a seed.

    Example:
        >>> other = torch.nn.Linear(3, 3)
        >>> for module in (model, other):
        ...     report = dte_dist.delta_broadcast(module)
        >>> try:
        ...     dte_dist.delta_broadcast(other if rank == 3 else model, timeout=5)
        ... except dte_dist.OrderMismatch:
        ...     report = dte_dist.delta_broadcast(model)  # in one order on all ranks
        >>> report.seeded
        ()
    """


class PeerLost(DeltaError):
    """A rank died, closed its connections or did not answer in time; the channel is unusable.

    All survivors raise it with the same text. Who is late only may come back: call again until all have met,
    at most as often as you like. Who died does not: form a group of the others.

    Args:
        what: as for `DeltaError`.
        lost: ranks of the group that are missing.
        late: they did not answer in time, and may be alive.
        facts: as for `DeltaError`.

    Attributes:
        lost, late: as passed.

    Example:
        >>> while True:
        ...     try:
        ...         report = dte_dist.delta_broadcast(model, timeout=60)
        ...         break
        ...     except dte_dist.PeerLost as error:
        ...         if not error.late:
        ...             # form a group without error.lost; who is at the right version needs no seed in it
        ...             raise
        >>> report.version
        1
    """

    def __init__(self, what: str, *, lost: Iterable[int] = (), late: bool = False, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.lost = tuple(lost)
        self.late = late


class ChannelClosed(DeltaError):
    """The channel was closed, or broke in an earlier call.

    Example:
        >>> transport = dte_dist.LoopbackTransport()
        >>> transport.close()
        >>> try:
        ...     transport.receive(1, timeout=1)
        ... except dte_dist.ChannelClosed as error:
        ...     print(error)
        the transport is closed. Hint: make a new one.
    """


class ApplyFailed(DeltaError):
    """A rank failed after the vote, while writing: it has no version and is seeded again by the next sync.

    Example:
        >>> try:
        ...     report = dte_dist.delta_broadcast(model)
        ... except dte_dist.ApplyFailed:
        ...     report = dte_dist.delta_broadcast(model)  # report.seeded names the rank
        >>> report.version
        1
    """


class SyncFailed(DeltaError):
    """Code of the caller (a detector, say) or of the machine raised during a sync; nothing moved.

    Example:
        >>> report = dte_dist.delta_broadcast(model)
        >>> def broken(live, known):
        ...     raise RuntimeError("no room for flags")
        >>> try:
        ...     dte_dist.delta_broadcast(model, detector=broken if rank == 1 else None)
        ... except dte_dist.SyncFailed as error:  # on every rank
        ...     print(error)
        RuntimeError: no room for flags (raised on rank 1 of the group)
    """


_FAMILY: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        DeltaError,
        LayoutMismatch,
        FrameError,
        VersionError,
        VersionGap,
        VersionReplay,
        VersionRestart,
        OrderMismatch,
        PeerLost,
        ChannelClosed,
        ApplyFailed,
        SyncFailed,
        ValueError,
    )
}


def to_wire(error: BaseException, size: int) -> bytes:
    """Write an error as exactly `size` bytes: its class name, a line break, its text, zeros.

    Behind the name of a `PeerLost` stand its ranks, and "late" if they are: "PeerLost 1 3 late".

    An error from outside the family becomes a `SyncFailed` that names its class; one of a subclass, the class
    of the family that it is a subclass of.

    Example:
        >>> from_wire(to_wire(FrameError("cut short"), 64))
        FrameError('cut short')
    """
    name = type(error).__name__
    if isinstance(error, DeltaError):
        name = next(each.__name__ for each in type(error).__mro__ if _FAMILY.get(each.__name__) is each)
    try:
        text = str(error)
    except Exception as inner:  # an error must not be lost because it cannot say what it is
        text = f"(its text raises {type(inner).__name__})"
    if name not in _FAMILY:
        name, text = SyncFailed.__name__, f"{name}: {text}"
    if isinstance(error, PeerLost):
        name = " ".join([name, *map(str, error.lost), *(["late"] if error.late else [])])
    encoded = f"{name}\n{text}".encode("utf-8", "backslashreplace")[:size]
    return encoded.decode("utf-8", "ignore").encode().ljust(size, b"\0")


def from_wire(data: bytes) -> Exception | None:
    """Read what `to_wire` wrote; None for all zeros (no error).

    Example:
        >>> from_wire(bytes(64)) is None
        True
    """
    text = data.rstrip(b"\0").decode("utf-8", "replace")
    if not text:
        return None
    head, _, message = text.partition("\n")
    name, _, rest = head.partition(" ")
    if name == PeerLost.__name__:
        ranks = [int(word) for word in rest.split() if word.isdecimal() and len(word) < 10]
        return PeerLost(message, lost=ranks, late="late" in rest.split())
    return _FAMILY.get(name, SyncFailed)(message)
