"""What carries payloads from one sender to its receivers: the interface, and the payload itself.

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
    """Everything that leads from one version to the next, as named tensors; nobody writes to them any more.

    Attributes:
        version: that it makes.
        base_version: that it starts from; -1 if it is full.
        full: every tensor is there, whole.
        tensors: a header and, by name, whole tensors or pairs of positions and values; see `engine.payload`.
        stream: random number of the run that holds `version`, 0 if not known; receivers tell a restart by it.
        base_stream: the same of `base_version`; it differs where a push in between may or may not have arrived.

    Example:
        >>> payload = Payload(8, 7, False, {})
        >>> payload.nbytes
        0
    """

    version: int
    base_version: int
    full: bool
    tensors: Mapping[str, Tensor]
    stream: int = 0
    base_stream: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Transport(ABC):
    """Carries payloads; subclass it to send them over anything.

    `send` returns once the payload is safe: the sender then builds the next delta on it. It raises whatever went wrong otherwise, and
    may be called again with the same version. Payloads are kept for receivers that come later, as many as the transport has room for.

    Example:
        >>> class Log(Transport):
        ...     def send(self, payload, *, timeout): self.last = payload
        ...     def receive(self, version, *, timeout): return self.last
        ...     def close(self): pass
    """

    @abstractmethod
    def send(self, payload: Payload, *, timeout: float) -> None:
        """Send a payload; one of the same version that is still kept is replaced.

        Args:
            payload: of which nothing may be changed.
            timeout: seconds.

        Raises:
            PeerLost: it could not be handed over in time.
            ChannelClosed: the transport is closed.
        """

    @abstractmethod
    def receive(self, version: int, *, timeout: float) -> Payload:
        """Return the payload that makes `version`, waiting for it.

        Raises:
            PeerLost: it did not come in time.
            VersionGap: it is not kept any more, or was left out.
            ChannelClosed: the transport is closed.
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
