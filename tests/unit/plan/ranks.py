"""Ranks with a layout each, from which a model map is made."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import WHOLE, Block, Cut, Entry, Manifest, MeshSpec, Placement
from dte_dist.plan.model_map import ModelMap, RankLayout

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


TIED = [("embed", "head")]
