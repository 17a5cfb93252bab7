"""The p2p route: frames go from each source straight to the receivers that hold their elements; no rank relays.

For one round, whose frame sizes every rank has been told:

1. The round has as many steps as there are sources or receivers, whichever are more. In step t, source number i sends to receiver
   number i + t (modulo the steps): every rank has one partner to send to and one to receive from, whatever the numbers.
   Where there is no such partner, or nothing to say, the step passes without a message, and later steps keep their partners.
2. A rank starts the sends of a step, then receives the frames of the step one after the other, the next one arriving in a
   second buffer while the last is unpacked, then waits for the sends of the step before. So at most the frames of two steps are in flight.
3. A rank that is source and receiver hands itself its frames; they never touch the network.

Every wait is for a step that the partner reaches without waiting for a later one of ours, so nothing can block in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dte_dist.report import Phases
from dte_dist.transport.buffers import Buffers
from dte_dist.transport.groups import Pending, Wire

__all__ = ["Exchange", "TakeFrom"]

TakeFrom = Callable[[int, int, Tensor], None]
"""What a receiver does with one frame: (source, chunk, frame); the tensor does not outlive the call."""


class Exchange:
    """Moves the frames of one round after the other between pairs of ranks.

    Args:
        wire: a group of all sources and receivers; None if that is one rank.
        rank: of this rank in the user's group.
        sources: group ranks of the sources, in the order all ranks agree on.
    """

    def __init__(self, wire: Wire | None, *, rank: int, sources: Sequence[int]) -> None:
        self._wire, self._rank, self._sources = wire, rank, tuple(sources)
        self._incoming = Buffers()

    def close(self) -> None:
        """Close the group; what waits on it fails."""
        if self._wire is not None:
            self._wire.close()

    def round(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[int]], targets: Sequence[int], take: TakeFrom,
        phases: Phases,
    ) -> None:  # fmt: skip
        """Move the frames of one round; all sources and all targets must call.

        Args:
            outgoing: on a source, its frames for each target, by chunk; empty ones are not sent.
            incoming: on a target, the sizes of the frames of each source, by chunk.
            targets: the receivers of this round, ascending.
            take: called with each frame on a target; must not raise.
            phases: where the time goes.
        """
        sending: list[Pending] = []
        for step in range(max(len(self._sources), len(targets))):
            started = self._send(step, outgoing, targets)
            source = self._partner(step, targets)
            if source is not None:
                self._receive(source, incoming.get(source, ()), outgoing, take, phases)
            with phases("wire"):
                for pending in sending:
                    pending.wait()
            sending = started
        with phases("wire"):
            for pending in sending:
                pending.wait()

    def _send(self, step: int, outgoing: Mapping[int, Sequence[Tensor]], targets: Sequence[int]) -> list[Pending]:
        """Start the sends of one step."""
        if self._rank not in self._sources or self._wire is None:
            return []
        place = (self._sources.index(self._rank) + step) % max(len(self._sources), len(targets))
        if place >= len(targets) or targets[place] == self._rank:
            return []
        to = targets[place]
        return [self._wire.send(frame.to(self._wire.device), to) for frame in outgoing.get(to, ()) if len(frame)]

    def _partner(self, step: int, targets: Sequence[int]) -> int | None:
        """Return the source that this rank receives from in one step, if any."""
        if self._rank not in targets:
            return None
        place = (targets.index(self._rank) - step) % max(len(self._sources), len(targets))
        return self._sources[place] if place < len(self._sources) else None

    def _receive(
        self, source: int, sizes: Sequence[int], outgoing: Mapping[int, Sequence[Tensor]], take: TakeFrom, phases: Phases
    ) -> None:
        """Receive and unpack the frames of one source."""
        chunks = [(chunk, size) for chunk, size in enumerate(sizes) if size]
        if source == self._rank or self._wire is None:
            with phases("decode"):
                for chunk, _ in chunks:
                    take(source, chunk, outgoing[self._rank][chunk])
            return
        arriving = [self._start(self._wire, number, size, source) for number, (_, size) in enumerate(chunks[:1])]
        for number, (chunk, _) in enumerate(chunks):
            frame, pending = arriving.pop()
            with phases("wire"):
                pending.wait()
            if number + 1 < len(chunks):
                arriving.append(self._start(self._wire, number + 1, chunks[number + 1][1], source))
            with phases("decode"):
                take(source, chunk, frame)

    def _start(self, wire: Wire, number: int, size: int, source: int) -> tuple[Tensor, Pending]:
        """Start to receive a frame of `size` bytes into one of two buffers."""
        frame = self._incoming.get(number, size, wire.device)
        return frame, wire.receive(frame, source)
