"""The broadcast route: frames of all sources are gathered to the root and streamed to receivers in buckets.

For one sync, whose frame sizes every rank knows:

1. Every rank packs the frames into the same buckets (`plan.schedule.pack_buckets`).
2. Sources send their frames to the root, each at its exact size, in the order of the buckets and at most a bucket ahead.
3. The root collects bucket i + 1 while bucket i is on its way to the receivers. It decodes nothing.
4. A receiver unpacks bucket i while bucket i + 1 arrives. Two buffers are enough on either side, unless receivers keep what comes.

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
from dte_dist.transport.buffers import Buffers, Frame
from dte_dist.transport.groups import Pending, Wire

__all__ = ["Relay", "Take"]

PIECE: Final = 256 << 10
"""Bytes of one piece of a chain."""

_CHAIN_FROM: Final = 1 << 20

Take = Callable[[Parcel, Tensor], None]
"""What a receiver does with one frame; the tensor is a view of the bucket, and stays as it is only if buckets are kept."""

_Bucket = tuple[Tensor, list[Pending]]
"""The buffer of a bucket, and what is still on its way into it."""


class Relay:
    """Moves frames over the channel's data groups.

    Args:
        gather: group of the sources; None if this rank is not a source or there is only one source.
        stream: group of root and receivers; None if this rank is neither.
        rank, root: group ranks.
        bucket_bytes: see `plan.schedule`.
    """

    def __init__(self, gather: Wire | None, stream: Wire | None, *, rank: int, root: int, bucket_bytes: int) -> None:
        self._gather, self._stream = gather, stream
        self._rank, self._root, self._bucket_bytes = rank, root, bucket_bytes
        self._incoming, self._outgoing = Buffers(), Buffers()

    def move(
        self, sizes: Mapping[int, Sequence[int]], frames: Sequence[Frame], targets: Sequence[int], take: Take | None, phases: Phases,
        *, keep: bool = False,
    ) -> None:  # fmt: skip
        """Move the frames of one sync; all sources, the root and all targets must call.

        Args:
            sizes: by source, bytes of the frame of each chunk.
            frames: this rank's own frames, by chunk; empty on a rank that is no source.
            targets: receivers, in ascending order.
            take: called with each frame on a target; must not raise.
            phases: where the time goes.
            keep: frames that `take` was called with stay as they are for as long as somebody holds them.
        """
        buckets = pack_buckets(sizes, self._bucket_bytes)
        take = take if self._rank in targets else None
        keep = keep and take is not None
        if self._rank == self._root:
            self._lead(buckets, frames, targets, take, phases, keep=keep)
        else:
            self._follow(buckets, frames, targets, take, phases, keep=keep)

    def _lead(
        self, buckets: list[list[Parcel]], frames: Sequence[Frame], targets: Sequence[int], take: Take | None, phases: Phases, *, keep: bool
    ) -> None:
        ahead = self._collect(0, buckets, frames, keep=keep)
        for number, bucket in enumerate(buckets):
            buffer, collecting = ahead
            with phases("gather"):
                for pending in collecting:
                    pending.wait()
            sending = self._send_bucket(buffer, targets)
            ahead = self._collect(number + 1, buckets, frames, keep=keep)
            if take is not None:
                self._unpack(bucket, buffer, take, phases)
            with phases("wire"):
                for pending in sending:
                    pending.wait()

    def _collect(self, number: int, buckets: list[list[Parcel]], frames: Sequence[Frame], *, keep: bool) -> _Bucket:
        """Start to fill the buffer of bucket `number`, if there is one: receive the frames of other sources, copy our own."""
        buffer, pending = self._buffer(number, buckets, keep=keep), []
        for parcel in buckets[number] if number < len(buckets) else ():
            place = buffer[parcel.begin : parcel.end]
            if parcel.source == self._rank:
                _write(frames[parcel.chunk], place)
            elif self._gather is not None:
                pending.append(self._gather.receive(place, parcel.source))
        return buffer, pending

    def _follow(
        self, buckets: list[list[Parcel]], frames: Sequence[Frame], targets: Sequence[int], take: Take | None, phases: Phases, *, keep: bool
    ) -> None:
        """Send our frames of each bucket, a bucket ahead; receive the bucket, while the next one arrives, if we are a target."""
        sending, coming = self._send_frames(0, buckets, frames), self._receive_bucket(0, buckets, targets, take, keep=keep)
        for number, bucket in enumerate(buckets):
            ahead = self._send_frames(number + 1, buckets, frames)
            if take is not None:
                buffer, arriving = coming
                with phases("wire"):
                    self._pass_on(arriving, buffer, targets)
                coming = self._receive_bucket(number + 1, buckets, targets, take, keep=keep)
                self._unpack(bucket, buffer, take, phases)
            with phases("gather"):
                for pending in sending:
                    pending.wait()
            sending = ahead

    def _send_frames(self, number: int, buckets: list[list[Parcel]], frames: Sequence[Frame]) -> list[Pending]:
        """Start to send this source's frames of bucket `number` to the root."""
        wire = self._gather
        mine = [parcel for parcel in (buckets[number] if number < len(buckets) else ()) if parcel.source == self._rank]
        if wire is None or not mine:
            return []
        made = _size_of([parcel for parcel in mine if callable(frames[parcel.chunk])])
        room = self._outgoing.get(number, made, wire.device)
        sending = []
        for parcel in mine:
            frame = frames[parcel.chunk]
            if callable(frame):
                size = parcel.end - parcel.begin
                place, room = room[:size], room[size:]
                frame(place)
                frame = place
            sending.append(wire.send(frame.to(wire.device), self._root))
        return sending

    @staticmethod
    def _unpack(bucket: list[Parcel], buffer: Tensor, take: Take, phases: Phases) -> None:
        with phases("decode"):
            for parcel in bucket:
                take(parcel, buffer[parcel.begin : parcel.end])

    def _buffer(self, number: int, buckets: list[list[Parcel]], *, keep: bool) -> Tensor:
        """Return the buffer of bucket `number`, of exactly its size; of no bytes if there is none."""
        wire = self._stream or self._gather
        size = buckets[number][-1].end if number < len(buckets) else 0
        return self._incoming.get(number, size, torch.device("cpu") if wire is None else wire.device, keep=keep)

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

    def _receive_bucket(
        self, number: int, buckets: list[list[Parcel]], targets: Sequence[int], take: Take | None, *, keep: bool
    ) -> _Bucket:
        """Start to receive bucket `number`, if there is one and we are a target."""
        if self._stream is None or take is None or number >= len(buckets):
            return self._buffer(len(buckets), buckets, keep=False), []
        buffer = self._buffer(number, buckets, keep=keep)
        if not self._is_chain(len(buffer), targets):
            return buffer, [self._stream.broadcast(buffer, self._root)]
        line = self._line(targets)
        before = line[line.index(self._rank) - 1]
        return buffer, [self._stream.receive(piece, before) for piece in buffer.split(PIECE)]

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


def _write(frame: Frame, place: Tensor) -> None:
    if callable(frame):
        frame(place)
    else:
        place.copy_(frame)


def _size_of(parcels: Sequence[Parcel]) -> int:
    return sum(parcel.end - parcel.begin for parcel in parcels)
