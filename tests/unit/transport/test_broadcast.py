"""Frames of a delta stay as they are after the broadcast route took them; those of a seed share two
buffers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dte_dist.report import Phases
from dte_dist.transport import broadcast as relay
from dte_dist.transport.broadcast import BucketedBroadcast
from tests.unit.transport.wires import SIZES, Posts, Taken, Wire, as_sent, check, frame_of, memories

keeping = pytest.mark.parametrize("keep", [False, True], ids=["seed", "delta"])
made_late = pytest.mark.parametrize("late", [False, True], ids=["made", "made as they are sent"])


def relayed(
    targets: Sequence[int], members: Sequence[int], sizes: dict[int, list[int]], keep: bool, late: bool
) -> dict[int, Taken]:
    """Run ranks 0 (source and root), 1 (source) and 2, 3 (receivers) of a channel; return what each target
    took.
    """
    posts: Posts = defaultdict(deque)
    taken: dict[int, Taken] = {rank: [] for rank in targets}
    for rank in (1, 0, 2, 3):  # a source first, then the root, then receivers as they stand in the chain
        gather = Wire(rank, [0, 1], posts) if rank in (0, 1) and len(sizes) > 1 else None
        lineage = Wire(rank, members, posts) if rank in members else None
        route = BucketedBroadcast(gather, lineage, rank=rank, root=0, bucket_bytes=1000)  # type: ignore[arg-type]
        frames = [
            as_sent(frame_of(rank, number, size), late) for number, size in enumerate(sizes.get(rank, []))
        ]

        for slot, frame in route.move(sizes, frames, targets, Phases(), keep=keep):
            taken[rank].append((slot.source, slot.chunk, frame, frame.clone()))
    assert not any(posts.values())
    return taken


@keeping
@made_late
@pytest.mark.parametrize("way", ["broadcast", "a chain for a few", "a chain for much"])
@pytest.mark.parametrize("root_is_target", [False, True], ids=["", "to the root too"])
def test_frames_of_many_buckets(
    way: str, root_is_target: bool, late: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.endswith("much"):
        monkeypatch.setattr(relay, "_CHAIN_FROM", 1000)
        monkeypatch.setattr(relay, "PIECE", 64)
    targets = [*([0] if root_is_target else []), 2, 3]
    members = [0, 2, 3] if "few" not in way else [0, 1, 2, 3]
    taken = relayed(targets, members, SIZES, keep, late)
    expected = {
        (source, number): frame_of(source, number, size)
        for source, row in SIZES.items()
        for number, size in enumerate(row)
        if size
    }
    for mine in taken.values():
        check(mine, expected, keep)
        assert memories(mine) > 4 if keep else memories(mine) == 2


@keeping
def test_a_rank_that_is_alone_takes_its_own_frames(keep: bool) -> None:
    taken: Taken = []
    frames = {(0, number): frame_of(0, number, size) for number, size in enumerate(SIZES[0]) if size}
    own = [frames.get((0, number), torch.empty(0, dtype=torch.uint8)) for number in range(len(SIZES[0]))]

    route = BucketedBroadcast(None, None, rank=0, root=0, bucket_bytes=100)
    for slot, frame in route.move({0: SIZES[0]}, own, [0], Phases(), keep=keep):
        taken.append((slot.source, slot.chunk, frame, frame.clone()))
    check(taken, frames, keep)
    assert memories(taken) > 4 if keep else memories(taken) == 2


@keeping
def test_what_was_kept_outlives_the_next_delta(keep: bool) -> None:
    """A receiver forgets what is staged when all have voted, which may be after another call has begun to
    collect.
    """
    posts: Posts = defaultdict(deque)
    lead, follow = (
        BucketedBroadcast(None, Wire(rank, [0, 1], posts), rank=rank, root=0, bucket_bytes=1000)
        for rank in (0, 1)
    )  # type: ignore[arg-type]
    taken: list[tuple[int, Tensor]] = []
    for step in range(4):
        frame = frame_of(0, step, 512)
        assert not list(lead.move({0: [512]}, [frame], [1], Phases(), keep=keep))
        taken += [(step, got) for _, got in follow.move({0: [512]}, [], [1], Phases(), keep=keep)]
    right = [torch.equal(frame, frame_of(0, step, 512)) for step, frame in taken]
    assert all(right) if keep else sum(right) < 4
