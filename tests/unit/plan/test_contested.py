"""Pieces that several sources hold and that nobody promised to be equal."""

from __future__ import annotations

from dte_dist.layout import Cut, Manifest, MeshSpec, Placement
from dte_dist.plan.model_map import ModelMap, RankLayout
from tests.unit.plan.ranks import REPLICATED, ROWS, TIED, entry, manifest, on_mesh, region, whole


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
