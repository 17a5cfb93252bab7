"""A rank without memory for a delta takes it off the wire, passes on what is for others, and says why."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.errors import FrameError, SyncFailed
from dte_dist.report import Phases
from dte_dist.transport import broadcast as relay
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.buffers import Buffers, explain_memory
from dte_dist.transport.p2p import PairwiseExchange
from tests.unit.transport.wires import SIZES, Posts, Taken, Wire, as_sent, check, frame_of

CPU = torch.device("cpu")
EMPTY = kernels.empty
MOST = {source: [max(size, 96) for size in row] for source, row in SIZES.items()}


class Short:
    """An allocator that has no room left on one rank.

    Attributes:
        rank: that allocates now.
        poor: who has no room.
        left: how often it has, still.
        asked: sizes that were asked for, by rank.
    """

    def __init__(self, poor: int, left: int) -> None:
        self.rank, self.poor, self.left = -1, poor, left
        self.asked: dict[int, list[int]] = defaultdict(list)

    def empty(self, count: int, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        self.asked[self.rank].append(count)
        if self.rank == self.poor:
            self.left -= 1
            if self.left < 0:
                raise MemoryError(f"no room for {count} bytes")
        return EMPTY(count, dtype, device)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Short]]:
    def make(poor: int, left: int) -> Short:
        allocator = Short(poor, left)
        monkeypatch.setattr(kernels, "empty", allocator.empty)
        return allocator

    yield make


def right_until(taken: Taken, expected: dict[tuple[int, int], Tensor], most: int) -> None:
    """What was taken is right, and no more than there was memory for."""
    assert len(taken) <= most
    for source, number, frame, when_taken in taken:
        assert torch.equal(when_taken, expected[source, number]) and torch.equal(frame, when_taken)


@pytest.mark.parametrize(("left", "late"), [(0, False), (1, True), (3, False)])
@pytest.mark.parametrize("poor", [0, 2, 3, 4], ids=["root", "first receiver", "receiver", "last receiver"])
@pytest.mark.parametrize("way", ["broadcast", "a chain for a few", "a chain for much"])
def test_on_the_broadcast_route_the_others_get_everything(
    way: str, poor: int, left: int, late: bool, short: Callable[[int, int], Short]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if way.endswith("much"):
            patch.setattr(relay, "_CHAIN_FROM", 1000)
            patch.setattr(relay, "PIECE", 64)
        check_relay(way, poor, left, late, short)


def check_relay(way: str, poor: int, left: int, late: bool, short: Callable[[int, int], Short]) -> None:
    targets, members = [0, 2, 3, 4], [0, 2, 3, 4] if "few" not in way else [0, 1, 2, 3, 4]
    posts: Posts = defaultdict(deque)
    taken: dict[int, Taken] = {rank: [] for rank in targets}
    errors: dict[int, Exception | None] = {}
    relays = {}
    for rank in (1, 0, 2, 3, 4):
        gather = Wire(rank, [0, 1], posts) if rank in (0, 1) else None
        lineage = Wire(rank, members, posts) if rank in members else None
        relays[rank] = BucketedBroadcast(gather, lineage, rank=rank, root=0, bucket_bytes=1000)  # type: ignore[arg-type]
        relays[rank].reserve(MOST, receiver=rank in targets)
    allocator = short(poor, left)
    for rank, route in relays.items():
        allocator.rank = rank
        frames = [
            as_sent(frame_of(rank, number, size), late) for number, size in enumerate(SIZES.get(rank, []))
        ]

        for slot, frame in route.move(SIZES, frames, targets, Phases(), keep=True):
            taken[rank].append((slot.source, slot.chunk, frame, frame.clone()))
        errors[rank] = route.error
    assert not any(posts.values()), "all that was sent has been received"
    expected = {
        (source, n): frame_of(source, n, size)
        for source, row in SIZES.items()
        for n, size in enumerate(row)
        if size
    }
    for rank in targets:
        if rank == poor:
            assert isinstance(errors[rank], MemoryError) and "no room" in str(errors[rank])
            right_until(taken[rank], expected, len(expected) - 1)
        else:
            assert errors[rank] is None
            check(taken[rank], expected, True)
    assert errors[1] is None and len(allocator.asked[poor]) == left + 1, (
        "nothing is asked for again once there was none"
    )


@pytest.mark.parametrize("late", [False, True], ids=["made", "made as they are sent"])
@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("poor", [1, 2], ids=["source and receiver", "receiver"])
def test_between_pairs_the_others_get_everything(
    poor: int, left: int, late: bool, short: Callable[[int, int], Short]
) -> None:
    sources, targets = [0, 1], [1, 2]
    posts: Posts = defaultdict(deque)
    pairs = [(source, to) for source in sources for to in targets]
    frames = {
        (source, to): [frame_of(source, number, size, to) for number, size in enumerate(SIZES[source])]
        for source, to in pairs
    }
    wires: list[Any] = [Wire(rank, range(3), posts) for rank in range(3)]
    exchanges = [PairwiseExchange(wire, rank=rank, sources=sources) for rank, wire in enumerate(wires)]
    for rank, exchange in enumerate(exchanges):
        exchange.reserve(MOST, receiver=rank in targets)
    allocator = short(poor, left)
    for rank, exchange in enumerate(exchanges):
        allocator.rank, taken = rank, list[Any]()
        outgoing = (
            {to: [(len(f), as_sent(f, late)) for f in frames[rank, to]] for to in targets}
            if rank in sources
            else {}
        )
        incoming = {source: SIZES[source] for source in sources} if rank in targets else {}

        keep = not (late and rank == 1)  # what is only made now is a seed, of which nothing is kept
        for source, number, frame in exchange.move(outgoing, incoming, targets, Phases(), keep=keep):
            taken.append((source, number, frame, frame.clone()))
        error = exchange.error
        mine = {
            (s, number): f
            for (s, to), row in frames.items()
            if to == rank
            for number, f in enumerate(row)
            if len(f)
        }
        if rank == poor and keep:
            assert isinstance(error, MemoryError)
            right_until(taken, mine, len(mine) - 1)
        else:
            assert error is None and len(taken) == len(mine)
            assert all(torch.equal(when, mine[source, number]) for source, number, _, when in taken)
    assert not any(posts.values())


def test_the_next_sync_starts_anew(short: Callable[[int, int], Short]) -> None:
    buffers = Buffers()
    buffers.reserve(100, CPU)
    short(-1, 0)
    assert len(buffers.get(0, 40, CPU, keep=True)) == 40 and isinstance(buffers.error, MemoryError)
    assert buffers.get(0, 40, CPU, keep=True).data_ptr() == buffers.get(2, 100, CPU).data_ptr()
    short(5, 0)
    assert buffers.get(1, 40, CPU, keep=True).data_ptr() == buffers.get(3, 100, CPU).data_ptr(), (
        "not while the same sync lasts"
    )
    buffers.begin()
    assert buffers.error is None
    assert buffers.get(0, 40, CPU, keep=True).data_ptr() not in {
        buffers.get(0, 1, CPU).data_ptr(),
        buffers.get(1, 1, CPU).data_ptr(),
    }


def through(route: Any, moved: Iterator[Any]) -> Exception | None:
    """Go through what is moved; return the error of the route."""
    for _ in moved:
        pass
    return route.error


def nothing(place: Tensor) -> None:
    place.zero_()


def reserving(
    rank: int, kind: str, posts: Posts, sizes: dict[int, list[int]]
) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
    """Return a route that has reserved its memory, and what moves dense frames of these sizes on it."""
    targets = [2]
    if kind == "relay":
        gather, lineage = (
            Wire(rank, members, posts) if rank in members else None for members in ([0, 1], [0, 2])
        )
        route: Any = BucketedBroadcast(gather, lineage, rank=rank, root=0, bucket_bytes=1000)  # type: ignore[arg-type]
        route.reserve(MOST, receiver=rank == 2)
        return route, lambda frames: through(route, route.move(sizes, frames, targets, Phases()))
    route = PairwiseExchange(Wire(rank, range(3), posts), rank=rank, sources=[0, 1])  # type: ignore[arg-type]
    route.reserve(MOST, receiver=rank == 2)
    incoming = sizes if rank == 2 else {}

    def move(frames: Sequence[Any]) -> Any:
        outgoing = {2: list(zip(sizes[rank], frames, strict=True))} if rank < 2 else {}
        return through(route, route.move(outgoing, incoming, targets, Phases()))

    return route, move


@pytest.mark.parametrize("kind", ["relay", "exchange"])
def test_a_seed_needs_no_memory_that_was_not_reserved(kind: str, short: Callable[[int, int], Short]) -> None:
    posts: Posts = defaultdict(deque)
    routes = {rank: reserving(rank, kind, posts, MOST) for rank in (1, 0, 2)}
    allocator = short(-1, 0)
    for rank, (_, move) in routes.items():
        allocator.rank = rank
        assert move([nothing] * len(MOST.get(rank, []))) is None
    assert not any(posts.values()) and not any(allocator.asked.values())


@pytest.mark.parametrize("kind", ["relay", "exchange"])
def test_frames_of_another_device_are_sent_from_reserved_memory(
    kind: str, short: Callable[[int, int], Short]
) -> None:
    """Those of the meta device have no bytes, but cannot be sent from where they are."""
    posts: Posts = defaultdict(deque)
    _, move = reserving(1, kind, posts, {0: [], 1: MOST[1]})
    allocator = short(-1, 0)
    allocator.rank = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "copy_", lambda self, other: self)
        move([torch.empty(size, dtype=torch.uint8, device="meta") for size in MOST[1]])
    sent = [tensor for queue in posts.values() for tensor in queue]
    assert (
        [len(tensor) for tensor in sent] == MOST[1]
        and all(tensor.is_cpu for tensor in sent)
        and not any(allocator.asked.values())
    )


# Texts ------------------------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        raised(lambda: np.empty(1 << 60, np.uint8)),
        raised(lambda: torch.empty(1 << 60, dtype=torch.uint8)),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=["python", "numpy", "torch", "cuda"],
)
def test_an_error_of_an_allocator_says_how_much_was_needed_and_what_to_do(error: Exception) -> None:
    told = explain_memory(error, 12345)
    assert type(told) is SyncFailed and told.__cause__ is error
    assert str(told).startswith(f"a rank ran out of memory: {type(error).__name__}") and str(error) in str(
        told
    )
    assert (
        "expected room for 12345 bytes of frames" in str(told)
        and 'mode="full"' in str(told)
        and "bucket_bytes=" in str(told)
    )
    assert "room for" not in str(explain_memory(error)).replace("no room for", "")


@pytest.mark.parametrize(
    "error",
    [None, ValueError("no memory to allocate"), RuntimeError("the device is gone"), FrameError("damaged")],
    ids=repr,
)
def test_other_errors_stay_what_they_are(error: Exception | None) -> None:
    assert explain_memory(error, 8) is error
