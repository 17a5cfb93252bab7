"""Index codecs: the positions of a segment's changes as a stream of bytes.

Positions count from the start of the segment and strictly increase. A codec is an entry of `INDEX_CODECS`, under the number
that names it on the wire; `codec.choose` says which is taken. To add one, write a class like those below.

| number | name | stream |
|---|---|---|
| 0 | `dense` | none: every element of the segment is present |
| 1 | `i32` | int32 positions |
| 2 | `u16` | per block of 65536 elements a uint32 count, then a uint16 offset in its block for each position |
| 3 | `ef` | Elias-Fano: `low` bits of each position as they are, the rest as differences in unary |
| 4 | `bitmap` | a bit for each element |
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.head import AGAIN
from dte_dist.errors import FrameError
from dte_dist.kernels.planes import MOST_LOW, ef_size, words

__all__ = ["BITMAP", "DENSE", "EF", "I32", "INDEX_CODECS", "U16", "IndexCodec", "Verdict", "check_size"]

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

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        """Write int32 positions, strictly increasing in [0, length), as new uint8; return that and `low`, for the table."""

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        """Read any bytes as int32[count] positions (None: all), and say whether they strictly increase in [0, length).

        The positions may share the memory of the stream.

        Raises:
            FrameError: the stream does not have the right size, or `low` is not one of this codec.
        """


class Dense:
    """No stream at all: the values of a whole segment."""

    number, name = 0, "dense"

    def size(self, count: int, length: int) -> int:
        return 0

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        return torch.empty(0, dtype=torch.uint8, device=positions.device), 0

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, 0)
        _check_low(self.name, low, 0)
        return None, count == length


class Int32:
    """Positions as they are; the smallest stream for a few changes in a long segment."""

    number, name = 1, "i32"

    def size(self, count: int, length: int) -> int:
        return 4 * count

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        return positions.clone(memory_format=torch.contiguous_format).view(torch.uint8), 0

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, self.size(count, length))
        _check_low(self.name, low, 0)
        positions = stream.view(torch.int32)
        return positions, kernels.on(stream.device).sorted_below(positions, length)


class Blocks:
    """Offsets in blocks of 65536, with a count per block: fast, and 16 bits for each."""

    number, name = 2, "u16"

    def size(self, count: int, length: int) -> int:
        return 4 * -(-length // 65536) + 2 * count

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        return kernels.on(positions.device).encode_u16(positions, length), 0

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, self.size(count, length))
        _check_low(self.name, low, 0)
        positions = torch.empty(count, dtype=torch.int32, device=stream.device)
        return positions, kernels.on(stream.device).decode_u16(stream, count, length, positions)

    def check(self, stream: Tensor, count: int, length: int, low: int) -> Verdict:
        """Say of a stream what `decode` does, without reading it.

        Raises:
            FrameError: as `decode`.
        """
        check_size(self.name, stream, self.size(count, length))
        _check_low(self.name, low, 0)
        sound: Verdict = kernels.on(stream.device).check_u16(stream, count, length)
        return sound


class EliasFano:
    """Within half a bit for each position of what positions that are independent need at least; with the best number of low bits."""

    number, name = 3, "ef"

    def size(self, count: int, length: int) -> int:
        size: int = kernels.codecs_on("cpu").best_low(count, length)[1]
        return size

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        low: int = kernels.codecs_on("cpu").best_low(len(positions), length)[0]
        return kernels.codecs_on(positions.device).encode_ef(positions, length, low), low

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        _check_low(self.name, low, MOST_LOW)
        check_size(self.name, stream, ef_size(count, length, low))
        return kernels.codecs_on(stream.device).decode_ef(stream, count, length, low)


class Bitmap:
    """A bit for each element: the smallest stream where about half of them are present."""

    number, name = 4, "bitmap"

    def size(self, count: int, length: int) -> int:
        return words(length)

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        return kernels.codecs_on(positions.device).encode_bitmap(positions, length), 0

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, words(length))
        _check_low(self.name, low, 0)
        return kernels.codecs_on(stream.device).decode_bitmap(stream, count, length)


DENSE, I32, U16, EF, BITMAP = Dense(), Int32(), Blocks(), EliasFano(), Bitmap()
_CODECS: Final[tuple[IndexCodec, ...]] = (DENSE, I32, U16, EF, BITMAP)
INDEX_CODECS: Final[dict[int, IndexCodec]] = {codec.number: codec for codec in _CODECS}


def check_size(name: str, stream: Tensor, size: int) -> None:
    """Raise FrameError unless a stream of the codec `name` has `size` bytes."""
    if stream.numel() != size:
        what = f"a stream of codec {name} has the wrong size"
        raise FrameError(what, expected=f"{size} bytes", got=f"{stream.numel()} bytes", fix=AGAIN)


def _check_low(name: str, low: int, most: int) -> None:
    if low > most:
        raise FrameError(f"a stream of codec {name} cannot have so many low bits", expected=f"up to {most}", got=low, fix=AGAIN)
