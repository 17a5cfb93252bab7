"""Index and value codecs: exact sizes, everything comes back, nothing unsound is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.change.flat import BITS
from dte_dist.codec.index import DENSE, INDEX_CODECS, choose_index
from dte_dist.codec.value import RAW, VALUE_CODECS, choose_value
from dte_dist.errors import FrameError

SPARSE = [codec for codec in INDEX_CODECS.values() if codec is not DENSE]
lengths = st.sampled_from([1, 2, 63, 65535, 65536, 65537, 131072, 1 << 20]) | st.integers(1, 1 << 20)
sparse = pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.name)


@st.composite
def segments(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Draw sorted positions and the length of their segment; borders are likely."""
    length = draw(lengths)
    near = [p for p in (0, 1, 65535, 65536, 131071, 131072, length - 2, length - 1) if 0 <= p < length]
    kind = draw(st.sampled_from(["borders", "few", "many", "all"]))
    if kind == "all":
        return np.arange(length, dtype=np.int32), length
    if kind == "many":
        rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        return np.flatnonzero(rng.random(length) < draw(st.sampled_from([0.001, 0.1, 0.9]))).astype(np.int32), length
    which = st.sampled_from(near) if kind == "borders" else st.integers(0, length - 1)
    return np.array(sorted(draw(st.sets(which, max_size=20))), np.int32), length


def test_numbers_are_those_of_the_tables() -> None:
    assert {number: codec.name for number, codec in INDEX_CODECS.items()} == {0: "dense", 1: "i32", 2: "u16"}
    assert {number: codec.name for number, codec in VALUE_CODECS.items()} == {0: "raw"}


@sparse
@settings(max_examples=40, deadline=None)
@given(segments())
def test_positions_come_back(codec, segment) -> None:
    positions, length = segment
    stream = codec.encode(torch.from_numpy(positions), length)
    assert stream.dtype == torch.uint8
    assert len(stream) == codec.size(len(positions), length)
    decoded, sound = codec.decode(stream, len(positions), length)
    assert sound
    assert np.array_equal(decoded.numpy(), positions)


@sparse
def test_encoding_copies(codec) -> None:
    positions = torch.tensor([1, 2], dtype=torch.int32)
    stream = codec.encode(positions, 9)
    positions.zero_()
    assert codec.decode(stream, 2, 9)[0].tolist() == [1, 2]


@sparse
@settings(max_examples=20, deadline=None)
@given(segments(), st.data())
def test_unsound_positions_are_refused(codec, segment, data: st.DataObject) -> None:
    """Encode positions that break the rules in one place: the decoder says so."""
    positions, length = segment
    if len(positions) < 2:
        return
    place = data.draw(st.integers(1, len(positions) - 1))
    broken = positions.copy()
    values = (positions[place - 1], -1, -(2**31), length) if codec.name == "i32" else (positions[place - 1],)
    for broken[place] in values:
        assert not codec.decode(codec.encode(torch.from_numpy(broken), length), len(broken), length)[1]


@sparse
def test_wrong_sizes_are_refused(codec) -> None:
    stream = codec.encode(torch.tensor([1, 2], dtype=torch.int32), 9)
    for wrong in (stream[:-4], stream[:0], torch.cat([stream, stream])):
        with pytest.raises(FrameError, match="wrong size"):
            codec.decode(wrong, 2, 9)


def test_dense() -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    assert DENSE.size(5, 5) == len(DENSE.encode(torch.arange(5, dtype=torch.int32), 5)) == 0
    assert DENSE.decode(empty, 5, 5) == (None, True)
    assert DENSE.decode(empty, 4, 5) == (None, False)
    with pytest.raises(FrameError):
        DENSE.decode(torch.zeros(1, dtype=torch.uint8), 5, 5)


@given(lengths, st.data())
def test_the_smallest_index_codec_is_chosen(length: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, length))
    allowed = [DENSE] if count == length else SPARSE
    assert choose_index(count, length).size(count, length) == min(codec.size(count, length) for codec in allowed)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_raw(width: int) -> None:
    """Every bit pattern comes back, NaNs of all kinds among them."""
    data = np.random.default_rng(0).integers(0, 256, 512 * width, np.uint8)
    data[: 2 * width] = 0xFF
    bits = torch.from_numpy(data).view(BITS[width])
    assert choose_value(bits, None) is RAW
    stream = RAW.encode(bits, None)
    assert len(stream) == RAW.size(bits, None) == 512 * width
    decoded, sound = RAW.decode(stream, 512, BITS[width], None)
    assert sound
    assert torch.equal(decoded, bits)
    with pytest.raises(FrameError):
        RAW.decode(stream, 511, BITS[width], None)
