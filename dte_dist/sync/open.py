"""How a channel opens: all ranks agree, make the same groups in the same order, and have it together or not
at all.

1.   Describe: what this rank holds and wants; kernels are compiled now, and others wait for a rank that
     compiles. An error is kept.
2. o The roll call over the store of the group (`liveness.rendezvous`): who does not come is known by name.
     The modules that come must not have been in different channels before.
3. o Connect, agree on who holds what (`sync.agreement`), compare what came of it, or all raise the
     error of one.
4. o Compare: where sources hold the same, though no mesh makes them replicas, their bits must be equal
     (`sync.replica_check`).
5. o Connect the groups for data, and build the states of source and receiver. What an earlier channel of the
     module left behind is taken up (`sync.retained_state`). An error while they are built is kept.
6. o The last row: has every rank built its channel? If not, all raise, and close their groups.

Steps with a ring (o) are exchanges. Any other error, of whatever rank, is found on the board of the channel,
and all raise the same. A rank that comes when the others have given it up goes on to the number of their next
try, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dte_dist import kernels
from dte_dist.errors import OrderMismatch, PeerLost
from dte_dist.layout import DTYPES, Layout, refuse_overlaps, refuse_shared
from dte_dist.liveness.board import names
from dte_dist.liveness.rendezvous import call_roll, forget_meeting
from dte_dist.liveness.watch import Watch
from dte_dist.options import SyncOptions, timeout_of
from dte_dist.plan.chunks import ChunkPlan
from dte_dist.plan.transfer_plan import Plan
from dte_dist.sync import retained_state as kept
from dte_dist.sync.agreement import Agreement, Described, agree, compare_plans, describe
from dte_dist.sync.channel import Channel
from dte_dist.sync.channel_state import ChannelState
from dte_dist.sync.inline_frames import InlineFrames
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.replica_check import refuse_rivals
from dte_dist.sync.routes import BroadcastRoute, P2PRoute, Routes
from dte_dist.sync.source import Source
from dte_dist.sync.verification import Verifier
from dte_dist.transport.all_or_none import AgreedError, agreed, capture, end_together, raise_if_any
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.communicator import Communicator, Membership
from dte_dist.transport.guard import DamagedRow
from dte_dist.transport.link_speed import LinkSpeed
from dte_dist.transport.p2p import PairwiseExchange

__all__ = ["Model", "open_channel"]

Model = torch.nn.Module | Layout
"""A channel belongs to one of these."""

_log = logging.getLogger(__name__)


_Groups = tuple[Communicator | None, Communicator | None, Communicator | None]
"""To gather, to stream, and for pairs of ranks; None where this rank has no part in it."""


class _GivenUp(Exception):
    """The others gave this rank up before it came."""


def open_channel(
    module: Model,
    group: dist.ProcessGroup | None,
    into: Model | None,
    options: SyncOptions,
    error: Exception | None,
    *,
    origin: int | None = None,
) -> Channel:
    """Open a channel; all ranks of the group must call.

    Args:
        module, group, into, options: of the call.
        error: what is wrong with the call, to be raised on all ranks.
        origin: of the channel that the module was in before, see `Watch.origin`.

    Raises:
        LayoutMismatch, OrderMismatch, ValueError, DeltaError: on every rank, with the same text.
        PeerLost: a rank did not come, or died, or raised what is no error of the family; on every survivor,
            with the same text.
    """
    while True:
        opening = _Opening(Membership.join(group, timeout_of(options)), options, origin)
        try:
            return opening.run(module, into, error)
        except _GivenUp:
            _log.info("the other ranks tried to open a channel before this one came: trying again with them")


@dataclass(slots=True)
class _Opening:
    """A channel in the making.

    Attributes:
        membership: of this rank in the group.
        options: of the call.
        origin: of the channel that the module was in before.
        watch: of the waits.
        wires: the groups made so far, the control group first.
        has_met: all ranks have heard of each other.
    """

    membership: Membership
    options: SyncOptions
    origin: int | None
    watch: Watch = field(init=False)
    wires: list[Communicator] = field(default_factory=list)
    has_met: bool = False

    def __post_init__(self) -> None:
        self.watch = Watch(self.membership, self.options["name"])
        self.watch.origin = self.origin

    def run(self, module: Model, into: Model | None, error: Exception | None) -> Channel:
        """Open the channel, or leave nothing open.

        Raises:
            _GivenUp: the others had given this rank up.
            Exception: as `open_channel` says.
        """
        channel: Channel | None = None
        self.watch.open()
        try:
            channel = self._steps(module, into, error)
            return channel
        except AgreedError as agreed:
            raise agreed.error from agreed.error.__cause__
        except PeerLost as lost:
            if not self.has_met and not self.watch.ends_here(self.watch.settle(lost)):
                raise _GivenUp from lost
            raise end_together(lost, self.watch, self._drop) from lost
        except Exception as caught:
            raise end_together(caught, self.watch, self._drop) from caught
        except BaseException as caught:
            end_together(caught, self.watch, self._drop)
            raise
        finally:
            if channel is None:
                self._drop("it was not opened")

    def _drop(self, _: str) -> None:
        self.watch.close()
        for wire in self.wires:
            wire.close()

    def _steps(self, module: Model, into: Model | None, error: Exception | None) -> Channel:
        """Go through the exchanges; `error` is what is wrong with the call, to be raised on all ranks."""
        membership = self.membership
        watch = self.watch
        mine: Described | None = None
        if error is None:
            mine, error = capture(lambda: self._describe(module, into))
        origins = call_roll(watch)
        watch.origin = agreed(lambda: _one_origin(origins)) or membership.channel
        control = Communicator("control", range(membership.size), membership, "gloo", watch=watch)
        self.wires.append(control)
        agreement = agree(control, mine, error)
        self.has_met = True
        layout = None if mine is None else mine.layout
        for compare in (
            lambda: compare_plans(control, agreement),
            lambda: refuse_rivals(control, agreement, layout),
        ):
            try:
                compare()
            except DamagedRow as damage:  # told in the last row: others wait for the groups of this rank
                error = error or damage
        groups = self._groups(agreement, mine)  # type: ignore[arg-type]  # agree raised where there is none
        target = module if into is None else into
        built, wrong = capture(
            lambda: self._build(agreement, mine, module, target, groups)  # type: ignore[arg-type]
        )
        watch.is_ending = True
        raise_if_any(control, error or wrong)
        watch.is_opening = False
        forget_meeting(watch, self.wires)
        if built is not None and built.parts.source is not None:
            kept.release_source(module, built.parts.source, agreement.model)
        return built  # type: ignore[return-value]  # raise_if_any raised where there is none

    def _describe(self, module: Model, into: Model | None) -> Described:
        described = describe(module, into, self.options, self.membership.backends)
        layouts = [layout for layout in (described.layout, described.into) if layout is not None]
        dtypes = {DTYPES[entry.dtype] for layout in layouts for entry in layout.manifest.entries}
        self._warm(dtype.itemsize for dtype in dtypes)
        return described

    def _warm(self, widths: Iterable[int]) -> None:
        """Compile what is not compiled yet; meanwhile the others wait without counting the time."""
        with self.watch.compiling() as say:
            kernels.precompile(widths, say)

    def _groups(self, agreement: Agreement, mine: Described) -> _Groups:
        """Make the groups for data, in the same order on all ranks."""
        device = mine.devices[0] if mine.devices else None
        gather = self._wire("gather", agreement.backend, sorted(agreement.sources), device)
        ends = sorted({agreement.root, *agreement.receivers})
        stream = self._wire("stream", agreement.backend, ends, device)
        if agreement.backend == "gloo":
            return gather, stream, self.wires[0]
        return gather, stream, self._wire("pairs", agreement.backend, range(self.membership.size), device)

    def _build(
        self, agreement: Agreement, mine: Described, module: Model, target: Model, groups: _Groups
    ) -> Channel:
        """Make the states. A failure here is told to all ranks in the last row."""
        rank = self.membership.rank
        root = agreement.root
        model = agreement.model
        gather, stream, pairs = groups
        totals = {
            source: {width: space.numel for width, space in spaces.items()}
            for source, spaces in model.source_spaces.items()
        }
        schedule = ChunkPlan(totals, self.options["bucket_bytes"])
        source = self._source(agreement, mine, module, schedule) if rank in agreement.sources else None
        receiver = self._receiver(agreement, mine, target) if rank in agreement.receivers else None
        self._warm({width for spaces in model.source_spaces.values() for width in spaces})
        speed = LinkSpeed()
        relay = BucketedBroadcast(
            gather, stream, rank=rank, root=root, bucket_bytes=self.options["bucket_bytes"], speed=speed
        )
        exchange = PairwiseExchange(pairs, rank=rank, sources=agreement.sources)
        routes = Routes(
            lambda: BroadcastRoute(model, schedule, source, receiver, relay=relay, root=root),
            lambda: P2PRoute(model, rank, self.options["bucket_bytes"], receiver, exchange),
            lambda: Plan.of(model, root),
        )
        parts = ChannelState(
            agreement,
            self.wires[0],
            routes,
            source,
            receiver,
            InlineFrames(len(agreement.sources)),
            speed,
            Verifier(model, self.wires[0], source, receiver),
            self.options["verify_interval"],
        )
        return Channel(self.options, parts, self.watch, self.wires, frozenset(mine.devices))

    def _wire(
        self, name: str, backend: str, members: Sequence[int], device: torch.device | None
    ) -> Communicator | None:
        """Make a data group if it has several members and this rank is one."""
        if len(members) < 2 or self.membership.rank not in members:
            return None
        self.wires.append(Communicator(name, members, self.membership, backend, device, watch=self.watch))
        return self.wires[-1]

    def _source(self, agreement: Agreement, mine: Described, module: Model, schedule: ChunkPlan) -> Source:
        state = Source(mine.layout, agreement.model, self.membership.rank, schedule, agreement.schema)
        kept.restore_source(module, self.membership.global_ranks, state, agreement.model)
        return state

    def _receiver(self, agreement: Agreement, mine: Described, target: Model) -> Receiver:
        rank = self.membership.rank
        model = agreement.model
        layout = mine.layout if mine.into is None else mine.into
        names = [entry.name for entry in layout.manifest.entries]
        tensors = layout.tensors()
        refuse_overlaps(names, tensors)
        if mine.into is not None and rank in agreement.sources:
            refuse_shared(names, mine.layout.tensors(), tensors)
        state = Receiver(layout, model, rank)
        kept.attach_copy(target, state, model, model.receiver_spaces[rank], layout.homes())
        return state


def _one_origin(origins: Mapping[int, int | None]) -> int | None:
    """Return the origin of the modules that come, None for new ones.

    Raises:
        OrderMismatch: they come from different channels; on every rank, for all see the same.
    """
    known = sorted({origin for origin in origins.values() if origin is not None})
    ranks = {origin: [rank for rank, other in origins.items() if other == origin] for origin in known}
    if len(ranks) > 1:
        said = ", ".join(f"{names(those)} that of channel {origin}" for origin, those in ranks.items())
        hint = "call the channels of a group in the same order on every rank; "
        hint += "dte_dist.close(module, group) lets a module change places"
        raise OrderMismatch(f"a channel opens again, but with different modules: {said}", hint=hint)
    return next(iter(ranks), None)
