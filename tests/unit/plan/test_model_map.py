"""The model map: slots, spaces, and who contributes what."""

from __future__ import annotations

import time

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.kernels.cpu import translate
from dte_dist.layout import Cut, Entry, Layout, Manifest, MeshSpec, Placement
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.model_map import ModelMap, RankLayout, Slot
from tests.unit.geometry import SHAPES
from tests.unit.plan.ranks import REPLICATED, ROWS, contributed, entry, holders, manifest, on_mesh, whole

# Slots and spaces -------------------------------------------------------------------------------------------


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


# Contributors -----------------------------------------------------------------------------------------------


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


# From real layouts ------------------------------------------------------------------------------------------


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


# Speed ------------------------------------------------------------------------------------------------------


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
