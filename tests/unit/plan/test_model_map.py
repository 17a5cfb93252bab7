"""The model map: who contributes what, and every way in which descriptions do not fit together."""

from __future__ import annotations

import time
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.errors import LayoutMismatch
from dte_dist.kernels.cpu import translate
from dte_dist.layout import WHOLE, Block, Cut, Entry, Layout, Manifest, MeshSpec, Placement
from dte_dist.plan.aliases import Aliases, aliased_entries
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.model_map import ModelMap, RankLayout, Slot
from tests.unit.geometry import SHAPES

ROWS = Placement(mesh=0, cuts=(Cut(0, 0),))
REPLICATED = Placement(mesh=0)


def entry(name, shape=(4, 6), dtype="bfloat16", placement=WHOLE):
    return Entry(name, shape, dtype, placement)


def region(name, offsets, shape, full=(4, 6), dtype="bfloat16"):
    return Entry(name, full, dtype, Placement(block=Block.rectangle(offsets, shape)))


def manifest(*entries, mesh=None, ties=()):
    return Manifest.build(entries, [MeshSpec(mesh, tuple(range(prod(mesh))))] if mesh else [], ties)


def whole(*entries, ties=(), **options):
    """A rank that holds plain tensors, by name or as entries."""
    return RankLayout(
        manifest(*(each if isinstance(each, Entry) else entry(each) for each in entries), ties=ties),
        (),
        **options,
    )


def on_mesh(shared, mesh, **options):
    """By rank, the holdings of all ranks of a mesh."""
    return {rank: RankLayout(shared, (at,), **options) for rank, at in enumerate(product(*map(range, mesh)))}


def contributed(model):
    """By slot name, the (rank, block) of all contributions."""
    found = {slot.name: [] for slot in model.slots}
    for rank, spaces in model.source_spaces.items():
        for width, space in spaces.items():
            for piece in space.pieces:
                assert model.slots[piece.slot].width == width
                found[model.slots[piece.slot].name].append((rank, piece.block))
    return found


def holders(model):
    return {name: [rank for rank, _ in parts] for name, parts in contributed(model).items()}


def refused(sources, receivers, *words):
    """Expect a LayoutMismatch whose text has all of these words, then the hint."""
    with pytest.raises(LayoutMismatch) as caught:
        ModelMap(sources, receivers)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "Hint: " in text


# Slots and spaces


def test_slots_are_sorted_and_counted():
    model = ModelMap(
        {0: whole(entry("b", (3,), "float32"), entry("a", (), "float8_e4m3fn"), entry("c", (0, 4)))},
        {1: whole(entry("a", (), "float8_e4m3fn"), entry("b", (3,), "float32"), entry("c", (0, 4)))},
    )
    assert model.slots == (
        Slot("a", (), "float8_e4m3fn"),
        Slot("b", (3,), "float32"),
        Slot("c", (0, 4), "bfloat16"),
    )
    assert (model.numel, model.nbytes) == (4, 13)
    assert {width: space.numel for width, space in model.source_spaces[0].items()} == {1: 1, 4: 3}
    assert [model.slot_of(name) for name in "abc"] == [0, 1, 2]
    assert model.slots[1].torch_dtype is torch.float32


def test_pieces_point_at_the_entries_of_their_own_rank():
    sources = {0: whole("a", "b", "c"), 2: RankLayout(manifest(entry("c")), ())}
    model = ModelMap(sources, {5: whole("c", partial=True), 6: whole("a", "b", "c")})
    assert [(piece.slot, piece.entry) for piece in model.source_spaces[0][2].pieces] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert model.source_spaces[2] == {}
    assert [(piece.slot, piece.entry) for piece in model.receiver_spaces[5][2].pieces] == [(2, 0)]


def test_receivers_that_are_placed_alike_share_their_spaces():
    shared = manifest(entry("a", placement=ROWS), mesh=(2,))
    receivers = {rank: RankLayout(shared, ((rank % 2,),)) for rank in range(1, 5)}
    spaces = ModelMap({0: whole("a")}, receivers).receiver_spaces
    assert spaces[1] is spaces[3]
    assert spaces[1][2].pieces.block.tolist() != spaces[2][2].pieces.block.tolist()


# Contributors


def test_of_replicas_the_first_contributes():
    """HSDP: axis 0 replicates, axis 1 shards; plain tensors and replicated ones come from the lowest rank."""
    sharded, norm = (
        entry("w", placement=Placement(0, (Cut(0, 1),))),
        entry("norm", (6,), placement=REPLICATED),
    )
    shared = manifest(sharded, norm, entry("plain"), mesh=(2, 2))
    everywhere = on_mesh(shared, (2, 2))
    receivers = {4: whole("w", entry("norm", (6,)), "plain")}
    assert holders(ModelMap(everywhere, receivers)) == {"w": [0, 1], "norm": [0], "plain": [0]}
    assert holders(ModelMap({rank: everywhere[rank] for rank in (3, 2)}, receivers)) == {
        "w": [2, 3],
        "norm": [2],
        "plain": [2],
    }
    assert holders(ModelMap({rank: everywhere[rank] for rank in (1, 2, 3)}, receivers)) == {
        "w": [1, 2],
        "norm": [1],
        "plain": [1],
    }


def test_replicas_on_a_mesh_take_turns():
    """Of slots that are cut alike; each replica sends its part of them, whatever else lies between them in
    the order of names.
    """
    entries = [
        entry(f"{layer}.{name}", shape, placement=REPLICATED)
        for layer in range(6)
        for name, shape in (("b", (6,)), ("w", (4, 6)))
    ]
    shared = manifest(*entries, entry("z.plain"), mesh=(3,))
    model = ModelMap(
        on_mesh(shared, (3,)), {3: whole(*(entry(each.name, each.shape) for each in entries), "z.plain")}
    )
    found = holders(model)
    assert [found[f"{layer}.{name}"] for name in "bw" for layer in range(6)] == 2 * [
        [0],
        [1],
        [2],
        [0],
        [1],
        [2],
    ]
    assert found["z.plain"] == [0]


def test_the_parts_of_hsdp_come_from_all_ranks():
    shared = manifest(
        *(entry(f"{layer}", placement=Placement(0, (Cut(0, 1),))) for layer in range(4)), mesh=(2, 2)
    )
    found = holders(ModelMap(on_mesh(shared, (2, 2)), {9: whole(*map(str, range(4)))}))
    assert found == {"0": [0, 1], "1": [2, 3], "2": [0, 1], "3": [2, 3]}


def test_the_order_in_which_ranks_are_named_does_not_matter():
    everywhere = on_mesh(manifest(entry("w", placement=Placement(0, (Cut(0, 1),))), mesh=(2, 2)), (2, 2))
    models = [
        ModelMap({rank: everywhere[rank] for rank in order}, {9: whole("w")})
        for order in ([0, 1, 2, 3], [2, 3, 1, 0])
    ]
    assert contributed(models[0]) == contributed(models[1])


def test_stages_of_a_pipeline_own_different_slots():
    stages = {0: whole("embed", "layers.0"), 1: whole("layers.1"), 2: whole("head", "layers.2")}
    names = ["embed", "head", "layers.0", "layers.1", "layers.2"]
    assert holders(ModelMap(stages, {3: whole(*names)})) == {
        "embed": [0],
        "head": [2],
        "layers.0": [0],
        "layers.1": [1],
        "layers.2": [2],
    }


def test_parameters_on_different_meshes():
    """Experts on a mesh of four, the rest on a mesh of two of these ranks."""
    shared = Manifest.build(
        [entry("expert", placement=Placement(1, (Cut(0, 0),))), entry("w", placement=ROWS)],
        [MeshSpec((2,), (0, 1)), MeshSpec((4,), (0, 1, 2, 3))],
    )
    sources = {rank: RankLayout(shared, ((rank,) if rank < 2 else None, (rank,))) for rank in range(4)}
    assert holders(ModelMap(sources, {7: whole("expert", "w")})) == {"expert": [0, 1, 2, 3], "w": [0, 1]}


def test_uneven_shards_leave_ranks_without_a_part():
    shared = manifest(entry("w", (5, 2), placement=ROWS), mesh=(4,))
    model = ModelMap(on_mesh(shared, (4,)), {9: whole(entry("w", (5, 2)))})
    assert holders(model) == {"w": [0, 1, 2]}
    assert model.source_spaces[3] == {}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_element_has_one_contributor_and_reaches_every_receiver(data):
    """Random slots on random meshes on both sides; replicas, empty shards and several dtypes included."""
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
    dtypes = [data.draw(st.sampled_from(["float8_e5m2", "bfloat16", "float32", "int64"])) for _ in shapes]

    def side(first):
        mesh = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        entries = []
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            dims = (
                data.draw(st.lists(st.sampled_from(range(len(mesh))), unique=True, max_size=len(mesh)))
                if shape
                else []
            )
            cuts = tuple(Cut(data.draw(st.integers(0, len(shape) - 1)), dim) for dim in dims)
            entries.append(Entry(f"s{index}", shape, dtype, Placement(0, cuts)))
        return {
            first + rank: holding for rank, holding in on_mesh(manifest(*entries, mesh=mesh), mesh).items()
        }

    sources, receivers = side(0), side(100)
    model = ModelMap(sources, receivers)
    for slot in model.slots:
        parts = [block.global_indices(slot.shape) for _, block in contributed(model)[slot.name]]
        assert sorted(np.concatenate([np.zeros(0, np.int64), *parts]).tolist()) == list(range(slot.numel))
    for spaces in model.receiver_spaces.values():
        for width, space in spaces.items():
            homes = []
            for source in (each[width] for each in model.source_spaces.values() if width in each):
                positions = torch.arange(source.numel, dtype=torch.int32)
                homes += [
                    home
                    for index_map in build_index_maps(source, space)
                    for home in translate(index_map, 0, positions, positions)[0].tolist()
                ]
            assert sorted(homes) == list(range(space.numel))


# Contested pieces


def contested(sources, names=("w",)):
    """By slot, the contested pieces: the ranks that speak for each, and whether buffers may differ there."""
    found = ModelMap(sources, {99: whole(*names)}).contested
    pieces = {}
    for piece, slot in enumerate(found.slot.tolist()):
        speakers = found.rank[found.piece == piece].tolist()
        assert speakers == [rank for rank in sorted(sources) if piece in found.held_by(rank)[0]]
        pieces.setdefault(sorted(names)[slot], []).append((speakers, bool(found.may_differ[piece])))
    return pieces


def on_meshes(*ranks, cut=True):
    """Sources that hold "w" on a one-dimensional mesh of their own, and "p" as plain tensors."""
    found = {}
    for members in ranks:
        entries = [entry("p"), entry("w", placement=ROWS if cut else REPLICATED)]
        shared = Manifest.build(entries, [MeshSpec((len(members),), tuple(members))])
        found |= {rank: RankLayout(shared, ((place,),)) for place, rank in enumerate(members)}
    return found


def test_what_one_source_holds_and_replicas_on_one_mesh_are_not_contested():
    norm = entry("norm", (6,), placement=REPLICATED)
    shared = manifest(norm, entry("w", placement=Placement(0, (Cut(0, 1),))), mesh=(2, 2))
    assert len(ModelMap(on_mesh(shared, (2, 2)), {9: whole("w", entry("norm", (6,)))}).contested) == 0
    assert contested({0: whole("w"), 1: whole("v")}, ("v", "w")) == {}
    assert contested({0: whole("w")}) == {}


def test_plain_tensors_on_several_sources_are_contested():
    assert contested({0: whole("v", "w"), 2: whole("w"), 5: whole("v", "w")}, ("v", "w")) == {
        "v": [([0, 5], True)],
        "w": [([0, 2, 5], True)],
    }
    parts = {rank: RankLayout(manifest(region("w", (2 * (rank % 2), 0), (2, 6))), ()) for rank in range(4)}
    assert contested(parts) == {"w": [([0, 2], True), ([1, 3], True)]}


def test_of_meshes_that_differ_one_rank_each_speaks():
    """Cut, one rank of a mesh holds each block; replicated, the first rank of a mesh speaks for all of it."""
    apart = on_meshes([0, 1], [2, 3])
    plain = ([0, 1, 2, 3], False)  # no mesh holds all four
    assert contested(apart, ("p", "w")) == {"p": [plain], "w": [([0, 2], False), ([1, 3], False)]}
    replicated = on_meshes([0, 1], [2, 3], cut=False)
    assert contested(replicated, ("p", "w")) == {"p": [plain], "w": [([0, 2], False)]}
    beside = {**on_meshes([0, 1], cut=False), 4: whole("p", "w")}
    assert contested(beside, ("p", "w")) == {"p": [([0, 1, 4], False)], "w": [([0, 4], False)]}


def test_plain_tensors_of_ranks_that_share_a_mesh_may_differ_as_buffers():
    """Also where each has a further mesh of its own, but not where one of the holders is outside."""
    assert contested(on_meshes([0, 1]), ("p", "w")) == {"p": [([0, 1], True)]}
    specs = [MeshSpec((2,), (0, 1)), MeshSpec((2,), (2, 3)), MeshSpec((4,), (0, 1, 2, 3))]
    shared = Manifest.build([entry("p"), entry("w", placement=Placement(2, (Cut(0, 0),)))], specs)
    first, second = {0: (0,), 1: (1,)}, {2: (0,), 3: (1,)}
    sources = {rank: RankLayout(shared, (first.get(rank), second.get(rank), (rank,))) for rank in range(4)}
    assert contested(sources, ("p", "w")) == {"p": [([0, 1, 2, 3], True)]}
    assert contested({**sources, 7: whole("p")}, ("p", "w")) == {"p": [([0, 1, 2, 3, 7], False)]}


def test_equal_meshes_are_one_mesh_whatever_their_number_in_a_manifest():
    here = Manifest.build([entry("w", placement=REPLICATED)], [MeshSpec((2,), (0, 1))])
    meshes = [MeshSpec((2,), (2, 3)), MeshSpec((2,), (0, 1))]
    there = Manifest.build([entry("w", placement=Placement(mesh=1))], meshes)
    assert contested({0: RankLayout(here, ((0,),)), 1: RankLayout(there, (None, (1,)))}) == {}


def test_a_tied_tensor_is_contested_under_any_of_its_names():
    sources = {0: whole("embed", "head", ties=TIED), 1: whole("head")}
    found = ModelMap(sources, {2: whole("embed", "head", ties=TIED)}).contested
    assert (found.slot.tolist(), found.rank.tolist(), found.entry.tolist()) == ([0], [0, 1], [0, 0])


# Coverage


def test_a_part_that_no_source_holds():
    shared = manifest(entry("a", placement=ROWS), entry("b"), mesh=(4,))
    sources = on_mesh(shared, (4,))
    refused(
        {rank: sources[rank] for rank in (0, 1, 3)},
        {9: whole("a", "b")},
        "do not hold the whole tensor",
        "tensor 'a'",
        "ranks 0, 1, 3",
        "expected 24 elements",
        "got 18 elements",
        "src=",
    )


def test_a_slot_of_which_sources_hold_nothing():
    outside = RankLayout(manifest(entry("a", placement=ROWS), mesh=(2,)), (None,))
    refused({0: outside}, {1: whole("a")}, "whole tensor", "tensor 'a'", "got 0 elements")


def test_parts_that_overlap():
    sources = {
        0: RankLayout(manifest(region("a", (0, 0), (3, 6))), ()),
        2: RankLayout(manifest(region("a", (2, 0), (2, 6))), ()),
    }
    refused(sources, {9: whole("a")}, "overlapping parts", "tensor 'a'", "ranks 0, 2")


def test_overlap_and_gap_that_add_up():
    """As many elements as the slot has, but not the right ones."""
    sources = {
        0: RankLayout(manifest(region("a", (0, 0), (3, 6))), ()),
        2: RankLayout(manifest(region("a", (2, 0), (1, 6))), ()),
    }
    refused(sources, {9: whole("a")}, "overlapping parts", "ranks 0, 2")


def test_a_whole_copy_beside_shards_is_refused():
    sources = on_mesh(manifest(entry("w", placement=ROWS), mesh=(2,)), (2,)) | {2: whole("w")}
    refused(sources, {9: whole("w")}, "overlapping parts", "tensor 'w'", "ranks 0, 2")


def test_the_first_bad_slot_is_named_though_a_like_one_is_good():
    shared = [region("a", (0, 0), (4, 3)), region("b", (0, 0), (4, 3)), region("c", (0, 0), (4, 3))]
    sources = {
        0: RankLayout(manifest(*shared), ()),
        1: RankLayout(manifest(region("a", (0, 3), (4, 3)), region("c", (0, 3), (4, 3))), ()),
    }
    refused(sources, {9: whole("a", "b", "c")}, "tensor 'b'", "ranks 0;", "got 12 elements")


def test_blocks_that_tile_one_slot_do_not_tile_a_larger_one():
    sources = {
        0: RankLayout(manifest(region("a", (0, 0), (4, 6)), region("b", (0, 0), (4, 6), full=(8, 6))), ())
    }
    refused(
        sources,
        {9: whole("a", entry("b", (8, 6)))},
        "do not hold the whole",
        "tensor 'b'",
        "expected 48 elements",
        "got 24 elements",
    )


# Differences


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


# Dtypes on the wire

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


# Ties

TIED = [("embed", "head")]


def test_tied_on_both_sides():
    model = ModelMap({0: whole("embed", "head", "w", ties=TIED)}, {1: whole("embed", "head", "w", ties=TIED)})
    assert [slot.name for slot in model.slots] == ["embed", "w"]
    assert model.slot_of("head") == model.slot_of("embed") == 0
    source, receiver = model.source_spaces[0][2], model.receiver_spaces[1][2]
    for space in (source, receiver):
        assert [(piece.slot, piece.entry) for piece in space.pieces] == [(0, 0), (1, 2)]
    assert len(build_index_maps(source, receiver)) == 1


def test_tied_on_the_source_only():
    model = ModelMap(
        {0: whole("embed", "head", "w", ties=TIED)}, {1: whole("embed", "head", "w"), 2: whole("head", "w")}
    )
    source = model.source_spaces[0][2]
    assert [(piece.slot, piece.entry) for piece in model.receiver_spaces[1][2].pieces] == [
        (0, 0),
        (0, 1),
        (1, 2),
    ]
    assert len(build_index_maps(source, model.receiver_spaces[1][2])) == 2
    assert [piece.entry for piece in model.receiver_spaces[2][2].pieces] == [0, 1]


def test_tied_on_the_receiver_only_is_refused():
    receivers = {1: whole("embed", "head", ties=TIED)}
    refused(
        {0: whole("embed", "head")},
        receivers,
        "a receiver ties embed and head",
        "tensor 'embed'",
        "ranks 1",
        "untie",
    )


def test_tied_on_one_of_two_sources():
    """Dropping one of the names would lose what the second source holds under it; a source that holds one
    name loses nothing.
    """
    ties = whole("embed", "head", ties=TIED)
    refused(
        {0: ties, 1: whole("embed", "head")},
        {2: ties},
        "ties embed and head, this one does not",
        "tensor 'embed'",
        "ranks 1",
    )
    assert holders(ModelMap({0: ties, 1: whole("head")}, {2: ties})) == {"embed": [0]}
    rows = manifest(entry("embed", (1, 6), placement=ROWS), entry("head", (1, 6), placement=ROWS), mesh=(2,))
    tied = manifest(*rows.entries, mesh=(2,), ties=TIED)
    served = {2: whole(entry("embed", (1, 6)), entry("head", (1, 6)), ties=TIED)}
    assert holders(ModelMap({0: RankLayout(tied, ((0,),)), 1: RankLayout(rows, ((1,),))}, served)) == {
        "embed": [0]
    }  # rank 1 holds no row


def test_ties_chain_over_sources():
    assert Aliases([manifest(ties=[("b", "c")]), manifest(ties=[("a", "c")])]).canonical("b") == "a"
    stages = {0: whole("a", "b", ties=[("a", "b")]), 1: whole("b", "c", ties=[("b", "c")])}
    model = ModelMap(stages, {2: whole("a", "b", "c", ties=[("a", "b", "c")])})
    assert holders(model) == {"a": [0]}


def test_one_wire_dtype_is_enough_for_tied_names():
    def tied(dtype, **options):
        return whole(entry("embed", dtype=dtype), entry("head", dtype=dtype), ties=TIED, **options)

    receiver = {1: tied("bfloat16")}
    assert [
        slot.dtype for slot in ModelMap({0: tied("float32", wire={"head": "bfloat16"})}, receiver).slots
    ] == ["bfloat16"]
    refused(
        {0: tied("float32", wire={"embed": "bfloat16", "head": "float16"})},
        receiver,
        "tied names",
        "ranks 0",
        "bfloat16",
        "float16",
    )


def test_names_are_tied_region_by_region():
    """Names that are tied share all of their memory, so equal regions are one: sent once, written once."""
    regions = [region(name, (row, 0), (2, 6)) for name in ("embed", "head") for row in (0, 2)]
    held = manifest(*regions, ties=TIED)
    assert aliased_entries(held) == [0, 1, 0, 1]
    assert aliased_entries(
        manifest(entry("a"), entry("b"), entry("c"), entry("d"), ties=[("a", "c", "d")])
    ) == [0, 1, 0, 0]
    model = ModelMap({0: whole("embed", "head", ties=TIED)}, {1: RankLayout(held, ())})
    assert model.receiver_spaces[1][2].numel == 24
    source, receiver = model.source_spaces[0][2], model.receiver_spaces[1][2]
    assert [len(index_map.begin) for index_map in build_index_maps(source, receiver)] == [1]
    model = ModelMap({0: RankLayout(held, ())}, {1: whole("embed", "head", ties=TIED)})
    assert holders(model) == {"embed": [0, 0]}


def test_tied_names_with_other_regions_stay_apart():
    rows = [region("embed", (row, 0), (2, 6)) for row in (0, 2)]
    assert aliased_entries(manifest(*rows, region("head", (0, 0), (4, 6)), ties=TIED)) == [0, 1, 2]


# From real layouts


def test_views_of_a_fused_projection():
    fused = torch.zeros(10, 4)
    views = Layout.from_views(
        [
            ("k", fused[6:8], (4, 4), (2, 0)),
            ("q", fused[:6], (6, 4), (0, 0)),
            ("k", fused[8:], (4, 4), (0, 0)),
        ]
    )
    source = Layout.from_tensors({"q": torch.zeros(6, 4), "k": torch.zeros(4, 4)})
    model = ModelMap({0: RankLayout(source.manifest, ())}, {1: RankLayout(views.manifest, ())})
    space = model.receiver_spaces[1][4]
    found = [(model.slots[piece.slot].name, piece.block.runs[0]) for piece in space.pieces]
    assert found == [("k", ((0, 2),)), ("k", ((2, 2),)), ("q", ((0, 6),))]
    assert [views.tensors()[piece.entry].data_ptr() for piece in space.pieces] == [
        fused[row].data_ptr() for row in (8, 6, 0)
    ]


def test_a_module_with_tied_weights():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    layout = Layout.from_module(module)
    model = ModelMap(
        {0: RankLayout(layout.manifest, layout.coordinates)},
        {1: RankLayout(layout.manifest, layout.coordinates)},
    )
    assert [slot.name for slot in model.slots] == ["0.bias", "0.weight", "1.bias"]


# Speed


def test_a_large_model_is_planned_fast():
    """20,000 slots on 16 sources and 4 receivers; the bound is loose, the time is printed."""
    shapes = [(4096, 1024), (1024, 4096), (1024,), (50257, 64), (1000, 130), ()]

    def side(first, mesh, cuts):
        placements = [Placement(0, cuts(len(shape)) if shape else ()) for shape in shapes]
        entries = [entry(f"layers.{i}", shapes[i % 6], placement=placements[i % 6]) for i in range(20000)]
        return {
            first + rank: holding for rank, holding in on_mesh(manifest(*entries, mesh=mesh), mesh).items()
        }

    sources, receivers = (
        side(0, (8, 2), lambda _: (Cut(0, 1), Cut(0, 0))),
        side(16, (4,), lambda dims: (Cut(dims - 1, 0),)),
    )
    begin = time.perf_counter()
    model = ModelMap(sources, receivers)
    middle = time.perf_counter()
    space = model.receiver_spaces[17][2]
    tables = [build_index_maps(spaces[2], space) for spaces in model.source_spaces.values()]
    end = time.perf_counter()
    print(
        f"20,000 slots x 16 sources x 4 receivers: map {middle - begin:.2f} s, index maps of one "
        f"receiver {end - middle:.2f} s"
    )
    assert all(len(layers) == 1 for layers in tables)
    assert end - begin < 30
