"""Whether the blocks that sources contribute tile every slot: no element twice, none left out.

A model has few different sets of blocks, however many slots it has, so each set is looked at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Block
from dte_dist.plan.flat_space import BlockTable

__all__ = ["disjoint", "first_gap", "refuse_gap"]


def first_gap(
    fulls: Sequence[int],
    slot: np.ndarray,
    block: np.ndarray,
    table: BlockTable,
) -> int | None:
    """Return the first slot that its blocks do not tile, None if all are tiled.

    Args:
        fulls: elements of each slot.
        slot, block: columns of contributed blocks, sorted by slot; a block by its number in `table`.

    Example:
        >>> table = BlockTable([Block((((0, 3),),)), Block((((3, 2),),))])
        >>> first_gap([5, 3, 5], np.array([0, 0, 1, 2]), np.array([0, 1, 0, 1]), table)
        2
    """
    borders = np.searchsorted(slot, np.arange(len(fulls) + 1)).tolist()
    known: dict[tuple[int, bytes], bool] = {}
    for index, (full, (begin, end)) in enumerate(zip(fulls, itertools.pairwise(borders), strict=True)):
        key = full, block[begin:end].tobytes()
        if key not in known:
            held = [table.blocks[number] for number in block[begin:end].tolist()]
            known[key] = sum(each.numel for each in held) == full and disjoint(held)
        if not known[key]:
            return index
    return None


def disjoint(blocks: Sequence[Block]) -> bool:
    """Tell whether no two of several blocks of one slot have an element in common.

    Example:
        >>> disjoint([Block.rectangle((0, 0), (2, 3)), Block.rectangle((2, 0), (2, 3)), Block.rectangle((1,
        ...     1), (1, 1))])
        False
    """
    # Where a mesh cut the slot, the blocks are a grid: along some dimension their runs are equal or apart,
    # and each group of equal ones is a smaller grid. Comparing all pairs is the way out for blocks of other
    # making.
    if len(blocks) < 2:
        return True
    for dim in range(len(blocks[0].runs)):
        groups: dict[object, list[Block]] = {}
        for block in blocks:
            groups.setdefault(block.runs[dim], []).append(block)
        runs = sorted(run for block, *_ in groups.values() for run in block.runs[dim])
        if len(groups) > 1 and all(sum(a) <= b[0] for a, b in itertools.pairwise(runs)):
            return all(map(disjoint, groups.values()))
    return not any(a.overlaps(b) for a, b in itertools.combinations(blocks, 2))


def refuse_gap(name: str, full: int, holders: Mapping[Block, int], hint: str) -> None:
    """Raise for a slot that its blocks do not tile, naming the ranks that hold them.

    Args:
        name, full: of the slot, and its elements.
        holders: by block, a rank that contributes it.
        hint: what to do if elements have no owner.

    Raises:
        LayoutMismatch: always.
    """
    for (a, rank_a), (b, rank_b) in itertools.combinations(holders.items(), 2):
        if a.overlaps(b):
            what = "sources hold overlapping parts"
            share = "let every element have one owner, or equal blocks on all its owners"
            raise LayoutMismatch(
                what,
                tensor=name,
                ranks=sorted({rank_a, rank_b}),
                hint=share,
            )
    covered = sum(block.numel for block in holders)
    raise LayoutMismatch(
        "the sources do not hold the whole tensor",
        tensor=name,
        ranks=sorted(set(holders.values())),
        expected=f"{full} elements",
        got=f"{covered} elements",
        hint=hint,
    )
