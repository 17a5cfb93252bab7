"""Which source sends a block that several sources hold.

1. A block that only one source holds is sent by that source.
2. Replicas on a mesh take turns: of the slots that are cut alike, the first block comes from the first of its
   holders, the next one from the second, and so on, so that the replicas of HSDP share the work of finding
   and sending changes.
3. Plain tensors come from the lowest rank. When a channel opens they must have equal bits on all sources, or
   be buffers of ranks that train one module (statistics of a batch); see `sync.replica_check`.

The choice follows from the layouts alone and stays for the life of a channel. Replicas of a trained weight
may drift apart in the last bit; a choice that changed, to balance load say, would send that drift as if it
were training.
"""

from __future__ import annotations

import numpy as np

__all__ = ["choose_contributors"]


def choose_contributors(slot: np.ndarray, block: np.ndarray, on_mesh: np.ndarray) -> np.ndarray:
    """Return, for every (slot, block) that somebody holds, sorted, the index of the piece that is sent.

    Args:
        slot, block: int64 columns of all pieces of all sources, in ascending order of ranks.
        on_mesh: bool, whether the piece lies on a mesh.

    Example:
        >>> slots, blocks = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 0, 1, 0, 0, 1])
        >>> choose_contributors(slots, blocks, np.ones(6, np.bool_)).tolist()
        [0, 4, 2]
    """
    key = slot * (1 + block.max(initial=0)) + block
    _, first, count = np.unique(key, return_index=True, return_counts=True)
    holders = np.argsort(key, kind="stable")
    begin = np.cumsum(count) - count
    takes_turns = count > 1
    if len(begin):
        takes_turns &= np.logical_and.reduceat(on_mesh[holders], begin)
    turn = np.zeros(len(first), np.int64)
    turn[takes_turns] = _ordinal(block[first[takes_turns]])
    return holders[begin + turn % count]


def _ordinal(numbers: np.ndarray) -> np.ndarray:
    """Return how many equal numbers stand before each number."""
    order = np.argsort(numbers, kind="stable")
    _, first, which = np.unique(numbers[order], return_index=True, return_inverse=True)
    ordinal = np.empty(len(numbers), np.int64)
    ordinal[order] = np.arange(len(numbers)) - first[which]
    return ordinal
