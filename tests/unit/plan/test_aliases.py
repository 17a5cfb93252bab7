"""Tied names: on both sides, on one of them, over several sources and region by region."""

from __future__ import annotations

from dte_dist.plan.aliases import Aliases, aliased_entries
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.model_map import ModelMap, RankLayout
from tests.unit.plan.ranks import ROWS, TIED, entry, holders, manifest, refused, region, whole


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
