"""A transport inside one process: for tests, examples, and trainers and rollouts that share a process."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from dte_dist.codec.named_tensors import Payload
from dte_dist.errors import ChannelClosed, PeerLost, VersionGap
from dte_dist.liveness.threads import Latch
from dte_dist.transport.base import Transport, check_timeout

__all__ = ["LoopbackTransport"]


class LoopbackTransport(Transport):
    """Hand payloads from any number of senders to any number of receivers in the same process; any threads
    may call it.

    `send` never waits. A payload may be received any number of times, as long as it is kept.

    Args:
        history: how many of the payloads sent last are kept, of each sender.

    Raises:
        ValueError: `history` is no positive number.

    Example:
        >>> transport = dte_dist.LoopbackTransport(history=4)
        >>> transport.send(dte_dist.Payload(1, -1, True, {}), timeout=1)
        >>> transport.receive(1, timeout=1).version
        1
    """

    def __init__(self, *, history: int = 16) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ValueError(f"history is a positive number of payloads, not {history!r}")
        self._room = history
        self._kept: dict[int, dict[int, Payload]] = {}
        self._last: dict[int, int] = {}
        self._closed = False
        self._guard = threading.Lock()
        self._moved = Latch()

    def send(self, payload: Payload, *, timeout: timedelta | float) -> None:
        """Keep a payload for receivers, and drop the sender's oldest if there is no room; never waits.

        Example:
            >>> transport = dte_dist.LoopbackTransport(history=1)
            >>> for version in (1, 2):
            ...     transport.send(dte_dist.Payload(version, -1, True, {}), timeout=1)
            >>> transport.receive(2, timeout=1).version  # version 1 is dropped
            2
        """
        check_timeout(timeout)
        with self._guard:
            self._refuse_closed()
            kept = self._kept.setdefault(payload.sender, {})
            kept.pop(payload.version, None)
            kept[payload.version] = payload
            self._last[payload.sender] = payload.version
            while len(kept) > self._room:
                del kept[next(iter(kept))]
            self._wake()

    def receive(self, version: int, *, sender: int = 0, timeout: timedelta | float) -> Payload:
        """Return the payload of a sender that makes `version`, waiting for it if the sender has not come so
        far.

        Example:
            >>> transport = dte_dist.LoopbackTransport()
            >>> transport.send(dte_dist.Payload(1, -1, True, {}), timeout=1)
            >>> transport.receive(1, timeout=1) is transport.receive(1, timeout=1)
            True
        """
        seconds = check_timeout(timeout)
        end = time.monotonic() + seconds
        while True:
            with self._guard:
                self._refuse_closed()
                kept = self._kept.get(sender, {})
                if version in kept:
                    return kept[version]
                got = f"v{', v'.join(map(str, kept))}" if kept else "nothing"
                left_out = version < self._last.get(sender, -1)
                moved = self._moved
            if left_out or not moved.wait(end - time.monotonic()):
                break
        if left_out:
            hint = "pull every version, keep a longer history, or push a full one"
            raise VersionGap(
                "a version is not kept, or was never sent",
                ranks=[sender],
                expected=f"v{version}",
                got=got,
                hint=hint,
            )
        expected = f"v{version} in {seconds:g} s"
        raise PeerLost(
            "a version did not come in time",
            ranks=[sender],
            expected=expected,
            got=got,
            hint="look after the sender",
        )

    def close(self) -> None:
        """Drop all payloads and wake whoever waits.

        Example:
            >>> transport = dte_dist.LoopbackTransport()
            >>> transport.close()
            >>> transport.receive(1, timeout=1)
            Traceback (most recent call last):
                ...
            dte_dist.errors.ChannelClosed: the transport is closed. Hint: make a new one.
        """
        with self._guard:
            self._closed = True
            self._kept.clear()
            self._wake()

    def _wake(self) -> None:
        """Have all that wait look again."""
        moved = self._moved
        self._moved = Latch()
        moved.set()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ChannelClosed("the transport is closed", hint="make a new one")
