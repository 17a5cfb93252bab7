"""Guarded rows, rows of a meeting and errors of others, damaged at random: a reader returns what is sound,
or refuses.

Where a checksum or a guard goes with the input it is left as it was, and then nothing but what was sent may
come out; or it is mended, as a program with a fault would have written it, and then whatever comes out must
be safe to work with. Inputs are small, and so is the memory that reading may take.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from dte_dist import kernels
from dte_dist.errors import FrameError, PeerLost, from_wire, to_wire
from dte_dist.tensors.flat import BITS
from dte_dist.transport.all_or_none import AgreedError
from dte_dist.transport.guard import guard_of
from dte_dist.transport.meeting import _check_rows
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import EXTREMES, damage_bytes, refuses_or_is_harmless


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


def rows_of_a_meeting(rng: Random) -> str:
    rows = np.array([[3, 0, 0], [3, 104, 800], [3, 0, 0]])
    for _ in range(rng.choice([0, 1, 1, 2])):
        rows[rng.randrange(3), rng.randrange(3)] = rng.choice([*EXTREMES, 104, 800])
    try:
        _check_rows(rows, [0, 1, 2], [1])
    except AgreedError as agreed:
        raise agreed.error from None
    assert 8 <= rows[1, 1] <= 1 << 26 and 0 <= rows[1, 2] <= 1 << 48 and not rows[[0, 2], 1:].any()
    return "read"


def guarded_row(rng: Random) -> str:
    """No damage to a row or its guard passes; nor is it taken for that of another rank or exchange."""
    turn = rng.randrange(1, 1000)
    row = np.array([rng.choice([0, 1, rng.getrandbits(62)]) for _ in range(rng.randint(1, 20))])
    data = np.array([*row, guard_of(row, 2, turn)]).tobytes()
    others = [
        np.array([*row, guard_of(row, *each)]).tobytes()
        for each in ((1, turn), (3, turn), (2, turn + 1), (2, turn - 1))
    ]
    damaged = rng.choice(others) if rng.random() < 0.1 else damage_bytes(rng, data, others)
    came = np.frombuffer(
        (damaged + bytes(len(data)))[: len(data)], np.int64
    )  # a short message leaves what was there
    sound = guard_of(came[:-1], 2, turn) == came[-1]
    assert sound == (came.tobytes() == data)
    return "sound" if sound else "refused"


def errors_of_others(rng: Random) -> str:
    kinds = [FrameError("cut short", ranks=[3]), PeerLost("gone é"), ValueError("no"), OSError("x" * 9000)]
    written = [to_wire(kind, 256) for kind in kinds]
    found = from_wire(damage_bytes(rng, rng.choice(written), written))
    assert found is None or isinstance(found, FrameError | ValueError | RuntimeError)
    assert found is None or to_wire(found, 256)
    return "an error" if found is not None else "none"


READERS: dict[Callable[[Random], str], int] = {
    rows_of_a_meeting: 3000,
    guarded_row: 5000,
    errors_of_others: 3000,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])
