"""Manifests: equal content is equal bytes, and bytes that are no manifest are refused."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import DTYPES, WHOLE, Block, Cut, Entry, Manifest, MeshSpec, Placement

MESHES = (MeshSpec((2, 2), (0, 1, 2, 3)), MeshSpec((2,), (1, 3)))
SHARDED = Placement(0, (Cut(0, 1), Cut(0, 0), Cut(1, 0)))


def example() -> Manifest:
    left, right = (Placement(block=Block.rectangle((0, column), (4, 2))) for column in (0, 2))
    entries = [
        Entry("norm", (7,), "float32", Placement(1)),
        Entry("fused", (4, 4), "float8_e4m3fn", right),
        Entry("embed", (7, 3), "bfloat16", Placement(0, (Cut(0, 1), Cut(0, 0)))),
        Entry("head", (7, 3), "bfloat16", Placement(0, (Cut(0, 1), Cut(0, 0)))),
        Entry("fused", (4, 4), "float8_e4m3fn", left),
        Entry("scalar", (), "int64", WHOLE),
    ]
    return Manifest.build(entries, MESHES, [["head", "embed"]])


def test_entries_are_ordered_by_name_and_region():
    manifest = example()
    assert [entry.name for entry in manifest.entries] == ["embed", "fused", "fused", "head", "norm", "scalar"]
    assert [manifest.block(index, ()).runs[1] for index in (1, 2)] == [((0, 2),), ((2, 2),)]
    assert manifest.ties == (("embed", "head"),)


def test_round_trip_keeps_everything_and_the_digest():
    manifest = example()
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.to_bytes() == manifest.to_bytes()
    assert again.digest() == manifest.digest()
    assert len(manifest.digest()) == 16


names = st.text('ab.é模\n"\0', max_size=6)
shapes = st.lists(st.integers(0, 1 << 18), max_size=3).map(tuple)


@st.composite
def entries(draw):
    shape = draw(shapes)
    block = Block.whole(shape)
    kinds = [WHOLE, Placement(0), Placement(1), Placement(block=block), Placement(1, block=block)]
    cuts = [Placement(0, (Cut(len(shape) - 1, 1), Cut(0, 0, 2)))] if shape else []
    return Entry(
        draw(names), shape, draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(kinds + cuts))
    )


@given(st.lists(entries(), unique_by=lambda entry: entry.name, max_size=6))
def test_any_manifest_survives_the_trip(drawn):
    manifest = Manifest.build(drawn, MESHES)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert Manifest.build(reversed(drawn), MESHES).digest() == manifest.digest()


@pytest.mark.parametrize(
    "changed",
    [
        Entry("embed", (7, 3), "float16", SHARDED),
        Entry("embed", (7, 4), "bfloat16", SHARDED),
        Entry("embed2", (7, 3), "bfloat16", SHARDED),
        Entry("embed", (7, 3), "bfloat16", Placement(0, (Cut(0, 0), Cut(0, 1), Cut(1, 0)))),
    ],
)
def test_the_digest_sees_every_part_of_an_entry(changed):
    one, other = (
        Manifest.build([entry], MESHES) for entry in (Entry("embed", (7, 3), "bfloat16", SHARDED), changed)
    )
    assert one.digest() != other.digest()


def test_the_digest_sees_meshes_and_ties():
    entries = [Entry("a", (2,), "bool", WHOLE), Entry("b", (2,), "bool", WHOLE)]
    manifests = [
        Manifest.build(entries),
        Manifest.build(entries, MESHES),
        Manifest.build(entries, (), [("a", "b")]),
    ]
    assert len({manifest.digest() for manifest in manifests}) == 3


def test_blocks_follow_from_the_coordinates():
    manifest = example()
    assert manifest.block(0, ((0, 1), None)).runs == (((4, 2),), ((0, 3),))
    assert manifest.block(manifest.entries[0], ((1, 1), None)).runs == (((6, 1),), ((0, 3),))
    assert manifest.block(0, (None, (0,))) is None
    assert manifest.block(4, (None, (1,))) == Block.whole((7,))
    assert manifest.block(5, ()).numel == 1
    assert manifest.block(0, ((0, 0), None)) is manifest.block(3, ((0, 0), None)), (
        "blocks are shared between entries of one geometry"
    )


@pytest.mark.parametrize("coordinates", [((2, 0), None), ((0,), None), ((0, 0),), ()])
def test_coordinates_of_another_model_are_refused(coordinates):
    with pytest.raises(LayoutMismatch, match="tensor 'embed'"):
        example().block(0, coordinates)


@given(st.binary(max_size=80))
def test_garbage_is_refused(data):
    with pytest.raises(LayoutMismatch, match="manifest are damaged"):
        Manifest.from_bytes(data)


@given(st.data())
def test_damaged_bytes_are_refused(data):
    good = bytearray(example().to_bytes())
    bad = good.copy()
    bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert Manifest.from_bytes(bytes(bad)) == example()  # a bit of the header of zlib that means nothing
    except LayoutMismatch as error:
        assert "damaged" in str(error)


def test_bytes_cut_short_or_followed_by_others_are_refused():
    good = example().to_bytes()
    for bad in (good[:-1], good[: len(good) // 2], good + b"\0", b""):
        with pytest.raises(LayoutMismatch, match="damaged"):
            Manifest.from_bytes(bad)


def forged(change) -> bytes:
    document = json.loads(zlib.decompress(example().to_bytes()))
    change(document)
    return zlib.compress(json.dumps(document).encode())


def test_forging_nothing_is_accepted():
    assert Manifest.from_bytes(forged(lambda document: None)) == example()


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(document):
        for step in path:
            document = document[step]
        document[last] = value

    return change


def stepped(*runs):
    """Return what puts runs along the second dimension, of 7 indices, in the format that has steps."""

    def change(document):
        document["format"] = 2
        document["geometries"].append([[4, 7], "bool", None, [], [[[0, 4]], list(runs)]])
        document["kinds"].append(len(document["geometries"]) - 1)
        document["names"].append("stepped")

    return change


FORGERIES = {
    "another format": put("format", 3),
    "a format of steps without one": put("format", 2),
    "a step in a format without them": put("geometries", 1, 4, 1, 0, [0, 1, 1, 3]),
    "a step of one run": stepped([0, 1, 2, 1]),
    "steps that overlap": stepped([0, 2, 1, 3]),
    "steps that touch": stepped([0, 1, 1, 3]),
    "a step back": stepped([9, 1, -2, 3]),
    "a step that leaves its tensor": stepped([0, 1, 2, 5]),
    "steps of a fraction": stepped([0, 1, 1.5, 3]),
    "steps of more runs than there is room for": stepped([0, 1, 2, 1 << 40]),
    "fewer runs than none, to make up for that": stepped([0, 1, 2, -(1 << 40)], [0, 1, 2, 1 << 40]),
    "a step of three numbers": stepped([0, 1, 2, 3], [6, 1, 2]),
    "a missing part": lambda document: document.pop("meshes"),
    "a name that is no string": put("names", 0, 7),
    "names out of order": put("names", 0, "zebra"),
    "a name twice": put("names", 4, "head"),
    "a geometry that is not there": put("kinds", 0, 99),
    "a negative geometry": put("kinds", 0, -1),
    "a geometry that is true": put("kinds", 0, True),
    "fewer kinds than names": lambda document: document["kinds"].pop(),
    "a negative size": put("geometries", 0, 0, 0, -7),
    "a fraction as size": put("geometries", 0, 0, 0, 7.5),
    "a size that is too large": put("geometries", 0, 0, 0, 1 << 63),
    "an unknown dtype": put("geometries", 0, 1, "qint8"),
    "a dtype that is no string": put("geometries", 0, 1, ["bool"]),
    "a dtype of a long text": put("geometries", 0, 1, "x" * 100_000),
    "more dimensions than torch has": put("geometries", 0, 0, [1] * 65),
    "more elements than can be counted": put("geometries", 0, 0, [1 << 40, 1 << 40]),
    "none of them, by way of too many": put("geometries", 0, 0, [0, 1 << 40, 1 << 40]),
    "more bytes than can be counted": put("geometries", 0, 0, [1 << 31, 1 << 31]),
    "tensors that are too large together": put("geometries", 0, 0, [1 << 30, 1 << 30]),
    "half a character as a name": put("names", 4, "norm\ud800"),
    "a mesh that is not there": put("geometries", 0, 2, 2),
    "cuts without a mesh": put("geometries", 0, 2, None),
    "a cut of a dimension that is not there": put("geometries", 0, 3, 0, 0, 2),
    "a cut along a dimension that the mesh lacks": put("geometries", 0, 3, 0, 1, 2),
    "a mesh dimension that cuts twice": put("geometries", 0, 3, 0, 1, 0),
    "no split at all": put("geometries", 0, 3, 0, 2, 0),
    "a split that takes for ever": put("geometries", 0, 3, 0, 2, 1 << 50),
    "splits that take for ever together": put("geometries", 0, 3, [[0, 1, 1 << 11], [0, 0, 1 << 10]]),
    "a block that leaves its tensor": put("geometries", 1, 4, 1, 0, 1, 9),
    "a block with a run of nothing": put("geometries", 1, 4, 1, 0, 1, 0),
    "a run of three numbers": put("geometries", 1, 4, 1, 0, [0, 1, 2]),
    "a block on a mesh that is not there": put("geometries", 1, 2, 2),
    "a block on a mesh that is true": put("geometries", 1, 2, True),
    "a block that is cut, too": put("geometries", 1, 3, [[0, 0, 1]]),
    "two shapes for one name": put("geometries", 1, 0, [4, 9]),
    "ranks that do not fill the mesh": put("meshes", 0, 1, [0, 1, 2]),
    "a rank twice": put("meshes", 0, 1, [0, 1, 2, 2]),
    "a mesh of many dimensions": put("meshes", 0, 0, [1] * 63 + [2, 2]),
    "an empty mesh": put("meshes", 0, 0, [0, 2]),
    "a tie of one": put("ties", 0, ["embed"]),
    "a tie of strangers": put("ties", 0, ["embed", "stranger"]),
    "ties out of order": put("ties", 0, ["head", "embed"]),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_manifests_are_refused(change):
    with pytest.raises(LayoutMismatch, match="damaged") as caught:
        Manifest.from_bytes(forged(change))
    assert len(str(caught.value)) < 1000 and str(caught.value).encode()


def test_a_step_is_read_as_its_runs_and_written_in_one_spelling():
    read = Manifest.from_bytes(forged(stepped([0, 1, 2, 3])))
    assert read.entries[-1].placement.block == Block((((0, 4),), ((0, 1), (2, 1), (4, 1))))
    for runs in ([[0, 1], [2, 1], [4, 1], [6, 1]], [[0, 1], [2, 1, 2, 3]], [[0, 1, 2, 3], [6, 1]]):
        # a writer knows the last two spellings, too, but writes one step
        again = Manifest.from_bytes(forged(lambda document, runs=runs: stepped_or_plain(document, runs)))
        written = json.loads(zlib.decompress(again.to_bytes()))
        assert written["format"] == 2 and written["geometries"][-1][4] == [[[0, 4]], [[0, 1, 2, 4]]]
        assert Manifest.from_bytes(again.to_bytes()) == again


def stepped_or_plain(document, runs):
    stepped(*runs)(document)
    document["format"] = 2 if any(len(run) == 4 for run in runs) else 1


def test_a_manifest_without_steps_is_what_it_was():
    assert json.loads(zlib.decompress(example().to_bytes()))["format"] == 1


def test_deep_nesting_and_bombs_are_refused():
    for text in (b"[" * 100_000, b" " * ((1 << 26) + 1)):
        with pytest.raises(LayoutMismatch, match="damaged"):
            Manifest.from_bytes(zlib.compress(text, 1))
