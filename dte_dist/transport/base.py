"""Transports carry payloads from senders to their receivers: the interface.

A transport moves whole payloads and never looks into them. `codec.named_tensors` says what the tensors of a
payload mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from dte_dist.codec.named_tensors import Payload

__all__ = ["TIMEOUT", "Check", "Transport", "check_timeout"]

TIMEOUT: Final = timedelta(minutes=10)
"""How long any one wait for another rank may take, unless the caller says otherwise."""

_SHORTEST: Final = 1e-3
"""Seconds; torch counts a timeout in whole milliseconds, and to it none at all means to wait for ever."""

_LONGEST: Final = 1e9
"""Seconds; past 292 years the nanoseconds of a deadline do not fit the integers that torch counts them in."""

Check = Callable[[Payload], object]
"""Raises if the receiver cannot take a payload."""


class Transport(ABC):
    """Carries payloads; subclass it to send them over anything.

    `send` returns once the payload is safe: the sender then builds the next delta on it. It raises whatever
    went wrong otherwise, and may be called again with the same version. A transport that keeps payloads (a
    store, a disk, memory) gives them to receivers that come later; one that does not (a process group) needs
    sender and receivers to meet, and says so.

    A transport of bytes carries `dte_dist.payload_to_frames(payload)`, and gives out
    `dte_dist.payload_from_frames`: what is damaged on the way is a `FrameError`.

    With several senders, each sends its own payload of a version, and a receiver asks for those of the
    senders it needs, one by one.

    Example:
        >>> class Folder(dte_dist.Transport):
        ...     def __init__(self, path):
        ...         self.path = path
        ...     def send(self, payload, *, timeout):
        ...         torch.save(dict(payload.tensors), f"{self.path}/{payload.version}.pt")
        ...     def receive(self, version, *, sender=0, timeout):
        ...         return dte_dist.payload_of(torch.load(f"{self.path}/{version}.pt"), version)
        ...     def close(self):
        ...         pass
        >>> from tempfile import TemporaryDirectory
        >>> copy = torch.zeros(3)
        >>> with TemporaryDirectory() as path:
        ...     engine = dte_dist.DeltaEngine(Folder(path))
        ...     engine.push({"w": torch.ones(3)}, version=1)
        ...     engine.pull({"w": copy}, version=1)
        >>> copy
        tensor([1., 1., 1.])
    """

    @abstractmethod
    def send(self, payload: Payload, *, timeout: float) -> None:
        """Send a payload; one of the same sender and version that is still kept is replaced.

        Args:
            payload: of which nothing may be changed.
            timeout: seconds.

        Raises:
            PeerLost: it could not be handed over in time.
            ChannelClosed: the transport is closed.

        Example:
            >>> transport = dte_dist.LoopbackTransport()
            >>> transport.send(dte_dist.Payload(1, -1, True, {"w": torch.ones(3)}), timeout=1)
        """

    @abstractmethod
    def receive(self, version: int, *, sender: int = 0, timeout: float) -> Payload:
        """Return the payload of a sender that makes `version`, waiting for it.

        Args:
            version: of the payload.
            sender: `Payload.sender`.
            timeout: seconds.

        Raises:
            PeerLost: it did not come in time.
            VersionGap: it is not kept any more, or was left out.
            ChannelClosed: the transport is closed.

        Example:
            >>> transport = dte_dist.LoopbackTransport()
            >>> transport.send(dte_dist.Payload(1, -1, True, {"w": torch.ones(3)}), timeout=1)
            >>> transport.receive(1, timeout=1).tensors
            {'w': tensor([1., 1., 1.])}
        """

    def receive_checked(self, version: int, check: Check, *, sender: int = 0, timeout: float) -> Payload:
        """Do what `receive` does, and have the payload checked before its sender is told that it came.

        For a transport whose senders do not wait for receivers this is `receive`, and then `check`.

        Args:
            version, sender, timeout: as for `receive`.
            check: raises if the receiver cannot take the payload; it may be called more than once.

        Example:
            >>> transport = dte_dist.LoopbackTransport()
            >>> transport.send(dte_dist.Payload(1, -1, True, {"w": torch.ones(3)}), timeout=1)
            >>> transport.receive_checked(1, lambda payload: print(payload.nbytes), timeout=1).version
            12
            1
        """
        payload = self.receive(version, sender=sender, timeout=timeout)
        check(payload)
        return payload

    def check_plan(self, plan: bytes, rank: int | None) -> None:  # noqa: B027
        """Refuse an engine that follows another plan than the transport, or as another rank; a transport
        without a plan takes any.

        Args:
            plan: `Plan.digest()` of the engine's plan; empty if it has none.
            rank: of the engine in it; None if it has none.

        Raises:
            LayoutMismatch: plan or rank differ.

        Example:
            >>> transport = dte_dist.LoopbackTransport()  # it has no plan
            >>> transport.check_plan(b"", None)
        """

    def fail(  # noqa: B027
        self, error: Exception, *, timeout: float, version: int | None = None
    ) -> None:
        """Tell ranks that may be waiting for this one why it will not send or receive; nobody waits unless a
        transport says so.

        Args:
            error: what is wrong here; the engine raises it next, unless this raises what all ranks raise.
            timeout: seconds.
            version: that this rank was to send or receive, if it was one.

        Example:
            >>> transport = dte_dist.LoopbackTransport()  # nobody waits for its senders
            >>> transport.fail(ValueError("no weights to send"), timeout=1)
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; whoever waits gets a `ChannelClosed`. May be called twice.

        Example:
            >>> transport = dte_dist.LoopbackTransport()
            >>> transport.close()
            >>> transport.close()
        """


def check_timeout(timeout: timedelta | float) -> float:
    """Return a timeout in seconds.

    Args:
        timeout: seconds or a timedelta, from a millisecond to 10^9 seconds (31 years).

    Raises:
        ValueError: it is something else.

    Example:
        >>> check_timeout(3), check_timeout(timedelta(minutes=2))
        (3.0, 120.0)
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not _SHORTEST <= seconds <= _LONGEST
    ):
        raise ValueError(
            f"timeout is a timedelta or a number of seconds, from 0.001 to 10^9, not {timeout!r}"
        )
    return float(seconds)
