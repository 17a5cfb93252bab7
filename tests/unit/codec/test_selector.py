"""What the chooser takes: the fewest bytes, the least time, or what it was told."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec import FAST, CodecSelector, selector
from dte_dist.codec.index_codecs import AGAIN, DENSE, INDEX_CODECS
from dte_dist.codec.value_codecs import RAW, ULP, VALUE_CODECS, Values
from tests.unit.codec.pairs import PAIRS
from tests.unit.kernels.test_index_codecs import some_distances, wide

GIB = float(1 << 30)


def test_each_codec_has_its_seconds() -> None:
    """What has none cannot be weighed: "auto" would raise in the middle of a sync."""
    values = set(VALUE_CODECS.values())
    assert selector._SECONDS.keys() == {*INDEX_CODECS.values(), *values} - {DENSE}
    assert selector._DENSE_SECONDS.keys() == values


@pytest.mark.parametrize(
    "codec", ["", "slow", "ef", "ef+", "+raw", "ef+zstd", "zip+raw", "ef+raw+raw", "EF+RAW", None, 3]
)
def test_unknown_codecs(codec: object) -> None:
    with pytest.raises(ValueError, match='codec must be "fast"'):
        CodecSelector(codec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"sparse_bytes_ratio": 0},
        {"sparse_bytes_ratio": 1.01},
        {"sparse_bytes_ratio": -1.0},
        {"bytes_per_second": 0.0},
        {"bytes_per_second": -5.0},
    ],
)
def test_numbers_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CodecSelector(**options)  # type: ignore[arg-type]


def test_who_wants_distances() -> None:
    """Never for eight bytes; for all who have nothing else, and over links that are slow enough for them to
    pay.
    """
    assert not any(CodecSelector(codec).relative(8) for codec in ("small", "ef+planes"))
    for width in (1, 2, 4):
        assert (
            CodecSelector("small").relative(width)
            and CodecSelector("u16+ulp").relative(width)
            and CodecSelector("dense+ulp").relative(width)
        )
        assert not (
            FAST.relative(width)
            or CodecSelector("auto").relative(width)
            or CodecSelector("ef+raw").relative(width)
        )
        assert [CodecSelector("auto", speed).relative(width) for speed in (1e6, 1e12)] == [True, False]
    assert CodecSelector("auto", 0.2 * GIB).relative(4) and not CodecSelector("auto", 0.2 * GIB).relative(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 1 << 20), st.floats(0.0001, 1), st.data())
def test_small_is_the_smallest_of_all_pairs(length: int, share: float, data: st.DataObject) -> None:
    pool = wide(data.draw(some_distances(2)))
    count = max(1, min(len(pool), int(length * share)))
    values = Values(pool[:count], True, 2)
    relative = [codec for codec in VALUE_CODECS.values() if codec.relative]
    sizes = [2 * length] + [codec.size(values, length - count) for codec in relative]
    sizes += [
        index.size(count, length) + value.size(values)
        for index, value in product(INDEX_CODECS.values(), relative)
        if index is not AGAIN and (index is not DENSE or count == length)
    ]
    index, value, whole = CodecSelector("small").select(count, length, values, whole=True)
    chosen = index.size(count, length) + (
        value.size(values, length - count) if whole and value is not RAW else value.size(values)
    )
    if whole and value is RAW:
        chosen = 2 * length
    assert chosen == min(sizes)
    assert (index is DENSE) == (whole or count == length)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_fast_takes_what_is_cheap_to_code(length: int, count: int) -> None:
    count = min(count, length)
    values = Values(torch.zeros(count, dtype=torch.int16), False, 2)
    index, value, whole = FAST.select(count, length, values, whole=True)
    sparse = min(4 * count, 4 * -(-length // 65536) + 2 * count) + 2 * count
    assert value is RAW and whole == (count < length and sparse >= 2 * length)
    if count == length or whole:
        assert index is DENSE
    else:
        assert 2 * count + index.size(count, length) == sparse and index.name in ("i32", "u16")


@pytest.mark.parametrize(
    "pair",
    PAIRS,
)
def test_a_pair_is_taken_as_long_as_it_is_smaller_than_all_elements(pair: str) -> None:
    selector = CodecSelector(pair)
    index_name, value_name = pair.replace("again", "ef").split(
        "+"
    )  # which it is where the delta before had nothing
    values = Values(torch.tensor([1, -1, 2, 5] * 50, dtype=torch.int32), selector.relative(2), 2)
    index, value, whole = selector.select(200, 100_000, values, whole=True)
    assert whole == (index_name == "dense") and index.name == index_name
    assert value.name == (
        "raw" if whole and value_name in ("ulp", "planes") else value_name
    )  # of 500 zeros for each change
    near = Values(torch.tensor([1, -1, 2, 5] * 50, dtype=torch.int32), selector.relative(2), 2)
    assert selector.select(200, 201, near, whole=True)[1].name == (
        "raw" if value_name == "ulp" else value_name
    )
    random = Values(torch.randint(-(1 << 15), 1 << 15, (200,)).to(torch.int32), selector.relative(2), 2)
    index, value, whole = selector.select(200, 201, random, whole=True)
    assert index is DENSE and whole
    index, value, whole = selector.select(200, 200, random, whole=True)
    assert index is DENSE and not whole and value.size(random) <= 400
    assert value in ((ULP,) if random.relative else (RAW, ULP))


def test_auto_weighs_bytes_against_time() -> None:
    """The slower the link, the fewer bytes; the faster, the cheaper the codecs."""
    values = Values(torch.tensor([1, -1, 1, 2] * 2500, dtype=torch.int32), True, 2)
    names = [
        CodecSelector("auto", speed).select(10_000, 1 << 20, values, whole=True) for speed in (1e7, 1e11)
    ]
    assert (names[0][0].name, names[0][1].name) == ("ef", "planes")
    assert names[1][0].name == "i32" and names[1][1].name == "ulp"
    sizes = []
    for speed in (1e6, 1e8, 3e8, 1e9, 1e11):
        selector = CodecSelector("auto", speed)
        index, value, _ = selector.select(
            10_000, 1 << 20, Values(values.values, selector.relative(2), 2), whole=True
        )
        sizes.append(index.size(10_000, 1 << 20) + value.size(values))
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_the_ratio_moves_the_border_to_whole_segments() -> None:
    values = {
        count: Values(torch.zeros(count, dtype=torch.int16), False, 2) for count in (1000, 3000, 4900, 5100)
    }
    for sparse_bytes_ratio, expected in (
        (1.0, [False, False, False, True]),
        (0.5, [False, True, True, True]),
        (0.1, [True] * 4),
    ):
        chosen = [
            CodecSelector(sparse_bytes_ratio=sparse_bytes_ratio).select(count, 10_000, each, whole=True)[2]
            for count, each in values.items()
        ]
        assert chosen == expected
    for sparse_bytes_ratio in (0.3, 1.0):
        steps = Values(torch.ones(5000, dtype=torch.int32), True, 2)
        index, value, whole = CodecSelector("small", sparse_bytes_ratio=sparse_bytes_ratio).select(
            5000, 10_000, steps, whole=True
        )
        assert (index.name, value.name, whole) == ("bitmap", "planes", False)
