"""The parts that a channel consists of on one rank; `sync.open` makes them, `sync.protocol` uses them."""

from __future__ import annotations

from dataclasses import dataclass

from dte_dist.sync.agreement import Agreement
from dte_dist.sync.inline_frames import InlineFrames
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.routes import Routes
from dte_dist.sync.source import Source
from dte_dist.sync.verification import Verifier
from dte_dist.transport.communicator import Communicator
from dte_dist.transport.link_speed import LinkSpeed

__all__ = ["ChannelState"]


@dataclass(frozen=True, slots=True, eq=False)
class ChannelState:
    """The parts of a channel on this rank.

    Attributes:
        agreement: what all ranks know.
        control: the channel's own group for rows.
        routes: by name, the ways that frames can take.
        source, receiver: what this rank is; may be both.
        inline: the room for small deltas in control rows.
        speed: of the links.
        verifier: compares digests.
        verify_interval: after so many versions; None for never.
    """

    agreement: Agreement
    control: Communicator
    routes: Routes
    source: Source | None
    receiver: Receiver | None
    inline: InlineFrames
    speed: LinkSpeed
    verifier: Verifier
    verify_interval: int | None = None
