"""Blocks: which part of a tensor one rank holds, as plain numbers.

Every DTensor placement cuts one dimension of a tensor, so what a rank holds is always a product of one index
list per dimension, and each list is a few runs of consecutive indices. A `Block` is that product. Its
elements, laid out row-major, have strictly increasing flat positions in the full tensor, which is why one
sorted list of positions in the block is all that has to travel.

A `Cut` says how a mesh dimension divides a tensor dimension. Cuts are applied one after another, each to what
the ones before it left, exactly as `torch.chunk` would be. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np

__all__ = [
    "Block",
    "Cut",
    "Run",
    "Runs",
    "chunk_bounds",
    "cut_block",
    "cut_runs",
    "range_blocks",
    "row_major",
]

Run = tuple[int, int]
"""Consecutive indices along one dimension: (start, length)."""

Runs = tuple[Run, ...]
"""Sorted, disjoint runs with gaps between them, none empty."""


@dataclass(frozen=True, slots=True)
class Block:
    """Hold the part of a tensor that one rank has: the product of one list of runs per dimension.

    Args:
        runs: per dimension a sorted tuple of (start, length), merged and without empty runs; `()` for a 0-dim
            tensor.

    Attributes:
        shape: shape of the local tensor.
        numel: number of its elements (1 for a 0-dim tensor).

    Raises:
        ValueError: the runs are unsorted, overlap, touch or are empty.

    Example:
        >>> Block((((0, 2), (4, 2)), ((1, 3),))).shape
        (4, 3)
    """

    runs: tuple[Runs, ...]
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    numel: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for runs in self.runs:
            _check_runs(runs)
        object.__setattr__(self, "shape", tuple(sum(length for _, length in runs) for runs in self.runs))
        object.__setattr__(self, "numel", prod(self.shape))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        """Return the block that holds all of a tensor of this shape."""
        return cls.rectangle((0,) * len(shape), shape)

    @classmethod
    def rectangle(cls, offsets: Sequence[int], shape: Sequence[int]) -> Block:
        """Return the hyper-rectangle of this shape that starts at `offsets`.

        Example:
            >>> Block.rectangle((2, 0), (3, 4)).runs
            (((2, 3),), ((0, 4),))
        """
        return cls(
            tuple(((start, length),) if length else () for start, length in zip(offsets, shape, strict=True))
        )

    def part(self, local: Block) -> Block:
        """Return the part of this block that is `local` of it, its own elements being a tensor of `shape`.

        Example:
            >>> Block((((0, 2), (4, 2)),)).part(Block.rectangle((1,), (2,))).runs
            (((1, 1), (4, 1)),)
        """
        dims = zip(self.runs, local.runs, strict=True)
        parts = ([run for some in inner for run in _slice(outer, *some)] for outer, inner in dims)
        return Block(tuple(map(_merged, parts)))

    def fits(self, full_shape: Sequence[int]) -> bool:
        """Tell whether this is a block of a tensor of `full_shape`."""
        return len(self.runs) == len(full_shape) and all(
            not runs or sum(runs[-1]) <= size for runs, size in zip(self.runs, full_shape, strict=True)
        )

    def overlaps(self, other: Block) -> bool:
        """Tell whether two blocks of one tensor have an element in common."""
        return all(_runs_meet(mine, theirs) for mine, theirs in zip(self.runs, other.runs, strict=True))

    def global_indices(self, full_shape: Sequence[int]) -> np.ndarray:
        """Return int64[numel]: the flat position in the full tensor of each element, in row-major order of
        the block.

        Meant for tests and verification: it is as large as the block.

        Raises:
            ValueError: the block does not fit `full_shape`.

        Example:
            >>> Block.rectangle((0, 1), (2, 2)).global_indices((2, 3)).tolist()
            [1, 2, 4, 5]
        """
        if not self.fits(full_shape):
            raise ValueError(f"{self} is no block of a tensor of shape {tuple(full_shape)}")
        flat = np.zeros(1, np.int64)
        for runs, size in zip(self.runs, full_shape, strict=True):
            flat = (flat[:, None] * size + _indices(runs)).reshape(-1)
        return flat


@dataclass(frozen=True, slots=True)
class Cut:
    """Divide a tensor dimension among the coordinates of a mesh dimension.

    Args:
        dim: dimension of the tensor.
        mesh_dim: dimension of the mesh.
        split_factor: 1 for a plain chunk per coordinate. A larger one first divides the dimension into this
            many equal pieces and then takes the coordinate's chunk of every piece (what `_StridedShard` says
            literally).
    """

    dim: int
    mesh_dim: int
    split_factor: int = 1


def chunk_bounds(size: int, parts: int) -> tuple[Run, ...]:
    """Return (start, length) of each of `parts` chunks of `size` elements, as `torch.chunk` with empty chunks
    at the end.

    Example:
        >>> chunk_bounds(5, 4)
        ((0, 2), (2, 2), (4, 1), (5, 0))
    """
    return tuple(_chunk(size, parts, index) for index in range(parts))


def cut_runs(runs: Runs, parts: int, index: int, split_factor: int = 1) -> Runs:
    """Return the runs that chunk `index` of `parts` keeps of `runs`.

    Example:
        >>> cut_runs(((0, 4), (8, 4)), 2, 1)
        ((8, 4),)
        >>> cut_runs(((0, 8),), 2, 1, split_factor=2)
        ((2, 2), (6, 2))
    """
    kept: list[Run] = []
    for piece_start, piece_length in chunk_bounds(sum(length for _, length in runs), split_factor):
        start, length = _chunk(piece_length, parts, index)
        kept.extend(_slice(runs, piece_start + start, length))
    return _merged(kept)


def cut_block(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]
) -> Block:
    """Return the block that the rank at `coordinate` of a mesh holds after `cuts`, applied in order.

    Raises:
        ValueError: the coordinate is not one of the mesh, or a cut names a dimension that does not exist.

    Example:
        >>> cut_block((7, 3), (2, 2), (0, 1), [Cut(0, 0), Cut(0, 1)]).runs
        (((2, 2),), ((0, 3),))
    """
    if len(coordinate) != len(mesh_shape) or not all(
        0 <= c < n for c, n in zip(coordinate, mesh_shape, strict=True)
    ):
        raise ValueError(f"{tuple(coordinate)} is no coordinate of a mesh of shape {tuple(mesh_shape)}")
    runs: list[Runs] = [((0, size),) if size else () for size in shape]
    for cut in cuts:
        if not (0 <= cut.dim < len(runs) and 0 <= cut.mesh_dim < len(mesh_shape)):
            raise ValueError(
                f"{cut} names a dimension that a tensor {tuple(shape)} on a mesh "
                f"{tuple(mesh_shape)} does not have"
            )
        runs[cut.dim] = cut_runs(
            runs[cut.dim], mesh_shape[cut.mesh_dim], coordinate[cut.mesh_dim], cut.split_factor
        )
    return Block(tuple(runs))


def row_major(shape: Sequence[int]) -> list[int]:
    """Return the strides of a row-major tensor: how many elements one index of each dimension is.

    Example:
        >>> row_major((2, 3, 4))
        [12, 4, 1]
    """
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def range_blocks(shape: Sequence[int], begin: int, end: int) -> tuple[Block, ...]:
    """Return the rectangles that flat positions [begin, end) of a row-major tensor are, in ascending order.

    They are at most 2n - 1 for n dimensions: from `begin` on, rows fill up until a whole slice begins, then
    whole slices follow, then the rows that are left. Each rectangle is contiguous in the full tensor.

    Args:
        shape: of the full tensor.
        begin, end: positions within it; none are held where `end` is not above `begin`.

    Raises:
        ValueError: the range leaves the tensor.

    Example:
        >>> [block.runs for block in range_blocks((3, 4), 2, 9)]
        [(((0, 1),), ((2, 2),)), (((1, 1),), ((0, 4),)), (((2, 1),), ((0, 1),))]
    """
    if begin >= end:
        return ()
    if begin < 0 or end > prod(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no positions {begin} to {end}")
    steps = row_major(shape)
    blocks = []
    while begin < end:
        at = [begin // step % size for step, size in zip(steps, shape, strict=True)]
        fits = (dim for dim, step in enumerate(steps) if begin % step == 0 and begin + step <= end)
        dim = next(fits, len(shape))
        rows = min((end - begin) // steps[dim], shape[dim] - at[dim]) if dim < len(shape) else 1
        sizes = [1] * dim + [rows] + list(shape[dim + 1 :])
        blocks.append(Block.rectangle(at, sizes[: len(shape)]))
        begin += blocks[-1].numel
    return tuple(blocks)


def _chunk(size: int, parts: int, index: int) -> Run:
    step = -(-size // parts)
    start = min(step * index, size)
    return start, min(step, size - start)


def _slice(runs: Runs, begin: int, length: int) -> list[Run]:
    """Return elements [begin, begin + length) of the indices that `runs` list."""
    sliced, passed = [], 0
    for start, count in runs:
        low, high = max(begin, passed), min(begin + length, passed + count)
        if high > low:
            sliced.append((start + low - passed, high - low))
        passed += count
    return sliced


def _merged(runs: Sequence[Run]) -> Runs:
    """Join sorted runs that touch."""
    merged: list[Run] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def _check_runs(runs: Runs) -> None:
    if any(start < 0 or length < 1 for start, length in runs) or any(
        sum(a) >= b[0] for a, b in pairwise(runs)
    ):
        raise ValueError(f"runs must be sorted, apart from each other and not empty, not {runs}")


def _runs_meet(mine: Runs, theirs: Runs) -> bool:
    i = 0
    j = 0
    while i < len(mine) and j < len(theirs):
        (start, length), (other, count) = mine[i], theirs[j]
        if start < other + count and other < start + length:
            return True
        if start < other:
            i += 1
        else:
            j += 1
    return False


def _indices(runs: Runs) -> np.ndarray:
    return np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(start, start + length, dtype=np.int64) for start, length in runs)]
    )
