"""The public collectives, with signatures like those of c10d."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack, overload

import torch

from dte_dist.errors import ChannelClosed, DeltaError
from dte_dist.layout import Layout
from dte_dist.liveness.groups import Group, Known, group_of, place_of
from dte_dist.options import SyncOptions, differences, options_of
from dte_dist.report import SyncReport, VerifyReport
from dte_dist.sync import in_flight as running
from dte_dist.sync.background import DeltaWork
from dte_dist.sync.channel import Abandoned, Channel
from dte_dist.sync.exclusive import exclusive
from dte_dist.sync.protocol import PreparedSync
from dte_dist.sync.registry import find_channel, find_or_open, is_in_use
from dte_dist.sync.streams import fork_streams, join_caller, use_streams
from dte_dist.transport.named_ranks import Ranks, group_ranks

__all__ = ["delta_broadcast", "delta_p2p", "verify"]

Module = torch.nn.Module | Layout

_log = logging.getLogger(__name__)


@overload
def delta_broadcast(
    module: Module,
    group: Group | None = ...,
    src: Ranks | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[SyncOptions],
) -> SyncReport: ...
@overload
def delta_broadcast(
    module: Module,
    group: Group | None = ...,
    src: Ranks | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[SyncOptions],
) -> DeltaWork: ...
def delta_broadcast(
    module: Module,
    group: Group | None = None,
    src: Ranks | None = None,
    async_op: bool = False,
    **options: Unpack[SyncOptions],
) -> SyncReport | DeltaWork:
    """Make the receivers' copy of a module bit-identical to the sources', moving only what changed since the
    last call.

    A collective: every rank of `group` must call, each with its own module; the modules may be sharded quite
    differently. The first call opens a channel and seeds the receivers with everything. Each later call
    raises the version.

    Args:
        module: on sources the trained module, on receivers the copy; any mixture of plain tensors and
            DTensors. A `Layout` describes weights that are no module.
        group: process group of sources and receivers, or a DeviceMesh of one dimension; None is the world.
        src: the sources, as ranks of the world (one, several, or a DeviceMesh), the first being the root that
            relays. Default: the ranks that share a mesh with rank 0 of the group; rank 0 alone if its module
            has no mesh.
        async_op: return a `DeltaWork` as soon as the bits to send are safe from the optimizer.
        options: any of the following, by keyword.

    Options that each call may give anew:
        version: number of the version this call makes, greater than the last; default: the last plus one. All
            sources must agree; receivers may leave it out.
        mode: "delta" (the default), or "full" to send everything: from the sources to all receivers if any
            source says so, to this rank alone if a mere receiver does.
        detector: on sources, a function that finds candidates for changes; see `dte_dist.Detector`. Default:
            all bits are compared with a snapshot.
        route: "broadcast" over the root (the default); "p2p" from shard to shard, as `delta_p2p`; or "auto",
            whichever moves fewer bytes through the busiest rank: `report.route` and `report.route_reason` say
            which and why.
        codec: on sources, how changes are written: "fast" to code, "small" in bytes, "auto" (the default) for
            the less time at the speed the links have shown, or a pair such as "ef+planes"; see
            docs/protocol.md. Receivers read all.
        sparse_bytes_ratio: on sources, changes are sent as changes where they take at most so much of the
            bytes of everything around them; above 0, at most 1.0 (the default).

    Options that stay the same for the life of a channel:
        group_src: the sources as ranks of the group, instead of `src`.
        into: on a rank that is both, the module to receive into. On a mere receiver it stands for `module`.
        wire_dtype: dtype in which values travel and receivers hold them, cast before they are compared. One
            dtype for all floating-point tensors, a mapping by name, a function of (name, dtype), or
            "receiver": whatever the receivers hold. A dtype may be given by its name: "bf16", "bfloat16",
            "fp16", "float16", "half", "fp32", "float32", "float". Default: the dtype of the sources.
        select: names to sync, as one or several fnmatch patterns or a function of the name. A receiver that
            passes it may hold part of the model. It must choose some tensor, unless the module has none; a
            pattern that matches none is warned of. Default: all.
        rename: function from this rank's names to the names all ranks agree on.
        anchor_interval: send everything after so many deltas. Default: never.
        verify_interval: compare digests of all copies after so many versions, as `dte_dist.verify` does; see
            `report.verified`. Default: never.
        bucket_bytes: bytes that travel at once, 64 to 2^30; a source and a receiver each hold two buckets.
            Default: 16 MiB.
        timeout: seconds (or timedelta) that any one wait for another rank may take. Default: 10 minutes.
        name: of the channel, 1 to 200 characters, the same on all ranks. Give one to each of several modules
            of one shape that are synchronised over one group: ranks that open the channels in another order
            are refused then. Without names their modules would be swapped.

    Returns:
        A `SyncReport`, or with async_op a `DeltaWork` whose `wait` returns it.

    Raises:
        ValueError: an argument makes no sense; on every rank.
        LayoutMismatch: the ranks do not describe the same model, or disagree on an option; on every rank.
        VersionError: the version is not newer; on every rank.
        PeerLost: a rank died or did not answer; on every survivor. Call again with a group of the survivors.
        ApplyFailed: a rank failed after the vote, while writing; on every rank. It is seeded by the next
            sync.
        DeltaError: anything else that went wrong on some rank; on every rank. No receiver has moved.

    Example:
        >>> # ranks 0 and 1 train it with FSDP2, ranks 2 and 3 hold a copy
        >>> report = dte_dist.delta_broadcast(model)
        >>> report.kind, report.reason
        ('full', 'first sync')
        >>> train()  # a step of the optimizer on ranks 0 and 1
        >>> report = dte_dist.delta_broadcast(model)
        >>> print(report)
        v1 -> v2 delta: ... of 1,072 changed (... %), ... to each receiver (dense 4.3 kB, ...x), 2 frames, ...
    """
    return _sync(module, group, src, async_op, said=options)


@overload
def delta_p2p(
    module: Module,
    group: Group | None = ...,
    src: Ranks | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[SyncOptions],
) -> SyncReport: ...
@overload
def delta_p2p(
    module: Module,
    group: Group | None = ...,
    src: Ranks | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[SyncOptions],
) -> DeltaWork: ...
def delta_p2p(
    module: Module,
    group: Group | None = None,
    src: Ranks | None = None,
    async_op: bool = False,
    **options: Unpack[SyncOptions],
) -> SyncReport | DeltaWork:
    """Do what `delta_broadcast` does, shard to shard: no root, each source sends each receiver only what that
    receiver holds.

    The same channel, versions, options, errors and guarantees: calls of both may be mixed, as long as all
    ranks make the same ones. With mode="full" it is a dense reshard of its own, from any layout to any
    layout, in bounded memory.

    Args:
        module, group, src, async_op: as for `delta_broadcast`.
        options: its keyword options; `route` is "p2p" unless said otherwise.

    Returns:
        A `SyncReport`, whose `wire_bytes` are those of the receiver that got most; with async_op a
        `DeltaWork`.

    Raises:
        ValueError, DeltaError: as `delta_broadcast`.

    Example:
        >>> report = dte_dist.delta_p2p(model)
        >>> train()
        >>> report = dte_dist.delta_p2p(model)
        >>> report.route, report.base_version, report.version
        ('p2p', 1, 2)
    """
    return _sync(module, group, src, async_op, said={"route": "p2p", **options})


def verify(module: Module, group: Group | None = None) -> VerifyReport:
    """Compare the live bits of all receivers with those that the sources sent; a receiver that differs is
    seeded by the next sync.

    A collective on the open channel of (module, group): every rank of the group must call, in the same order
    as its syncs. It finds what no version counter shows: writes through `.data` or numpy, memory that was
    discarded and mapped again, a detector that forgot a change, a fault of the machine. Each tensor has a
    digest of 64 bits, a sum over its elements of a hash of position and bits, so that shards add up. It costs
    one read of the weights on each rank, one of the snapshot on sources, and 8 bytes a tensor and kind of
    receiver.

    Args:
        module: as passed to `delta_broadcast`.
        group: likewise; None is the world.

    Returns:
        A `VerifyReport`, the same on every rank. Called before the next step of the optimizer, its `moved` is
        0.

    Raises:
        ValueError: there is no open channel on this rank, or `group` is a mesh of several dimensions.
        LayoutMismatch: another rank called something else on the channel; on every rank.
        PeerLost: a rank died or did not answer; on every survivor.
        DeltaError: anything else that went wrong on some rank; on every rank.

    Example:
        >>> report = dte_dist.delta_broadcast(model)
        >>> if rank == 2:
        ...     model[0].bias.data[0] = 7.0  # no version counter shows this write
        >>> found = dte_dist.verify(model)
        >>> found.equal, found.ranks, found.first
        (False, (2,), '0.bias')
        >>> dte_dist.delta_broadcast(model).seeded
        (2,)
    """
    pg = group_of(group)
    if (channel := find_channel(module, pg)) is None:
        raise ValueError(
            "there is no open channel of this module and group: verify after delta_broadcast or delta_p2p"
        )
    into = channel.into()
    with exclusive(module, into), torch.inference_mode(False), torch.no_grad():
        running.wait_for(module, into)
        channel.refuse_forked()
        # A call of another thread may have opened a new one meanwhile.
        channel = find_channel(module, pg) or channel
        try:
            return channel.verify()
        except BaseException as error:
            channel.abort(error)
            if isinstance(error, Abandoned):
                raise ChannelClosed(
                    "another rank closed the channel", hint="sync again; a new channel opens"
                ) from error
            raise


def _sync(
    module: Module, group: Group | None, src: Ranks | None, async_op: bool, *, said: SyncOptions
) -> SyncReport | DeltaWork:
    """Make one call of a collective; whatever is wrong with it on this rank is raised on all ranks."""
    place = place_of(group_of(group))
    into = said.get("into")
    options: SyncOptions | None = None
    error: Exception | None = None
    try:
        if into is module:
            raise ValueError(
                "into= must be another module: a rank that is both source and receiver has two copies"
            )
        if not isinstance(async_op, bool):
            raise ValueError(f"async_op must be True or False, got {async_op!r}")
        given = said.copy()
        if src is not None or "group_src" in given:
            given["group_src"] = group_ranks(src, said.get("group_src"), place)
        options = options_of(**given)
    except (ValueError, DeltaError) as caught:
        error = caught
    except Exception as caught:  # an argument of a type that cannot be worked with
        error = ValueError(f"an argument makes no sense: {type(caught).__name__}: {caught}")
    if (wrong := _refuse_kind(module)) is not None:
        error = wrong
        if is_in_use(place.group):  # the other ranks may be about to use a channel that this rank cannot find
            raise error
        module = torch.nn.Module()  # it stands in, to tell them when they open one
    call = _Call(module, place.group, options or options_of(), error, into)
    # A channel outlives a caller's inference_mode.
    with (
        exclusive(module, into),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        running.wait_for(module, into)
        return call.start() if async_op is True else call.run()


def _refuse_kind(module: Any) -> ValueError | None:
    """Return what is wrong with what is no module; None if it is one."""
    if isinstance(module, torch.nn.Module | Layout):
        return None
    return ValueError(f"expected a torch.nn.Module or a dte_dist.Layout, got {type(module).__name__}")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a collective: its arguments, and what is wrong with them on this rank."""

    module: Module
    group: Known
    options: SyncOptions
    error: Exception | None
    into: Module | None
    begin: float = field(default_factory=time.perf_counter)

    def run(self) -> SyncReport:
        """Sync; where another rank had closed the channel, open a new one with it first."""
        while True:
            channel = self._channel()
            try:
                return channel.run(self._prepare(channel))
            except Abandoned as abandoned:
                _log.info("%s: opening a new one", abandoned)
            except BaseException as error:
                channel.abort(error)
                raise

    def start(self) -> DeltaWork:
        """Prepare here, so that the bits to send are safe, and run the rest in the background."""
        channel = self._channel()
        modules = [self.module, self.into]

        def finish() -> SyncReport:
            try:
                return channel.run(prepared)
            except (
                Abandoned
            ) as abandoned:  # the bits of the call are gone, and the optimizer may have stepped
                raise abandoned.error() from abandoned
            finally:
                modules.clear()  # until now they must not be collected, which closes the channel

        streams = fork_streams(channel.devices)
        work = DeltaWork(finish, streams)
        try:
            with use_streams(streams):
                prepared = self._prepare(channel, background=True)
            join_caller(streams)
            running.register(
                work, self.module, self.into
            )  # before it starts: the next call is to wait for it in any case
            work.start()
        except BaseException as error:
            if work.ended(0):  # it never began
                channel.abort(error)
            raise
        return work

    def _channel(self) -> Channel:
        return find_or_open(self.module, self.group, self.into, self.options, self.error)

    def _prepare(self, channel: Channel, background: bool = False) -> PreparedSync:
        return channel.prepare(
            self.options, self.begin, check=lambda: self._check(channel), background=background
        )

    def _check(self, channel: Channel) -> None:
        """Raise what is wrong with the call."""
        if self.error is not None:
            raise self.error
        different = differences(channel.options, self.options)
        if different:
            names = ", ".join(different)
            hint = "pass the same, or call dte_dist.close(module, group) on every rank first"
            raise ValueError(f"{names}: not what the call that opened the channel passed; {hint}")
