"""The model map refuses slots, shapes and dtypes that do not fit together, and says which they are."""

from __future__ import annotations

from dte_dist.plan.model_map import ModelMap
from tests.unit.plan.ranks import entry, refused, whole


def test_missing_and_extra_slots():
    source = {0: whole("a", "b", "c")}
    refused(
        source,
        {3: whole("a"), 4: whole("a", "b", "c")},
        "lacks a tensor",
        "(and 1 more)",
        "tensor 'b'",
        "ranks 3]",
        "rename=",
    )
    alike = whole("a", "b")
    refused(
        source, {3: alike, 5: alike}, "lacks a tensor that the sources have [", "tensor 'c'", "ranks 3, 5"
    )
    refused(
        source, {2: whole("a", "b", "c", "d")}, "has a tensor that no source has", "tensor 'd'", "ranks 2"
    )
    refused(
        source, {2: whole("a", "d", partial=True)}, "has a tensor that no source has", "tensor 'd'", "ranks 2"
    )


def test_a_partial_receiver_may_lack_slots():
    model = ModelMap({0: whole("a", "b", "c")}, {2: whole("b", partial=True), 3: whole("a", "b", "c")})
    assert [piece.slot for piece in model.receiver_spaces[2][2].pieces] == [1]


def test_shapes_and_dtypes_that_differ():
    source = {0: whole(entry("a", (4, 6)))}
    refused(
        source,
        {2: whole(entry("a", (4, 5)))},
        "shapes differ",
        "tensor 'a'",
        "ranks 2",
        "expected (4, 6)",
        "got (4, 5)",
    )
    other = whole(entry("a", dtype="float32"))
    refused(
        source,
        {2: other},
        "dtypes differ",
        "tensor 'a'",
        "ranks 2",
        "expected bfloat16",
        "got float32",
        "wire_dtype=",
    )
    refused(
        source,
        {2: whole("a"), 3: whole(entry("a", dtype="float16"))},
        "dtypes differ",
        "ranks 3",
        "got float16",
    )


def test_sources_that_differ_among_each_other():
    receivers = {9: whole("a")}
    refused(
        {0: whole("a"), 1: whole(entry("a", (4, 5)))},
        receivers,
        "sources differ",
        "tensor 'a'",
        "ranks 0, 1",
        "(4, 6)",
        "(4, 5)",
    )
    refused(
        {0: whole("a"), 1: whole(entry("a", dtype="float32"))},
        receivers,
        "sources differ",
        "ranks 0, 1",
        "float32",
        "bfloat16",
    )
