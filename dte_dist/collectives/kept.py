"""What outlasts a channel, so that receivers at the right version go on without a seed.

A source's chain and snapshot wait under its module for the next channel, once the channel broke. A receiver's chain says what the
copy holds, which is a fact about its memory: all channels that write to one copy share it, open or broken. Both count only for the
pieces that they are of, and go when the module goes.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dte_dist.change.snapshot import Snapshot
from dte_dist.engine.chain import NONE, Chain
from dte_dist.engine.receiver import ReceiverState
from dte_dist.engine.source import SourceState
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.space import FlatSpace

__all__ = ["drop_source", "forget_copy", "keep_source", "share_copy", "take_up_source"]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """What a broken channel leaves behind on a source.

    Attributes:
        chain, snapshot: of the source.
        covers: digest of the pieces that the snapshot covers.
    """

    chain: Chain
    snapshot: Snapshot | None
    covers: bytes


@dataclass(slots=True, eq=False)
class _Copy:
    """Where the live copy in one module stands; all channels that write to it share this.

    Attributes:
        chain: of the receivers.
        covers: digest of the pieces that were received when the chain was last moved.
    """

    chain: Chain
    covers: bytes


_sources: weakref.WeakKeyDictionary[Any, _Source] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[Any, _Copy] = weakref.WeakKeyDictionary()


def keep_source(module: Any, state: SourceState, model: ModelMap) -> None:
    """Keep what the source of a broken channel holds."""
    _sources[module] = _Source(state.chain, state.snapshot, _digest(model, state.spaces))


def take_up_source(module: Any, state: SourceState, model: ModelMap) -> None:
    """Give a new source what is kept of an earlier one with the same pieces; it stays kept."""
    kept = _sources.get(module)
    if kept is not None and kept.covers == _digest(model, state.spaces):
        state.chain, state.snapshot = kept.chain, kept.snapshot


def drop_source(module: Any) -> None:
    """Drop what is kept of a source, if anything is."""
    _sources.pop(module, None)


def share_copy(target: Any, state: ReceiverState, model: ModelMap, spaces: Mapping[int, FlatSpace]) -> None:
    """Let a new receiver share the chain of the copy in `target`, of which it holds `spaces`."""
    covers = _digest(model, spaces)
    copy = _copies.setdefault(target, _Copy(state.chain, covers))
    if copy.covers != covers:  # some of it may never have been received
        copy.chain.version, copy.covers = NONE, covers
    state.chain = copy.chain


def forget_copy(target: Any) -> None:
    """Let the copy in `target`, if there is one, stand where one stands that never received anything."""
    if target in _copies:
        _copies[target].chain.forget()


def _digest(model: ModelMap, spaces: Mapping[int, FlatSpace]) -> bytes:
    """Hash what a rank holds of the model: names, dtypes and blocks of its pieces, in order."""
    hashed = hashlib.blake2b(digest_size=16)
    for width, space in spaces.items():
        for piece in space.pieces:
            slot = model.slots[piece.slot]
            hashed.update(f"{width} {slot.name} {slot.dtype} {slot.shape} {piece.block.runs}\n".encode())
    return hashed.digest()
