"""Which channels are open, and how one opens.

Channels belong to their module: they are found by (module, group), and go when the module goes or `close` is called. What a
rank held in a channel that broke waits under the module for the next channel, so that receivers at the right version go on
without a seed.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dte_dist import kernels
from dte_dist.change.snapshot import Snapshot
from dte_dist.collectives import running
from dte_dist.collectives.channel import Channel
from dte_dist.collectives.letters import Letters
from dte_dist.collectives.opening import Agreement, Described, agree, describe
from dte_dist.collectives.options import Options
from dte_dist.collectives.routes import P2PRoute, RelayRoute, Routes
from dte_dist.collectives.speed import LinkSpeed
from dte_dist.collectives.sync import Parts
from dte_dist.collectives.work import THREAD_NAME
from dte_dist.engine.chain import NONE, Chain
from dte_dist.engine.receiver import ReceiverState
from dte_dist.engine.source import SourceState
from dte_dist.errors import LayoutMismatch, PeerLost
from dte_dist.layout import DTYPES, Layout, refuse_overlaps, refuse_shared
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.schedule import Schedule
from dte_dist.plan.space import FlatSpace
from dte_dist.plan.transfer import Plan
from dte_dist.transport.exchange import Exchange
from dte_dist.transport.groups import LossBoard, Membership, Wire
from dte_dist.transport.relay import Relay
from dte_dist.transport.together import Agreed, or_error, raise_if_any

__all__ = ["close", "find_or_open", "is_in_use"]

Model = torch.nn.Module | Layout

_EXIT_PATIENCE = 20.0
_PID = os.getpid()


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
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


_channels: weakref.WeakKeyDictionary[Any, dict[Any, Channel]] = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[Any, _Copy] = weakref.WeakKeyDictionary()


def find_or_open(module: Model, group: dist.ProcessGroup, into: Model | None, options: Options, error: Exception | None) -> Channel:
    """Return the open channel of (module, group), or open one; opening is collective.

    Args:
        module, group, into, options: of the call.
        error: what is wrong with the call, to be raised on all ranks.

    Raises:
        LayoutMismatch, ValueError: on every rank, if a call makes no sense or the ranks do not agree.
        PeerLost: a rank did not come.
    """
    mine = _channels.get(module)
    if mine is None:
        mine = _channels[module] = {}
        weakref.finalize(module, _close_all, mine).atexit = False
    for other, channel in list(mine.items()):
        if channel.broken is not None or _is_gone(other):
            _keep(module, channel)
            mine.pop(other).close("its group is gone")
    if group not in mine:
        with _no_collection():
            mine[group] = _open(module, group, into, options, error)
    return mine[group]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector rest: opening makes many objects that stay, and it would walk all of a large process for them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_in_use(group: dist.ProcessGroup) -> bool:
    """Return whether this rank has an open channel over a group."""
    return any(group in mine for mine in _channels.values())


def _at_exit() -> None:
    """Let syncs in the background end, or end them: a thread inside a collective would bring the interpreter down with it."""
    if os.getpid() != _PID:
        return
    if not running.finish(_EXIT_PATIENCE):
        for channels in list(_channels.values()):
            for channel in channels.values():
                channel.drop("the process exits")
        running.finish(_EXIT_PATIENCE)
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(_EXIT_PATIENCE)


atexit.register(_at_exit)


def _close_all(channels: dict[Any, Channel]) -> None:
    for channel in channels.values():
        channel.close("its module is gone")


def _is_gone(group: dist.ProcessGroup) -> bool:
    """Return whether the user has destroyed a group."""
    try:
        return dist.get_rank(group) < 0
    except (ValueError, RuntimeError):
        return True


def close(module: Model, group: dist.ProcessGroup | None = None) -> None:
    """Close the channel of (module, group) on this rank and forget what it held; a sync in the background ends first.

    The next `delta_broadcast` opens a new channel and seeds all receivers. Closing what is not open does nothing.

    Args:
        module: as passed to `delta_broadcast`.
        group: likewise; None is the world.

    Example:
        >>> dte_dist.close(module, group)
    """
    running.join(module)
    _kept.pop(module, None)
    channel = _channels.get(module, {}).pop(dist.group.WORLD if group is None else group, None)
    if channel is not None:
        channel.close()
        if channel.parts.receiver is not None:
            channel.parts.receiver.chain.forget()
    elif module in _copies:
        _copies[module].chain.forget()


def _open(module: Model, group: dist.ProcessGroup, into: Model | None, options: Options, error: Exception | None) -> Channel:
    membership = Membership.join(group, options.timeout)
    opening = _Opening(membership, [], options)
    channel: Channel | None = None
    try:
        try:
            channel = opening.run(module, into, error)
        except Agreed as agreed:
            raise agreed.error from agreed.error.__cause__
        return channel
    except PeerLost as lost:
        raise PeerLost(LossBoard(membership).agree(str(lost))) from lost
    finally:
        if channel is None:
            for wire in opening.wires:
                wire.close()


def _describe(module: Model, into: Model | None, options: Options, membership: Membership) -> Described:
    described = describe(module, into, options, membership.backends)
    layouts = [layout for layout in (described.layout, described.into) if layout is not None]
    dtypes = {DTYPES[entry.dtype] for layout in layouts for entry in layout.manifest.entries}
    # Before anyone waits for this rank: where nothing is cached, compiling takes longer than a short timeout.
    kernels.warm({dtype.itemsize for dtype in dtypes})
    return described


def _refuse_other_plan(digests: np.ndarray) -> None:
    """Refuse to go on where ranks made different plans of the same descriptions; all see the same rows."""
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        fix = "run the same version of dte_dist on every rank"
        raise LayoutMismatch("ranks come to different plans for the same layouts", ranks=[0, *others], fix=fix)


@dataclass(slots=True)
class _Opening:
    """A channel in the making.

    Attributes:
        membership: of this rank in the group.
        wires: the groups made so far, the control group first.
        options: of the call.
    """

    membership: Membership
    wires: list[Wire]
    options: Options

    def run(self, module: Model, into: Model | None, error: Exception | None) -> Channel:
        """Go through the exchanges; `error` is what is wrong with the call, to be raised on all ranks."""
        control = Wire("control", range(self.membership.size), self.membership, "gloo")
        self.wires.append(control)
        mine: Described | None = None
        if error is None:
            mine, error = or_error(lambda: _describe(module, into, self.options, self.membership))
        agreement = agree(control, mine, error)
        built: Channel | None = None
        try:
            built = self.build(agreement, mine, _kept.get(module), module if into is None else into)  # type: ignore[arg-type]  # agree raised
        except PeerLost:
            raise
        except Exception as caught:  # told to all ranks in the last row
            error = caught
        _refuse_other_plan(raise_if_any(control, error, np.frombuffer(agreement.model.digest(), np.int64).tolist()))
        _kept.pop(module, None)
        return built  # type: ignore[return-value]  # raise_if_any raised where there is none

    def build(self, agreement: Agreement, mine: Described, kept: _Kept | None, target: Model) -> Channel:
        """Make the data groups and the states; groups are made in the same order on all ranks."""
        rank, root, model = self.membership.rank, agreement.root, agreement.model
        totals = {source: {width: space.numel for width, space in spaces.items()} for source, spaces in model.source_spaces.items()}
        schedule = Schedule(totals, self.options.bucket_bytes)
        device = mine.devices[0] if mine.devices else None
        gather = self._wire("gather", agreement.backend, sorted(agreement.sources), device)
        stream = self._wire("stream", agreement.backend, sorted({root, *agreement.receivers}), device)
        everyone = range(self.membership.size)
        pairs = self.wires[0] if agreement.backend == "gloo" else self._wire("pairs", agreement.backend, everyone, device)
        source = self._source(agreement, mine, kept, schedule) if rank in agreement.sources else None
        receiver = self._receiver(agreement, mine, target) if rank in agreement.receivers else None
        kernels.warm({width for spaces in model.source_spaces.values() for width in spaces})
        relay = Relay(gather, stream, rank=rank, root=root, bucket_bytes=self.options.bucket_bytes)
        exchange = Exchange(pairs, rank=rank, sources=agreement.sources)
        routes = Routes(
            lambda: RelayRoute(model, schedule, source, receiver, relay=relay, root=root),
            lambda: P2PRoute(model, rank, self.options.bucket_bytes, receiver, exchange),
            lambda: Plan.of(model, root),
        )
        parts = Parts(agreement, self.wires[0], routes, source, receiver, Letters(len(agreement.sources)), LinkSpeed())
        return Channel(self.options, parts, LossBoard(self.membership), self.wires, frozenset(mine.devices))

    def _wire(self, name: str, backend: str, members: Sequence[int], device: torch.device | None) -> Wire | None:
        """Make a data group if it has several members and this rank is one."""
        if len(members) < 2 or self.membership.rank not in members:
            return None
        self.wires.append(Wire(name, members, self.membership, backend, device))
        return self.wires[-1]

    def _source(self, agreement: Agreement, mine: Described, kept: _Kept | None, schedule: Schedule) -> SourceState:
        rank, model = self.membership.rank, agreement.model
        state = SourceState(mine.layout, model, rank, schedule, agreement.schema)
        if kept is not None and kept.covers == _digest(model, model.source_spaces[rank]):
            state.chain, state.snapshot = kept.chain, kept.snapshot
        return state

    def _receiver(self, agreement: Agreement, mine: Described, target: Model) -> ReceiverState:
        rank, model = self.membership.rank, agreement.model
        layout = mine.layout if mine.into is None else mine.into
        names, tensors = [entry.name for entry in layout.manifest.entries], layout.tensors()
        refuse_overlaps(names, tensors)
        if mine.into is not None and rank in agreement.sources:
            refuse_shared(names, mine.layout.tensors(), tensors)
        state = ReceiverState(layout, model, rank)
        covers = _digest(model, model.receiver_spaces[rank])
        copy = _copies.setdefault(target, _Copy(state.chain, covers))
        if copy.covers != covers:  # some of it may never have been received
            copy.chain.version, copy.covers = NONE, covers
        state.chain = copy.chain
        return state


def _keep(module: Model, channel: Channel) -> None:
    """Keep what the source of a broken channel holds; a receiver's chain stays with its copy anyway."""
    source, model = channel.parts.source, channel.parts.agreement.model
    if source is not None:
        _kept[module] = _Kept(source.chain, source.snapshot, _digest(model, source.spaces))


def _digest(model: ModelMap, spaces: Mapping[int, FlatSpace]) -> bytes:
    """Hash what a rank holds of the model: names, dtypes and blocks of its pieces, in order."""
    hashed = hashlib.blake2b(digest_size=16)
    for width, space in spaces.items():
        for piece in space.pieces:
            slot = model.slots[piece.slot]
            hashed.update(f"{width} {slot.name} {slot.dtype} {slot.shape} {piece.block.runs}\n".encode())
    return hashed.digest()
