"""Index codecs: the positions of a segment's changes as a stream of bytes.

Positions count from the start of the segment and strictly increase. A codec is an entry of `INDEX_CODECS`, under the number
that names it on the wire; the writer takes the one whose stream is smallest. To add one, write a class like those below.

| number | name | stream |
|---|---|---|
| 0 | `dense` | none: every element of the segment is present |
| 1 | `i32` | int32 positions |
| 2 | `u16` | per block of 65536 elements a uint32 count, then a uint16 offset in its block for each position |
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.head import AGAIN
from dte_dist.errors import FrameError

__all__ = ["DENSE", "INDEX_CODECS", "IndexCodec", "Verdict", "check_size", "choose_index"]

Verdict = bool | Tensor
"""Whether a stream is sound; a bool tensor of no dimension where only the device knows yet (see `kernels`)."""


class IndexCodec(Protocol):
    """One way to write positions.

    Attributes:
        number: what stands for it on the wire.
        name: what stands for it in reports.
    """

    number: int
    name: str

    def size(self, count: int, length: int) -> int:
        """Return the bytes of the stream of `count` positions in a segment of `length` elements."""

    def encode(self, positions: Tensor, length: int) -> Tensor:
        """Write int32 positions, strictly increasing in [0, length), as new uint8."""

    def decode(self, stream: Tensor, count: int, length: int) -> tuple[Tensor | None, Verdict]:
        """Read any bytes as int32[count] positions (None: all), and say whether they strictly increase in [0, length).

        The positions may share the memory of the stream.

        Raises:
            FrameError: the stream does not have the right size.
        """


class Dense:
    """No stream at all: the values of a whole segment."""

    number, name = 0, "dense"

    def size(self, count: int, length: int) -> int:
        return 0

    def encode(self, positions: Tensor, length: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=positions.device)

    def decode(self, stream: Tensor, count: int, length: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, 0)
        return None, count == length


class I32:
    """Positions as they are; the smallest stream for a few changes in a long segment."""

    number, name = 1, "i32"

    def size(self, count: int, length: int) -> int:
        return 4 * count

    def encode(self, positions: Tensor, length: int) -> Tensor:
        return positions.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, stream: Tensor, count: int, length: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, self.size(count, length))
        positions = stream.view(torch.int32)
        return positions, kernels.on(stream.device).sorted_below(positions, length)


class U16:
    """Offsets in blocks of 65536, with a count per block."""

    number, name = 2, "u16"

    def size(self, count: int, length: int) -> int:
        return 4 * -(-length // 65536) + 2 * count

    def encode(self, positions: Tensor, length: int) -> Tensor:
        return kernels.on(positions.device).encode_u16(positions, length)

    def decode(self, stream: Tensor, count: int, length: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, self.size(count, length))
        positions = torch.empty(count, dtype=torch.int32, device=stream.device)
        return positions, kernels.on(stream.device).decode_u16(stream, count, length, positions)


DENSE: Final = Dense()
_SPARSE: Final[tuple[IndexCodec, ...]] = (U16(), I32())
INDEX_CODECS: Final[dict[int, IndexCodec]] = {codec.number: codec for codec in (DENSE, *_SPARSE)}


def choose_index(count: int, length: int) -> IndexCodec:
    """Return the codec that writes `count` positions in `length` elements smallest; dense only if all are present.

    Example:
        >>> choose_index(1, 1 << 20).name, choose_index(1000, 1 << 20).name, choose_index(9, 9).name
        ('i32', 'u16', 'dense')
    """
    return DENSE if count == length else min(_SPARSE, key=lambda codec: codec.size(count, length))


def check_size(name: str, stream: Tensor, size: int) -> None:
    """Raise FrameError unless a stream of the codec `name` has `size` bytes."""
    if stream.numel() != size:
        what = f"a stream of codec {name} has the wrong size"
        raise FrameError(what, expected=f"{size} bytes", got=f"{stream.numel()} bytes", fix=AGAIN)
