"""Frames, read: one uint8 tensor as the changes of a chunk.

A reader gives out nothing before everything is proven: the checksum, that the frame is the one expected, each
number of the table, each position. Numbers of the table are Python ints on the host, so no hostile value can
overflow; streams stay where the frame is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import header as heads
from dte_dist.codec.header import CHECKSUM_WORD, ENTRY, HEAD, MOST_ELEMENTS, SYNC_AGAIN, FrameHead
from dte_dist.codec.index_codecs import INDEX_CODECS, U16, Again, IndexCodec, Verdict
from dte_dist.codec.previous_delta import DeltaPositions, PreviousDelta
from dte_dist.codec.value_codecs import (
    MOST_RELATIVE,
    VALUE_CODECS,
    BitPlaneParams,
    ValueCodec,
)
from dte_dist.errors import FrameError
from dte_dist.kernels.sizes import padded
from dte_dist.tensors.flat import BITS

__all__ = ["Segment", "read_frame"]

_START_BYTES: Final = 16 << 10


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
        >>> from dte_dist.codec.frame import FrameWriter
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
        if not (border <= first and first + length <= end and 1 <= count <= length <= MOST_ELEMENTS):
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
        middle = at + padded(index_bytes)
        stop = middle + padded(value_bytes)
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
