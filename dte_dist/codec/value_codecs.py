"""Value codecs: the new bits of a segment's changes as a stream of bytes.

A codec is an entry of `VALUE_CODECS`, under the number that names it on the wire. Those that are relative
write how far the bits moved, in their order and modulo 2^bits (docs/protocol.md, "Distances"): a reader that
holds what the writer knows adds the distances to it. They exist for elements of 1, 2 and 4 bytes.

| number | name | relative | stream |
|---|---|---|---|
| 0 | `raw` | no | the bits as they are |
| 1 | `ulp` | yes | the distances as they are |
| 3 | `planes` | yes | sign, some low bits, and whether it is far; what is left as its length and its bits |
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.header import SYNC_AGAIN
from dte_dist.codec.index_codecs import Verdict, check_size
from dte_dist.errors import FrameError
from dte_dist.kernels.sizes import (
    MOST_LOW,
    Classes,
    Planes,
    bitmap_nbytes,
    choose_planes,
    ef_size,
    low_size,
)
from dte_dist.tensors.flat import BITS

__all__ = [
    "MOST_RELATIVE",
    "NO_PARAMS",
    "PLANES",
    "RAW",
    "ULP",
    "VALUE_CODECS",
    "BitPlaneParams",
    "ValueCodec",
    "Values",
]

MOST_RELATIVE: Final = 4
"""Bytes of the widest elements that have distances."""


class BitPlaneParams(NamedTuple):
    """Parameters of a stream of values in the segment table, beside its size; all 0 but for `planes`
    (docs/protocol.md, "Values").

    Attributes:
        shift: low bits that are written as they are.
        outlier_index_bits: 1 more than the low bits of the positions of the outliers, which are the values
            that have other bits than these; 0 if these positions are a plane.
        outliers: how many there are.
        unary: bits of the plane in which the lengths of their other bits are written in unary.
    """

    shift: int = 0
    outlier_index_bits: int = 0
    outliers: int = 0
    unary: int = 0


NO_PARAMS: Final = BitPlaneParams()


class Values:
    """The values of one segment, bits or distances, and what they would cost; worked out when it is first
    asked for.

    Args:
        values: one for each position: bits, or int32 distances.
        relative: these are distances.
        width: bytes of an element.
    """

    def __init__(self, values: Tensor, relative: bool, width: int) -> None:
        self.values, self.relative, self.width = values, relative, width
        self.count = values.numel()

    @cached_property
    def classes(self) -> Classes:
        """How many distances there are of each size."""
        return kernels.on(self.values.device).measure(self.values)

    @cached_property
    def planes(self) -> Planes:
        """How they are best written as planes."""
        return self.planes_with(0)

    def planes_with(self, zeros: int) -> Planes:
        """Return how they are best written as planes together with `zeros` distances of 0."""
        return choose_planes(self.classes, self.width, zeros)


class ValueCodec(Protocol):
    """One way to write values.

    Attributes:
        number: what stands for it on the wire.
        name: what stands for it in reports.
        relative: it writes distances, not bits.
    """

    number: int
    name: str
    relative: bool

    def least(self, count: int, width: int) -> int:
        """Return bytes that the stream of `count` values takes at least, whatever they are."""

    def size(self, values: Values, zeros: int = 0) -> int:
        """Return the bytes of the stream; of that of the values and some distances of 0, if there are any."""

    def encode(self, values: Values) -> tuple[Tensor, BitPlaneParams]:
        """Write values as new uint8; they cannot be written again."""

    def decode(
        self, stream: Tensor, count: int, dtype: torch.dtype, params: BitPlaneParams
    ) -> tuple[Tensor, Verdict]:
        """Read any bytes as `count` values and say whether they are sound; the values may share the memory of
        the stream.

        Raises:
            FrameError: the stream does not have the right size, or the terms are not those of this codec.
        """


class Whole:
    """Values as they are."""

    def __init__(self, number: int, name: str, relative: bool) -> None:
        self.number, self.name, self.relative = number, name, relative

    def least(self, count: int, width: int) -> int:
        return count * width

    def size(self, values: Values, zeros: int = 0) -> int:
        return (values.count + zeros) * values.width

    def encode(self, values: Values) -> tuple[Tensor, BitPlaneParams]:
        kept = values.values
        if self.relative and values.width < kept.element_size():
            return kernels.on(kept.device).narrow(kept, BITS[values.width]).view(torch.uint8), NO_PARAMS
        return kept.clone(memory_format=torch.contiguous_format).view(torch.uint8), NO_PARAMS

    def decode(
        self, stream: Tensor, count: int, dtype: torch.dtype, params: BitPlaneParams
    ) -> tuple[Tensor, Verdict]:
        check_size(self.name, stream, count * dtype.itemsize)
        _check_terms(self.name, params, params == NO_PARAMS)
        return stream.view(dtype), True


class BitPlanes:
    """Two to four bits for each distance of training; for distances of any scale, as many low bits as pay."""

    number, name, relative = 3, "planes", True

    def least(self, count: int, width: int) -> int:
        return bitmap_nbytes(count)

    def size(self, values: Values, zeros: int = 0) -> int:
        return values.planes_with(zeros).size if zeros else values.planes.size

    def encode(self, values: Values) -> tuple[Tensor, BitPlaneParams]:
        plan = values.planes
        stream = kernels.on(values.values.device).encode_planes(values.classes, values.width, plan)
        return stream, BitPlaneParams(plan.shift, plan.spread, plan.far, plan.unary)

    def decode(
        self, stream: Tensor, count: int, dtype: torch.dtype, params: BitPlaneParams
    ) -> tuple[Tensor, Verdict]:
        shift, spread, far, unary = params
        most = 8 * dtype.itemsize - shift
        _check_terms(
            self.name,
            params,
            most > 0 and spread <= MOST_LOW + 1 and far <= count and far <= unary <= far * most,
        )
        places = ef_size(far, count, spread - 1) if spread else bitmap_nbytes(count)
        size = (
            bitmap_nbytes(count)
            + low_size(count, shift)
            + places
            + bitmap_nbytes(unary)
            + bitmap_nbytes(unary - far)
        )
        check_size(self.name, stream, size)
        return kernels.on(stream.device).decode_planes(
            stream, count, dtype, Planes(shift, spread, far, unary, size)
        )


RAW = Whole(0, "raw", False)
ULP = Whole(1, "ulp", True)
PLANES = BitPlanes()
_CODECS: Final[tuple[ValueCodec, ...]] = (RAW, ULP, PLANES)
"""Number 2 was a byte for each distance (docs/decisions/002-codecs-that-stay.md); it is not used again."""

VALUE_CODECS: Final[dict[int, ValueCodec]] = {codec.number: codec for codec in _CODECS}


def _check_terms(name: str, params: BitPlaneParams, fits: bool) -> None:
    if not fits:
        raise FrameError(
            f"a stream of codec {name} cannot have these terms",
            expected="those of its codec",
            got=params,
            hint=SYNC_AGAIN,
        )
