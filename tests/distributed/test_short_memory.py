"""Distributed tier, four ranks over gloo: memory that is short on one rank, wherever a sync asks for it.

All ranks raise the same error, which names the rank, the bytes and the hint; nothing has moved, the
channel stays, and the next sync is a delta that contains this one. Only what a seed wrote is seeded again.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dte_dist
from dte_dist import Layout, kernels
from dte_dist.codec import FrameWriter
from dte_dist.codec import payload_bytes as packing
from dte_dist.sync.frame_builder import Lane, Lanes
from dte_dist.sync.receiver import Receiver
from dte_dist.transport import broadcast as relay
from dte_dist.transport import buffers
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT, Rows, caught, channel_of, digest, facts, same, sync

pytestmark = pytest.mark.slow

SHAPE = (256, 512)
BUCKET = 1 << 16
ERRORS: list[Exception] = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9 bytes."
    ),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


class Model:
    """Rows of a weight on the sources, the first or the last ranks; whole copies on all that receive."""

    def __init__(self, rank: int, *, last: bool = False, colocated: bool = False) -> None:
        self.sources = [3, 2] if last else [0, 1]
        place = self.sources.index(rank) if rank in self.sources else 2
        held = Rows(place, 2, SHAPE)
        self.layout, self.part, self.is_source = held.layout, held.parts[0], rank in self.sources
        self.copy = None if self.is_source else self.part
        self.into: Layout | None = None
        if colocated and rank == self.sources[0]:
            self.copy = torch.zeros(SHAPE)
            self.into = Layout.from_views([("w0000", self.copy, SHAPE, (0, 0))])

    def change(self, by: float = 1.0) -> None:
        """Change half of the elements of the sources."""
        if self.is_source:
            self.part[::2] += by

    def few(self, by: float) -> None:
        """Change two elements of each source."""
        if self.is_source:
            self.part[3, :2] += by

    def sync(self, **options: Any) -> dte_dist.SyncReport:
        report: dte_dist.SyncReport = sync(
            self.layout, src=self.sources, into=self.into, bucket_bytes=BUCKET, **options
        )
        return report

    def held(self) -> str | None:
        return None if self.copy is None else digest(self.copy)

    def right(self) -> bool:
        """Whether the copy is what the sources hold."""
        parts: list[Any] = [None] * 4
        torch.distributed.all_gather_object(parts, self.part if self.is_source else None)
        whole = torch.cat([parts[source] for source in self.sources])
        return self.copy is None or digest(whole) == digest(self.copy)


@contextmanager
def short(
    here: bool, error: Exception, *, calls: int = 1, place: Any = None, name: str = ""
) -> Iterator[None]:
    """Where this is `here`, let the allocator of the buffers, or a method, raise from some call on."""
    original = kernels.empty if place is None else getattr(place, name)
    seen: list[int] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) >= calls:
            raise error
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if here and place is None:
            patch.setattr(buffers, "kernels", SimpleNamespace(empty=failing))
        elif here:
            patch.setattr(place, name, failing)
        yield


def told(errors: list[tuple[str, str]], poor: int, kind: str = "SyncFailed") -> str:
    """Check the error that all ranks raise; return its text."""
    name, text = same(errors)
    assert (
        name == kind
        and "a rank ran out of memory: " in text
        and text.endswith(f"(raised on rank {poor} of the group)")
    ), text
    assert 'mode="full"' in text and "bucket_bytes=" in text
    return str(text)


# A delta ----------------------------------------------------------------------------------------------------


def delta(
    rank: int, world: int, poor: int, error: Exception, calls: int, *, chain: bool = False, **options: Any
) -> dict[str, Any]:
    """A delta that is too large for one rank; what its error says to do, with no more memory; and so on."""
    model, found = Model(rank, colocated=True), dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch:
        if chain:
            patch.setattr(relay, "_CHAIN_FROM", 1)
            patch.setattr(relay, "PIECE", 512)
        model.sync(**options)
        channel, before = channel_of(model.layout), model.held()
        model.change()
        with short(rank == poor, error, calls=calls):
            found["error"] = caught(lambda: model.sync(**options))
            found["again"] = caught(lambda: model.sync(**options))
        found["untouched"] = model.held() == before
        found["next"] = facts(model.sync(**options))[:5]
        found["kept"] = channel_of(model.layout) is channel
        found["right"] = [model.right()]
        model.change()
        with short(rank == poor, error):
            found["full"] = facts(model.sync(mode="full", **options))[2:4]
        found["right"].append(model.right())
        model.change()
        found["after"] = facts(model.sync(**options))[2:4]
        found["right"].append(model.right())
    return found


@pytest.mark.parametrize("error", ERRORS, ids=["python", "torch", "cuda"])
@pytest.mark.parametrize(
    ("poor", "calls"),
    [(0, 1), (2, 1), (3, 2)],
    ids=["the root, which receives", "a receiver", "the last one, later"],
)
@pytest.mark.parametrize("way", [{}, {"chain": True}, {"route": "p2p"}], ids=["broadcast", "a chain", "p2p"])
def test_a_delta_that_one_rank_has_no_memory_for_moves_nobody(
    ranks: Ranks, way: dict[str, Any], poor: int, calls: int, error: Exception
) -> None:
    found = ranks.run(delta, poor, error, calls, **way)
    text = told([each["error"] for each in found], poor)
    assert (
        f"a rank ran out of memory: {type(error).__name__}" in text
        and str(error) in text
        and "expected room for " in text
    )
    assert same([each["again"] for each in found]) == found[0]["error"], (
        "the same again while there is no memory"
    )
    assert all(each["untouched"] and each["kept"] and all(each["right"]) for each in found)
    assert same([each["next"] for each in found]) == (2, 1, "delta", "", SHAPE[0] * SHAPE[1] // 2)
    assert same([each["full"] for each in found]) == ("full", "mode") and same(
        [each["after"] for each in found]
    ) == ("delta", "")


def staged(rank: int, world: int, poor: int, place: Any, name: str, *, small: bool) -> dict[str, Any]:
    """Memory that is short where frames are read or made, in inline frames or in buckets."""
    model, found = Model(rank, colocated=True), dict[str, Any]()
    for step in range(3):
        model.change(step) if not small or step == 0 else model.few(step)
        model.sync()
    before, channel = model.held(), channel_of(model.layout)
    model.few(7.0) if small else model.change(7.0)
    with short(rank == poor, ERRORS[0], place=place, name=name):
        found["error"] = caught(model.sync)
    found["untouched"], found["kept"] = model.held() == before, channel_of(model.layout) is channel
    found["next"], found["right"] = facts(model.sync())[:4], model.right()
    return found


@pytest.mark.parametrize("small", [True, False], ids=["inline frames", "buckets"])
@pytest.mark.parametrize(
    ("poor", "place", "name"),
    [
        (0, Receiver, "_take"),
        (3, Receiver, "_take"),
        (0, FrameWriter, "finish"),
        (1, FrameWriter, "finish"),
    ],
    ids=[
        "a frame read on the root",
        "a frame read on a receiver",
        "a frame made on the root",
        "a frame made on the other source",
    ],
)
def test_memory_that_is_short_while_frames_are_read_or_made_moves_nobody(
    ranks: Ranks, poor: int, place: Any, name: str, small: bool
) -> None:
    found = ranks.run(staged, poor, place, name, small=small)
    told([each["error"] for each in found], poor)
    assert all(each["untouched"] and each["kept"] and each["right"] for each in found)
    assert same([each["next"] for each in found]) == (4, 3, "delta", "")


# A seed -----------------------------------------------------------------------------------------------------


def reserved(rank: int, world: int, poor: int, calls: int, **options: Any) -> dict[str, Any]:
    """The first sync: memory for two buckets cannot be had, which is told before anything moves."""
    model, found = Model(rank, colocated=True), dict[str, Any]()
    before = model.held()
    with short(rank == poor, ERRORS[1], calls=calls):
        found["error"] = caught(lambda: model.sync(**options))
    channel = channel_of(model.layout)
    found["untouched"], found["next"] = model.held() == before, facts(model.sync(**options))[:4]
    found["kept"], found["right"] = channel_of(model.layout) is channel, [model.right()]
    model.change()
    found["after"] = facts(model.sync(**options))[2:4]
    found["right"].append(model.right())
    return found


@pytest.mark.parametrize(
    ("poor", "calls"),
    [(0, 1), (0, 2), (1, 1), (3, 2)],
    ids=["root", "root, the second", "other source", "receiver, the second"],
)
@pytest.mark.parametrize("route", ["broadcast", "p2p"])
def test_two_buckets_that_one_rank_has_no_memory_for_are_told_before_anything_moves(
    ranks: Ranks, route: str, poor: int, calls: int
) -> None:
    found = ranks.run(reserved, poor, calls, route=route)
    told([each["error"] for each in found], poor)
    assert all(each["untouched"] and each["kept"] and all(each["right"]) for each in found)
    assert same([each["next"] for each in found])[2] == "full" and same(
        [each["after"] for each in found]
    ) == ("delta", "")


SEEDS: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "a source writes": (1, Lanes, "write_seed", {}),
    "a source of higher rank than the receivers writes": (2, Lanes, "write_seed", {"last": True}),
    "a source translates": (1, Lane, "fetch", {"route": "p2p"}),
    "a source of higher rank translates": (3, Lane, "fetch", {"route": "p2p", "last": True}),
    "a receiver writes": (2, Receiver, "_place", {}),
    "a receiver of the p2p route writes": (3, Receiver, "_place", {"route": "p2p"}),
}


def seeded(
    rank: int, world: int, poor: int, place: Any, name: str, *, last: bool = False, **options: Any
) -> dict[str, Any]:
    model, found = Model(rank, last=last), dict[str, Any]()
    with short(rank == poor, ERRORS[0], calls=3, place=place, name=name):
        found["error"] = caught(lambda: model.sync(**options))
    channel = channel_of(model.layout)
    found["next"], found["right"] = facts(model.sync(**options))[2], [model.right()]
    model.change()
    found["after"] = facts(model.sync(**options))[2:4]
    found["kept"] = channel_of(model.layout) is channel
    found["right"].append(model.right())
    return found


@pytest.mark.parametrize(("poor", "place", "name", "how"), SEEDS.values(), ids=SEEDS)
def test_memory_that_is_short_during_a_seed_is_apply_failed_and_names_the_rank(
    ranks: Ranks, poor: int, place: Any, name: str, how: dict[str, Any]
) -> None:
    """Whoever finds frames that could not be made says less of it than the rank that could not make them."""
    found = ranks.run(seeded, poor, place, name, **how)
    told([each["error"] for each in found], poor, "ApplyFailed")
    assert same([each["next"] for each in found]) == "full" and same([each["after"] for each in found]) == (
        "delta",
        "",
    )
    assert all(each["kept"] and all(each["right"]) for each in found)


# Real -------------------------------------------------------------------------------------------------------


def limited(rank: int, world: int, poor: int) -> dict[str, Any]:
    """The system gives one rank no more addresses: less than a delta of 48 MiB takes."""
    held, found = Rows(rank, 1, (3072, 4096)), dict[str, Any]()
    options: dict[str, Any] = {"src": [0], "bucket_bytes": 1 << 24}
    sync(held.layout, **options)
    before = digest(held.parts[0])
    if rank == 0:
        held.parts[0].neg_()
    if rank == poor:
        with open("/proc/self/statm") as file:
            addresses = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (addresses + (24 << 20), resource.RLIM_INFINITY))
    found["error"] = caught(lambda: sync(held.layout, **options))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["untouched"] = rank == 0 or digest(held.parts[0]) == before
    found["next"] = facts(sync(held.layout, **options))[:5]
    found["bits"] = digest(held.parts[0])
    return found


@pytest.mark.timeout(240)
def test_addresses_that_the_system_does_not_give_are_told_like_that(ranks: Ranks) -> None:
    found = ranks.run(limited, 2, seconds=200)
    text = told([each["error"] for each in found], 2)
    assert any(each in text for each in ("MemoryError: Unable to allocate", "DefaultCPUAllocator"))
    assert all(each["untouched"] for each in found) and same([each["bits"] for each in found])
    assert same([each["next"] for each in found]) == (2, 1, "delta", "", 3072 * 4096)


# Payloads ---------------------------------------------------------------------------------------------------


def payloads(rank: int, world: int, case: str) -> dict[str, Any]:
    """A payload of two pieces, its description before it; memory is short on one rank at some call."""
    poor, place, name, calls = PAYLOADS[case]
    transport = dte_dist.ProcessGroupTransport(timeout=TIMEOUT)
    found: dict[str, Any] = {}

    def meet(version: int) -> int:
        if rank == 0:
            transport.send(
                dte_dist.Payload(version, -1, True, {"w": torch.full((5 << 20,), version)}), timeout=TIMEOUT
            )
            return version
        return int(transport.receive(version, timeout=TIMEOUT).tensors["w"][-1])

    with short(rank == poor, ERRORS[0], calls=calls, place=place, name=name):
        found["error"] = caught(lambda: meet(3))
    found["next"] = [meet(version) for version in (3, 4)]
    transport.close()
    return found


PAYLOADS: dict[str, tuple[int, Any, str, int]] = {
    "the sender writes its description": (0, packing, "_write", 1),
    "the sender writes the second piece": (0, packing, "_write", 3),
    "the sender gathers its frames": (0, packing.Packed, "frames", 1),
    "the sender gathers its data": (0, packing.Packed, "_data", 1),
    "a receiver makes room for a description": (2, packing._Bytes, "__init__", 1),
    "a receiver makes room for data": (3, packing._Bytes, "__init__", 2),
    "a receiver takes a piece": (1, packing.Arrival, "take", 2),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_a_payload_that_one_rank_has_no_memory_for_reaches_nobody(ranks: Ranks, case: str) -> None:
    found = ranks.run(payloads, case)
    kind, text = same([each["error"] for each in found])
    assert (
        kind == "SyncFailed"
        and "a rank ran out of memory: MemoryError" in text
        and "free memory on this rank, and push again" in text
    )
    assert text.endswith(f"(raised on rank {PAYLOADS[case][0]} of the group)")
    assert same([each["next"] for each in found]) == [3, 4]
