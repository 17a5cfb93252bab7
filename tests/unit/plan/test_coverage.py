"""Parts that no source holds, and parts that overlap, are refused by name."""

from __future__ import annotations

from dte_dist.plan.model_map import RankLayout
from tests.unit.plan.ranks import ROWS, entry, manifest, on_mesh, refused, region, whole


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
