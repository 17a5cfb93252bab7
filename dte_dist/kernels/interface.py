"""The interface of a kernel backend, `Kernels`, and what the kernels read: flat tensors and index maps.

Rules that hold for every kernel:

1.  Arrays are 1-D and contiguous, on the device of the backend. Bits are uint8, int16, int32 or int64 by the
    width of the elements (`BITS`).
2.  Positions are int32 where they count from the start of a segment; where they count in a whole flat space
    (`scatter`, `scatter_1d`, `gather_1d`, `strictly_increasing`) also int64.
3.  Distances are those of bit patterns in their order, in ULPs, modulo the range of their dtype; encoders
    take int32. docs/protocol.md says what the streams are, `sizes.py` how many bytes they take.
4.  A decoder takes any bytes of the right size, and returns whether they are sound; where they are not, it
    has read and written only what is its own.
5.  A verdict or a checksum may be a tensor of no dimension on the device: `bool(...)` or `int(...)` waits for
    the device, so a caller may collect many and ask once. The docstrings of `kernels.torch` say which kernels
    wait themselves.
6.  A kernel that writes to a tensor of a `Flat` moves its version counter by 1, as an in-place op does, and
    counts that in `flat.writes`: a counter that has moved further was moved by somebody else.
7.  A backend may split large work over threads; what it writes does not depend on how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.sizes import Classes, Planes
from dte_dist.kernels.table import Table

__all__ = ["BITS", "Flat", "Kernels", "Tables", "Verdict"]

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype that bits of one width are looked at through."""

Verdict = bool | Tensor
"""Whether a stream is sound, or positions are; a bool tensor of no dimension where only the device knows."""


class Flat(Protocol):
    """Many tensors seen as one array of elements of one width: the part of `tensors.flat.FlatTensors` that
    kernels use; it stands above them and is described there.
    """

    @property
    def tensors(self) -> Sequence[Tensor]: ...
    @property
    def starts(self) -> np.ndarray: ...
    @property
    def table(self) -> Table: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype] | None: ...
    @property
    def cast(self) -> np.ndarray: ...
    @property
    def writes(self) -> np.ndarray: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def width(self) -> int: ...

    def __len__(self) -> int: ...
    def view(self, index: int) -> Tensor: ...
    def spans(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


class Tables(Protocol):
    """From the flat space of a source to that of a receiver: the part of `plan.index_map.IndexMap` that
    kernels use; it stands above them and is described there.
    """

    @property
    def begin(self) -> np.ndarray: ...
    @property
    def end(self) -> np.ndarray: ...
    @property
    def shift(self) -> np.ndarray: ...
    @property
    def origin(self) -> np.ndarray: ...
    @property
    def axis(self) -> np.ndarray: ...
    @property
    def axes(self) -> np.ndarray: ...
    @property
    def extent(self) -> np.ndarray: ...
    @property
    def stride(self) -> np.ndarray: ...
    @property
    def segment(self) -> np.ndarray: ...
    @property
    def low(self) -> np.ndarray: ...
    @property
    def high(self) -> np.ndarray: ...
    @property
    def target(self) -> np.ndarray: ...

    def tables(self) -> tuple[np.ndarray, ...]: ...


class Kernels(Protocol):
    """What a backend does to elements.

    `length` is that of the segment that positions count in, `count` how many of them there are.
    """

    @property
    def __name__(self) -> str: ...

    # Live tensors

    def advance(  # noqa: PLR0917
        self, flat: Flat, begin: int, end: int, known: Tensor, positions: Tensor, old: Tensor, new: Tensor
    ) -> int:
        """Bring `known`, bits[end - begin], up to date with elements [begin, end) of `flat`; return how many
        differed. Their int32 positions, counted from `begin` (not written if all differ), and their bits
        before and after go to the front of `positions`, `old` and `new`, each [>= end - begin].
        """

    def read(self, flat: Flat, begin: int, out: Tensor) -> None:
        """Copy elements [begin, begin + len(out)) of `flat` to the bits `out`."""

    def write(self, flat: Flat, begin: int, bits: Tensor) -> None:
        """Copy `bits` to elements [begin, begin + len(bits)) of `flat`."""

    def scatter(self, flat: Flat, positions: Tensor, bits: Tensor) -> None:
        """Write each bit pattern to its position (int32 or int64) in `flat`; any order, each at most once."""

    def scatter_add(self, flat: Flat, positions: Tensor, distances: Tensor) -> None:
        """Move the bits at int64 positions of `flat` by distances in the dtype of bits, as `scatter`."""

    def add_ulps(self, flat: Flat, positions: Tensor, distances: Tensor) -> Tensor:
        """Return the bits that `scatter_add` would write."""

    def scatter_1d(self, array: Tensor, positions: Tensor, bits: Tensor) -> None:
        """Write each bit pattern to its position (int32 or int64) in one array of the same dtype."""

    def gather_1d(self, array: Tensor, positions: Tensor) -> Tensor:
        """Return the bits of an array at these positions (int32 or int64)."""

    def checksum(self, frame: Tensor, skip: int = -1) -> int | Tensor:
        """Return 64 bits, signed, over the 8-byte words of a uint8 tensor; word `skip` counts as zero."""

    def searchsorted(self, positions: Tensor, starts: Sequence[int]) -> list[int]:
        """Return how many of some ascending int32 or int64 positions are below each of `starts`."""

    def strictly_increasing(self, positions: Tensor, length: int) -> Verdict:
        """Return whether positions (int32 or int64) strictly increase within [0, length)."""

    # Index maps, from a source's flat space to a receiver's; positions count from `first`

    def translate(
        self, index_map: Tables, first: int, positions: Tensor, bits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the receiver's int64 positions of ascending int32 ones, and their bits; those that it
        does not hold are dropped.
        """

    def patch(
        self,
        index_map: Tables,
        first: int,
        positions: Tensor,
        values: Tensor,
        flat: Flat,
        *,
        relative: bool,
        length: int | None = None,
    ) -> None:
        """Do `translate`, then `scatter` or, if `relative`, `scatter_add`; with `length`, positions are a
        sound uint8 stream of `encode_u16`.
        """

    def scatter_dense(self, index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
        """Copy dense bits, those of a source's positions from `first` on, into `flat`, a receiver's space."""

    def gather_dense(self, index_map: Tables, first: int, bits: Tensor, array: Tensor) -> None:
        """Do the reverse of `scatter_dense`: fill `bits` from a receiver's space that is one array."""

    def gather_dense_flat(self, index_map: Tables, first: int, bits: Tensor, flat: Flat) -> None:
        """Do the reverse of `scatter_dense`: fill `bits` from `flat`, a receiver's space."""

    def digest(
        self, index_map: Tables, first: int, bits: Tensor, starts: np.ndarray, sums: np.ndarray
    ) -> None:
        """Add hashes of dense bits to int64 `sums`[pieces] of a receiver's pieces, which begin at int64
        `starts`[pieces + 1].
        """

    # Index codecs: int32 positions below `length`, ascending, as uint8

    def encode_u16(self, positions: Tensor, length: int) -> Tensor:
        """Write for each block of 65536 a uint32 count, then all positions as uint16 within their block."""

    def check_u16(self, stream: Tensor, count: int, length: int) -> Verdict:
        """Return whether the size, the counts and the order of a stream of `encode_u16` are sound."""

    def decode_u16(self, stream: Tensor, count: int, length: int, positions: Tensor) -> Verdict:
        """Read what `encode_u16` wrote into int32[count]; False if it is not sound."""

    def encode_ef(self, positions: Tensor, length: int, low: int) -> Tensor:
        """Write `low` bits of each position as they are, the rest in unary (Elias and Fano)."""

    def decode_ef(self, stream: Tensor, count: int, length: int, low: int) -> tuple[Tensor, Verdict]:
        """Return int32[count] positions of `encode_ef`, and whether they strictly increase below `length`."""

    def encode_bitmap(self, positions: Tensor, length: int) -> Tensor:
        """Write a bit for each of `length` elements, in whole words."""

    def decode_bitmap(self, stream: Tensor, count: int, length: int) -> tuple[Tensor, Verdict]:
        """Return int32[count] positions of `encode_bitmap`, and whether these are all, below `length`."""

    def split_again(self, previous: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return which previous positions are among `positions`, as a plane of bits, and the new ones."""

    def count_again(self, plane: Tensor, size: int) -> int:
        """Return how many of `size` bits are set; -1 if one beyond them is."""

    def join_again(self, previous: Tensor, plane: Tensor, fresh: Tensor, count: int) -> Tensor:
        """Return int32[count] positions: the previous ones whose bit is set and the fresh ones, in order."""

    # Value codecs: distances in ULPs

    def ulp_deltas(self, old: Tensor, new: Tensor) -> Tensor:
        """Return how far bits of 1, 2 or 4 bytes have moved, element by element, as int32."""

    def subtract(self, bits: Tensor, known: Tensor) -> Tensor:
        """Return how far each bit pattern is from the known one, in the dtype of bits."""

    def add(self, bits: Tensor, distances: Tensor) -> Tensor:
        """Return the bit pattern that is so far from each one: the reverse of `subtract`."""

    def narrow(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Return int32 distances in the dtype of bits of 1, 2 or 4 bytes."""

    def widen(self, distances: Tensor) -> Tensor:
        """Return distances in the dtype of bits as int32: the reverse of `narrow`."""

    def measure(self, distances: Tensor) -> Classes:
        """Count int32 distances by size."""

    def encode_planes(self, classes: Classes, width: int, plan: Planes) -> Tensor:
        """Write distances as planes of bits, as `plan` says; `classes.wide` may be overwritten."""

    def decode_planes(
        self, stream: Tensor, count: int, dtype: torch.dtype, plan: Planes
    ) -> tuple[Tensor, Verdict]:
        """Return distances in the dtype of bits, and whether the stream agrees with `plan`."""
