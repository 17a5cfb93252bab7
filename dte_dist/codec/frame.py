"""Frames: one chunk's changes as one uint8 tensor, and back.

A frame is a head, a table with an entry per segment, and the streams of the segments, each starting at a
multiple of 8 bytes (docs/protocol.md). A writer encodes each segment as it is added, so that the caller's
buffers are free again at once.
A reader gives out nothing before everything is proven: the checksum, that the frame is the one expected, each
    number of the table, each position. Numbers of the table are Python ints on the host, so no hostile value
    can overflow; streams stay where the frame is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import header as heads
from dte_dist.codec.header import CHECKSUM_WORD, ENTRY, HEAD, SYNC_AGAIN, FrameHead
from dte_dist.codec.index_codecs import DENSE, INDEX_CODECS, U16, Again, IndexCodec, Verdict
from dte_dist.codec.previous_delta import DeltaPositions, PreviousDelta
from dte_dist.codec.selector import FAST, CodecSelector
from dte_dist.codec.value_codecs import (
    MOST_RELATIVE,
    NO_PARAMS,
    RAW,
    VALUE_CODECS,
    BitPlaneParams,
    ValueCodec,
    Values,
)
from dte_dist.errors import FrameError
from dte_dist.tensors.flat import BITS

__all__ = ["FrameWriter", "Segment", "dense_size", "read_frame"]

_MOST_ELEMENTS: Final = 1 << 28
_START_BYTES: Final = 16 << 10
_CHECKSUM_AT: Final = slice(8 * CHECKSUM_WORD, 8 * CHECKSUM_WORD + 8)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The changes of elements [first, first + length) of the space that the frame counts in: a source's own,
    or a pair space (p2p).

    Attributes:
        first: position of the segment in the space.
        length: its number of elements.
        positions: int32, strictly increasing, counted from `first`; None if all elements are present.
        values: one per position, as an integer of the width: a bit pattern, or a distance.
        relative: the values are distances from the bits that are there (see `kernels.interface`).
        packed: the positions are a stream of codec u16, which has been checked, instead.
    """

    first: int
    length: int
    positions: Tensor | None
    values: Tensor
    relative: bool = False
    packed: bool = False

    def unpacked(self) -> Tensor:
        """Return the positions as int32, whatever they are.

        Raises:
            ValueError: all elements are present.
        """
        if self.positions is None:
            raise ValueError("a whole segment has no positions")
        if not self.packed:
            return self.positions
        positions = torch.empty(len(self.values), dtype=torch.int32, device=self.positions.device)
        kernels.on(positions.device).decode_u16(self.positions, len(self.values), self.length, positions)
        return positions


def dense_size(lengths: Iterable[int], width: int) -> int:
    """Return the bytes of a frame of dense segments of these lengths, before it is made.

    Example:
        >>> dense_size([3, 4], 2)
        192
    """
    return HEAD.itemsize + sum(ENTRY.itemsize + _padded(length * width) for length in lengths)


class FrameWriter:
    """Collects the changes of one chunk, segment by segment, and makes a frame of them.

    Args:
        head: what the frame says about itself.
        device: where the frame is made, and where positions and values come from.
        selector: of the codecs.
        history: of the deltas of one source. If the selector asks for it, positions that are added are noted
            there.

    Attributes:
        codecs: segments so far by pair of codecs, such as "u16+raw".

    Example:
        >>> head = FrameHead(schema=7, lineage=9, base=1, version=2, source=0, number=0, count=1, width=4,
        ...     first=0, length=100)
        >>> writer = FrameWriter(head, "cpu")
        >>> writer.add(0, 100, torch.tensor([3, 8], dtype=torch.int32), torch.tensor([1, 2],
        ...     dtype=torch.int32))
        >>> frame = writer.finish()
        >>> frame.dtype, dict(writer.codecs)
        (torch.uint8, {'u16+raw': 1})
    """

    __slots__ = (
        "_before",
        "_device",
        "_entries",
        "_head",
        "_history",
        "_places",
        "_selector",
        "_streams",
        "codecs",
    )

    def __init__(
        self,
        head: FrameHead,
        device: torch.device | str,
        selector: CodecSelector = FAST,
        history: PreviousDelta | None = None,
    ) -> None:
        self._history = history if selector.keeps and not head.seed else None
        self._before = self._history.before(head) if self._history is not None else None
        keep = self._history is not None
        self._head, self._places = head if head.keep == keep else replace(head, keep=keep), DeltaPositions()
        self._selector = selector
        self._device = torch.device(device)
        self._entries: list[tuple[int, ...]] = []
        self._streams: list[Tensor] = []
        self.codecs: Counter[str] = Counter()

    def add(
        self,
        first: int,
        length: int,
        positions: Tensor | None,
        values: Tensor,
        *,
        relative: bool = False,
        whole: Callable[[], Tensor] | None = None,
    ) -> None:
        """Add the changes of elements [first, first + length); segments come in ascending order. No changes
        add nothing.

        Args:
            first: position of the segment in the source's flat space.
            length: elements of the segment, at most 2^28.
            positions: int32, strictly increasing in [0, length); None if there is a value for each element.
            values: one per position: bits of the head's width, or, if `relative`, int32 distances, which may
                be overwritten.
            relative: they are distances.
            whole: returns the bits that all elements have now, which must stay as they are until `finish`;
                without it a segment of which only a part changed is not sent whole.

        Raises:
            ValueError: the segment is not in the chunk, not behind the last one, or its arrays do not fit.
        """
        count = values.numel()
        if not count:
            return
        self._check(first, length, values.dtype, torch.int32 if relative else BITS[self._head.width])
        if not (length if positions is None else positions.numel()) == count <= length:
            raise ValueError(f"positions do not fit {count} values in a segment of {length} elements")
        if relative and (self._head.seed or self._head.width > MOST_RELATIVE):
            raise ValueError("a seed, and elements of 8 bytes, are not written as distances")
        of_changes = Values(values, relative, self._head.width)
        again = self._again(first, length, positions)
        index, value, entire = self._selector.select(
            count, length, of_changes, whole=whole is not None, again=again
        )
        if index is DENSE and not value.relative and whole is not None:
            self._append((first, length, length), (DENSE, RAW), 0, NO_PARAMS, None, whole().view(torch.uint8))
            return
        if entire and positions is not None:
            of_changes = _spread(length, positions, of_changes)
        index_stream, low = (
            (None, 0) if index is DENSE or positions is None else index.encode(positions, length)
        )
        if self._history is not None and index is not DENSE and positions is not None:
            self._places.add(first, length, positions.clone())  # the caller's memory is used again
        value_stream, params = value.encode(of_changes)
        self._append(
            (first, length, of_changes.count), (index, value), low, params, index_stream, value_stream
        )

    def _again(self, first: int, length: int, positions: Tensor | None) -> Again | None:
        """Return the codec for positions that may have come before."""
        previous = None if self._before is None or positions is None else self._before.within(first, length)
        return None if previous is None else Again(previous, positions)

    def add_dense(self, first: int, bits: Tensor) -> None:
        """Add the bits of all elements [first, first + len(bits)); they must stay as they are until `finish`.

        Raises:
            ValueError: the segment is not in the chunk or not behind the last one.
        """
        for low in range(0, bits.numel(), _MOST_ELEMENTS):
            part = bits[low : low + _MOST_ELEMENTS]
            self._check(first + low, part.numel(), part.dtype, BITS[self._head.width])
            where = first + low, part.numel(), part.numel()
            self._append(where, (DENSE, RAW), 0, NO_PARAMS, None, part.contiguous().view(torch.uint8))

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return the frame: uint8, a multiple of 8 bytes; of no bytes at all if nothing was added.

        Args:
            out: where to make it, uint8 of exactly its size on the device of the writer.
        """
        if not self._entries:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._history is not None:
            self._history.record(self._head, self._places)
        table = np.array(self._entries, ENTRY).view(np.uint8)
        size = HEAD.itemsize + len(table) + sum(stream.numel() for stream in self._streams)
        head = heads.pack_head(self._head, size=size, segments=len(self._entries))
        start = torch.from_numpy(np.concatenate([head, table])).to(self._device, non_blocking=True)
        out = kernels.empty(size, torch.uint8, self._device) if out is None else out
        frame = torch.cat([start, *self._streams], out=out)
        frame[_CHECKSUM_AT].view(torch.int64).fill_(kernels.on(self._device).checksum(frame, CHECKSUM_WORD))
        return frame

    def _check(self, first: int, length: int, dtype: torch.dtype, wanted: torch.dtype) -> None:
        begin, end = self._head.first, self._head.first + self._head.length
        if self._entries:
            begin = self._entries[-1][0] + self._entries[-1][1]
        if not (begin <= first and first + length <= end and length <= _MOST_ELEMENTS):
            raise ValueError(
                f"segment [{first}, {first + length}) is not within what is left of the "
                f"chunk, [{begin}, {end})"
            )
        if dtype != wanted:
            raise ValueError(f"a frame of width {self._head.width} takes {wanted}, not {dtype}")

    def _append(
        self,
        where: tuple[int, int, int],
        pair: tuple[IndexCodec, ValueCodec],
        low: int,
        params: BitPlaneParams,
        *streams: Tensor | None,
    ) -> None:
        self.codecs[f"{pair[0].name}+{pair[1].name}"] += 1
        sizes = [0 if stream is None else stream.numel() for stream in streams]
        of_pair = (
            pair[0].number,
            pair[1].number,
            low,
            params.shift,
            params.outlier_index_bits,
            0,
            params.outliers,
            params.unary,
        )
        self._entries.append((*where, *sizes, *of_pair))
        for stream, size in zip(streams, sizes, strict=True):
            if stream is not None:
                self._streams.append(stream)
            if size % 8:
                self._streams.append(_zeros(self._device)[: -size % 8])


def _spread(length: int, positions: Tensor, values: Values) -> Values:
    """Return the distances of all elements of a segment."""
    distances = torch.zeros(length, dtype=torch.int32, device=positions.device)
    distances[positions.to(torch.int64)] = values.values
    return Values(distances, True, values.width)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the table whose numbers have been checked, and where its streams lie in the frame."""

    first: int
    length: int
    count: int
    index: IndexCodec
    value: ValueCodec
    low: int
    params: BitPlaneParams
    index_at: slice
    value_at: slice


def read_frame(
    frame: Tensor, expect: FrameHead, history: PreviousDelta | None = None, *, packed: bool = False
) -> list[Segment]:
    """Prove a frame sound and read it.

    Args:
        frame: uint8, on any device; segments may share its memory.
        expect: what its head must say.
        history: of what was read from this source; if the frame asks for it, its positions are noted there,
            and must stay as they are.
        packed: streams of codec u16 are checked, but left as they are, for kernels that read them so; not of
            positions that are noted.

    Returns:
        The segments in ascending order, at least one. A frame of no bytes stands for no changes and is not
        read.

    Raises:
        FrameError: the frame is damaged, is not the one expected, or counts on a history that is not known
            here.
        VersionRestart, VersionGap, VersionReplay, VersionError: it does not lead from the version held to the
            next.

    Example:
        >>> head = FrameHead(schema=7, lineage=9, base=1, version=2, source=0, number=0, count=1, width=4,
        ...     first=0, length=100)
        >>> writer = FrameWriter(head, "cpu")
        >>> writer.add(0, 100, torch.tensor([3, 8], dtype=torch.int32), torch.tensor([1, 2],
        ...     dtype=torch.int32))
        >>> [segment] = read_frame(writer.finish(), expect=head)
        >>> segment.positions.tolist(), segment.values.tolist()
        ([3, 8], [1, 2])
    """
    heads.check_tensor(frame)
    if frame.data_ptr() % 8 or frame.storage_offset() % 8:
        frame = frame.clone()
    start = frame[:_START_BYTES].cpu().numpy()
    row = heads.unpack_head(start, frame.numel())
    _check_sum(frame, row["checksum"])
    head = heads.head_of(row)
    heads.check_head(head, expect)
    entries = _read_table(frame, start, row["segments"], head)
    segments: list[Segment] = []
    verdicts: list[Verdict] = []
    before, noted = (history.before(head), head.keep) if history is not None else (None, False)
    for entry in entries:
        segment, *sound = _decode(
            frame, _after(entry, before, frame.device), BITS[head.width], packed and not noted
        )
        segments.append(segment)
        verdicts += sound
    answers = _answers(verdicts)  # once, after all streams have been read
    if not all(answers):
        entry = entries[answers.index(False) // 2]
        raise _bad_segment(
            f"codecs {entry.index.name}, {entry.value.name} at element {entry.first}",
            "sound streams, positions in order",
        )
    if noted and history is not None:
        history.record(head, _places(segments))
    return segments


def _places(segments: Iterable[Segment]) -> DeltaPositions:
    """Return where a frame has changes, but for segments that were sent whole."""
    places = DeltaPositions()
    for segment in segments:
        if segment.positions is not None:
            places.add(segment.first, segment.length, segment.positions)
    return places


def _check_sum(frame: Tensor, claimed: int) -> None:
    actual = int(kernels.on(frame.device).checksum(frame, CHECKSUM_WORD)) if frame.numel() % 8 == 0 else None
    if actual != claimed:
        raise FrameError(
            "a frame is damaged: its checksum is wrong", expected=claimed, got=actual, hint=SYNC_AGAIN
        )


def _read_table(frame: Tensor, start: np.ndarray, segments: int, head: FrameHead) -> list[_Entry]:
    """Check every number of the table; `start` are the first bytes of the frame on the host, where the table
    mostly lies.
    """
    at = HEAD.itemsize + segments * ENTRY.itemsize
    if not HEAD.itemsize < at <= frame.numel():
        raise FrameError(
            "a frame has no room for its segments",
            expected="at least one, within the frame",
            got=segments,
            hint=SYNC_AGAIN,
        )
    if at > len(start):
        start = frame[:at].cpu().numpy()
    entries: list[_Entry] = []
    border, end = head.first, head.first + head.length
    for row in start[HEAD.itemsize : at].view(ENTRY).tolist():
        first, length, count, index_bytes, value_bytes, index, value, low, shift, spread, zero, far, unary = (
            row
        )
        if not (border <= first and first + length <= end and 1 <= count <= length <= _MOST_ELEMENTS):
            raise _bad_segment(
                f"{count} changes in [{first}, {first + length})",
                f"at least one, all in what is left, [{border}, {end})",
            )
        if index not in INDEX_CODECS or value not in VALUE_CODECS or zero:
            raise _bad_segment(
                f"codecs {index}, {value}, {zero}",
                f"those of {sorted(INDEX_CODECS)}, {sorted(VALUE_CODECS)}, 0",
            )
        if VALUE_CODECS[value].relative and (head.seed or head.width > MOST_RELATIVE):
            raise _bad_segment("distances", "bits, for a seed and for elements of 8 bytes")
        middle, stop = at + _padded(index_bytes), at + _padded(index_bytes) + _padded(value_bytes)
        if stop > frame.numel():
            raise _bad_segment(f"streams up to byte {stop}", f"a frame of {frame.numel()} bytes")
        spans = slice(at, at + index_bytes), slice(middle, middle + value_bytes)
        params = BitPlaneParams(shift, spread, far, unary)
        entries.append(
            _Entry(first, length, count, INDEX_CODECS[index], VALUE_CODECS[value], low, params, *spans)
        )
        border, at = first + length, stop
    if at != frame.numel():
        raise _bad_segment(f"streams up to byte {at}", f"a frame of {frame.numel()} bytes")
    return entries


def _after(entry: _Entry, before: DeltaPositions | None, device: torch.device) -> _Entry:
    """Return an entry that knows the positions of the delta before, if its codec counts on them."""
    previous = (
        before.within(entry.first, entry.length)
        if before is not None and isinstance(entry.index, Again)
        else None
    )
    return entry if previous is None else replace(entry, index=Again(previous.to(device)))


def _decode(
    frame: Tensor, entry: _Entry, dtype: torch.dtype, packed: bool
) -> tuple[Segment, Verdict, Verdict]:
    """Read the streams of a segment; return it, and whether each was sound."""
    stream, shape = frame[entry.index_at], (entry.count, entry.length, entry.low)
    packed = packed and entry.index is U16
    positions, ordered = (stream, U16.check(stream, *shape)) if packed else entry.index.decode(stream, *shape)
    values, sound = entry.value.decode(frame[entry.value_at], entry.count, dtype, entry.params)
    return Segment(entry.first, entry.length, positions, values, entry.value.relative, packed), ordered, sound


def _answers(verdicts: list[Verdict]) -> list[bool]:
    """Fetch the verdicts that are still on the device, all at once."""
    waiting = [verdict for verdict in verdicts if isinstance(verdict, Tensor)]
    if not waiting:
        return [bool(verdict) for verdict in verdicts]
    fetched = iter(torch.stack(waiting).tolist())
    return [next(fetched) if isinstance(verdict, Tensor) else verdict for verdict in verdicts]


def _bad_segment(got: str, expected: str) -> FrameError:
    return FrameError("a segment of a frame is not sound", expected=expected, got=got, hint=SYNC_AGAIN)


@cache
def _zeros(device: torch.device) -> Tensor:
    """Return 8 bytes, to fill up words with."""
    return torch.zeros(8, dtype=torch.uint8, device=device)


def _padded(size: int) -> int:
    return size + -size % 8
