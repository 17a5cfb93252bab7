"""The model map and dtypes on the wire: who chooses them, and casts that are refused."""

from __future__ import annotations

import pytest

from dte_dist.plan.model_map import ModelMap
from tests.unit.plan.ranks import entry, refused, whole

MASTERS = [entry("norm", (6,), "float32"), entry("step", (), "int64"), entry("w", dtype="float32")]
SERVED = [entry("norm", (6,), "float32"), entry("step", (), "int64"), entry("w", dtype="bfloat16")]


def wire_dtypes(wire, source=MASTERS, receiver=SERVED, **options):
    return [
        slot.dtype
        for slot in ModelMap({0: whole(*source, wire=wire)}, {1: whole(*receiver, **options)}).slots
    ]


@pytest.mark.parametrize(
    "wire", ["receiver", {"w": "bfloat16"}, {"w": "bfloat16", "norm": "float32", "unknown": "float16"}]
)
def test_sources_cast_before_they_compare(wire):
    assert wire_dtypes(wire) == ["float32", "int64", "bfloat16"]


def test_without_a_wire_dtype_sources_send_what_they_hold():
    assert (
        wire_dtypes(None, receiver=MASTERS)
        == wire_dtypes({}, receiver=MASTERS)
        == ["float32", "int64", "float32"]
    )
    refused(
        {0: whole(*MASTERS)},
        {1: whole(*SERVED)},
        "dtypes differ",
        "tensor 'w'",
        "expected float32",
        "got bfloat16",
        '"receiver"',
    )


def test_slots_that_no_receiver_holds_keep_their_dtype():
    assert wire_dtypes("receiver", receiver=SERVED[2:], partial=True) == ["float32", "int64", "bfloat16"]


def test_receivers_that_disagree_cannot_choose():
    receivers = {2: whole("a"), 3: whole(entry("a", dtype="float32"))}
    refused({0: whole("a", wire="receiver")}, receivers, "dtypes differ", "tensor 'a'", "ranks 2")


@pytest.mark.parametrize(
    ("wire", "held", "wanted"),
    [
        ("receiver", "float32", "int32"),
        ("receiver", "int64", "int32"),
        ("receiver", "bfloat16", "float8_e4m3fn"),
        ({"a": "int32"}, "float32", "int32"),
        ({"a": "bfloat16"}, "int16", "bfloat16"),
        ("receiver", "complex64", "float32"),
        ("receiver", "bool", "uint8"),
    ],
)
def test_casts_that_are_refused(wire, held, wanted):
    sources = {0: whole(entry("a", dtype=held), wire=wire)}
    refused(
        sources,
        {1: whole(entry("a", dtype=wanted))},
        "cast is not made",
        "tensor 'a'",
        "ranks 0",
        f"expected {held}",
        f"got {wanted}",
    )


def test_a_cast_to_8_bits_must_be_named():
    sources = {0: whole("a", wire={"a": "float8_e4m3fn"})}
    assert ModelMap(sources, {1: whole(entry("a", dtype="float8_e4m3fn"))}).nbytes == 24


def test_spaces_are_sorted_by_the_width_on_the_wire():
    model = ModelMap({0: whole(*MASTERS, wire="receiver")}, {1: whole(*SERVED)})
    assert {width: space.pieces.slot.tolist() for width, space in model.source_spaces[0].items()} == {
        2: [2],
        4: [0],
        8: [1],
    }
