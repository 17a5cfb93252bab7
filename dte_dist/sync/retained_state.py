"""The state that outlasts a channel, so that receivers at the right version go on without a seed.

A source's version state and snapshot wait under its module for the next channel of the group, or of its
survivors, once the channel broke. A receiver's version state says what the copy holds, which is a fact about
its memory: all channels that write to the same tensors of a module share it, open or broken. Channels that
write to other tensors of the module (`select=`) have chains of their own. Where two of them have some tensors
in common, a sync of one takes the version of the other. All of it goes when the module goes.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dte_dist.detect.snapshot import Snapshot
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.model_map import ModelMap
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.source import Source
from dte_dist.sync.version import VersionState

__all__ = [
    "attach_copy",
    "discard_source",
    "invalidate_copy",
    "release_source",
    "restore_source",
    "retain_source",
    "states_of",
]


Home = tuple[int, Any]
"""Where a tensor is found in a module (`Layout.homes`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The state that a broken channel leaves behind on a source.

    Attributes:
        state, snapshot: of the source.
        covers: digest of the pieces that the snapshot covers.
        names: of the tensors that they belong to.
        ranks: of the world that were in the group.
    """

    state: VersionState
    snapshot: Snapshot | None
    covers: bytes
    names: frozenset[str]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Where some tensors of a module stand as a receiver's copy.

    Attributes:
        state: of the receivers that hold these pieces.
        homes: where in the module the tensors are found.
    """

    state: VersionState
    homes: frozenset[Home]


_sources: weakref.WeakKeyDictionary[Any, list[_Source]] = weakref.WeakKeyDictionary()
"""By module, the last one kept last."""
_copies: weakref.WeakKeyDictionary[Any, dict[bytes, _Copy]] = weakref.WeakKeyDictionary()
"""By module, then by digest of the pieces that are received."""


def retain_source(module: Any, ranks: Sequence[int], source: Source, model: ModelMap) -> None:
    """Keep what the source of a broken channel over some ranks of the world holds."""
    here = tuple(ranks)
    mine = _Source(source.state, source.snapshot, _digest(model, source.spaces), _names(model, source), here)
    others = [kept for kept in _sources.get(module, []) if (kept.covers, kept.ranks) != (mine.covers, here)]
    _sources[module] = [*others, mine]


def restore_source(module: Any, ranks: Sequence[int], source: Source, model: ModelMap) -> None:
    """Give a new source what is kept of an earlier one with the same pieces; it stays kept until
    `release_source`.

    That of a group of the same ranks is taken if there is one: each group has receivers of its own. Otherwise
    it is the last one kept, since survivors of a lost rank form a new group.
    """
    covers = _digest(model, source.spaces)
    found = [kept for kept in _sources.get(module, []) if kept.covers == covers]
    if found:
        kept = max(reversed(found), key=lambda each: each.ranks == tuple(ranks))
        source.state, source.snapshot = kept.state, kept.snapshot


def release_source(module: Any, source: Source, model: ModelMap) -> None:
    """Keep no longer what the source of an open channel has taken up, or what it stands for now.

    Where it could take up nothing, its tensors are cut otherwise than before, since trainers came or went,
    say. Snapshots of the same tensors are of no use then, and would stay as long as the module: a copy of its
    shard at every such change.
    """
    kept = _sources.get(module, [])
    names = _names(model, source)
    others = [each for each in kept if each.state is not source.state]
    took_nothing = len(others) == len(kept)
    _sources[module] = [each for each in others if not (took_nothing and each.names == names)]


def discard_source(module: Any, ranks: Sequence[int] | None) -> None:
    """Drop what is kept of the sources of a group, or of all groups (None), if anything is."""
    _sources[module] = [
        kept for kept in _sources.get(module, []) if ranks is not None and kept.ranks != tuple(ranks)
    ]


def attach_copy(
    target: Any, receiver: Receiver, model: ModelMap, spaces: Mapping[int, FlatSpace], homes: Sequence[Home]
) -> None:
    """Let a new receiver share the version state of the tensors in `target` of which it holds `spaces`.

    Args:
        target: module or layout that receives.
        receiver: the new one.
        model: as all ranks agree on it.
        spaces: of this rank as a receiver.
        homes: of each entry, where in `target` it is found: names are what ranks agree to call it, over each
            group anew.
    """
    held = frozenset(homes[entry] for space in spaces.values() for entry in space.pieces.entry.tolist())
    copies = _copies.setdefault(target, {})
    copy = copies.setdefault(_digest(model, spaces, homes), _Copy(receiver.state, held))
    receiver.state = copy.state
    rivals = [other for other in copies.values() if other is not copy and other.homes & copy.homes]
    copy.state.overlapping = [other.state for other in rivals]
    for other in rivals:
        if copy.state not in other.state.overlapping:
            other.state.overlapping.append(copy.state)


def states_of(target: Any) -> list[VersionState]:
    """Return the chains of all copies in a module."""
    return [copy.state for copy in _copies.get(target, {}).values()]


def invalidate_copy(target: Any) -> None:
    """Let all copies in `target` stand where those stand that never received anything."""
    for state in states_of(target):
        state.reset()


def _names(model: ModelMap, state: Source) -> frozenset[str]:
    """Return the names of the tensors that a source contributes to."""
    return frozenset(
        model.slots[slot].name for space in state.spaces.values() for slot in space.pieces.slot.tolist()
    )


def _digest(model: ModelMap, spaces: Mapping[int, FlatSpace], homes: Sequence[Home] | None = None) -> bytes:
    """Hash what a rank holds of the model: names (or homes, if given), dtypes and blocks of its pieces, in
    order.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for width, space in spaces.items():
        for piece in space.pieces:
            slot = model.slots[piece.slot]
            which = slot.name if homes is None else homes[piece.entry]
            hashed.update(f"{width} {which} {slot.dtype} {slot.shape} {piece.block.runs}\n".encode())
    return hashed.digest()
