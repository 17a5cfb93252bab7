"""How a channel opens: all ranks agree, make the same groups in the same order, and have it together or not at all.

1.   Describe: what this rank holds and wants; kernels are compiled now, so that nobody waits for it later. An error is kept.
2. o Agree on who holds what (`collectives.agreement`), compare what came of it, or all raise the error of one.
3. o Compare: where sources hold the same, though no mesh makes them replicas, their bits must be equal
     (`collectives.copies`).
4. o Build: data groups, which connect, and the states of source and receiver. What an earlier channel of the
     module left behind is taken up (`collectives.kept`). An error is kept.
5. o The last row: has every rank built its channel? If not, all raise, and close their groups.

Steps with a ring (o) are exchanges. A rank that does not come is a `PeerLost` with one text, found on the loss board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dte_dist import kernels
from dte_dist.collectives import kept
from dte_dist.collectives.agreement import Agreement, Described, agree, compare_plans, describe
from dte_dist.collectives.channel import Channel
from dte_dist.collectives.copies import refuse_rivals
from dte_dist.collectives.letters import Letters
from dte_dist.collectives.options import Options
from dte_dist.collectives.routes import P2PRoute, RelayRoute, Routes
from dte_dist.collectives.sync import Parts
from dte_dist.collectives.verification import Verifier
from dte_dist.engine.receiver import ReceiverState
from dte_dist.engine.source import SourceState
from dte_dist.errors import PeerLost
from dte_dist.layout import DTYPES, Layout, refuse_overlaps, refuse_shared
from dte_dist.plan.schedule import Schedule
from dte_dist.plan.transfer import Plan
from dte_dist.transport.exchange import Exchange
from dte_dist.transport.groups import DamagedRow, LossBoard, Membership, Wire
from dte_dist.transport.relay import Relay
from dte_dist.transport.speed import LinkSpeed
from dte_dist.transport.together import Agreed, end_together, or_error, raise_if_any

__all__ = ["Model", "open_channel"]

Model = torch.nn.Module | Layout
"""What a channel belongs to."""


def open_channel(module: Model, group: dist.ProcessGroup, into: Model | None, options: Options, error: Exception | None) -> Channel:
    """Open a channel; all ranks of the group must call.

    Args:
        module, group, into, options: of the call.
        error: what is wrong with the call, to be raised on all ranks.

    Raises:
        LayoutMismatch, ValueError, DeltaError: on every rank, with the same text.
        PeerLost: a rank did not come.
    """
    membership = Membership.join(group, options.timeout)
    opening = _Opening(membership, [], options)
    channel: Channel | None = None
    try:
        try:
            channel = opening.run(module, into, error)
        except Agreed as told:
            raise told.error from told.error.__cause__
        except PeerLost:
            raise
        except Exception as alone:  # on this rank only: the others are to raise what it was, not that they lost this rank
            raise end_together(alone, LossBoard(membership), lambda why: None, rank=membership.rank) from alone
        return channel
    except PeerLost as lost:
        raise PeerLost(LossBoard(membership).agree(str(lost))) from lost
    finally:
        if channel is None:
            for wire in opening.wires:
                wire.close()


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
        membership = self.membership
        control = Wire("control", range(membership.size), membership, "gloo")
        self.wires.append(control)
        mine: Described | None = None
        if error is None:
            mine, error = or_error(lambda: _describe(module, into, self.options, membership.backends))
        agreement = agree(control, mine, error)
        layout = None if mine is None else mine.layout
        for compare in (
            lambda: compare_plans(control, agreement),
            lambda: refuse_rivals(control, agreement, layout),
        ):
            try:
                compare()
            except DamagedRow as damage:  # told in the last row: this rank has its plan, and others wait for its groups
                error = error or damage
        built: Channel | None = None
        try:
            built = self._build(agreement, mine, module, module if into is None else into)  # type: ignore[arg-type]  # agree raised
        except PeerLost:
            raise
        except Exception as caught:  # told to all ranks in the last row
            error = error or caught
        raise_if_any(control, error)
        kept.drop_source(module)
        return built  # type: ignore[return-value]  # raise_if_any raised where there is none

    def _build(self, agreement: Agreement, mine: Described, module: Model, target: Model) -> Channel:
        """Make the data groups and the states; groups are made in the same order on all ranks."""
        rank, root, model = self.membership.rank, agreement.root, agreement.model
        totals = {source: {width: space.numel for width, space in spaces.items()} for source, spaces in model.source_spaces.items()}
        schedule = Schedule(totals, self.options.bucket_bytes)
        device = mine.devices[0] if mine.devices else None
        gather = self._wire("gather", agreement.backend, sorted(agreement.sources), device)
        stream = self._wire("stream", agreement.backend, sorted({root, *agreement.receivers}), device)
        everyone = range(self.membership.size)
        pairs = self.wires[0] if agreement.backend == "gloo" else self._wire("pairs", agreement.backend, everyone, device)
        source = self._source(agreement, mine, module, schedule) if rank in agreement.sources else None
        receiver = self._receiver(agreement, mine, target) if rank in agreement.receivers else None
        kernels.warm({width for spaces in model.source_spaces.values() for width in spaces})
        speed = LinkSpeed()
        relay = Relay(gather, stream, rank=rank, root=root, bucket_bytes=self.options.bucket_bytes, speed=speed)
        exchange = Exchange(pairs, rank=rank, sources=agreement.sources)
        routes = Routes(
            lambda: RelayRoute(model, schedule, source, receiver, relay=relay, root=root),
            lambda: P2PRoute(model, rank, self.options.bucket_bytes, receiver, exchange),
            lambda: Plan.of(model, root),
        )
        parts = Parts(
            agreement, self.wires[0], routes, source, receiver, Letters(len(agreement.sources)), speed,
            Verifier(model, self.wires[0], source, receiver), self.options.verify_interval,
        )  # fmt: skip
        return Channel(self.options, parts, LossBoard(self.membership), self.wires, frozenset(mine.devices))

    def _wire(self, name: str, backend: str, members: Sequence[int], device: torch.device | None) -> Wire | None:
        """Make a data group if it has several members and this rank is one."""
        if len(members) < 2 or self.membership.rank not in members:
            return None
        self.wires.append(Wire(name, members, self.membership, backend, device))
        return self.wires[-1]

    def _source(self, agreement: Agreement, mine: Described, module: Model, schedule: Schedule) -> SourceState:
        state = SourceState(mine.layout, agreement.model, self.membership.rank, schedule, agreement.schema)
        kept.take_up_source(module, state, agreement.model)
        return state

    def _receiver(self, agreement: Agreement, mine: Described, target: Model) -> ReceiverState:
        rank, model = self.membership.rank, agreement.model
        layout = mine.layout if mine.into is None else mine.into
        names, tensors = [entry.name for entry in layout.manifest.entries], layout.tensors()
        refuse_overlaps(names, tensors)
        if mine.into is not None and rank in agreement.sources:
            refuse_shared(names, mine.layout.tensors(), tensors)
        state = ReceiverState(layout, model, rank)
        kept.share_copy(target, state, model, model.receiver_spaces[rank])
        return state


def _describe(module: Model, into: Model | None, options: Options, backends: str) -> Described:
    described = describe(module, into, options, backends)
    layouts = [layout for layout in (described.layout, described.into) if layout is not None]
    dtypes = {DTYPES[entry.dtype] for layout in layouts for entry in layout.manifest.entries}
    # Before anyone waits for this rank: where nothing is cached, compiling takes longer than a short timeout.
    kernels.warm({dtype.itemsize for dtype in dtypes})
    return described
