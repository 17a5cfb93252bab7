"""Index codecs: exact sizes, positions come back, nothing unsound is accepted. Their bytes:
kernels/test_index_codecs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec.index_codecs import AGAIN, DENSE, EF, INDEX_CODECS
from dte_dist.errors import FrameError
from tests.unit.kernels.test_index_codecs import segments

SPARSE = [
    codec for codec in INDEX_CODECS.values() if codec not in {DENSE, AGAIN}
]  # for `again` see test_index_codecs_again.py

sparse = pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.name)


def test_numbers_are_those_of_the_tables() -> None:
    names = {0: "dense", 1: "i32", 2: "u16", 3: "ef", 4: "bitmap", 5: "again"}
    assert {number: codec.name for number, codec in INDEX_CODECS.items()} == names


@sparse
@settings(max_examples=40, deadline=None)
@given(segments())
def test_positions_come_back(codec, segment) -> None:
    positions, length = segment
    stream, low = codec.encode(torch.from_numpy(positions), length)
    assert stream.dtype == torch.uint8
    assert len(stream) == codec.size(len(positions), length)
    decoded, sound = codec.decode(stream, len(positions), length, low)
    assert sound
    assert np.array_equal(decoded.numpy(), positions)


@sparse
def test_encoding_copies(codec) -> None:
    positions = torch.tensor([1, 2], dtype=torch.int32)
    stream, low = codec.encode(positions, 9)
    positions.zero_()
    assert codec.decode(stream, 2, 9, low)[0].tolist() == [1, 2]


@sparse
@settings(max_examples=40, deadline=None)
@given(segments(), st.data())
def test_unsound_positions_are_refused(codec, segment, data: st.DataObject) -> None:
    """Encode positions that break the rules in one place: the encoder or the decoder says so."""
    positions, length = segment
    if len(positions) < 2:
        return
    place = data.draw(st.integers(1, len(positions) - 1))
    broken = positions.copy()
    values = (positions[place - 1], -1, -(2**31), length) if codec.name == "i32" else (positions[place - 1],)
    for broken[place] in values:
        try:
            stream, low = codec.encode(torch.from_numpy(broken), length)
        except ValueError:
            continue
        assert not codec.decode(stream, len(broken), length, low)[1]


@sparse
def test_wrong_sizes_are_refused(codec) -> None:
    stream, low = codec.encode(torch.tensor([1, 2], dtype=torch.int32), 9)
    for wrong in (stream[:-4], stream[:0], torch.cat([stream, stream])):
        with pytest.raises(FrameError, match="wrong size"):
            codec.decode(wrong, 2, 9, low)
    with pytest.raises(FrameError, match="low bits"):
        codec.decode(stream, 2, 9, 25)


def test_dense() -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    assert DENSE.size(5, 5) == len(DENSE.encode(torch.arange(5, dtype=torch.int32), 5)[0]) == 0
    assert DENSE.decode(empty, 5, 5, 0) == (None, True)
    assert DENSE.decode(empty, 4, 5, 0) == (None, False)
    for stream, low in ((torch.zeros(1, dtype=torch.uint8), 0), (empty, 1)):
        with pytest.raises(FrameError):
            DENSE.decode(stream, 5, 5, low)


def test_elias_fano_needs_half_a_bit_more_than_the_entropy() -> None:
    """2 + log2(1 / density) bits each, against 1.44 + log2(1 / density); and whole words for every plane."""
    for density in (0.0005, 0.004, 0.011, 0.06, 0.2):
        count, length = int(density * (1 << 20)), 1 << 20
        entropy = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / density
        assert 8 * (EF.size(count, length) - 80) / count < entropy + 0.75
