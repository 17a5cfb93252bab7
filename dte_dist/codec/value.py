"""Value codecs: the new bits of a segment's changes as a stream of bytes.

A codec is an entry of `VALUE_CODECS`, under the number that names it on the wire. `known` are the bits that were there
before, for codecs that write distances; it is None where nobody knows them (a seed).

| number | name | stream |
|---|---|---|
| 0 | `raw` | the bits as they are |
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from dte_dist.codec.index import Verdict, check_size

__all__ = ["RAW", "VALUE_CODECS", "ValueCodec", "choose_value"]


class ValueCodec(Protocol):
    """One way to write bits.

    Attributes:
        number: what stands for it on the wire.
        name: what stands for it in reports.
    """

    number: int
    name: str

    def size(self, bits: Tensor, known: Tensor | None) -> int | None:
        """Return the bytes of the stream, or None if the codec cannot write these bits."""

    def encode(self, bits: Tensor, known: Tensor | None) -> Tensor:
        """Write bits as new uint8."""

    def decode(self, stream: Tensor, count: int, dtype: torch.dtype, known: Tensor | None) -> tuple[Tensor, Verdict]:
        """Read any bytes as `count` bit patterns and say whether they are sound; the bits may share the memory of the stream.

        Raises:
            FrameError: the stream does not have the right size.
        """


class Raw:
    """The bits as they are."""

    number, name = 0, "raw"

    def size(self, bits: Tensor, known: Tensor | None) -> int | None:
        return bits.numel() * bits.element_size()

    def encode(self, bits: Tensor, known: Tensor | None) -> Tensor:
        return bits.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, stream: Tensor, count: int, dtype: torch.dtype, known: Tensor | None) -> tuple[Tensor, Verdict]:
        check_size(self.name, stream, count * dtype.itemsize)
        return stream.view(dtype), True


RAW: Final = Raw()
VALUE_CODECS: Final[dict[int, ValueCodec]] = {codec.number: codec for codec in (RAW,)}


def choose_value(bits: Tensor, known: Tensor | None) -> ValueCodec:
    """Return the codec that writes these bits smallest."""
    sizes = {codec.size(bits, known): codec for codec in VALUE_CODECS.values()}
    return sizes[min(size for size in sizes if size is not None)]
