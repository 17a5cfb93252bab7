"""The broadcast route: frames of all sources are gathered to the root and streamed to receivers in buckets.

For one sync, whose frame sizes every rank knows:

1. Every rank packs the frames into the same buckets (`plan.chunks.pack_buckets`).
2. Sources send their frames to the root, each at its exact size, in the order of the buckets and at most a
   bucket ahead.
3. The root collects bucket i + 1 while bucket i is on its way to the receivers. It decodes nothing.
4. A receiver unpacks bucket i while bucket i + 1 arrives. Two buffers are enough on either side, unless
   receivers keep what comes.

A receiver that has no memory for what is to be kept takes the buckets into two buffers that it reserved
before, and passes them on all the same: `error` says why.

Buckets reach all receivers by a broadcast each, or, where much is sent or only a few receivers are meant,
through a chain: each receiver passes pieces on to the next as they arrive, which costs the root one copy for
any number of receivers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dte_dist.plan.chunks import Parcel, pack_buckets
from dte_dist.report import Phases
from dte_dist.transport.buffers import Buffers, Frame, lies_on, write
from dte_dist.transport.communicator import Communicator, Pending
from dte_dist.transport.link_speed import LinkSpeed

__all__ = ["BucketedBroadcast"]

PIECE: Final = 256 << 10
"""Bytes of the smallest piece of a chain."""

_LARGEST: Final = 4 << 20
"""Bytes of the largest one."""

_PIECE_SECONDS: Final = 4e-3
"""Seconds that a piece may take on its way: each receiver of a chain is that much behind the one before, but
each piece costs work as well.
"""

_CHAIN_FROM: Final = 1 << 20

_Bucket = tuple[Tensor, list[Pending]]
"""The buffer of a bucket, and what is still on its way into it."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of `BucketedBroadcast.move` on this rank.

    Attributes:
        buckets: of all frames.
        frames: this rank's own.
        line: the root, then the targets in the order of a chain.
        piece: bytes of the pieces of a chain; 0 if buckets are broadcast.
        is_target: whether frames are given out here.
        keep: whether they are kept.
        phases: where the time goes.
    """

    buckets: Sequence[Sequence[Parcel]]
    frames: Sequence[Frame]
    line: Sequence[int]
    piece: int
    is_target: bool
    keep: bool
    phases: Phases

    def bucket(self, number: int) -> Sequence[Parcel]:
        """Return a bucket; nothing behind the last one."""
        return self.buckets[number] if number < len(self.buckets) else ()


class BucketedBroadcast:
    """Moves frames over the channel's data groups.

    Args:
        gather: group of the sources; None if this rank is not a source or there is only one source.
        stream: group of root and receivers; None if this rank is neither.
        rank, root: group ranks.
        bucket_bytes: see `plan.chunks`.
        speed: of the links, as all ranks know it.

    Attributes:
        error: why this rank could not keep the frames of the last `move`, so that not all were given out;
            None if they were.
    """

    def __init__(
        self,
        gather: Communicator | None,
        stream: Communicator | None,
        *,
        rank: int,
        root: int,
        bucket_bytes: int,
        speed: LinkSpeed | None = None,
    ) -> None:
        self._speed = speed or LinkSpeed()
        self._gather = gather
        self._stream = stream
        self._rank = rank
        self._root = root
        self._bucket_bytes = bucket_bytes
        self._incoming = Buffers()
        self._outgoing = Buffers()

    def reserve(self, most: Mapping[int, Sequence[int]], *, receiver: bool) -> None:
        """Make room for buckets before ranks are in step; to call where an error is told to all of them.

        Args:
            most: by source, the most bytes of its frame of each chunk.
            receiver: this rank may be a target.
        """
        largest = max(map(max, filter(None, most.values())), default=0)
        largest = max(largest, min(self._bucket_bytes, sum(map(sum, most.values()))))
        if receiver or self._rank == self._root:
            self._incoming.reserve(largest, self._device)
        if self._rank in most and self._rank != self._root:
            self._outgoing.reserve(largest, self._device)

    @property
    def _device(self) -> torch.device:
        """Where frames travel."""
        wire = self._stream or self._gather
        return torch.device("cpu") if wire is None else wire.device

    def move(
        self,
        sizes: Mapping[int, Sequence[int]],
        frames: Sequence[Frame],
        targets: Sequence[int],
        phases: Phases,
        *,
        keep: bool = False,
    ) -> Iterator[tuple[Parcel, Tensor]]:
        """Move the frames of one sync, and yield each on a target; all sources, the root and all targets must
        call, and go through it to the end.

        A frame is a view of its bucket, and stays as it is until the next one only, unless frames are kept.

        Args:
            sizes: by source, bytes of the frame of each chunk.
            frames: this rank's own frames, by chunk; empty on a rank that is no source.
            targets: receivers, in ascending order.
            phases: where the time goes.
            keep: frames stay as they are for as long as somebody holds them.
        """
        self._incoming.begin()
        total = sum(map(sum, sizes.values()))
        buckets = pack_buckets(sizes, self._bucket_bytes)
        line = [self._root, *(target for target in targets if target != self._root)]
        piece = self._piece() if self._is_chain(total, line) else 0
        is_target = self._rank in targets
        run = _Run(buckets, frames, line, piece, is_target, keep and is_target, phases)
        yield from self._run_root(run) if self._rank == self._root else self._run_receiver(run)

    @property
    def error(self) -> Exception | None:
        """Why frames could not be kept."""
        return self._incoming.error

    def _run_root(self, run: _Run) -> Iterator[tuple[Parcel, Tensor]]:
        ahead: _Bucket = self._collect(0, run)
        before: list[Pending] = []
        for number, bucket in enumerate(run.buckets):
            buffer, collecting = ahead
            with run.phases("gather"):
                for pending in collecting:
                    pending.wait()
            sending = self._send_bucket(buffer, run)
            self._wait(
                before, run
            )  # only now, so that the link is never idle; the next bucket comes into the same buffer
            ahead = self._collect(number + 1, run)
            before = sending
            yield from self._unpack(bucket, buffer, run)
        self._wait(before, run)

    @staticmethod
    def _wait(sending: Sequence[Pending], run: _Run) -> None:
        with run.phases("wire"):
            for pending in sending:
                pending.wait()

    def _collect(self, number: int, run: _Run) -> _Bucket:
        """Start to fill the buffer of bucket `number`, if there is one: receive the frames of other sources,
        copy our own.
        """
        buffer = self._buffer(number, run)
        pending = []
        for parcel in run.bucket(number):
            place = buffer[parcel.begin : parcel.end]
            if parcel.source == self._rank:
                write(run.frames[parcel.chunk], place)
            elif self._gather is not None:
                pending.append(self._gather.receive(place, parcel.source))
        return buffer, pending

    def _run_receiver(self, run: _Run) -> Iterator[tuple[Parcel, Tensor]]:
        """Send our frames of each bucket, a bucket ahead; receive the bucket, while the next one arrives, if
        we are a target.
        """
        sending = self._send_frames(0, run)
        coming = self._receive_bucket(0, run)
        for number, bucket in enumerate(run.buckets):
            ahead = self._send_frames(number + 1, run)
            if run.is_target:
                buffer, arriving = coming
                with run.phases("wire"):
                    self._pass_on(arriving, buffer, run)
                coming = self._receive_bucket(number + 1, run)
                yield from self._unpack(bucket, buffer, run)
            with run.phases("gather"):
                for pending in sending:
                    pending.wait()
            sending = ahead

    def _send_frames(self, number: int, run: _Run) -> list[Pending]:
        """Start to send this source's frames of bucket `number` to the root."""
        wire = self._gather
        frames = run.frames
        mine = [parcel for parcel in run.bucket(number) if parcel.source == self._rank]
        if wire is None or not mine:
            return []
        made = _size_of([parcel for parcel in mine if not lies_on(frames[parcel.chunk], wire.device)])
        room = self._outgoing.get(number, made, wire.device)
        sending = []
        for parcel in mine:
            frame = frames[parcel.chunk]
            size = parcel.end - parcel.begin
            if not lies_on(frame, wire.device):
                place = room[:size]
                room = room[size:]
                write(frame, place)
                frame = place
            sending.append(wire.send(frame, self._root))
        return sending

    def _unpack(self, bucket: Sequence[Parcel], buffer: Tensor, run: _Run) -> Iterator[tuple[Parcel, Tensor]]:
        if run.is_target and self._incoming.error is None:
            for parcel in bucket:
                yield parcel, buffer[parcel.begin : parcel.end]

    def _buffer(self, number: int, run: _Run) -> Tensor:
        """Return the buffer of bucket `number`, of exactly its size; of no bytes if there is none."""
        bucket = run.bucket(number)
        return self._incoming.get(number, bucket[-1].end if bucket else 0, self._device, keep=run.keep)

    def _is_chain(self, total: int, line: Sequence[int]) -> bool:
        """Decide from what all ranks know: a broadcast reaches every receiver, and is cheap while it is
        small.
        """
        wire = self._stream
        if wire is None:
            return False
        large = total >= _CHAIN_FROM and wire.device.type == "cpu"
        return set(line) != set(wire.members) or (large and len(wire.members) > 2)

    def _piece(self) -> int:
        """Return the bytes of a piece, from what all ranks know; a power of 2."""
        bytes_ = max(self._speed.agreed or 0.0, 1.0) * _PIECE_SECONDS
        return min(max(1 << int(bytes_).bit_length(), PIECE), _LARGEST)

    def _send_bucket(self, buffer: Tensor, run: _Run) -> list[Pending]:
        if self._stream is None or len(run.line) < 2:
            return []
        if not run.piece:
            return [self._stream.broadcast(buffer, self._root)]
        return [self._stream.send(piece, run.line[1]) for piece in buffer.split(run.piece)]

    def _receive_bucket(self, number: int, run: _Run) -> _Bucket:
        """Start to receive bucket `number`, if there is one and we are a target."""
        if not run.is_target:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), []
        buffer = self._buffer(number, run)
        if self._stream is None or not run.bucket(number):
            return buffer, []
        if not run.piece:
            return buffer, [self._stream.broadcast(buffer, self._root)]
        before = run.line[run.line.index(self._rank) - 1]
        return buffer, [self._stream.receive(piece, before) for piece in buffer.split(run.piece)]

    def _pass_on(self, arriving: list[Pending], buffer: Tensor, run: _Run) -> None:
        """Wait for the pieces of a bucket, sending each on to the next receiver of a chain."""
        after = run.line[run.line.index(self._rank) + 1 :][:1]
        if self._stream is None or not after or not run.piece:
            for pending in arriving:
                pending.wait()
            return
        sends = []
        for pending, piece in zip(arriving, buffer.split(run.piece), strict=True):
            pending.wait()
            sends.append(self._stream.send(piece, after[0]))
        for pending in sends:
            pending.wait()


def _size_of(parcels: Sequence[Parcel]) -> int:
    return sum(parcel.end - parcel.begin for parcel in parcels)
