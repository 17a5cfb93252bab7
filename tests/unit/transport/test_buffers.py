"""Frames of a delta stay as they are after they were taken: what is staged are views of them. Those of a seed
share two buffers.

Both routes, over a wire within this process: whatever is sent or received is moved when it is waited for,
    never before, as late as a network may do it. So a buffer that is used again too early is noticed too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist.report import Phases
from dte_dist.transport import broadcast as relay
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.buffers import Buffers, Frame
from dte_dist.transport.p2p import PairwiseExchange

Posts = dict[tuple[int, int], deque[Tensor]]
Taken = list[tuple[int, int, Tensor, Tensor]]
keeping = pytest.mark.parametrize("keep", [False, True], ids=["seed", "delta"])
made_late = pytest.mark.parametrize("late", [False, True], ids=["made", "made as they are sent"])


class Later:
    """Something on its way, which happens when it is waited for."""

    def __init__(self, happen: Callable[[], Any]) -> None:
        self._happen, self.done = happen, False

    def wait(self) -> None:
        assert not self.done
        self.done = True
        self._happen()


class Wire:
    """A group of ranks that run one after the other: senders first."""

    device = torch.device("cpu")

    def __init__(self, rank: int, members: Sequence[int], posts: Posts) -> None:
        self.rank, self.members, self._posts = rank, tuple(members), posts

    def send(self, tensor: Tensor, to: int) -> Later:
        return Later(lambda: self._posts[self.rank, to].append(tensor.clone()))

    def receive(self, tensor: Tensor, source: int) -> Later:
        return Later(lambda: tensor.copy_(self._posts[source, self.rank].popleft()))

    def broadcast(self, tensor: Tensor, root: int) -> Later:
        if self.rank != root:
            return self.receive(tensor, root)
        others = [self.send(tensor, member) for member in self.members if member != root]

        def happen() -> None:
            for other in others:
                other.wait()

        return Later(happen)

    def send_recv(
        self, outgoing: tuple[Tensor, int] | None, incoming: tuple[Tensor, int] | None
    ) -> tuple[Later | None, Later | None]:
        return self.send(*outgoing) if outgoing else None, self.receive(*incoming) if incoming else None


def frame_of(source: int, number: int, size: int, to: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([source, number, to]).integers(0, 256, size, np.uint8))


def as_sent(frame: Tensor, late: bool) -> Frame:
    def write(place: Tensor) -> None:
        place.copy_(frame)

    return write if late else frame


def check(taken: Taken, expected: dict[tuple[int, int], Tensor], keep: bool) -> None:
    """Every frame came once and right; kept ones are still what they were, and the others have had two
    buffers at most.
    """
    assert {(source, number) for source, number, *_ in taken} == expected.keys() and len(taken) == len(
        expected
    )
    for source, number, frame, when_taken in taken:
        assert torch.equal(when_taken, expected[source, number])
        assert not keep or torch.equal(frame, when_taken)
        assert frame.data_ptr() % 8 == 0


def memories(taken: Taken) -> int:
    return len({frame.untyped_storage().data_ptr() for *_, frame, _ in taken})


# The broadcast route
# -----------------------------------------------------------------------------------------------------

SIZES = {0: [2000, 1504, 0, 128, 1000, 96, 8], 1: [0, 2000, 1504, 96, 800, 104, 96]}
"""By source, of every chunk; the first ones are the largest, so that no buffer has to grow."""


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


# The p2p route
# -----------------------------------------------------------------------------------------------------------


@keeping
@made_late
def test_frames_between_pairs(late: bool, keep: bool) -> None:
    """Rank 0 is a source, 1 a source and a receiver, 2 a receiver; to each go other frames."""
    sources, targets, posts = [0, 1], [1, 2], defaultdict[tuple[int, int], deque[Tensor]](deque)
    pairs = [(source, to) for source in sources for to in targets]
    frames = {
        (source, to): [frame_of(source, number, size, to) for number, size in enumerate(SIZES[source])]
        for source, to in pairs
    }
    for rank in range(3):
        taken: Taken = []
        exchange = PairwiseExchange(Wire(rank, range(3), posts), rank=rank, sources=sources)  # type: ignore[arg-type]
        outgoing = (
            {to: [(len(f), as_sent(f, late)) for f in frames[rank, to]] for to in targets}
            if rank in sources
            else {}
        )
        incoming = {source: SIZES[source] for source in sources} if rank in targets else {}

        for source, number, frame in exchange.move(outgoing, incoming, targets, Phases(), keep=keep):
            taken.append((source, number, frame, frame.clone()))
        mine = {
            (s, number): f
            for (s, to), row in frames.items()
            if to == rank
            for number, f in enumerate(row)
            if len(f)
        }
        check(taken, mine, keep)
        if taken and not keep:
            own = (
                sum(map(bool, SIZES[1])) if not late else 1
            )  # a rank's own frames are handed over as they are
            assert memories(taken) == (2 + own if rank == 1 else 2)
    assert not any(posts.values())


# Buffers ----------------------------------------------------------------------------------------------------
# -------------


def test_buffers_that_are_kept_are_new_ones() -> None:
    buffers, device = Buffers(), torch.device("cpu")
    turns = [buffers.get(number, size, device) for number, size in enumerate((100, 100, 50, 100))]
    assert turns[0].data_ptr() == turns[2].data_ptr() != turns[1].data_ptr() == turns[3].data_ptr()
    kept = [buffers.get(number, 100, device, keep=True) for number in range(4)]
    assert len({*(buffer.data_ptr() for buffer in kept), turns[0].data_ptr(), turns[1].data_ptr()}) == 6
    assert buffers.get(0, 100, device).data_ptr() == turns[0].data_ptr()
    assert [len(buffers.get(0, 0, device, keep=keep)) for keep in (False, True)] == [0, 0]


@pytest.mark.parametrize("size", [0, 1, 7, (4 << 20) - 1, 4 << 20, (4 << 20) + 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_room_of_any_size(size: int, dtype: torch.dtype) -> None:
    """From 4 MiB on it is numpy's: aligned to a line of the cache, all of it may be written, and it lives as
    long as the tensor.
    """
    from dte_dist import kernels

    room = kernels.empty(size // dtype.itemsize, dtype)
    assert (
        room.shape == (size // dtype.itemsize,)
        and room.dtype == dtype
        and room.is_contiguous()
        and room.device.type == "cpu"
    )
    assert room.data_ptr() % 64 == 0 or not len(room)
    part = room.fill_(1)[-3:]
    del room
    kernels.empty(size // dtype.itemsize, dtype).fill_(2)
    assert (part == 1).all()
