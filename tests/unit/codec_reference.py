"""The streams of docs/protocol.md in plain numpy and Python ints, from the specification: what both modules
of kernels must equal.
"""

from __future__ import annotations

import numpy as np

ORDERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def words(flags: np.ndarray) -> bytes:
    """Bits in whole words of 8 bytes, the first in the lowest bit of the first byte."""
    packed = np.packbits(flags.astype(bool), bitorder="little").tobytes()
    return packed + bytes(-len(packed) % 8)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def flags_at(places: np.ndarray, count: int) -> np.ndarray:
    flags = np.zeros(count, bool)
    flags[places] = True
    return flags


def low_bits(values: np.ndarray, low: int) -> bytes:
    """Whole bytes of all values first, then one plane for each bit that is left."""
    values = values.astype(np.uint64)
    out = b"".join(
        padded((values >> np.uint64(8 * byte) & np.uint64(255)).astype(np.uint8).tobytes())
        for byte in range(low // 8)
    )
    return out + b"".join(words(values >> np.uint64(bit) & np.uint64(1)) for bit in range(low // 8 * 8, low))


def bitmap(positions: np.ndarray, length: int) -> bytes:
    return words(flags_at(positions, length))


def ef(positions: np.ndarray, length: int, low: int) -> bytes:
    high = (positions.astype(np.int64) >> low) + np.arange(len(positions))
    return low_bits(positions, low) + words(flags_at(high, len(positions) + ((length - 1) >> low)))


def order(bits: np.ndarray) -> np.ndarray:
    """Where bit patterns are in the total order of IEEE 754: negative ones downwards, below all others.
    Python ints.
    """
    width = bits.dtype.itemsize
    signed = bits.view(ORDERS[width]).tolist()
    return np.array(
        [value if value >= 0 else -(value + (1 << (8 * width - 1))) - 1 for value in signed], object
    )


def distances(new: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Differences in that order, wrapped into the range of a signed integer of the width."""
    half = 1 << (8 * new.dtype.itemsize - 1)
    return np.array(
        [(a - b + half) % (2 * half) - half for a, b in zip(order(new), order(known), strict=True)], np.int64
    )


def as_bytes(values: np.ndarray, width: int) -> bytes:
    return values.astype(ORDERS[width]).tobytes()


def planes(values: np.ndarray, width: int, shift: int, spread: int) -> tuple[bytes, int, int]:
    """The stream, how many are far, and the bits of all their high parts."""
    magnitude = (np.abs(values.astype(np.int64)) - 1) % (1 << 8 * width)
    high = magnitude >> shift
    far = np.flatnonzero(high > 0)
    lengths, bits = "", ""
    for value in high[far].tolist():
        text = f"{value:b}"
        lengths += "0" * (len(text) - 1) + "1"
        bits += text[:0:-1]
    stream = words(values < 0) + low_bits(magnitude, shift)
    stream += words(high > 0) if spread < 0 else ef(far, len(values), spread)
    return (
        stream + b"".join(words(np.array(list(text), int)) for text in (lengths, bits)),
        len(far),
        len(lengths),
    )


def again(previous: np.ndarray, positions: np.ndarray, length: int, low: int) -> bytes:
    """A bit for each previous position, then the positions that are new; `low` is of no meaning if there are
    none.
    """
    fresh = np.array(sorted(set(positions.tolist()) - set(previous.tolist())), np.int32)
    return words(np.isin(previous, positions)) + (ef(fresh, length, low) if len(fresh) else b"")
