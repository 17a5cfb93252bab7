"""How a sync is cut: segments, chunks, rounds and buckets, the same on every rank.

Everything up to the rounds follows from the layouts alone, so that all ranks make the same number of rounds whatever
changed where (a cut that depends on bytes produced would differ between ranks, and hang). Buckets are packed from
the sizes that the ranks exchange at the start of each round, by a rule that gives every rank the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

__all__ = ["SEGMENT", "Chunk", "Parcel", "Schedule", "pack_buckets"]

SEGMENT: Final = 1 << 20
"""Most elements of a segment: the unit of detection and of codec choice."""

_ROUND_BYTES: Final = 64 << 20
_MOST_CHUNKS: Final = 1024


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [first, first + length) of a source's flat space of one width: what becomes one frame."""

    number: int
    width: int
    first: int
    length: int

    def segments(self) -> Iterator[tuple[int, int]]:
        """Yield (first, length) of each segment of the chunk."""
        for first in range(self.first, self.first + self.length, SEGMENT):
            yield first, min(SEGMENT, self.first + self.length - first)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One frame on its way: which chunk of which source, and its place in the bucket.

    Attributes:
        source: group rank of the source.
        chunk: index of the chunk within the round.
        begin, end: bytes of the bucket that hold the frame.
    """

    source: int
    chunk: int
    begin: int
    end: int


class Schedule:
    """The chunks and rounds of one channel.

    Args:
        totals: for each source (group rank), elements in its flat space of each width.
        bucket_bytes: dense bytes of a chunk, and most bytes of a bucket of several frames.

    Attributes:
        per_round: chunks of each source in a round.
        rounds: number of rounds of a sync.

    Example:
        >>> schedule = Schedule({0: {2: 1000}, 1: {2: 700}}, bucket_bytes=512)
        >>> schedule.rounds, [chunk.length for chunk in schedule.round(1, 0)]
        (1, [256, 256, 188])
    """

    def __init__(self, totals: Mapping[int, Mapping[int, int]], bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.per_round = max(1, min(_MOST_CHUNKS, -(-_ROUND_BYTES // bucket_bytes)))
        self._totals = {source: dict(sorted(widths.items())) for source, widths in totals.items()}
        most = max((self.count(source) for source in totals), default=0)
        self.per_round = max(1, min(self.per_round, most))
        self.rounds = -(-most // self.per_round)

    def _step(self, width: int) -> int:
        """Elements of a full chunk; whole 8-byte words where a bucket has room for one."""
        step = max(1, self.bucket_bytes // width)
        return step - step % 8 if step >= 8 else step

    def count(self, source: int) -> int:
        """Return the number of chunks of a source, which is the number of its frames."""
        return sum(-(-total // self._step(width)) for width, total in self._totals[source].items())

    def chunks(self, source: int, begin: int = 0, end: int | None = None) -> Iterator[Chunk]:
        """Yield chunks number `begin` up to `end` of a source, in order of width and position."""
        base = 0
        end = self.count(source) if end is None else end
        for width, total in self._totals[source].items():
            step = self._step(width)
            here = -(-total // step)
            for number in range(max(begin, base), min(end, base + here)):
                first = (number - base) * step
                yield Chunk(number, width, first, min(step, total - first))
            base += here

    def round(self, source: int, number: int) -> list[Chunk]:
        """Return the chunks of a source in round `number`; may be fewer than `per_round`, or none."""
        begin = number * self.per_round
        return list(self.chunks(source, begin, begin + self.per_round))


def pack_buckets(sizes: Mapping[int, Sequence[int]], bucket_bytes: int) -> list[list[Parcel]]:
    """Pack the frames of a round into buckets: whole frames, in order of chunk and source, up to `bucket_bytes`.

    Args:
        sizes: for each source, in one order on all ranks, bytes of its frame of each chunk of the round; 0 where nothing changed.
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
