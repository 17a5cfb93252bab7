"""The p2p route: frames go from each source straight to the receivers that hold their elements; no rank
relays.

For one sync, whose frame sizes every rank knows:

1. There are as many steps as there are sources or receivers, whichever are more. In step t, source number i
   sends to receiver number i + t (modulo the steps): every rank has one partner to send to and one to receive
   from, whatever the numbers. Where there is no such partner, or nothing to say, the step passes without a
   message, and later steps keep their partners.
2. Within a step a rank starts to send its n-th frame and to receive the n-th frame of its partner, waits for
   the latter, starts both with the next ones, and unpacks it meanwhile. At most two sends and two receives
   are in flight, in two buffers each unless they are kept.
3. A rank that is source and receiver hands itself its frames; they never touch the network.

Nothing can block in a circle: the rank that is furthest behind waits only for what its partners have started
already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dte_dist.errors import PeerLost
from dte_dist.report import Phases
from dte_dist.transport.buffers import Buffers, Frame, lies_on, write
from dte_dist.transport.communicator import Communicator, Pending

__all__ = ["Arrived", "PairwiseExchange", "Sized"]

_NOBODY: Final = -1

Sized = tuple[int, Frame]
"""A frame and its bytes."""

Arrived = tuple[int, int, Tensor]
"""A frame on a target: (source, number, frame)."""


@dataclass(frozen=True, slots=True)
class _Round:
    """The part of this rank in one round.

    Attributes:
        to, frames: whom it sends to, and what.
        source, chunks: whom it receives from, and number and size of each frame.
    """

    to: int
    frames: Sequence[Sized]
    source: int
    chunks: Sequence[tuple[int, int]]


class PairwiseExchange:
    """Moves frames between pairs of ranks.

    Args:
        wire: a group of all sources and receivers; None if that is one rank.
        rank: of this rank in the user's group.
        sources: group ranks of the sources, in the order all ranks agree on.

    Attributes:
        error: why this rank could not keep the frames of the last `move`, so that not all were given out;
            None if they were.
    """

    def __init__(self, wire: Communicator | None, *, rank: int, sources: Sequence[int]) -> None:
        self._wire = wire
        self._rank = rank
        self._sources = tuple(sources)
        self._incoming = Buffers()
        self._outgoing = Buffers()
        self._own = Buffers()
        self._sent = 0

    def reserve(self, most: Mapping[int, Sequence[int]], *, receiver: bool) -> None:
        """Make room for frames before ranks are in step; to call where an error is told to all of them.

        Args:
            most: by source, the most bytes of each of its frames.
            receiver: this rank may be a target.
        """
        largest = max(map(max, filter(None, most.values())), default=0)
        if receiver:
            self._incoming.reserve(largest, self._device)
        if self._rank in most:
            self._outgoing.reserve(largest, self._device)
        if receiver and self._rank in most:
            self._own.reserve(largest, self._device)

    @property
    def _device(self) -> torch.device:
        """Where frames travel."""
        return torch.device("cpu") if self._wire is None else self._wire.device

    def move(
        self,
        outgoing: Mapping[int, Sequence[Sized]],
        incoming: Mapping[int, Sequence[int]],
        targets: Sequence[int],
        phases: Phases,
        *,
        keep: bool = False,
    ) -> Iterator[Arrived]:
        """Move the frames of one sync, and yield each on a target; all sources and all targets must call, and
        go through it to the end.

        A frame stays as it is until the next one only, unless frames are kept.

        Args:
            outgoing: on a source, its frames for each target, by chunk, with their sizes; those of no bytes
                are not sent.
            incoming: on a target, the sizes of the frames of each source, by chunk.
            targets: the receivers, ascending.
            phases: where the time goes.
            keep: frames stay as they are for as long as somebody holds them.
        """
        self._incoming.begin()
        sending: deque[Pending] = deque()
        for step in range(max(len(self._sources), len(targets))):
            to, source = self._partners(step, targets)
            frames = (
                [(size, frame) for size, frame in outgoing.get(to, ()) if size] if to != self._rank else []
            )
            if source == self._rank:
                yield from self._hand_over(outgoing[source], phases, keep)
                source = _NOBODY
            now = _Round(
                to,
                frames,
                source,
                [(chunk, size) for chunk, size in enumerate(incoming.get(source, ())) if size],
            )
            going = self._start(now, 0, sending, phases, keep)
            for number in range(max(len(frames), len(now.chunks))):
                frame, pending = going
                if pending is not None:
                    _wait(pending, phases)
                going = self._start(now, number + 1, sending, phases, keep)
                if frame is not None and self._incoming.error is None:
                    yield source, now.chunks[number][0], frame
        for pending in sending:
            _wait(pending, phases)

    @property
    def error(self) -> Exception | None:
        """Why frames could not be kept."""
        return self._incoming.error

    def _partners(self, step: int, targets: Sequence[int]) -> tuple[int, int]:
        """Return whom this rank sends to and receives from in one step; `_NOBODY` where there is none."""
        steps = max(len(self._sources), len(targets))
        to = source = _NOBODY
        if self._rank in self._sources:
            place = (self._sources.index(self._rank) + step) % steps
            to = targets[place] if place < len(targets) else _NOBODY
        if self._rank in targets:
            place = (targets.index(self._rank) - step) % steps
            source = self._sources[place] if place < len(self._sources) else _NOBODY
        return to, source

    def _hand_over(self, frames: Sequence[Sized], phases: Phases, keep: bool) -> Iterator[Arrived]:
        """Yield this rank's own frames, wherever they lie."""
        for chunk, (size, frame) in enumerate(frames):
            if size:
                with phases("encode"):
                    made = self._made(self._own, 0, (size, frame), keep=keep) if callable(frame) else frame
                yield self._rank, chunk, made

    def _made(self, buffers: Buffers, number: int, sized: Sized, *, keep: bool = False) -> Tensor:
        """Return a frame, written into a buffer if it is only made now, or does not lie where it travels."""
        size, frame = sized
        if lies_on(frame, self._device):
            return frame
        place = buffers.get(number, size, self._device, keep=keep)
        write(frame, place)
        return place

    def _start(
        self, now: _Round, number: int, sending: deque[Pending], phases: Phases, keep: bool
    ) -> tuple[Tensor | None, Pending | None]:
        """Start to send frame `number`, once at most one other is on its way, and to receive the partner's;
        return the latter.
        """
        frame: Tensor | None = None
        outgoing = incoming = None
        if number < len(now.frames):
            while len(sending) > 1:
                _wait(sending.popleft(), phases)
            with phases("encode"):
                made = self._made(self._outgoing, self._sent, now.frames[number])
            self._sent += 1
            outgoing = made, now.to
        if number < len(now.chunks):
            frame = self._incoming.get(number, now.chunks[number][1], self._reach().device, keep=keep)
            incoming = frame, now.source
        sent, received = self._reach().send_recv(outgoing, incoming) if outgoing or incoming else (None, None)
        if sent is not None:
            sending.append(sent)
        return frame, received

    def _reach(self) -> Communicator:
        if self._wire is None:
            raise PeerLost(
                "a group of one rank has nobody to send to", hint="report this as a bug of dte_dist"
            )
        return self._wire


def _wait(pending: Pending, phases: Phases) -> None:
    with phases("wire"):
        pending.wait()
