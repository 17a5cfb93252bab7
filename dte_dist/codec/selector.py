"""Which pair of codecs a segment is written with: by exact sizes and by what codecs and link cost, before
anything is encoded.

| `codec=` | takes |
|---|---|
| `"fast"` | `u16` or `i32`, whichever is smaller, with `raw`: the cheapest to code |
| `"small"` | the pair with the fewest bytes |
| `"auto"` | the least seconds, on the link and in the codecs; `"fast"` while the speed is not known |
| `"ef+planes"` or any other pair | that pair |

All but "fast" take the index codec `again` where it is the best one, and have both ends keep positions for it
(`codec.previous_delta`): "small" where it is smaller by an eighth, since it takes twice as long as the
others, "auto" only over links that are slow enough for it to pay. The pair "again+..." is "ef+..." where
`again` is not smaller.

All of them send a segment whole where that is cheaper: dense with `raw`, or with distances where both ends
know the bits that were there. How a segment's changes are written is decided segment by segment, but whether
they are bits or distances once for all segments of a width: distances have to be taken where the known bits
are at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dte_dist.codec.index_codecs import AGAIN, BITMAP, DENSE, EF, I32, INDEX_CODECS, U16, Again, IndexCodec
from dte_dist.codec.value_codecs import (
    MOST_RELATIVE,
    PLANES,
    RAW,
    ULP,
    VALUE_CODECS,
    ValueCodec,
    Values,
)

__all__ = ["FAST", "CodecSelector"]

_Codec = TypeVar("_Codec", IndexCodec, ValueCodec)

_TYPICAL: Final = 0.35
"""Bytes of a distance of training as planes: 2.3 to 4 bits, more where more elements change."""

_SAVED: Final = 1.6
"""Bytes that `again` saves for each change against `u16`, where most positions come again."""

_WORTH: Final = 0.875
"""For "small", which does not weigh time: the bytes that positions in `again` may take at most, of those in
another codec.
"""

_SECONDS: Final = {
    I32: 0.9e-9,
    U16: 1.0e-9,
    EF: 4.9e-9,
    BITMAP: 4.0e-9,
    AGAIN: 8.6e-9,
    RAW: 0.6e-9,
    ULP: 4.0e-9,
    PLANES: 8.0e-9,
}
"""Seconds for each change to write and read it, estimated from runs on one core of a busy server; distances
are also taken and added.
"""

_DENSE_SECONDS: Final = {RAW: 0.4e-9, ULP: 2.0e-9, PLANES: 5.0e-9}
"""Seconds for each element of a segment that is sent whole."""


@dataclass(frozen=True, slots=True)
class CodecSelector:
    """Chooses codecs.

    Args:
        codec: "fast", "small", "auto", or a pair such as "ef+planes".
        bytes_per_second: of the slowest link that a frame passes; None if that is not known. Only "auto"
            asks.
        ratio: changes are written as changes where they take fewer bytes than `ratio` times those of the
            whole segment. 1.0 compares bytes alone; less sends segments whole earlier, which is cheaper to
            write into place than many changes are.

    Raises:
        ValueError: there is no such codec, or a number is out of range.

    Example:
        >>> CodecSelector("auto", bytes_per_second=125e6).relative(2), CodecSelector("auto",
        ...     bytes_per_second=12.5e9).relative(2)
        (True, False)
    """

    codec: str = "fast"
    bytes_per_second: float | None = None
    sparse_bytes_ratio: float = 1.0
    _index: tuple[IndexCodec, ...] = field(init=False, repr=False, compare=False)
    _absolute: tuple[ValueCodec, ...] = field(init=False, repr=False, compare=False)
    _relative: tuple[ValueCodec, ...] = field(init=False, repr=False, compare=False)
    _again: bool = field(init=False, repr=False, compare=False)
    _byte: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.sparse_bytes_ratio <= 1:
            raise ValueError(
                f"sparse_bytes_ratio must be above 0 and at most 1, got {self.sparse_bytes_ratio!r}"
            )
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be positive or None, got {self.bytes_per_second!r}")
        timed = self.codec == "auto" and self.bytes_per_second is not None
        index, value = _codecs(self.codec, timed)
        object.__setattr__(self, "_index", tuple(codec for codec in index if codec is not AGAIN))
        object.__setattr__(self, "_again", AGAIN in index)
        object.__setattr__(self, "_absolute", tuple(codec for codec in value if not codec.relative))
        object.__setattr__(self, "_relative", tuple(codec for codec in value if codec.relative))
        object.__setattr__(
            self, "_byte", 1 / self.bytes_per_second if timed and self.bytes_per_second else 0.0
        )

    def relative(self, width: int) -> bool:
        """Return whether elements of this width are written as distances."""
        if width > MOST_RELATIVE or not self._relative:
            return False
        return not self._absolute or (width - _TYPICAL) * self._byte > _SECONDS[PLANES] - _SECONDS[RAW]

    @property
    def keeps(self) -> bool:
        """Whether positions are worth keeping, because the next delta may be written with `again`."""
        return self._again and (not self._byte or _SAVED * self._byte > _SECONDS[AGAIN] - _SECONDS[U16])

    def select(
        self, count: int, length: int, values: Values, *, whole: bool, again: Again | None = None
    ) -> tuple[IndexCodec, ValueCodec, bool]:
        """Return how a segment with `count` changes in `length` elements is written, and whether it is sent
        whole though not all changed.

        Args:
            count: at least 1.
            length: of the segment.
            values: one for each change; distances if `relative`.
            whole: whether it can be sent whole.
            again: `again` for these positions, if the delta before had some in this segment.
        """
        if count == length:
            value, size, _ = self._value_of(values)
            return DENSE, value if size <= length * values.width else _as_they_are(values), False
        index, index_size, index_cost = self._index_of(count, length, again)
        value, value_size, value_cost = self._value_of(values)
        if whole:
            size = index_size + value_size
            best, cost = self._whole_of(count, length, values, size)
            must = DENSE in self._index or size >= self.sparse_bytes_ratio * length * values.width
            if must or cost <= index_cost + value_cost:
                return DENSE, best, True
        return index, value, False

    def _index_of(self, count: int, length: int, again: Again | None) -> tuple[IndexCodec, int, float]:
        """Return the best codec of positions, its bytes and its cost."""
        best: IndexCodec = I32
        least, cost = 0, math.inf
        for codec in self._index if self._index != (DENSE,) else (U16, I32):
            size = codec.size(count, length)
            each = self._cost(codec, size, count)
            if each < cost:
                best, least, cost = codec, size, each
        if again is not None and self._again and self._may_pay(again, count, length, cost):
            size = again.size(count, length)  # a pass over the positions
            if size < least and self._cost(AGAIN, size, count) < self._margin * cost:
                return again, size, self._cost(AGAIN, size, count)
        return best, least, cost

    def _may_pay(self, again: Again, count: int, length: int, cost: float) -> bool:
        """Return whether `again` seems to cost less than something else."""
        sizes = again.least, again.estimate
        return all(self._cost(AGAIN, size(count, length), count) < self._margin * cost for size in sizes)

    @property
    def _margin(self) -> float:
        """Return how much of the cost of another codec `again` may take at most."""
        return _WORTH if self.codec == "small" else 1.0

    def _value_of(self, values: Values) -> tuple[ValueCodec, int, float]:
        """Return the best codec of values, its bytes and its cost."""
        best, least, cost = _as_they_are(values), values.count * values.width, math.inf
        for codec in self._relative if values.relative else self._absolute:
            if self._cost(codec, codec.least(values.count, values.width), values.count) < cost:
                size = codec.size(values)
                each = self._cost(codec, size, values.count)
                if each < cost:
                    best, least, cost = codec, size, each
        return best, least, cost if cost < math.inf else self._cost(best, least, values.count)

    def _whole_of(self, count: int, length: int, values: Values, size: int) -> tuple[ValueCodec, float]:
        """Return the best codec of all elements of a segment, and its cost; `size` is that of the changes
        alone.
        """
        dense = length * values.width
        best: ValueCodec = RAW
        cost = dense * self._byte + length * _DENSE_SECONDS[RAW] if self._byte else dense
        for codec in self._relative if values.relative else ():
            # Else nothing has to be measured.
            if DENSE in self._index or codec.least(length, values.width) < size:
                whole = codec.size(values, length - count)
                each = whole * self._byte + length * _DENSE_SECONDS[codec] if self._byte else whole
                if whole < dense and each < cost:
                    best, cost = codec, each
        return best, cost

    def _cost(self, codec: IndexCodec | ValueCodec, size: int, count: int) -> float:
        return size * self._byte + count * _SECONDS[codec] if self._byte else size


def _as_they_are(values: Values) -> ValueCodec:
    return ULP if values.relative else RAW


def _codecs(codec: str, timed: bool) -> tuple[tuple[IndexCodec, ...], tuple[ValueCodec, ...]]:
    """Return the codecs to choose from."""
    if codec == "fast" or (codec == "auto" and not timed):
        return (U16, I32), (RAW,)
    if codec == "small":
        return (U16, I32, EF, BITMAP, AGAIN), (PLANES, ULP)
    if codec == "auto":
        return (U16, I32, EF, BITMAP, AGAIN), (RAW, PLANES, ULP)
    index, plus, value = codec.partition("+") if isinstance(codec, str) else ("", "", "")
    pair = _named(INDEX_CODECS.values(), index), _named(VALUE_CODECS.values(), value)
    if not plus or None in pair:
        names = [", ".join(each.name for each in codecs.values()) for codecs in (INDEX_CODECS, VALUE_CODECS)]
        raise ValueError(
            f'codec must be "fast", "small", "auto", or one of {names[0]}, "+", and one of '
            f"{names[1]}; got {codec!r}"
        )
    return (EF, AGAIN) if pair[0] is AGAIN else (pair[0],), (pair[1],)  # type: ignore[return-value]


def _named(codecs: Iterable[_Codec], name: str) -> _Codec | None:
    return next((codec for codec in codecs if codec.name == name), None)


FAST: Final = CodecSelector()
"""Takes the codecs that are cheapest to code."""
