"""What carries payloads from senders to their receivers: the interface, and the payload itself.

A transport moves whole payloads and never looks into them. `engine.payload` says what the tensors of a payload mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Payload", "Transport", "check_timeout"]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Everything that leads from one version of what a sender holds to the next, as named tensors; nobody writes to them any more.

    Attributes:
        version: that it makes.
        base_version: that it starts from; -1 if it is full.
        full: every tensor is there, whole.
        tensors: a header and, by name, whole tensors or pairs of positions and values; see `engine.payload`.
        lineage: random number of the run that holds `version`, 0 if not known; receivers tell a restart by it.
        base_lineage: the same of `base_version`; it differs where a push in between may or may not have arrived.
        sender: rank of the sender in the plan; 0 if there is no plan.
        plan: digest of the plan, if the sender is one of several and sends its share of each tensor; empty if it sends whole tensors.

    Example:
        >>> payload = Payload(8, 7, False, {})
        >>> payload.nbytes, payload.sender
        (0, 0)
    """

    version: int
    base_version: int
    full: bool
    tensors: Mapping[str, Tensor]
    lineage: int = 0
    base_lineage: int = 0
    sender: int = 0
    plan: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Transport(ABC):
    """Carries payloads; subclass it to send them over anything.

    `send` returns once the payload is safe: the sender then builds the next delta on it. It raises whatever went wrong otherwise, and
    may be called again with the same version. A transport that keeps payloads (a store, a disk, memory) gives them to receivers
    that come later; one that does not (a process group) needs sender and receivers to meet, and says so.

    With several senders, each sends its own payload of a version, and a receiver asks for those of the senders it needs, one by one.

    Example:
        >>> class Log(Transport):
        ...     def send(self, payload, *, timeout): self.last = payload
        ...     def receive(self, version, *, sender=0, timeout): return self.last
        ...     def close(self): pass
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
        """

    def fail(self, error: Exception, *, timeout: float) -> None:  # noqa: B027
        """Tell ranks that may be waiting for this one why it will not send or receive; nobody waits unless a transport says so.

        Args:
            error: what is wrong here; the engine raises it next, unless this raises what all ranks raise.
            timeout: seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; whoever waits gets a `ChannelClosed`. May be called twice."""


def check_timeout(timeout: float) -> float:
    """Return a timeout that is a positive number of seconds.

    Raises:
        ValueError: it is not.

    Example:
        >>> check_timeout(3)
        3.0
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is a positive number of seconds, not {timeout!r}")
    return float(timeout)
