"""How a channel opens: all ranks agree, make the same groups in the same order, and have it together or not
at all.

1.   Describe: what this rank holds and wants; kernels are compiled now, and others wait for a rank that
     compiles. An error is kept.
2. o Come together: the roll call, and the control group (`transport.opening`).
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

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dte_dist import kernels
from dte_dist.layout import DTYPES, Layout, refuse_overlaps, refuse_shared
from dte_dist.liveness.groups import Known
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
from dte_dist.transport.all_or_none import capture, raise_if_any
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.communicator import Communicator, Membership
from dte_dist.transport.guard import DamagedRow
from dte_dist.transport.link_speed import LinkSpeed
from dte_dist.transport.opening import Opening, open_together
from dte_dist.transport.p2p import PairwiseExchange

__all__ = ["Model", "open_channel"]

Model = torch.nn.Module | Layout
"""A channel belongs to one of these."""

_Groups = tuple[Communicator | None, Communicator | None, Communicator | None]
"""To gather, to stream, and for pairs of ranks; None where this rank has no part in it."""


def open_channel(
    module: Model,
    group: Known,
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

    def steps(opening: Opening) -> Channel:
        return _ChannelOpening(opening, options).steps(module, into, error)

    timeout = timeout_of(options)
    return open_together(group, timeout, steps, name=options["name"], origin=origin)


@dataclass(frozen=True, slots=True)
class _ChannelOpening:
    """A channel in the making.

    Attributes:
        opening: of the ranks of the group.
        options: of the call.
    """

    opening: Opening
    options: SyncOptions

    @property
    def membership(self) -> Membership:
        """This rank's place in the group."""
        return self.opening.membership

    def steps(self, module: Model, into: Model | None, error: Exception | None) -> Channel:
        """Go through the exchanges; `error` is what is wrong with the call, to be raised on all ranks."""
        opening = self.opening
        mine: Described | None = None
        if error is None:
            mine, error = capture(lambda: self._describe(module, into))
        control = opening.connect()
        agreement = agree(control, mine, error)
        opening.has_met = True
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
        opening.watch.is_ending = True
        raise_if_any(control, error or wrong)
        opening.end()
        if built is not None and built.parts.source is not None:
            kept.release_source(module, built.parts.source, agreement.model)
        return built  # type: ignore[return-value]  # raise_if_any raised where there is none

    def _describe(self, module: Model, into: Model | None) -> Described:
        described = describe(module, into, self.options, self.membership.backends, self.membership.world)
        layouts = [layout for layout in (described.layout, described.into) if layout is not None]
        dtypes = {DTYPES[entry.dtype] for layout in layouts for entry in layout.manifest.entries}
        self._warm(dtype.itemsize for dtype in dtypes)
        return described

    def _warm(self, widths: Iterable[int]) -> None:
        """Compile what is not compiled yet; meanwhile the others wait without counting the time."""
        with self.opening.watch.compiling() as say:
            kernels.precompile(widths, say)

    def _groups(self, agreement: Agreement, mine: Described) -> _Groups:
        """Make the groups for data, in the same order on all ranks."""
        device = mine.devices[0] if mine.devices else None
        gather = self.opening.wire("gather", agreement.backend, sorted(agreement.sources), device)
        ends = sorted({agreement.root, *agreement.receivers})
        stream = self.opening.wire("stream", agreement.backend, ends, device)
        if agreement.backend == "gloo":
            return gather, stream, self.opening.wires[0]
        everyone = range(self.membership.size)
        return gather, stream, self.opening.wire("pairs", agreement.backend, everyone, device)

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
            self.opening.wires[0],
            routes,
            source,
            receiver,
            InlineFrames(len(agreement.sources)),
            speed,
            Verifier(model, self.opening.wires[0], source, receiver),
            self.options["verify_interval"],
        )
        return Channel(self.options, parts, self.opening.watch, self.opening.wires, frozenset(mine.devices))

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
