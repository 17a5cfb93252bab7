"""The broadcast route: frames of all sources are gathered to the root and streamed to receivers in buckets.

For one round, whose frame sizes every rank has been told:

1. Every rank packs the frames into the same buckets (`plan.schedule.pack_buckets`).
2. Sources start to send their frames to the root, each at its exact size, in the order of the buckets.
3. The root collects bucket i + 1 while bucket i is on its way to the receivers. It decodes nothing.
4. A receiver unpacks bucket i while bucket i + 1 arrives. Two buffers are enough on either side.

A bucket reaches all receivers by one broadcast, or, when it is large or meant for a few receivers only, through
a chain: each receiver passes pieces on to the next as they arrive, which costs the root one copy for any number of receivers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from dte_dist.plan.schedule import Parcel, pack_buckets
from dte_dist.report import Phases
from dte_dist.transport.groups import Pending, Wire

__all__ = ["Relay", "Take"]

PIECE: Final = 256 << 10
"""Bytes of one piece of a chain."""

_CHAIN_FROM: Final = 1 << 20

Take = Callable[[Parcel, Tensor], None]
"""What a receiver does with one frame; the tensor is a view of the bucket and does not outlive the call."""


class Relay:
    """Moves the frames of one round after the other over the channel's data groups.

    Args:
        gather: group of the sources; None if this rank is not a source or there is only one source.
        stream: group of root and receivers; None if this rank is neither.
        rank, root: group ranks.
        bucket_bytes: see `plan.schedule`.
    """

    def __init__(self, gather: Wire | None, stream: Wire | None, *, rank: int, root: int, bucket_bytes: int) -> None:
        self._gather, self._stream = gather, stream
        self._rank, self._root, self._bucket_bytes = rank, root, bucket_bytes
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    def close(self) -> None:
        """Close the groups; what waits on them fails."""
        for wire in (self._gather, self._stream):
            if wire is not None:
                wire.close()

    def round(
        self, sizes: Mapping[int, Sequence[int]], frames: Sequence[Tensor], targets: Sequence[int], take: Take | None, phases: Phases
    ) -> None:
        """Move the frames of one round; all sources, the root and all targets must call.

        Args:
            sizes: by source, bytes of the frame of each chunk of the round.
            frames: this rank's own frames, by chunk; empty on a rank that is no source.
            targets: receivers, in ascending order.
            take: called with each frame on a target; must not raise.
            phases: where the time goes.
        """
        buckets = pack_buckets(sizes, self._bucket_bytes)
        if self._rank == self._root:
            self._lead(buckets, frames, targets, take, phases)
            return
        sends = self._send_frames(buckets, frames)
        if self._rank in targets and take is not None:
            self._follow(buckets, targets, take, phases)
        with phases("gather"):
            for pending in sends:
                pending.wait()

    def _send_frames(self, buckets: list[list[Parcel]], frames: Sequence[Tensor]) -> list[Pending]:
        """Start to send this source's frames to the root."""
        if self._gather is None:
            return []
        mine = [parcel for bucket in buckets for parcel in bucket if parcel.source == self._rank]
        return [self._gather.send(frames[parcel.chunk].to(self._gather.device), self._root) for parcel in mine]

    def _lead(
        self, buckets: list[list[Parcel]], frames: Sequence[Tensor], targets: Sequence[int], take: Take | None, phases: Phases
    ) -> None:
        collecting = self._collect(0, buckets, frames)
        for number, bucket in enumerate(buckets):
            with phases("gather"):
                for pending in collecting:
                    pending.wait()
            buffer = self._buffer(number, bucket)
            sending = self._send_bucket(buffer, targets)
            collecting = self._collect(number + 1, buckets, frames)
            if take is not None and self._rank in targets:
                self._unpack(bucket, buffer, take, phases)
            with phases("wire"):
                for pending in sending:
                    pending.wait()

    def _collect(self, number: int, buckets: list[list[Parcel]], frames: Sequence[Tensor]) -> list[Pending]:
        """Start to fill the buffer of bucket `number`: receive the frames of other sources, copy our own."""
        if number >= len(buckets):
            return []
        buffer = self._buffer(number, buckets[number])
        pending = []
        for parcel in buckets[number]:
            place = buffer[parcel.begin : parcel.end]
            if parcel.source == self._rank:
                place.copy_(frames[parcel.chunk])
            elif self._gather is not None:
                pending.append(self._gather.receive(place, parcel.source))
        return pending

    def _follow(self, buckets: list[list[Parcel]], targets: Sequence[int], take: Take, phases: Phases) -> None:
        arriving: list[Pending] | None = None
        for number, bucket in enumerate(buckets):
            buffer = self._buffer(number, bucket)
            with phases("wire"):
                arriving = arriving if arriving is not None else self._receive_bucket(buffer, targets)
                self._pass_on(arriving, buffer, targets)
            following = number + 1 < len(buckets)
            arriving = self._receive_bucket(self._buffer(number + 1, buckets[number + 1]), targets) if following else None
            self._unpack(bucket, buffer, take, phases)

    @staticmethod
    def _unpack(bucket: list[Parcel], buffer: Tensor, take: Take, phases: Phases) -> None:
        with phases("decode"):
            for parcel in bucket:
                take(parcel, buffer[parcel.begin : parcel.end])

    def _buffer(self, number: int, bucket: list[Parcel]) -> Tensor:
        """Return the buffer of bucket `number`, of exactly its size; two take turns."""
        wire = self._stream or self._gather
        device = wire.device if wire is not None else torch.device("cpu")
        size, which = bucket[-1].end, number % 2
        if len(self._buffers[which]) < size:
            self._buffers[which] = torch.empty(max(size, min(self._bucket_bytes, 2 * size)), dtype=torch.uint8, device=device)
        return self._buffers[which][:size]

    def _is_chain(self, size: int, targets: Sequence[int]) -> bool:
        """Decide from what all ranks know: a broadcast reaches every receiver, and is cheap while it is small."""
        wire = self._stream
        if wire is None:
            return False
        everyone = set(targets) | {self._root} == set(wire.members)
        large = size >= _CHAIN_FROM and wire.device.type == "cpu"
        return not everyone or (large and len(wire.members) > 2)

    def _line(self, targets: Sequence[int]) -> list[int]:
        return [self._root, *(target for target in targets if target != self._root)]

    def _send_bucket(self, buffer: Tensor, targets: Sequence[int]) -> list[Pending]:
        line = self._line(targets)
        if self._stream is None or len(line) < 2:
            return []
        if not self._is_chain(len(buffer), targets):
            return [self._stream.broadcast(buffer, self._root)]
        return [self._stream.send(piece, line[1]) for piece in buffer.split(PIECE)]

    def _receive_bucket(self, buffer: Tensor, targets: Sequence[int]) -> list[Pending]:
        if self._stream is None:
            return []
        if not self._is_chain(len(buffer), targets):
            return [self._stream.broadcast(buffer, self._root)]
        line = self._line(targets)
        before = line[line.index(self._rank) - 1]
        return [self._stream.receive(piece, before) for piece in buffer.split(PIECE)]

    def _pass_on(self, arriving: list[Pending], buffer: Tensor, targets: Sequence[int]) -> None:
        """Wait for the pieces of a bucket, sending each on to the next receiver of a chain."""
        line = self._line(targets)
        after = line[line.index(self._rank) + 1 :][:1]
        if self._stream is None or not after or not self._is_chain(len(buffer), targets):
            for pending in arriving:
                pending.wait()
            return
        sends = []
        for pending, piece in zip(arriving, buffer.split(PIECE), strict=True):
            pending.wait()
            sends.append(self._stream.send(piece, after[0]))
        for pending in sends:
            pending.wait()
