"""Frames, written: one chunk's changes as one uint8 tensor.

A frame is a head, a table with an entry per segment, and the streams of the segments, each starting at a
multiple of 8 bytes (docs/protocol.md). A writer encodes each segment as it is added, so that the caller's
buffers are free again at once. `codec.frame_reader` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import header as heads
from dte_dist.codec.header import CHECKSUM_WORD, ENTRY, HEAD, MOST_ELEMENTS, FrameHead
from dte_dist.codec.index_codecs import DENSE, Again, IndexCodec
from dte_dist.codec.previous_delta import DeltaPositions, PreviousDelta
from dte_dist.codec.selector import FAST, CodecSelector
from dte_dist.codec.value_codecs import (
    MOST_RELATIVE,
    NO_PARAMS,
    RAW,
    BitPlaneParams,
    ValueCodec,
    Values,
)
from dte_dist.kernels.sizes import padded
from dte_dist.tensors.flat import BITS

__all__ = ["FrameWriter", "dense_size"]

_CHECKSUM_AT: Final = slice(8 * CHECKSUM_WORD, 8 * CHECKSUM_WORD + 8)


def dense_size(lengths: Iterable[int], width: int) -> int:
    """Return the bytes of a frame of dense segments of these lengths, before it is made.

    Example:
        >>> dense_size([3, 4], 2)
        192
    """
    return HEAD.itemsize + sum(ENTRY.itemsize + padded(length * width) for length in lengths)


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
            first: position of the segment in the space of its lane.
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
        for low in range(0, bits.numel(), MOST_ELEMENTS):
            part = bits[low : low + MOST_ELEMENTS]
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
        if not (begin <= first and first + length <= end and length <= MOST_ELEMENTS):
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


@cache
def _zeros(device: torch.device) -> Tensor:
    """Return 8 bytes, to fill up words with."""
    return torch.zeros(8, dtype=torch.uint8, device=device)
