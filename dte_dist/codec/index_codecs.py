"""Index codecs: the positions of a segment's changes as a stream of bytes.

Positions count from the start of the segment and strictly increase. A codec is an entry of `INDEX_CODECS`,
under the number that names it on the wire; `codec.selector` says which is taken. To add one, write a class
like those below.

| number | name | stream |
|---|---|---|
| 0 | `dense` | none: every element of the segment is present |
| 1 | `i32` | int32 positions |
| 2 | `u16` | per 65536 elements a uint32 count, then for each position a uint16 offset |
| 3 | `ef` | Elias-Fano: `low` bits of each position as they are, the rest as differences in unary |
| 4 | `bitmap` | a bit for each element |
| 5 | `again` | a bit for each position that the delta before had here; the others as `ef` |
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.header import SYNC_AGAIN
from dte_dist.errors import FrameError
from dte_dist.kernels.sizes import MOST_LOW, best_low, bitmap_nbytes, ef_size

__all__ = [
    "AGAIN",
    "BITMAP",
    "DENSE",
    "EF",
    "I32",
    "INDEX_CODECS",
    "U16",
    "Again",
    "IndexCodec",
    "Verdict",
    "check_size",
]

Verdict = bool | Tensor
"""Whether a stream is sound; a bool tensor of no dimension where only the device knows yet (see `kernels`).
"""


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
        """Write int32 positions, strictly increasing in [0, length), as new uint8; return that and `low`, for
        the table.
        """

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        """Read any bytes as int32[count] positions (None: all), and say whether they strictly increase in [0,
        length).

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
        return positions, kernels.on(stream.device).strictly_increasing(positions, length)


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
        return kernels.on(stream.device).check_u16(stream, count, length)


class EliasFano:
    """Within half a bit for each position of what positions that are independent need at least; with the best
    number of low bits.
    """

    number, name = 3, "ef"

    def size(self, count: int, length: int) -> int:
        return best_low(count, length)[1]

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        low = best_low(len(positions), length)[0]
        return kernels.on(positions.device).encode_ef(positions, length, low), low

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        _check_low(self.name, low, MOST_LOW)
        check_size(self.name, stream, ef_size(count, length, low))
        return kernels.on(stream.device).decode_ef(stream, count, length, low)


class Bitmap:
    """A bit for each element: the smallest stream where about half of them are present."""

    number, name = 4, "bitmap"

    def size(self, count: int, length: int) -> int:
        return bitmap_nbytes(length)

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        return kernels.on(positions.device).encode_bitmap(positions, length), 0

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        check_size(self.name, stream, bitmap_nbytes(length))
        _check_low(self.name, low, 0)
        return kernels.on(stream.device).decode_bitmap(stream, count, length)


_RUNS: Final = 8
_RUN: Final = 256
"""How many runs of how many previous positions are looked for among the new ones, to judge how many come
again.
"""

_WITHOUT: Final = "nothing of it was applied; sync again, the next delta does without"


class Again:
    """A bit for each position that the delta before had in this segment; the best where most of them change
    again, step after step.

    Unlike the others it is made for one segment: both ends have to know the positions of the delta before.

    Args:
        previous: int32, strictly increasing, counted from the start of the segment, at least one; None if
            they are not known.
        positions: those to write.
    """

    number, name = 5, "again"

    def __init__(self, previous: Tensor | None = None, positions: Tensor | None = None) -> None:
        self._previous, self._positions = previous, positions

    @property
    def _known(self) -> Tensor:
        """Return the previous positions."""
        if self._previous is None:
            what = "a frame counts on the positions of the delta before, which are not known here"
            raise FrameError(
                what, expected="another index codec", got=f"{self.name} without a history", hint=_WITHOUT
            )
        return self._previous

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        """Return the plane and the new positions; one pass over all of them."""
        plane, fresh = kernels.on(self._known.device).split_again(self._known, self._all)
        return plane, fresh

    @property
    def _all(self) -> Tensor:
        """Return the positions to write."""
        if self._positions is None:
            raise ValueError(f"codec {self.name} has no positions to write")
        return self._positions

    def least(self, count: int, length: int) -> int:
        """Return bytes that the stream takes at least, however many of the positions come again."""
        known = len(self._known)
        return bitmap_nbytes(known) + _size_of_fresh(max(count - known, 0), length)

    def estimate(self, count: int, length: int) -> int:
        """Return about how many bytes the stream takes, judged by some of the previous positions; all of them
        cost a pass.

        On an accelerator it waits three times.
        """
        known = len(self._known)
        if known <= _RUNS * _RUN:
            return self.size(count, length)
        return bitmap_nbytes(known) + _size_of_fresh(max(count - round(self._share * known), 0), length)

    @cached_property
    def _share(self) -> float:
        """Return which share of the previous positions comes again, in some runs of them."""
        known, positions = self._known, self._all
        runs = [
            known[start : start + _RUN] for start in range(0, len(known) - _RUN, (len(known) - _RUN) // _RUNS)
        ]
        ends = [
            int(end)
            for run in torch.stack([run[:: _RUN - 1] for run in runs]).tolist()
            for end in (run[0], run[1] + 1)
        ]
        borders = kernels.on(positions.device).searchsorted(positions, ends)
        now = torch.cat([positions[low:high] for low, high in zip(borders[::2], borders[1::2], strict=True)])
        fresh = kernels.on(known.device).split_again(torch.cat(runs), now)[1]
        return (len(now) - len(fresh)) / (len(runs) * _RUN)

    def size(self, count: int, length: int) -> int:
        return bitmap_nbytes(len(self._known)) + _size_of_fresh(len(self._split[1]), length)

    def encode(self, positions: Tensor, length: int) -> tuple[Tensor, int]:
        plane, fresh = self._split
        if not len(fresh):
            return plane, 0
        stream, low = EF.encode(fresh, length)
        return torch.cat([plane, stream]), low

    def decode(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor | None, Verdict]:
        known, at, codecs = self._known, bitmap_nbytes(len(self._known)), kernels.on(stream.device)
        if len(stream) < at:
            check_size(self.name, stream, at)
        plane = stream[:at]
        again: int = codecs.count_again(plane, len(known))
        if not 0 <= again <= count:
            what, got = f"a stream of codec {self.name} is not sound", "others" if again < 0 else again
            raise FrameError(
                what, expected=f"up to {count} of {len(known)} that come again", got=got, hint=SYNC_AGAIN
            )
        fresh = count - again
        _check_low(self.name, low, MOST_LOW if fresh else 0)
        check_size(self.name, stream, at + (ef_size(fresh, length, low) if fresh else 0))
        others, sound = codecs.decode_ef(stream[at:], fresh, length, low) if fresh else (known[:0], True)
        positions = codecs.join_again(known, plane, others, count)
        return positions, sound & kernels.on(stream.device).strictly_increasing(positions, length)


def _size_of_fresh(count: int, length: int) -> int:
    """Return the bytes of positions that did not change the time before."""
    return EF.size(count, length) if count else 0


DENSE, I32, U16, EF, BITMAP, AGAIN = Dense(), Int32(), Blocks(), EliasFano(), Bitmap(), Again()
_CODECS: Final[tuple[IndexCodec, ...]] = (DENSE, I32, U16, EF, BITMAP, AGAIN)
INDEX_CODECS: Final[dict[int, IndexCodec]] = {codec.number: codec for codec in _CODECS}


def check_size(name: str, stream: Tensor, size: int) -> None:
    """Raise FrameError unless a stream of the codec `name` has `size` bytes."""
    if stream.numel() != size:
        what = f"a stream of codec {name} has the wrong size"
        raise FrameError(what, expected=f"{size} bytes", got=f"{stream.numel()} bytes", hint=SYNC_AGAIN)


def _check_low(name: str, low: int, most: int) -> None:
    if low > most:
        raise FrameError(
            f"a stream of codec {name} cannot have so many low bits",
            expected=f"up to {most}",
            got=low,
            hint=SYNC_AGAIN,
        )
