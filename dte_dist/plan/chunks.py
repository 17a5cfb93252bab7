"""How a sync is cut: segments, chunks and buckets, the same on every rank.

Segments and chunks follow from the layouts alone. Buckets are packed from the sizes of the frames, which all
ranks exchange first, by a rule that gives every rank the same buckets. Nothing is triggered by bytes that
only one rank knows: that would differ between ranks, and hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

__all__ = [
    "SEGMENT",
    "Chunk",
    "ChunkPlan",
    "Parcel",
    "pack_buckets",
    "segments_of",
]

SEGMENT: Final = 1 << 20
"""Elements of the segments that a chunk is cut into. Where little changed, up to 8 of them are compared at
once (`detect.snapshot`), and more are encoded as one (`sync.frame_builder`)."""

_MOST_CHUNKS: Final = 1 << 14


def segments_of(first: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (first, length) of each segment of elements [first, first + length), which begin with one.

    Example:
        >>> list(segments_of(5, SEGMENT + 1))
        [(5, 1048576), (1048581, 1)]
    """
    for begin in range(first, first + length, SEGMENT):
        yield begin, min(SEGMENT, first + length - begin)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [first, first + length) of a lane's space of one width: what becomes one frame.

    On the broadcast route a source has one lane, whose space is its own; on p2p one per receiver.
    """

    number: int
    width: int
    first: int
    length: int

    def segments(self) -> Iterator[tuple[int, int]]:
        """Return (first, length) of each segment of the chunk."""
        return segments_of(self.first, self.length)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One frame on its way: which chunk of which source, and its place in the bucket.

    Attributes:
        source: group rank of the source.
        chunk: number of the chunk.
        begin, end: bytes of the bucket that hold the frame.
    """

    source: int
    chunk: int
    begin: int
    end: int


class ChunkPlan:
    """The chunks of every lane: on the broadcast route of every source, on p2p of every lane of one source.

    Args:
        totals: for each lane, by number (that of a source is its group rank), elements in its space of each
            width.
        bucket_bytes: dense bytes of a chunk; more where a lane would have more than 2^14 chunks of one width.

    Attributes:
        most_chunks: of any lane.

    Example:
        >>> schedule = ChunkPlan({0: {2: 1000}, 1: {2: 700}}, bucket_bytes=512)
        >>> schedule.most_chunks, [chunk.length for chunk in schedule.chunks(1)]
        (4, [256, 256, 188])
    """

    def __init__(self, totals: Mapping[int, Mapping[int, int]], bucket_bytes: int) -> None:
        self._chunks = {lane: tuple(_cut(widths, bucket_bytes)) for lane, widths in totals.items()}
        self.most_chunks = max(map(len, self._chunks.values()), default=0)

    def chunks(self, lane: int) -> tuple[Chunk, ...]:
        """Return the chunks of a lane, in order of width and position."""
        return self._chunks[lane]


def _cut(totals: Mapping[int, int], bucket_bytes: int) -> Iterator[Chunk]:
    number = 0
    for width, total in sorted(totals.items()):
        step = max(1, bucket_bytes // width)
        step -= step % 8 if step >= 8 else 0  # whole 8-byte words
        if total > step * _MOST_CHUNKS:
            step = -(-total // (8 * _MOST_CHUNKS)) * 8
        for first in range(0, total, step):
            yield Chunk(number, width, first, min(step, total - first))
            number += 1


def pack_buckets(sizes: Mapping[int, Sequence[int]], bucket_bytes: int) -> list[list[Parcel]]:
    """Pack the frames of a sync into buckets: whole frames, in order of chunk and source, up to
    `bucket_bytes`.

    Args:
        sizes: for each source, in one order on all ranks, bytes of its frame of each chunk; 0 where nothing
            changed.
        bucket_bytes: most bytes of a bucket; a frame that is larger has a bucket of its own.

    Example:
        >>> [[(p.source, p.end) for p in bucket] for bucket in pack_buckets({0: [8, 0], 1: [16, 64]}, 64)]
        [[(0, 8), (1, 24)], [(1, 64)]]
    """
    buckets: list[list[Parcel]] = []
    filled = 0
    for chunk, column in enumerate(zip_longest(*sizes.values(), fillvalue=0)):
        for source, size in zip(sizes, column, strict=True):
            if not size:
                continue
            if not buckets or filled + size > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(Parcel(source, chunk, filled, filled + size))
            filled += size
    return buckets
