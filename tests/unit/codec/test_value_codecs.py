"""Value codecs: exact sizes, values come back, nothing unsound is accepted. Their bytes:
kernels/test_index_codecs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec.value_codecs import PLANES, RAW, ULP, VALUE_CODECS, BitPlaneParams, Values
from dte_dist.errors import FrameError
from dte_dist.tensors.flat import BITS
from tests.unit.kernels.test_index_codecs import as_bits, some_distances, wide

RELATIVE = [codec for codec in VALUE_CODECS.values() if codec.relative]
relative = pytest.mark.parametrize("codec", RELATIVE, ids=lambda codec: codec.name)


def test_numbers_are_those_of_the_table() -> None:
    names = {0: "raw", 1: "ulp", 3: "planes"}  # 2 was given up
    assert {number: codec.name for number, codec in VALUE_CODECS.items()} == names


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_raw(width: int) -> None:
    """Every bit pattern comes back, NaNs of all kinds among them."""
    data = np.random.default_rng(0).integers(0, 256, 512 * width, np.uint8)
    data[: 2 * width] = 0xFF
    bits = torch.from_numpy(data).view(BITS[width])
    stream, terms = RAW.encode(Values(bits, False, width))
    assert len(stream) == RAW.size(Values(bits, False, width)) == 512 * width and terms == BitPlaneParams()
    decoded, sound = RAW.decode(stream, 512, BITS[width], terms)
    assert sound
    assert torch.equal(decoded, bits)
    with pytest.raises(FrameError):
        RAW.decode(stream, 511, BITS[width], terms)


@relative
@pytest.mark.parametrize("width", [1, 2, 4])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_distances_come_back(codec, width: int, data: st.DataObject) -> None:
    distances = data.draw(some_distances(width))
    size = codec.size(Values(wide(distances), True, width))
    stream, terms = codec.encode(Values(wide(distances), True, width))
    assert codec.least(len(distances), width) <= len(stream) == size
    decoded, sound = codec.decode(stream, len(distances), BITS[width], terms)
    assert sound and torch.equal(decoded, as_bits(distances, width))
    zeros = data.draw(st.sampled_from([1, 7, 100]))
    more = np.concatenate([distances, np.zeros(zeros, np.int64)])
    assert codec.size(Values(wide(distances), True, width), zeros) == codec.size(
        Values(wide(more), True, width)
    )


@relative
def test_streams_of_distances_that_contradict_the_table(codec) -> None:
    distances = torch.tensor([1, -1, 2, 3, 400, -20_000, 0, 5], dtype=torch.int32)
    stream, terms = codec.encode(Values(distances.clone(), True, 2))
    wrong = [
        (stream[:-1], terms),
        (stream[:8], terms),
        (torch.cat([stream, stream]), terms),
        (stream[:0], terms),
    ]
    for shift, spread, far, unary in (
        (16, 0, 0, 0),
        (0, 26, 3, 3),
        (0, 1, 9, 9),
        (0, 1, 4, 3),
        (0, 1, 4, 65),
        (0, 0, 2**32 - 1, 2),
        (255, 0, 0, 0),
        (15, 0, 4, 5),
    ):
        wrong.append((stream, BitPlaneParams(shift, spread, far, unary)))
    for stream_, terms_ in wrong:
        try:
            assert not codec.decode(stream_, len(distances), torch.int16, terms_)[1]
        except FrameError as error:
            assert "wrong size" in str(error) or "these terms" in str(error)


def test_distances_as_they_are() -> None:
    """`ulp` has any distance, in as many bytes as the bits themselves."""
    distances = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    assert ULP.size(Values(distances, True, 2)) == 2**17 < PLANES.size(Values(distances, True, 2))
