"""A random case of `cases.py` as a plan, and the ends of one rank: its layouts, what they hold, and an engine
over any transport.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dte_dist import DeltaEngine, Layout, Plan, Transport, kernels
from dte_dist.plan.model_map import RankLayout
from tests.distributed.cases import Case, local_tensor, same_bits

VERSIONS = 3


def warm(rank: int, world: int) -> None:
    """Compile the kernels before the clock of a test runs."""
    kernels.precompile((1, 2, 4, 8))


@dataclass
class Peer:
    """One rank of a case, by its place in the group.

    Attributes:
        sent: this rank's own tensors by name, and `source` their layout; nothing on a rank that does not
            send.
        held, target: the same of the copy.
    """

    case: Case
    rank: int
    sent: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    source: Layout | None = None
    target: Layout | None = None
    engine: DeltaEngine | None = None

    def __post_init__(self) -> None:
        case, world = self.case, self.case.group[self.rank]
        if world in case.sources:
            held = {
                n: local_tensor(t, case.at_source[n], case.sources, world) for n, t in case.tensors.items()
            }
            self.sent = held | {second: held[first] for second, first in case.ties.items()}
            self.source = Layout.from_tensors(self.sent)
        if world in case.receivers:
            blank = {n: torch.zeros_like(case.expected(n)) for n in case.tensors}
            held = {n: local_tensor(t, case.at_receiver[n], case.receivers, world) for n, t in blank.items()}
            self.held = held | {
                second: held[first] for second, first in case.ties.items() if case.receivers_tie
            }
            self.target = Layout.from_tensors(self.held)

    def start(self, transport: Transport, plan: Plan, pick: random.Random) -> None:
        """Make the engine; its options are drawn anew for each rank."""
        options = {
            "anchor_interval": pick.choice((None, None, 1)),
            "sparse_bytes_ratio": pick.choice((0.0, 0.3, 1.0, 1.0)),
        }
        self.engine = DeltaEngine(transport, plan=plan, rank=self.rank, timeout=60, **options)

    def push(self, version: int) -> None:
        """Take over the truth and push it, on a sender."""
        for name, tensor in self.sent.items():
            part = self.case.at_source[name].part(
                self.case.tensors[name], self.case.sources.index(self.case.group[self.rank])
            )
            local = _local(tensor)
            local.copy_(part.reshape(local.shape))
        if self.source is not None:
            self.engine.push(self.source, version)

    def pull(self, version: int) -> list[str]:
        """Pull on a receiver; return what is wrong then."""
        if self.target is None:
            return []
        self.engine.pull(self.target, version)
        wrong = [] if self.engine.version == version else [f"version {self.engine.version}"]
        for name, tensor in self.held.items():
            part = self.case.at_receiver[name].part(
                self.case.expected(name), self.case.receivers.index(self.case.group[self.rank])
            )
            local = _local(tensor)
            if not same_bits(local.reshape(part.shape) if not part.numel() else local, part):
                wrong.append(f"{name} {self.case.at_source[name]} -> {self.case.at_receiver[name]}")
        return [f"{self.case.seed} v{version} rank {self.rank}: {line}" for line in wrong]


def peers_and_plan(case: Case) -> tuple[list[Peer], Plan]:
    """Return all ranks of a case, and the plan that each of them computes alone."""
    peers = [Peer(case, rank) for rank in range(len(case.group))]
    wire = {name: str(dtype).removeprefix("torch.") for name, dtype in case.wire.items()} or None
    sources = {
        peer.rank: RankLayout(peer.source.manifest, peer.source.coordinates, wire)
        for peer in sorted(
            peers,
            key=lambda peer: case.sources.index(case.group[peer.rank]) if peer.source is not None else -1,
        )
        if peer.source is not None
    }
    return peers, Plan.between(sources, {peer.rank: peer.target for peer in peers if peer.target is not None})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
