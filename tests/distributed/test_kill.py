"""Distributed tier, four ranks over gloo: a rank is killed, the survivors learn of it in time and go on in a
new group.

Ranks 0 and 1 are the sources, each with its rows of every tensor; 2 and 3 are receivers. State outlives a
program in `STATE`. A victim blocks in the middle of a sync and touches a file, and only then the parent kills
it: nothing depends on luck or sleep.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dte_dist import Layout
from dte_dist.sync.receiver import Receiver
from dte_dist.transport.broadcast import BucketedBroadcast
from tests.distributed.launcher import Outcome, Ranks
from tests.distributed.tools import caught, channel_of, digest, parts_of, sync

pytestmark = pytest.mark.slow

SHAPE, TENSORS, PATIENCE = (16, 8), 4, 20.0
STATE: dict[str, Any] = {}


def weights(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator) for _ in range(TENSORS)]


def layout(tensors: list[torch.Tensor], low: int = 0, high: int = SHAPE[0]) -> Layout:
    return Layout.from_views(
        [(f"w{i}", tensor[low:high], SHAPE, (low, 0)) for i, tensor in enumerate(tensors)]
    )


def step(number: int) -> None:
    """Change all tensors of a source, each rank its own part of the same model."""
    for tensor in STATE["tensors"]:
        tensor[:, number] += 1.0


def call(sources: int, **options: Any) -> Any:
    return sync(
        STATE["layout"],
        group_src=list(range(sources)),
        **{"timeout": PATIENCE, "bucket_bytes": 256, **options},
    )


def bits() -> list[str]:
    return [digest(tensor) for tensor in STATE["tensors"]]


def begin(rank: int, world: int, over_tcp: bool) -> list[str]:
    """Seed the receivers and follow with a delta; `over_tcp` puts the store on rank 0, where it may die."""
    if over_tcp:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        port = [store.port if store is not None else 0]
        dist.broadcast_object_list(port, 0)
        dist.destroy_process_group()
        store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    STATE["tensors"] = weights(1 if rank < 2 else 10 + rank)
    STATE["layout"] = layout(STATE["tensors"], *((8 * rank, 8 * rank + 8) if rank < 2 else ()))
    for number in (0, 1):
        if rank < 2:
            step(number)
        report = call(2)
    assert (report.version, report.kind) == (2, "delta")
    parts_of(
        STATE["layout"]
    ).inline.capacity = 0  # on all ranks: the next delta takes its route, however small
    return bits()


def broken_sync(
    rank: int, world: int, victim: int | None, flag: str, patience: float = PATIENCE
) -> tuple[str, str, float, list[str]]:
    """Sync; the victim stops in the middle of it, once a frame or two have passed."""
    if rank < 2:
        step(2)
    if rank == victim:
        block_at(rank, flag)
    start = time.monotonic()
    error = caught(lambda: call(2, timeout=patience))
    return *error, time.monotonic() - start, bits()


def block_at(rank: int, flag: str) -> None:
    """Make a receiver stop before it takes its second frame, the root before its second bucket, the other
    source before it sends any.
    """
    place, name, number = {0: (BucketedBroadcast, "_send_bucket", 2), 1: (BucketedBroadcast, "move", 1)}.get(
        rank, (Receiver, "take", 2)
    )
    original, calls = getattr(place, name), []

    def stopping(*args: Any, **kept: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            Path(flag).touch()
            threading.Event().wait()
        return original(*args, **kept)

    setattr(place, name, stopping)  # for good: this rank will be killed


def go_on(rank: int, world: int, members: list[int], rendezvous: str, sources: int) -> tuple[Any, ...]:
    """Form a new world of the survivors and sync twice; the first rank trains the whole model if sources were
    lost.
    """
    dist.destroy_process_group()
    store = dist.FileStore(rendezvous, len(members))
    dist.init_process_group("gloo", store=store, rank=members.index(rank), world_size=len(members))
    if sources == 1 and rank == members[0]:
        STATE["tensors"] = weights(99)
        STATE["layout"] = layout(STATE["tensors"])
    seen = []
    for number in (3, 4):
        if members.index(rank) < sources:
            step(number)
        report = call(sources)
        seen.append((report.version, report.base_version, report.kind, report.reason, report.seeded))
    return seen, bits()


def wait_for(flag: Path) -> None:
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline, "the victim never came to its place"
        time.sleep(0.01)


def check_survivors(outcomes: list[Outcome], victim: int, before: list[str]) -> list[int]:
    """All survivors raised the same PeerLost in time, and no receiver moved."""
    survivors = [rank for rank in range(4) if rank != victim]
    assert outcomes[victim].died
    told = [outcomes[rank].value for rank in survivors]
    assert [error for error, *_ in told] == ["PeerLost"] * 3, [outcome.text for outcome in outcomes]
    assert len({text for _, text, *_ in told}) == 1 or victim == 0, told
    assert all(took < PATIENCE for _, _, took, _ in told)
    assert all(outcomes[rank].value[3] == before for rank in survivors if rank >= 2)
    return survivors


FRAMES, SYNCS = "between two frames", "between two syncs"


@pytest.mark.parametrize(
    ("victim", "when"),
    [(3, FRAMES), (1, FRAMES), (0, FRAMES), (3, SYNCS), (0, SYNCS)],
    ids=lambda value: {3: "receiver", 1: "source", 0: "root"}.get(value, value),
)
def test_survivors_of_a_killed_rank_raise_in_time_and_go_on_in_a_new_group(
    tmp_path: Path, victim: int, when: str
) -> None:
    flag = tmp_path / "blocked"
    with Ranks(4) as ranks:
        before = ranks.run(begin, over_tcp=victim == 0)
        assert before[2] == before[3]
        if when == SYNCS:
            ranks.kill(victim)
            ranks.start(broken_sync, None, "")
        else:
            ranks.start(broken_sync, victim, str(flag))
            wait_for(flag)
            ranks.kill(victim)
        survivors = check_survivors(ranks.finish(90), victim, before[2])
        sources = 2 if victim == 3 else 1
        ranks.start(go_on, survivors, str(tmp_path / "store"), sources)
        outcomes = [outcome for rank, outcome in enumerate(ranks.finish(90)) if rank != victim]
    assert not any(outcome.error for outcome in outcomes), [outcome.trace for outcome in outcomes]
    seen, final = zip(*[outcome.value for outcome in outcomes], strict=True)
    assert all(reports == seen[0] for reports in seen)
    if victim == 3:
        assert seen[0] == [(3, 2, "delta", "", ()), (4, 3, "delta", "", ())]
        whole = weights(1)
        for number in range(5):
            for tensor in whole:
                tensor[:, number] += 1.0
        assert final[2] == [digest(tensor) for tensor in whole]
    else:
        restarted = (3, 2, "full", "sources restarted, receivers held v2", (1, 2))
        assert seen[0] == [restarted, (4, 3, "delta", "", ())]
        assert final[0] == final[1] == final[2]


def left_by_one(rank: int, world: int) -> str:
    """After the survivors raised: the next call over the same group fails in time as well."""
    start = time.monotonic()
    error, _ = caught(lambda: call(2, timeout=2.0))
    assert time.monotonic() - start < PATIENCE
    return error


def short_patience(rank: int, world: int) -> None:
    """Seed with little patience."""
    STATE["tensors"] = weights(1 if rank < 2 else 10 + rank)
    STATE["layout"] = layout(STATE["tensors"], *((8 * rank, 8 * rank + 8) if rank < 2 else ()))
    call(2, timeout=3.0)
    assert channel_of(STATE["layout"]).broken is None


def test_a_rank_that_hangs_is_peer_lost_on_the_others_after_their_timeout_and_so_is_every_call_without_it(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "blocked"
    with Ranks(4) as ranks:
        ranks.run(short_patience)
        ranks.start(broken_sync, 3, str(flag), 3.0)
        wait_for(flag)
        told = [outcome.value for outcome in ranks._collect(range(3), 60)]
        assert [error for error, *_ in told] == ["PeerLost"] * 3
        assert all(took < 15 for _, _, took, _ in told)
        ranks.kill(3)
        ranks.start(left_by_one)
        assert [outcome.value for outcome in ranks.finish(60)[:3]] == ["PeerLost"] * 3
