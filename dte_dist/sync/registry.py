"""Which channels are open on this rank.

Channels belong to their module: they are found by (module, group), and go when the module goes or `close` is
called, or when they are found broken or their group destroyed at the next call. At exit, syncs in the
background end first.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dte_dist.layout import Layout
from dte_dist.liveness.groups import Group, Known, group_of, is_gone
from dte_dist.options import SyncOptions
from dte_dist.sync import in_flight as running
from dte_dist.sync import retained_state as kept
from dte_dist.sync.background import THREAD_NAME
from dte_dist.sync.channel import Channel
from dte_dist.sync.control import INVALIDATED
from dte_dist.sync.exclusive import exclusive
from dte_dist.sync.open import Model, open_channel

__all__ = ["close", "find_channel", "find_or_open", "invalidate", "is_in_use"]

_EXIT_PATIENCE = 20.0
_PID = os.getpid()
_log = logging.getLogger(__name__)

_channels: weakref.WeakKeyDictionary[Any, dict[Any, Channel]] = weakref.WeakKeyDictionary()
_origins: weakref.WeakKeyDictionary[Any, dict[Any, int | None]] = weakref.WeakKeyDictionary()
"""By module and group, where they first met (`Watch.origin`)."""


def find_or_open(
    module: Model,
    group: Known,
    into: Model | None,
    options: SyncOptions,
    error: Exception | None,
) -> Channel:
    """Return the open channel of (module, group), or open one; opening is collective.

    Args:
        module, group, into, options: of the call.
        error: what is wrong with the call, to be raised on all ranks.

    Raises:
        LayoutMismatch, ValueError: on every rank, if a call makes no sense or the ranks do not agree.
        PeerLost: a rank did not come.
        ChannelClosed: this process was forked from the one that has the channel.
    """
    mine = _channels.get(module)
    if mine is None:
        mine = _channels[module] = {}
        weakref.finalize(module, _close_all, mine).atexit = False
    for other, channel in list(mine.items()):
        channel.refuse_forked()
        channel.abort()
        if channel.broken is not None or is_gone(other):
            if (
                source := channel.parts.source
            ) is not None:  # a receiver's version state stays with its copy anyway
                ranks = channel.watch.membership.global_ranks
                kept.retain_source(module, ranks, source, channel.parts.agreement.model)
            mine.pop(other).close("its group is gone")
    _forget_origins(module)
    if group not in mine:
        _retire(group, options["name"])
        with _no_collection():
            origin = _origins.get(module, {}).get(group)
            mine[group] = open_channel(module, group, into, options, error, origin=origin)
        _origins.setdefault(module, {})[group] = mine[group].watch.origin
        _warn_of_twins(mine[group], group)
    return mine[group]


def _forget_origins(module: Model) -> None:
    """Let go of groups that the user has destroyed: each holds connections and threads."""
    origins = _origins.get(module, {})
    for other in list(origins):
        if is_gone(other):
            del origins[other]


def find_channel(module: Model, group: Known | None) -> Channel | None:
    """Return the open channel of (module, group), None if there is none; of what is no module there never
    is.
    """
    return _channels.get(module, {}).get(group) if isinstance(module, torch.nn.Module | Layout) else None


def _warn_of_twins(opened: Channel, group: Known) -> None:
    """Warn where another channel over the group is like the one just opened, and neither has a name."""
    others = [channels[group] for channels in list(_channels.values()) if group in channels]
    nameless = [each for each in (opened, *others) if each.broken is None and each.options["name"] is None]
    if opened in nameless and any(_are_alike(opened, other) for other in nameless if other is not opened):
        _log.warning(
            "another module with the same layout is synchronised over this group: pass name= for each. A "
            "rank that opens the channels in another order is refused then; without names its modules are "
            "swapped in silence"
        )


def _are_alike(one: Channel, other: Channel) -> bool:
    """Return whether all ranks hold the same of two models."""
    mine = one.parts.agreement
    theirs = other.parts.agreement
    roles = (mine.sources, mine.receivers) == (theirs.sources, theirs.receivers)
    return roles and mine.model.slots == theirs.model.slots and mine.model.digest() == theirs.model.digest()


def _retire(group: Known, name: str | None) -> None:
    """Close the channel of this name that another module has over the group: the module was built anew.

    The others, who still call the old channel, find that it was closed, and open a new one with this rank.
    Without a name nothing can be concluded: several modules over one group are as it should be.
    """
    others = [channels[group] for channels in list(_channels.values()) if group in channels]
    for channel in others:
        if name is not None and channel.options["name"] == name:
            channel.close(f"another module took its name, {name!r}")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector rest: opening makes many objects that stay, and it would walk all of a large
    process for them.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_in_use(group: Known) -> bool:
    """Return whether this rank has an open channel over a group."""
    return any(group in mine for mine in list(_channels.values()))


def _at_exit() -> None:
    """Let syncs in the background end, or end them: a thread inside a collective would bring the interpreter
    down with it.
    """
    if os.getpid() != _PID:
        return
    if not running.wait_all(_EXIT_PATIENCE):
        for channels in list(_channels.values()):
            for channel in channels.values():
                channel.leave_halfway("the process exits before the sync has ended")
        running.wait_all(_EXIT_PATIENCE)
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(_EXIT_PATIENCE)


atexit.register(_at_exit)


def _close_all(channels: dict[Any, Channel]) -> None:
    for channel in channels.values():
        channel.close("its module is gone")


def invalidate(module: Model, group: Group | None = None) -> None:
    """Say that this rank's live copy is not what its channels believe it to be: the next sync seeds this
    rank, and says so.

    Local and cheap; no other rank needs to call. It is for writes that move no version counter, which are not
    noticed: `param.data.copy_`, as inference engines load weights, numpy, memory that was discarded and
    mapped again (sleep and wake-up of an engine).

    Args:
        module: that receives: the module passed to `delta_broadcast` on a mere receiver, or its `into=`.
        group: only what this group's channel holds, or a DeviceMesh of one dimension; None is all groups.

    Raises:
        ValueError: this rank only sends the module, so there is no copy to distrust; or `group` is a mesh of
            several dimensions.

    Example:
        >>> report = dte_dist.delta_broadcast(model)
        >>> if rank == 2:
        ...     model[0].bias.data[0] = 7.0  # as an engine does that loads weights or wakes up
        ...     dte_dist.invalidate(model)
        >>> dte_dist.delta_broadcast(model).seeded
        (2,)
    """
    only = None if group is None else group_of(group)
    with exclusive(module):
        running.wait_for(module)
        channels = [channel for other, channel in _channels.get(module, {}).items() if only in (None, other)]
        states = [channel.parts.receiver.state for channel in channels if channel.parts.receiver is not None]
        states = states or kept.states_of(module)
        if channels and not states:
            raise ValueError(
                "this rank only sends this module: invalidate is for the module that "
                "receives, on its own rank"
            )
        for state in states:
            state.invalidate(INVALIDATED)


def close(module: Model, group: Group | None = None) -> None:
    """Close the channel of (module, group) on this rank and forget what it held; a sync in the background
    ends first.

    The next `delta_broadcast` opens a new channel and seeds all receivers. Closing what is not open does
    nothing.

    Args:
        module: as passed to `delta_broadcast`.
        group: likewise; None is the world.

    Raises:
        ValueError: `group` is a mesh of several dimensions.

    Example:
        >>> report = dte_dist.delta_broadcast(model)
        >>> dte_dist.close(model)  # on every rank
        >>> # a new channel may have other options
        >>> dte_dist.delta_broadcast(model, bucket_bytes=1 << 20).version
        1
    """
    pg = group_of(group)
    with exclusive(module):
        running.wait_for(module)
        channel = _channels.get(module, {}).pop(pg, None)
        kept.discard_source(module, None if channel is None else channel.watch.membership.global_ranks)
        _origins.get(module, {}).pop(pg, None)
        if channel is not None:
            channel.close()
            if channel.parts.receiver is not None:
                channel.parts.receiver.state.reset()
        else:
            kept.invalidate_copy(module)
