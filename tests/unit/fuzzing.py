"""Mutational fuzzing: valid inputs are damaged at random, and a reader must return the right thing or refuse.

    DTE_FUZZ_SEED=7 DTE_FUZZ_INPUTS=5000 python -m pytest tests/unit -k fuzz

The seed of a run is printed with what it found; without one in the environment it is another one each time.
Input number n of a reader depends on the seed, on the name of the reader and on n alone.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from dte_dist.errors import FrameError, LayoutMismatch, VersionError

__all__ = ["EXTREMES", "damage_bytes", "damage_json", "fuzz", "limited_memory", "refuses_or_is_harmless"]

SEED = int(os.environ.get("DTE_FUZZ_SEED") or secrets.randbits(32))
INPUTS = int(os.environ.get("DTE_FUZZ_INPUTS") or 0)
REFUSED = (FrameError, LayoutMismatch, VersionError)
ROOM = 384 << 20
"""Bytes of addresses that reading one small input may take; what is more raises a MemoryError."""

READABLE = {"read", "decided", "sound", "an error", "applied"}
"""The words for an input that was taken."""

PATIENCE = 30.0
"""Seconds that reading one input never takes, whatever else the machine does."""

EXTREMES = [
    0,
    1,
    2,
    7,
    8,
    -1,
    -2,
    -8,
    127,
    128,
    255,
    256,
    1 << 15,
    (1 << 16) - 1,
    1 << 16,
    1 << 20,
    1 << 28,
    (1 << 28) + 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 8,
    (1 << 32) - 1,
    1 << 32,
    1 << 48,
    1 << 53,
    1 << 60,
    1 << 61,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 31),
    -(1 << 32),
    -(1 << 62),
    -(1 << 63),
    -(1 << 63) + 1,
]


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let the process have few more addresses than it has, where the system tells how many that are."""
    if not os.path.exists("/proc/self/statm"):
        yield
        return
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(name: str, inputs: int, one: Callable[[Random], str]) -> Counter[str]:
    """Call `one` with a source of random numbers for each input; return how often it said what.

    Args:
        name: of the reader.
        inputs: how many, unless the environment says otherwise.
        one: makes an input, reads it, checks what came of it, and says in a word what that was. What it
            raises is counted if the reader may refuse with it, and is an error of the test if not.
    """
    counts: Counter[str] = Counter()
    longest = 0.0
    with limited_memory():
        for number in range(INPUTS or inputs):
            begin = time.perf_counter()
            try:
                counts[one(Random(f"{SEED} {name} {number}"))] += 1
            except REFUSED as error:
                assert str(error).encode("utf-8"), "it can be told to others"
                assert len(str(error)) < 2000, f"an endless text: seed {SEED}, {name}, input {number}"
                counts[type(error).__name__] += 1
            except BaseException as error:
                error.add_note(f"DTE_FUZZ_SEED={SEED}, reader {name!r}, input {number}")
                raise
            longest = max(longest, time.perf_counter() - begin)
    print(f"DTE_FUZZ_SEED={SEED} {name}: {dict(counts)}, the longest in {longest:.3f} s")
    assert longest < PATIENCE
    return counts


def refuses_or_is_harmless(reader: Callable[[Random], str], inputs: int) -> None:
    """Fuzz a reader; fail if it never refused."""
    counts = fuzz(reader.__name__, inputs, reader)
    assert sum(counts.values()) > 0 and counts.keys() - READABLE, f"no input was ever refused: {counts}"


def damage_bytes(rng: Random, data: bytes, others: Sequence[bytes] = (), *, most: int = 3) -> bytes:
    """Return bytes that differ from `data` in one to `most` places.

    Args:
        rng: of random numbers.
        data: valid.
        others: valid too; blocks of these are put in.
        most: how much is done at most.
    """
    damaged = bytearray(data)
    for _ in range(rng.randint(1, most)):
        rng.choice(_DAMAGE)(rng, damaged, [*others, data])
    return bytes(damaged)


def _flip(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    for _ in range(rng.choice([1, 1, 4])):
        if data:
            data[rng.randrange(len(data))] = rng.choice([0, 255, 127, 128, rng.randrange(256)])


def _number(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Put an extreme number, or one near what is there, into an aligned field."""
    size = rng.choice([1, 2, 4, 4, 8, 8])
    if len(data) < size:
        return
    at = rng.randrange(len(data) // size) * size
    if rng.random() < 0.5:
        at = min(at, rng.randrange(0, 36) * 4) // size * size  # heads stand in front
    there = int.from_bytes(data[at : at + size], "little")
    value = rng.choice(
        [*EXTREMES, len(data), len(data) // 8, there + 1, there - 1, there + 8, 2 * there, ~there]
    )
    data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def _cut(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) // rng.choice([1, 8]) :]


def _extend(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    count = rng.choice([1, 7, 8, 16, 64])
    data += bytes(count) if rng.random() < 0.5 else rng.randbytes(count)


def _block(rng: Random, data: bytes | bytearray) -> slice:
    begin = rng.randrange(len(data) + 1)
    if rng.random() < 0.5:
        begin = begin // 8 * 8
    return slice(begin, begin + rng.choice([1, 4, 8, 8, 16, 40, 64, 96]))


def _splice(rng: Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Put a block of another input over one of this, or where it stands there, or in between."""
    other = rng.choice(others)
    here, there = _block(rng, data), _block(rng, other)
    taken = other[there]
    where = rng.randrange(3)
    if where == 0:
        data[here] = taken
    elif where == 1:
        data[there.start : there.start + len(taken)] = taken
    else:
        data[here.start : here.start] = taken


def _remove(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[_block(rng, data)]


def _swap(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    one, other = sorted((_block(rng, data), _block(rng, data)), key=lambda block: block.start)
    size = min(one.stop - one.start, other.start - one.start, len(data) - other.start)
    if size > 0:
        first, second = data[one.start : one.start + size], data[other.start : other.start + size]
        data[one.start : one.start + size], data[other.start : other.start + size] = second, first


_DAMAGE = [_flip, _flip, _set, _number, _number, _number, _cut, _extend, _splice, _splice, _remove, _swap]


# JSON -------------------------------------------------------------------------------------------------------

_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    63,
    65,
    1.0,
    0.5,
    -0.0,
    1e300,
    float("inf"),
    float("nan"),
    1 << 62,
    (1 << 62) + 1,
    1 << 63,
    1 << 64,
    1 << 200,
    10**400,
    -(1 << 63),
    "",
    "w",
    "bfloat16",
    "float32",
    "qint8",
    "receiver",
    "\0",
    "\ud800",
    "é" * 40,
    "x" * 3000,
    "0" * 33,
    [],
    [[]],
    [0],
    [-1],
    [1, 2, 3],
    [0] * 70,
    [1 << 40] * 3,
    {},
    {"w": "float32"},
    {"w": 1},
    [True],
    [None],
    [[0, 1 << 62]],
]


def damage_json(rng: Random, document: Any, *, most: int = 3) -> bytes:
    """Return JSON that differs from a document in one to `most` places, or is damaged as bytes, too."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, most)):
        holders = list(_holders(document))
        if not holders:
            return json.dumps(rng.choice(_VALUES)).encode()
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        _change(rng, holder, key, holders)
    if rng.random() < 0.01:
        document = rng.choice(_VALUES)
    data = json.dumps(document, separators=(",", ":")).encode()
    return damage_bytes(rng, data) if rng.random() < 0.1 else data


def _holders(node: Any) -> Iterator[Any]:
    """Yield every list and object that holds something."""
    if isinstance(node, dict | list) and node:
        yield node
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _holders(inner)


def _change(rng: Random, holder: Any, key: Any, holders: Sequence[Any]) -> None:
    how, there = rng.randrange(8), holder[key]
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(there))
    elif how == 2:
        holder[key] = [there]
    elif how == 3:
        other = rng.choice(holders)
        holder[key] = copy.deepcopy(
            other[rng.choice(list(other) if isinstance(other, dict) else range(len(other)))]
        )
    elif how == 4 and isinstance(holder, list):
        at = rng.randrange(len(holder))
        holder[key], holder[at] = holder[at], there
    elif how == 5 and type(there) is int:
        holder[key] = rng.choice([there + 1, there - 1, -there, there * 2, *EXTREMES])
    elif how == 6 and isinstance(holder, dict):
        holder[rng.choice(["format", "x", "", key * 2])] = copy.deepcopy(there)
    else:
        holder[key] = copy.deepcopy(rng.choice(_VALUES))
