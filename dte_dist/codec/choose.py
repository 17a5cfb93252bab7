"""Which pair of codecs a segment is written with: by exact sizes and by what codecs and link cost, before anything is encoded.

| `codec=` | takes |
|---|---|
| `"fast"` | `u16` or `i32`, whichever is smaller, with `raw`: the cheapest to code |
| `"small"` | the pair with the fewest bytes |
| `"auto"` | the least seconds: bytes over the speed of the link, and what the codecs take; `"fast"` where the speed is not known |
| `"ef+planes"` or any other pair | that pair |

All of them send a segment whole where that is cheaper: dense with `raw`, or with distances where both ends know the bits that were
there. How a segment's changes are written is decided segment by segment, but whether they are bits or distances once for all
segments of a width: distances have to be taken where the known bits are at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dte_dist.codec.index import BITMAP, DENSE, EF, I32, INDEX_CODECS, U16, IndexCodec
from dte_dist.codec.value import MOST_RELATIVE, PLANES, RAW, ULP, ULP8, VALUE_CODECS, ValueCodec, Values
from dte_dist.kernels.planes import words

__all__ = ["FAST", "Chooser", "Pair"]

Pair = tuple[IndexCodec, ValueCodec]

_Codec = TypeVar("_Codec", IndexCodec, ValueCodec)

_TYPICAL: Final = 0.35
"""Bytes of a distance of training as planes: 2.3 to 4 bits, more where more elements change."""

_SECONDS: Final = {
    I32: 0.9e-9, U16: 1.9e-9, EF: 4.9e-9, BITMAP: 4.0e-9, RAW: 0.6e-9, ULP: 4.0e-9, ULP8: 6.2e-9, PLANES: 8.0e-9,
}  # fmt: skip
"""Seconds for each change to write and read it, on one core of an EPYC 7003 at 2.45 GHz; those of distances with taking and adding them."""

_DENSE_SECONDS: Final = {RAW: 0.4e-9, ULP: 2.0e-9, ULP8: 3.0e-9, PLANES: 5.0e-9}
"""Seconds for each element of a segment that is sent whole."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses codecs.

    Args:
        codec: "fast", "small", "auto", or a pair such as "ef+planes".
        bytes_per_second: of the slowest link that a frame passes; None if that is not known. Only "auto" asks.
        ratio: changes are written as changes where they take fewer bytes than `ratio` times those of the whole segment. 1.0 compares
            bytes alone; less sends segments whole earlier, which is cheaper to write into place than many changes are.

    Raises:
        ValueError: there is no such codec, or a number is out of range.

    Example:
        >>> Chooser("auto", bytes_per_second=125e6).relative(2), Chooser("auto", bytes_per_second=12.5e9).relative(2)
        (True, False)
    """

    codec: str = "fast"
    bytes_per_second: float | None = None
    ratio: float = 1.0
    _index: tuple[IndexCodec, ...] = field(init=False, repr=False, compare=False)
    _value: tuple[ValueCodec, ...] = field(init=False, repr=False, compare=False)
    _byte: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {self.ratio!r}")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be positive or None, got {self.bytes_per_second!r}")
        timed = self.codec == "auto" and self.bytes_per_second is not None
        index, value = _codecs(self.codec, timed)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_byte", 1 / self.bytes_per_second if timed and self.bytes_per_second else 0.0)

    def relative(self, width: int) -> bool:
        """Return whether elements of this width are written as distances."""
        if width > MOST_RELATIVE or not any(codec.relative for codec in self._value):
            return False
        return RAW not in self._value or (width - _TYPICAL) * self._byte > _SECONDS[PLANES] - _SECONDS[RAW]

    def pair(self, count: int, length: int, values: Values) -> Pair:
        """Return how `count` changes of `length` elements are written as changes; dense only if all are present.

        Args:
            count: at least 1.
            length: of the segment.
            values: one for each change; distances if `relative`.
        """
        sparse = [codec for codec in self._index if codec is not DENSE] or [U16, I32]
        index = DENSE if count == length else min(sparse, key=lambda codec: self._cost(codec, codec.size(count, length), count))
        codecs = self._values_of(values)
        value = codecs[0] if len(codecs) == 1 else min(codecs, key=lambda codec: self._cost(codec, codec.size(values), count))
        if index is DENSE and value.size(values) > length * values.width:
            value = ULP if values.relative else RAW
        return index, value

    def whole(self, pair: Pair, count: int, length: int, values: Values) -> ValueCodec | None:
        """Return the value codec with which the whole segment is better sent; None if it is better written as `pair`.

        Args:
            pair, count, length, values: of the changes.
        """
        index, value = pair
        if index is DENSE:
            return None
        size, dense = index.size(count, length) + value.size(values), length * values.width
        best: ValueCodec = RAW
        least = self._dense_cost(RAW, dense, length)
        # Two planes at least are needed: where the changes take less, nothing more has to be measured.
        for codec in self._values_of(values) if values.relative and size > 2 * words(length) else ():
            whole = codec.size(values, length - count)
            if whole < dense and self._dense_cost(codec, whole, length) < least:
                best, least = codec, self._dense_cost(codec, whole, length)
        if DENSE in self._index or size >= self.ratio * dense:
            return best
        cost = self._cost(index, index.size(count, length), count) + self._cost(value, value.size(values), count)
        return best if least <= cost else None

    def _values_of(self, values: Values) -> list[ValueCodec]:
        """Return the codecs that can write these values; whatever they are, they can be written as they are."""
        return [codec for codec in self._value if codec.relative == values.relative] or [ULP if values.relative else RAW]

    def _cost(self, codec: IndexCodec | ValueCodec, size: int, count: int) -> float:
        return size * self._byte + count * _SECONDS[codec] if self._byte else size

    def _dense_cost(self, codec: ValueCodec, size: int, length: int) -> float:
        return size * self._byte + length * _DENSE_SECONDS[codec] if self._byte else size


def _codecs(codec: str, timed: bool) -> tuple[tuple[IndexCodec, ...], tuple[ValueCodec, ...]]:
    """Return the codecs to choose from."""
    if codec == "fast" or (codec == "auto" and not timed):
        return (U16, I32), (RAW,)
    if codec == "small":
        return (U16, I32, EF, BITMAP), (ULP, ULP8, PLANES)
    if codec == "auto":
        return (U16, I32, EF, BITMAP), (RAW, ULP, ULP8, PLANES)
    index, plus, value = codec.partition("+") if isinstance(codec, str) else ("", "", "")
    pair = _named(INDEX_CODECS.values(), index), _named(VALUE_CODECS.values(), value)
    if not plus or None in pair:
        names = [", ".join(each.name for each in codecs.values()) for codecs in (INDEX_CODECS, VALUE_CODECS)]
        raise ValueError(f'codec must be "fast", "small", "auto", or one of {names[0]}, "+", and one of {names[1]}; got {codec!r}')
    return (pair[0],), (pair[1],)  # type: ignore[return-value]


def _named(codecs: Iterable[_Codec], name: str) -> _Codec | None:
    return next((codec for codec in codecs if codec.name == name), None)


FAST: Final = Chooser()
"""Takes the codecs that are cheapest to code."""
