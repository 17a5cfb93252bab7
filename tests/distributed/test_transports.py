"""One suite of scenarios for every transport, and every topology of `DeltaEngine`.

A scenario is written once, as if every rank ran it: `push` is done by those senders that this process plays,
`pull` by its receivers. Over `LoopbackTransport` one process plays them all, over `ProcessGroupTransport`
each real rank (gloo) plays itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dte_dist import (
    ChannelClosed,
    DeltaEngine,
    FrameError,
    Layout,
    LoopbackTransport,
    Payload,
    PeerLost,
    Plan,
    ProcessGroupTransport,
    Transport,
    VersionGap,
    VersionReplay,
    VersionRestart,
)
from dte_dist.codec.named_tensors import HEADER
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Ranks
from tests.distributed.shares import warm

WORLD, PATIENCE = 4, 20.0
TOPOLOGIES = {
    "whole": ([0], [1, 2, 3]),
    "sharded": ([0, 1], [2, 3]),
    "colocated": ([0, 1, 2, 3], [0, 1, 2, 3]),
}
TRUTH = {
    "w": torch.zeros(24, 12),
    "b": torch.zeros(12, dtype=torch.bfloat16),
    "s": torch.zeros((), dtype=torch.int64),
}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


class Faulty(Transport):
    """Another transport, whose `send` can be made to raise instead of sending or after it, or to spoil what
    it sends; keeps the last.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.failing, self.last = inner, "", Payload(0, -1, True, {})
        self.spoil: Callable[[Payload], Payload] = lambda payload: payload

    def send(self, payload: Payload, *, timeout: float) -> None:
        self.last = payload = self.spoil(payload)
        if self.failing != "before":
            self.inner.send(payload, timeout=timeout)
        if self.failing:
            raise OSError("the cable is out")

    def receive(self, version: int, *, sender: int = 0, timeout: float) -> Payload:
        return self.inner.receive(version, sender=sender, timeout=timeout)

    def close(self) -> None:
        self.inner.close()


class Stage:
    """Senders and receivers of one topology, as far as this process plays them.

    Attributes:
        truth: the weights that all ranks know.
        senders, receivers: ranks that this process plays.
        push_with, pull_with: their engines; one for both, until a scenario says otherwise.
        kinds: of what receivers got: F full, d delta, - nothing changed.
        keeps: the transport keeps payloads, so that a version may be sent and asked for again.
    """

    def __init__(
        self,
        topology: str,
        played: Sequence[int],
        connect: Callable[[Plan | None], Transport],
        timeout: float = PATIENCE,
    ) -> None:
        sources, copies = TOPOLOGIES[topology]
        self.truth = {name: tensor.clone() for name, tensor in TRUTH.items()}
        self.sent = {
            rank: self._parts(topology, place, len(sources), 0) for place, rank in enumerate(sources)
        }
        self.held = {rank: self._parts(topology, place, len(copies), -1) for place, rank in enumerate(copies)}
        self.source, self.target = (
            {rank: _given(topology, parts) for rank, parts in side.items()} for side in (self.sent, self.held)
        )
        self.plan = None if topology == "whole" else Plan.between(self.source, self.target)
        self.senders, self.receivers = (
            [rank for rank in side if rank in played] for side in (sources, copies)
        )
        self.topology, self.kinds = topology, ""
        inner = connect(self.plan)
        self.keeps = isinstance(inner, LoopbackTransport)
        self.transport = {rank: Faulty(inner) for rank in played}
        self.restart()

    @staticmethod
    def _parts(
        topology: str, place: int, ranks: int, dim: int
    ) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
        """Return slices of the truth, and memory for them: cut along a dimension; what has none is whole
        everywhere.
        """
        parts = {}
        for name, tensor in TRUTH.items():
            region = [slice(0, size) for size in tensor.shape]
            if topology != "whole" and region:
                step = tensor.shape[dim] // ranks
                region[dim] = slice(place * step, (place + 1) * step)
            parts[name] = tuple(region), tensor[tuple(region)].clone()
        return parts

    def new_engine(self, rank: int, **options: Any) -> DeltaEngine:
        where = {} if self.plan is None else {"plan": self.plan, "rank": rank}
        return DeltaEngine(self.transport[rank], timeout=PATIENCE, **where, **options)

    def restart(self, **options: Any) -> None:
        """Start with new engines on both sides."""
        self.push_with = {rank: self.new_engine(rank, **options) for rank in self.transport}
        self.pull_with = dict(self.push_with)

    def change(self, seed: int) -> None:
        """Write other bits to a few elements of the truth."""
        rng = torch.Generator().manual_seed(seed)
        for name in ("w", "b"):
            bits = self.truth[name].view(-1).view(torch.uint8).view(self.truth[name].numel(), -1)
            bits[torch.randint(0, len(bits), (5,), generator=rng), 0] ^= 1

    def push(self, version: int, **options: Any) -> None:
        for rank in self.senders:
            for name, (region, tensor) in self.sent[rank].items():
                tensor.copy_(self.truth[name][region])
            self.push_with[rank].push(self.source[rank], version, **options)

    def pull(self, version: int) -> None:
        for rank in self.receivers:
            staged = self.pull_with[rank].decode_for_live_apply(version)
            if rank == self.receivers[0]:
                kinds = {
                    "F" if payload.full else "d" if changes else "-" for payload, changes in staged.parts
                }
                self.kinds += min(kinds, key="Fd-".index)
            self.pull_with[rank].commit_live_apply(staged, self.target[rank])
        assert self.versions() == {version} or not self.receivers
        self.check()

    def both(self, version: int, **options: Any) -> None:
        self.push(version, **options)
        self.pull(version)

    def miss(self, version: int) -> None:
        """Receive a version and drop it."""
        for rank in self.receivers:
            self.pull_with[rank].decode_for_live_apply(version)

    def refuse(self, version: int, kind: type[Exception], match: str) -> None:
        """Pull on every receiver, which must raise and move nothing."""
        for rank in self.receivers:
            before = {name: tensor.clone() for name, (_, tensor) in self.held[rank].items()}
            with pytest.raises(kind, match=match):
                self.pull_with[rank].pull(self.target[rank], version)
            assert all(same_bits(before[name], tensor) for name, (_, tensor) in self.held[rank].items())

    def versions(self) -> set[int]:
        return {self.pull_with[rank].version for rank in self.receivers}

    def check(self) -> None:
        for rank in self.receivers:
            for name, (region, tensor) in self.held[rank].items():
                assert same_bits(tensor, self.truth[name][region]), f"{name} of rank {rank}"


def _given(topology: str, parts: dict[str, tuple[tuple[slice, ...], Tensor]]) -> Any:
    if topology == "whole":
        return {name: tensor for name, (_, tensor) in parts.items()}
    return Layout.from_views(
        (name, tensor, tuple(TRUTH[name].shape), tuple(along.start for along in region))
        for name, (region, tensor) in parts.items()
    )


def quickstart(stage: Stage) -> None:
    """The chain of versions, anchors, and versions in which nothing changed."""
    stage.restart(anchor_interval=4)
    for step in range(12):
        if step % 3:
            stage.change(step)
        stage.both(step)
    assert stage.kinds in ("", "Fdd-dF-dd-Fd")


def memory_of_receivers_stays(stage: Stage) -> None:
    def marks() -> list[tuple[int, int]]:
        return [
            (tensor.data_ptr(), tensor._version)
            for rank in stage.receivers
            for _, tensor in stage.held[rank].values()
        ]

    before = marks()
    stage.both(1)
    after = marks()
    assert all(new[0] == old[0] and new[1] > old[1] for new, old in zip(after, before, strict=True))


def gap(stage: Stage) -> None:
    stage.both(1)
    stage.change(1)
    stage.push(2)
    stage.miss(2)
    stage.change(2)
    stage.push(5)
    stage.refuse(5, VersionGap, "later version")
    assert stage.versions() <= {1}
    stage.both(6, full=True)
    stage.change(3)
    stage.both(7)


def nothing_to_start_from(stage: Stage) -> None:
    stage.both(1)
    stage.pull_with = {rank: stage.new_engine(rank) for rank in stage.receivers}
    stage.change(1)
    stage.push(2)
    stage.refuse(2, VersionGap, "before anything")
    stage.both(3, full=True)


def replay(stage: Stage) -> None:
    stage.both(3)
    stage.change(1)
    stage.both(4)
    for rank in stage.senders:
        with nullcontext() if stage.keeps else pytest.raises(VersionReplay, match="already"):
            stage.transport[rank].inner.send(stage.transport[rank].last, timeout=PATIENCE)
    stage.refuse(4, VersionReplay, "already")
    assert stage.versions() <= {4}
    stage.change(2)
    stage.both(5)


def restart(stage: Stage) -> None:
    """Senders that start anew are noticed, wherever their versions are; a full version above the one held is
    the hint.
    """
    for held, versions in ((5, (1, 2)), (6, (6 if stage.keeps else 5, 7))):
        stage.both(held, full=True)
        stage.push_with = {rank: stage.new_engine(rank) for rank in stage.senders}
        for version in versions:
            stage.change(version)
            stage.push(version)
            stage.refuse(version, VersionRestart, "another run")
    stage.both(9, full=True)


def full_payloads_without_header(stage: Stage) -> None:
    """Lineages travel beside the tensors: a sender that starts anew is noticed all the same."""
    stage.restart(anchor_interval=2, header=False)
    for version in range(6):
        stage.change(version)
        stage.both(version)
        assert all(
            (HEADER in stage.transport[rank].last.tensors) == bool(version % 3) for rank in stage.senders
        )
    stage.push_with = {rank: stage.new_engine(rank, header=False) for rank in stage.senders}
    for version in (3, 5, 6) if stage.keeps else (3, 4, 6):
        stage.change(version)
        stage.push(version)
        stage.refuse(version, VersionRestart, "another run")
    stage.both(9, full=True)


def send_that_fails_before(stage: Stage) -> None:
    stage.both(1)
    stage.change(1)
    for rank in stage.senders:
        stage.transport[rank].failing = "before"
        with pytest.raises(OSError, match="cable"):
            stage.push_with[rank].push(stage.source[rank], 2)
        assert stage.push_with[rank].tracker.version == 1
        stage.transport[rank].failing = ""
    stage.change(2)
    stage.both(2)
    stage.change(3)
    stage.both(3)


def send_that_fails_after(stage: Stage) -> None:
    """Who got the version that the sender does not know of is told; who did not goes on."""
    stage.both(1)
    stage.change(1)
    _push_and_raise(stage, 2)
    stage.miss(2)
    stage.change(2)
    if not stage.keeps:
        for rank in stage.senders:
            with pytest.raises(VersionReplay, match="already"):
                stage.push_with[rank].push(stage.source[rank], 2)
    stage.both(2 if stage.keeps else 3)
    stage.change(3)
    _push_and_raise(stage, 4)
    stage.pull(4)
    for version in (4, 5) if stage.keeps else (5,):
        stage.change(version)
        stage.push(version)
        stage.refuse(version, VersionRestart, "another run")
    stage.both(7, full=True)


def _push_and_raise(stage: Stage, version: int) -> None:
    for rank in stage.senders:
        stage.transport[rank].failing = "after"
    for rank in stage.senders:
        for name, (region, tensor) in stage.sent[rank].items():
            tensor.copy_(stage.truth[name][region])
        with pytest.raises(OSError, match="cable"):
            stage.push_with[rank].push(stage.source[rank], version)
        stage.transport[rank].failing = ""


def wrong_payload(stage: Stage) -> None:
    """One sender of several sends nonsense: nothing of the version is written."""
    stage.both(1)
    for version, wrong in enumerate(("header", "missing", "positions", "both"), 2):
        stage.change(version)
        stage.push_with = {rank: stage.new_engine(rank) for rank in stage.senders}
        if 0 in stage.transport:
            stage.transport[0].spoil = lambda payload, wrong=wrong: _spoiled(payload, wrong)
        stage.push(version)
        stage.refuse(version, FrameError, "payload|tensor")
        assert stage.versions() <= {1}
    if 0 in stage.transport:
        stage.transport[0].spoil = lambda payload: payload
    stage.both(9, full=True)


def _spoiled(payload: Payload, wrong: str) -> Payload:
    tensors = dict(payload.tensors)
    if wrong == "header":
        tensors[HEADER] = tensors[HEADER] + torch.tensor([0, 0, 1, 0, 0, 0])
    elif wrong == "missing":
        del tensors["w"]
    elif wrong == "both":
        tensors |= {"w@delta_idx": torch.tensor([3], dtype=torch.int32), "w@delta_val": torch.zeros(1)}
    else:
        del tensors["w"]
        tensors |= {"w@delta_idx": torch.tensor([3, 2], dtype=torch.int32), "w@delta_val": torch.zeros(2)}
    return replace(payload, tensors=tensors)


def disturbed_targets(stage: Stage) -> None:
    """Somebody else wrote to the targets, or replaced one: no delta, until a full payload repairs it."""
    stage.both(1)
    for version, how in enumerate(("write", "replace"), 2):
        stage.change(version)
        for rank in stage.receivers:
            region, tensor = stage.held[rank]["b"]
            if how == "write":
                tensor.zero_()
            else:
                stage.held[rank]["b"] = region, tensor.clone()
                stage.target[rank] = _given(stage.topology, stage.held[rank])
        stage.push(10 * version)
        stage.refuse(10 * version, VersionGap, "somebody else wrote.*tensor 'b'")
        assert stage.versions() <= {-1}
        stage.change(version)
        stage.push(10 * version + 1)
        stage.refuse(10 * version + 1, VersionGap, "before anything")
        stage.both(10 * version + 2, full=True)
        stage.change(version)
        stage.both(10 * version + 3)


def nobody_sends(stage: Stage) -> None:
    stage.both(1)
    begin = time.monotonic()
    for rank in stage.receivers:
        engine = stage.new_engine(rank)
        engine._timeout = 0.5
        with pytest.raises(PeerLost):
            engine.decode_for_live_apply(2)
    assert time.monotonic() - begin < PATIENCE
    stage.check()


def closed_by_one(stage: Stage) -> None:
    stage.both(1)
    if 0 in stage.transport:
        stage.transport[0].close()
        stage.transport[0].close()
    for rank in stage.senders:
        with pytest.raises(ChannelClosed):
            stage.push_with[rank].push(stage.source[rank], 2)
    if stage.topology != "colocated":
        stage.refuse(2, ChannelClosed, "closed")
    stage.check()


def comes_late(stage: Stage) -> None:
    """A transport that keeps payloads gives them to a receiver that comes later: an anchor and what follows
    it.
    """
    stage.restart(anchor_interval=2)
    for version in range(5):
        stage.change(version)
        stage.push(version)
    with pytest.raises(VersionGap, match="before anything"):
        stage.pull(2)
    stage.miss(3)
    stage.truth, now = {name: tensor.clone() for name, tensor in TRUTH.items()}, stage.truth
    for version in range(4):
        stage.change(version)
    stage.pull(3)
    stage.truth = now
    stage.pull(4)
    stage.change(9)
    stage.both(5)


SCENARIOS = [
    quickstart,
    memory_of_receivers_stays,
    gap,
    nothing_to_start_from,
    replay,
    restart,
    full_payloads_without_header,
    send_that_fails_before,
    send_that_fails_after,
    wrong_payload,
    disturbed_targets,
    nobody_sends,
    closed_by_one,
]
RUNS = [
    (scenario, topology)
    for scenario in SCENARIOS
    for topology in TOPOLOGIES
    if (scenario, topology) != (nobody_sends, "colocated")
]
IDS = [f"{scenario.__name__}-{topology}" for scenario, topology in RUNS]


@pytest.mark.parametrize(
    ("scenario", "topology"), [*RUNS, *((comes_late, topology) for topology in TOPOLOGIES)]
)
def test_over_loopback(scenario: Callable[[Stage], None], topology: str) -> None:
    transport = LoopbackTransport()
    scenario(Stage(topology, range(WORLD), lambda _: transport))


def perform(rank: int, world: int, scenario: Callable[[Stage], None], topology: str) -> None:
    stage = Stage(topology, [rank], lambda plan: ProcessGroupTransport(plan=plan, timeout=PATIENCE))
    scenario(stage)
    dist.barrier()
    stage.transport[rank].close()


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "topology"), RUNS, ids=IDS)
def test_over_a_process_group(ranks: Ranks, scenario: Callable[[Stage], None], topology: str) -> None:
    ranks.run(perform, scenario, topology, seconds=60)
