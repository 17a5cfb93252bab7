"""Random blocks and flat spaces, and the brute-force oracle that the plan is held against."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import strategies as st

from dte_dist.layout import Block, Cut, cut_block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces

SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 6, 7, 9]), max_size=3).map(tuple)


@st.composite
def runs(draw, size):
    """Draw any runs within [0, size): none, one, or several with gaps."""
    if not size:
        return ()
    kept = draw(st.one_of(st.just([True] * size), st.lists(st.booleans(), min_size=size, max_size=size)))
    edges = np.flatnonzero(np.diff([0, *kept, 0])).reshape(-1, 2).tolist()
    return tuple((low, high - low) for low, high in edges)


@st.composite
def mesh_blocks(draw, shape):
    """Draw a mesh and cuts in any order; return the blocks of all its coordinates, which tile the tensor
    (with replicas).
    """
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = draw(st.permutations(range(len(mesh)))) if shape else []
    dims = dims[: draw(st.integers(0, len(dims)))]
    cuts = [Cut(draw(st.integers(0, len(shape) - 1)), dim, draw(st.integers(1, 2))) for dim in dims]
    return [cut_block(shape, mesh, coordinate, cuts) for coordinate in product(*map(range, mesh))]


@st.composite
def blocks(draw, shape):
    """Draw one block: of a mesh, or the product of any runs."""
    if draw(st.booleans()):
        return draw(st.sampled_from(draw(mesh_blocks(shape))))
    return Block(tuple(draw(runs(size)) for size in shape))


@st.composite
def spaces(draw, shapes, width, *, disjoint):
    """Draw a flat space: of each slot no block, one, or several (disjoint on a source; on a receiver as they
    come).
    """
    pieces, seen = [], set()
    for slot, shape in enumerate(shapes):
        for _ in range(draw(st.integers(0, 2))):
            block = draw(blocks(shape))
            held = {(slot, index) for index in block.global_indices(shape).tolist()}
            if disjoint and held & seen:
                continue
            seen |= held
            pieces.append(Piece(slot, len(pieces), block))
    return FlatSpace.of(width, Pieces.of(pieces))


@st.composite
def pairs_of_spaces(draw, width=2):
    """Draw the shapes of a few slots, a source's space and a receiver's."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    return shapes, draw(spaces(shapes, width, disjoint=True)), draw(spaces(shapes, width, disjoint=False))


def elements(space, shapes):
    """Return (slot, flat position in the slot) of each position of a small flat space."""
    return [
        (piece.slot, index)
        for piece in space.pieces
        for index in piece.block.global_indices(shapes[piece.slot]).tolist()
    ]


def homes(source, receiver, shapes):
    """Return for each position of a source's space the list of all its positions in a receiver's."""
    found = {}
    for position, element in enumerate(elements(receiver, shapes)):
        found.setdefault(element, []).append(position)
    return [found.get(element, []) for element in elements(source, shapes)]


def global_index(block, shape, position):
    """Return where one element of a block, of any size, lies in the full tensor."""
    index, stride = 0, 1
    for axis, size, extent in zip(reversed(block.runs), reversed(shape), reversed(block.shape), strict=True):
        position, coordinate = divmod(position, extent)
        for start, length in axis:
            if coordinate < length:
                index += (start + coordinate) * stride
                break
            coordinate -= length
        stride *= size
    return index


def local_index(block, shape, index):
    """Return where one element of the full tensor lies in a block, None if the block does not hold it."""
    position, stride = 0, 1
    for axis, size, extent in zip(reversed(block.runs), reversed(shape), reversed(block.shape), strict=True):
        index, coordinate = divmod(index, size)
        passed = 0
        for start, length in axis:
            if start <= coordinate < start + length:
                position += (passed + coordinate - start) * stride
                break
            passed += length
        else:
            return None
        stride *= extent
    return position


def whole_space(width, *shapes):
    """Return the flat space of a rank that holds slots 0, 1, ... entirely."""
    return FlatSpace.of(
        width, Pieces.of(Piece(slot, slot, Block.whole(shape)) for slot, shape in enumerate(shapes))
    )


def numel(shapes):
    """Return the elements of all shapes together."""
    return sum(map(prod, shapes))
