"""Frames: one chunk's changes as one uint8 tensor, and back.

A frame is a head, a table with an entry per segment, and the streams of the segments, each starting at a multiple of 8 bytes
(docs/protocol.md). A writer encodes each segment as it is added, so that the caller's buffers are free again at once.
A reader gives out nothing before everything is proven: the checksum, that the frame is the one expected, each number of the
table, each position. Numbers of the table are Python ints on the host, so no hostile value can overflow; streams stay
where the frame is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.change.flat import BITS
from dte_dist.codec import head as heads
from dte_dist.codec.head import AGAIN, CHECKSUM_WORD, ENTRY, HEAD, FrameHead
from dte_dist.codec.index import DENSE, INDEX_CODECS, IndexCodec, Verdict, choose_index
from dte_dist.codec.value import RAW, VALUE_CODECS, ValueCodec, choose_value
from dte_dist.errors import FrameError

__all__ = ["FrameWriter", "Segment", "dense_size", "prefers_dense", "read_frame"]

_MOST_ELEMENTS: Final = 1 << 28
_START_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The changes of elements [first, first + length) of a source's flat space.

    Attributes:
        first: position of the segment in the flat space.
        length: its number of elements.
        positions: int32, strictly increasing, counted from `first`; None if all elements are present.
        bits: one bit pattern per position.
    """

    first: int
    length: int
    positions: Tensor | None
    bits: Tensor


def dense_size(lengths: Iterable[int], width: int) -> int:
    """Return the bytes of a frame of dense segments of these lengths, before it is made.

    Example:
        >>> dense_size([3, 4], 2)
        176
    """
    return HEAD.itemsize + sum(ENTRY.itemsize + _padded(length * width) for length in lengths)


def prefers_dense(length: int, count: int, width: int) -> bool:
    """Return whether all `length` elements of a segment take no more bytes than its `count` changes; never if there are none.

    Example:
        >>> prefers_dense(1 << 20, 1000, 2), prefers_dense(1 << 20, 600_000, 2)
        (False, True)
    """
    return count > 0 and choose_index(count, length).size(count, length) + count * width >= length * width


class FrameWriter:
    """Collects the changes of one chunk, segment by segment, and makes a frame of them.

    Args:
        head: what the frame says about itself.
        device: where the frame is made, and where positions and bits come from.

    Attributes:
        codecs: segments so far by pair of codecs, such as "u16+raw".

    Example:
        >>> writer = FrameWriter(head, torch.device("cpu"))
        >>> writer.add(0, 1 << 20, positions[:count], bits[:count])
        >>> frame = writer.finish()
    """

    __slots__ = ("_device", "_entries", "_head", "_padding", "_streams", "codecs")

    def __init__(self, head: FrameHead, device: torch.device | str) -> None:
        self._head = head
        self._device = torch.device(device)
        self._entries: list[tuple[int, ...]] = []
        self._streams: list[Tensor] = []
        self._padding = torch.zeros(8, dtype=torch.uint8, device=self._device)
        self.codecs: Counter[str] = Counter()

    def prefers_dense(self, length: int, count: int) -> bool:
        """Return `prefers_dense` for elements of this writer's width."""
        return prefers_dense(length, count, self._head.width)

    def add(self, first: int, length: int, positions: Tensor, bits: Tensor, *, known: Tensor | None = None) -> None:
        """Add the changes of elements [first, first + length); segments come in ascending order. No changes add nothing.

        Args:
            first: position of the segment in the source's flat space.
            length: elements of the segment, at most 2^28.
            positions: int32, strictly increasing in [0, length).
            bits: one bit pattern of the head's width per position.
            known: the bits that were there before, for codecs that use them.

        Raises:
            ValueError: the segment is not in the chunk, not behind the last one, or its arrays do not fit.
        """
        count = positions.numel()
        if count:
            self._check(first, length, bits)
            if not count == bits.numel() <= length:
                raise ValueError(f"{count} positions and {bits.numel()} bit patterns in a segment of {length} elements")
            index, value = choose_index(count, length), choose_value(bits, known)
            self.codecs[f"{index.name}+{value.name}"] += 1
            self._append((first, length, count), (index.number, value.number), index.encode(positions, length), value.encode(bits, known))

    def add_dense(self, first: int, bits: Tensor) -> None:
        """Add the bits of all elements [first, first + len(bits)); they must stay as they are until `finish`.

        Raises:
            ValueError: the segment is not in the chunk or not behind the last one.
        """
        for low in range(0, bits.numel(), _MOST_ELEMENTS):
            part = bits[low : low + _MOST_ELEMENTS]
            self._check(first + low, part.numel(), part)
            self.codecs[f"{DENSE.name}+{RAW.name}"] += 1
            self._append((first + low, part.numel(), part.numel()), (DENSE.number, RAW.number), None, part.contiguous().view(torch.uint8))

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return the frame: uint8, a multiple of 8 bytes; of no bytes at all if nothing was added.

        Args:
            out: where to make it, uint8 of exactly its size on the device of the writer.
        """
        if not self._entries:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        table = np.array(self._entries, ENTRY).view(np.uint8)
        size = HEAD.itemsize + len(table) + sum(stream.numel() for stream in self._streams)
        head = heads.pack_head(self._head, size=size, segments=len(self._entries))
        start = torch.from_numpy(np.concatenate([head, table])).to(self._device, non_blocking=True)
        frame = torch.cat([start, *self._streams], out=out)
        frame.view(torch.int64)[CHECKSUM_WORD] = kernels.on(self._device).checksum(frame, CHECKSUM_WORD)
        return frame

    def _check(self, first: int, length: int, bits: Tensor) -> None:
        begin, end = self._head.first, self._head.first + self._head.length
        if self._entries:
            begin = self._entries[-1][0] + self._entries[-1][1]
        if not (begin <= first and first + length <= end and length <= _MOST_ELEMENTS):
            raise ValueError(f"segment [{first}, {first + length}) is not within what is left of the chunk, [{begin}, {end})")
        if bits.dtype != BITS[self._head.width]:
            raise ValueError(f"a frame of width {self._head.width} takes {BITS[self._head.width]}, not {bits.dtype}")

    def _append(self, where: tuple[int, int, int], codecs: tuple[int, int], *streams: Tensor | None) -> None:
        sizes = [0 if stream is None else stream.numel() for stream in streams]
        self._entries.append((*where, *sizes, *codecs, 0))
        for stream, size in zip(streams, sizes, strict=True):
            if stream is not None:
                self._streams.append(stream)
            if size % 8:
                self._streams.append(self._padding[: -size % 8])


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the table whose numbers have been checked, and where its streams lie in the frame."""

    first: int
    length: int
    count: int
    index: IndexCodec
    value: ValueCodec
    index_at: slice
    value_at: slice


def read_frame(frame: Tensor, expect: FrameHead) -> list[Segment]:
    """Prove a frame sound and read it.

    Args:
        frame: uint8, on any device; segments may share its memory.
        expect: what its head must say.

    Returns:
        The segments in ascending order, at least one. A frame of no bytes stands for no changes and is not read.

    Raises:
        FrameError: the frame is damaged, or is not the one expected.
        VersionRestart, VersionGap, VersionReplay, VersionError: it does not lead from the version held to the next.

    Example:
        >>> for segment in read_frame(frame, expect):
        ...     stage(segment.first, segment.positions, segment.bits)
    """
    heads.check_tensor(frame)
    if frame.data_ptr() % 8 or frame.storage_offset() % 8:
        frame = frame.clone()
    start = frame[:_START_BYTES].cpu().numpy()
    row = heads.unpack_head(start, frame.numel())
    _check_sum(frame, row["checksum"])
    head = heads.head_of(row)
    heads.check_head(head, expect)
    return _decode(frame, _read_table(frame, start, row["segments"], head), BITS[head.width])


def _check_sum(frame: Tensor, claimed: int) -> None:
    actual = int(kernels.on(frame.device).checksum(frame, CHECKSUM_WORD)) if frame.numel() % 8 == 0 else None
    if actual != claimed:
        raise FrameError("a frame is damaged: its checksum is wrong", expected=claimed, got=actual, fix=AGAIN)


def _read_table(frame: Tensor, start: np.ndarray, segments: int, head: FrameHead) -> list[_Entry]:
    """Check every number of the table; `start` are the first bytes of the frame on the host, where the table mostly lies."""
    at = HEAD.itemsize + segments * ENTRY.itemsize
    if not HEAD.itemsize < at <= frame.numel():
        raise FrameError("a frame has no room for its segments", expected="at least one, within the frame", got=segments, fix=AGAIN)
    if at > len(start):
        start = frame[:at].cpu().numpy()
    entries: list[_Entry] = []
    border, end = head.first, head.first + head.length
    for first, length, count, index_bytes, value_bytes, index, value, zero in start[HEAD.itemsize : at].view(ENTRY).tolist():
        if not (border <= first and first + length <= end and 1 <= count <= length <= _MOST_ELEMENTS):
            raise _bad_segment(f"{count} changes in [{first}, {first + length})", f"at least one, all in what is left, [{border}, {end})")
        if index not in INDEX_CODECS or value not in VALUE_CODECS or zero:
            raise _bad_segment(f"codecs {index}, {value}, {zero}", f"those of {sorted(INDEX_CODECS)}, {sorted(VALUE_CODECS)}, 0")
        middle, stop = at + _padded(index_bytes), at + _padded(index_bytes) + _padded(value_bytes)
        if stop > frame.numel():
            raise _bad_segment(f"streams up to byte {stop}", f"a frame of {frame.numel()} bytes")
        spans = slice(at, at + index_bytes), slice(middle, middle + value_bytes)
        entries.append(_Entry(first, length, count, INDEX_CODECS[index], VALUE_CODECS[value], *spans))
        border, at = first + length, stop
    if at != frame.numel():
        raise _bad_segment(f"streams up to byte {at}", f"a frame of {frame.numel()} bytes")
    return entries


def _decode(frame: Tensor, entries: list[_Entry], dtype: torch.dtype) -> list[Segment]:
    """Read all streams, then ask once whether they were sound."""
    segments: list[Segment] = []
    verdicts: list[Verdict] = []
    for entry in entries:
        positions, ordered = entry.index.decode(frame[entry.index_at], entry.count, entry.length)
        bits, sound = entry.value.decode(frame[entry.value_at], entry.count, dtype, None)
        segments.append(Segment(entry.first, entry.length, positions, bits))
        verdicts += [ordered, sound]
    answers = _answers(verdicts)
    if not all(answers):
        entry = entries[answers.index(False) // 2]
        raise _bad_segment(f"codecs {entry.index.name}, {entry.value.name} at element {entry.first}", "sound streams, positions in order")
    return segments


def _answers(verdicts: list[Verdict]) -> list[bool]:
    """Fetch the verdicts that are still on the device, all at once."""
    waiting = [verdict for verdict in verdicts if isinstance(verdict, Tensor)]
    if not waiting:
        return [bool(verdict) for verdict in verdicts]
    fetched = iter(torch.stack(waiting).tolist())
    return [next(fetched) if isinstance(verdict, Tensor) else verdict for verdict in verdicts]


def _bad_segment(got: str, expected: str) -> FrameError:
    return FrameError("a segment of a frame is not sound", expected=expected, got=got, fix=AGAIN)


def _padded(size: int) -> int:
    return size + -size % 8
