"""Are the receivers bit-identical to the sources? Asked after every timed call, outside of the timed part.

Source s and receiver r have a block of every parameter in common. Both hash the bytes of these blocks, in the
order of the model; the hashes must be equal for every pair. It is a hash of our own and no code of what is
being measured.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numba import njit
from torch import Tensor

from benchlib.world import World

__all__ = ["NotExact", "check", "digest"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class NotExact(Exception):
    """A receiver does not hold the bits of the sources; raised on every rank."""


def check(world: World, what: str) -> None:
    """Raise NotExact, on every rank of the group, unless every receiver holds the bits of every source.

    Args:
        world: all its members call.
        what: was done, for the text.
    """
    pairs = [(world.rank, r) for r in range(world.receivers if world.split else 1)] if world.is_source else []
    if world.is_receiver:
        pairs = [(s, world.rank - world.sources) for s in range(world.sources)]
    mine = [_digest_of_pair(world, source, receiver) for source, receiver in pairs]
    everyone: list[list[int]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everyone, mine, group=world.group)
    wrong = [
        (source, world.sources + receiver)
        for source in range(world.sources)
        for receiver in range(world.receivers)
        if everyone[source][receiver if world.split else 0] != everyone[world.sources + receiver][source]
    ]
    if wrong:
        pairs_text = ", ".join(f"rank {receiver} from source {source}" for source, receiver in wrong)
        raise NotExact(f"{what}: receivers differ from the sources: {pairs_text}")


def digest(tensor: Tensor, seed: int = 0) -> int:
    """Return 64 bits that depend on every byte of a tensor and on where it stands; chain tensors by passing
    the last digest as seed.

    Example:
        >>> a = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        >>> digest(a) == digest(a.clone()), digest(a) == digest(a.flip(0))
        (True, False)
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(data) // 8 * 8
    rest = np.zeros(8, np.uint8)
    rest[: len(data) - whole] = data[whole:]
    words = _mix(np.require(data[:whole].view(np.uint64), requirements="A"), np.uint64(seed))
    return int(
        _mix(np.concatenate([rest.view(np.uint64), np.array([len(data)], np.uint64)]), np.uint64(words))
    )


def _digest_of_pair(world: World, source: int, receiver: int) -> int:
    value = 0
    for index, local in enumerate(world.locals()):
        block, held = world.block(index, source, receiver), world.held(index)
        here = tuple(
            slice(want.start - have.start, want.stop - have.start)
            for want, have in zip(block, held, strict=True)
        )
        value = digest(local[here], value)
    return value


@njit(nogil=True, cache=True)
def _mix(words: np.ndarray, seed: np.uint64) -> np.uint64:
    """Add up the words, each scrambled together with its place (the finaliser of splitmix64)."""
    total = np.uint64(seed)
    for place in range(words.size):
        word = words[place] + (np.uint64(place) + seed + np.uint64(1)) * _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * _FIRST
        word = (word ^ (word >> np.uint64(27))) * _SECOND
        total += word ^ (word >> np.uint64(31))
    return total
