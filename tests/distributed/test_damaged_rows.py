"""Distributed tier, four ranks over gloo: a row or a description that comes damaged to one rank, at every
exchange of an opening, of a sync and of a meeting. Every rank gets an error of the family in bounded time, no
process ends, and the next calls, over a new channel, give right bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dte_dist
from dte_dist.plan.model_map import ModelMap
from dte_dist.sync import agreement
from dte_dist.transport.communicator import Communicator
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT, Rows, caught, digest, facts, same, sync

pytestmark = pytest.mark.slow

SOURCES = 2
SOON = TIMEOUT / 2
SIZES = 16 + 4
"""A word of a control row in which sizes of frames stand, however many columns may come before them."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


class Done:
    """Stands for an operation that has been waited for."""

    def wait(self) -> None:
        pass


@contextmanager
def damage(
    here: bool, number: int, sender: int, word: int, *, method: str = "all_gather", by: int = 8
) -> Iterator[None]:
    """Add to a word of what a rank sent, once it came here with an exchange (from 1) on the control group."""
    original, calls = getattr(Communicator, method), []

    def at_fault(wire: Communicator) -> bool:
        calls.extend([1] if wire.name == "control" else [])
        return wire.name == "control" and len(calls) == number

    def all_gather(wire: Communicator, parts: dict[int, Tensor]) -> None:
        original(wire, parts)
        if at_fault(wire):
            parts[sender][word] += by

    def broadcast(wire: Communicator, tensor: Tensor, root: int) -> Any:
        pending = original(wire, tensor, root)
        if not at_fault(wire):
            return pending
        pending.wait()
        tensor.view(torch.int64)[word] += by
        return Done()

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(Communicator, method, {"all_gather": all_gather, "broadcast": broadcast}[method])
        yield
        assert not here or len(calls) >= number, f"there were {len(calls)} exchanges only"


def until_it_works(
    call: Callable[[], Any], first: tuple[str, str] | None
) -> tuple[list[tuple[str, str]], float, Any]:
    """Call until a call works after an error; return errors, seconds of the longest, and the last report.

    Args:
        call: of a collective.
        first: class and text of what the call before raised; None if it worked.
    """
    errors, longest = [first] if first is not None else [], 0.0
    for _ in range(5):
        begin, report = time.monotonic(), None
        try:
            report = call()
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        longest = max(longest, time.monotonic() - begin)
        if report is not None and errors and errors[-1][0] in ("PeerLost", "FrameError"):
            return errors, longest, report
    raise AssertionError(f"no call worked after an error: {errors}")


def in_a_sync(
    rank: int,
    world: int,
    who: int,
    sender: int,
    *,
    number: int,
    word: int,
    rows: int = 48,
    fail: bool = False,
) -> Any:
    """A first sync, one with damage, and calls until it works again; then two more steps."""
    held = Rows(rank, SOURCES, (rows, 4))

    def call(**options: Any) -> dte_dist.SyncReport:
        return sync(held.layout, src=list(range(SOURCES)), bucket_bytes=64, **options)

    call()
    if rank < SOURCES:
        held.parts[0][:3].neg_()
    detector = (lambda *_: 1 / 0) if fail and rank == 0 else None
    with damage(rank == who, number, sender, word):
        first = outcome(lambda: call(detector=detector))
    errors, longest, report = until_it_works(call, first)
    bits, reports = [held.whole(SOURCES)], [facts(report)]
    for step in range(2):
        if rank < SOURCES:
            held.parts[0][step] += 1
        reports.append(facts(call()))
        bits.append(held.whole(SOURCES))
    return first, errors, longest, reports, bits


def outcome(call: Callable[[], Any]) -> tuple[str, str] | None:
    """Return class and text of what a call raises; None if it works."""
    error = caught(call)
    return error if error[0] else None


def check_told(texts: set[tuple[str, str]], who: int, sender: int, what: str = "row") -> None:
    ((name, text),) = texts
    assert name == "PeerLost" and text.startswith(
        f"rank {who} failed: DamagedRow: a {what} came damaged, short or out of turn to rank {who}"
    )
    assert f"[ranks {sender};" in text and "call again on every rank" in text


ROWS: dict[str, dict[str, int]] = {
    "the control row, a version": {"number": 1, "word": 3},
    "the control row, a size": {"number": 1, "word": SIZES},
    "the control row, whether it failed": {"number": 1, "word": 0},
    "sizes in a row of their own": {"number": 2, "word": 1, "rows": 2560},
    "the vote": {"number": 2, "word": 0},
    "the vote, its guard": {"number": 2, "word": 2},
}


@pytest.mark.parametrize(("who", "sender"), [(3, 0), (2, 3), (0, 2), (1, 0)])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_damaged_row_in_a_sync_ends_it_on_all_ranks_and_the_next_call_is_right(
    ranks: Ranks, row: dict[str, int], who: int, sender: int
) -> None:
    found = ranks.run(in_a_sync, who, sender, **row)
    check_told({first for first, *_ in found}, who, sender)
    assert all(longest < SOON for _, _, longest, *_ in found)
    again, *later = same([reports for *_, reports, _ in found])
    before_the_vote = row["number"] == 1 or "rows" in row
    if before_the_vote:
        assert again[:5] == (2, 1, "delta", "", 24), "nobody moved: the next delta contains this one"
    elif who >= SOURCES:
        assert again[2] == "delta" and again[10] == (who,), (
            "only the rank that did not come to know of the vote"
        )
    else:
        assert again[2:4] == ("full", "sources hold different versions")
    assert [report[2:4] for report in later] == [("delta", "")] * 2
    same([bits for *_, bits in found])


@pytest.mark.parametrize(("who", "sender"), [(3, 0), (0, 2)])
def test_a_damaged_acknowledgement_seeds_nobody(ranks: Ranks, who: int, sender: int) -> None:
    """The others have ended their sync by then: they are told at their next call."""
    found = ranks.run(in_a_sync, who, sender, number=3, word=0)
    assert [first is None for first, *_ in found] == [rank != who for rank in range(4)]
    check_told({errors[-1] for _, errors, *_ in found}, who, sender)
    assert all(len(errors) == 1 and longest < SOON for _, errors, longest, *_ in found)
    again, *later = same([reports for *_, reports, _ in found])
    assert [report[2:4] for report in (again, *later)] == [("delta", "")] * 3 and again[1] == 2
    same([bits for *_, bits in found])


@pytest.mark.parametrize("who", [1, 3])
def test_a_damaged_text_of_an_error_is_told_at_the_next_call(ranks: Ranks, who: int) -> None:
    found = ranks.run(in_a_sync, who, 0, number=2, word=7, fail=True)
    name, text = same([first for rank, (first, *_) in enumerate(found) if rank != who])
    assert name == "SyncFailed" and "ZeroDivisionError" in text and "rank 0 of the group" in text
    check_told({errors[-1] for _, errors, *_ in found}, who, 0)
    again, *later = same([reports for *_, reports, _ in found])
    assert again[:5] == (2, 1, "delta", "", 24) and [report[2:4] for report in later] == [("delta", "")] * 2
    same([bits for *_, bits in found])


# Opening ----------------------------------------------------------------------------------------------------


def in_an_opening(
    rank: int, world: int, who: int, sender: int, *, number: int, word: int, method: str
) -> Any:
    """The first call, with damage, and calls until it works; then one more step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "shard"))["shard"]
    torch.manual_seed(rank // 2)
    module = torch.nn.Linear(6, 8)
    if rank < SOURCES:
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))

    def call() -> dte_dist.SyncReport:
        return sync(module)

    with damage(rank == who, number, sender, word, method=method):
        first = outcome(call)
    errors, longest, report = until_it_works(call, first)
    reports, bits = [facts(report)[2:4]], []
    for _ in range(2):
        with torch.no_grad():
            if rank < SOURCES:
                weight = module.weight.to_local()
                weight[0] += 1
        reports.append(facts(call())[2:4])
        weight = module.weight.full_tensor() if rank < SOURCES else module.weight
        bits.append(digest(weight))
    return first, errors, longest, reports, bits


OPENING: dict[str, dict[str, Any]] = {
    "the size of a description": {"number": 1, "word": 2, "method": "all_gather"},
    "the number of coordinates": {"number": 1, "word": 3, "method": "all_gather"},
    "a digest": {"number": 1, "word": 4, "method": "all_gather"},
    "a description": {"number": 1, "word": 9, "method": "broadcast"},
    "its guard": {"number": 1, "word": -1, "method": "broadcast"},
    "coordinates": {"number": 2, "word": 0, "method": "all_gather"},
    "the plan": {"number": 3, "word": 1, "method": "all_gather"},
    "digests of what both sources hold": {"number": 4, "word": 1, "method": "all_gather"},
    "the last row": {"number": 5, "word": 0, "method": "all_gather"},
}


@pytest.mark.parametrize(("who", "sender"), [(3, 0), (0, 1), (2, 3)])
@pytest.mark.parametrize("row", OPENING.values(), ids=OPENING)
def test_damage_while_a_channel_opens_ends_that_on_all_ranks_and_the_next_call_opens_it(
    ranks: Ranks, row: dict[str, Any], who: int, sender: int
) -> None:
    if row["method"] == "broadcast":
        who, sender = {0: (1, 0), 2: (3, 0), 3: (3, 0)}[
            who
        ]  # rank 0 is the first that has the description of the sources
    found = ranks.run(in_an_opening, who, sender, **row)
    if row["number"] in (3, 4):
        name, text = same([errors[-1] for _, errors, *_ in found])
        assert (
            name == "FrameError"
            and text.startswith("a row came damaged")
            and text.endswith(f"(raised on rank {who} of the group)")
        )
    else:
        check_told(
            {errors[-1] for _, errors, *_ in found},
            who,
            sender,
            "description" if row["method"] == "broadcast" else "row",
        )
    if row["number"] < 5:
        assert all(first is not None for first, *_ in found)
    assert all(longest < SOON for _, _, longest, *_ in found)
    assert same([reports for *_, reports, _ in found]) == [
        ("full", "first sync"),
        ("delta", ""),
        ("delta", ""),
    ]
    same([bits for *_, bits in found])


def differing(rank: int, world: int, kind: str) -> Any:
    """Open with something that is different on rank 2, then as it should be."""
    held = Rows(rank, SOURCES, (48, 4))

    def out_of_memory(*_: Any) -> Any:
        raise MemoryError("no room for the plan")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            place, name, other = {
                "plan": (ModelMap, "digest", lambda _: bytes(16)),
                "columns": (agreement, "_format", lambda: 7),
                "memory": (agreement, "_plan", out_of_memory),
            }[kind]
            patch.setattr(place, name, other)
        begin = time.monotonic()
        error = caught(lambda: sync(held.layout, src=list(range(SOURCES))))
        soon = time.monotonic() - begin < SOON
    return error, soon, facts(sync(held.layout, src=list(range(SOURCES))))[2:4], held.whole(SOURCES)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("plan", "LayoutMismatch", "ranks come to different plans for the same layouts [ranks 0, 2]"),
        ("columns", "LayoutMismatch", "ranks write their rows or frames differently [ranks 0, 2]"),
        ("memory", "PeerLost", "rank 2 failed: MemoryError: no room for the plan"),
    ],
)
def test_a_rank_that_comes_to_something_else_while_a_channel_opens_is_known_to_all(
    ranks: Ranks, kind: str, name: str, said: str
) -> None:
    error, soon, report, _ = same(ranks.run(differing, kind))
    assert error[0] == name and error[1].startswith(said) and soon and report == ("full", "first sync")


# Payloads ---------------------------------------------------------------------------------------------------


def in_a_meeting(rank: int, world: int, who: int, number: int) -> Any:
    """Open a transport and meet twice, with damage at one exchange; then do so with a new transport."""
    errors: list[tuple[str, str]] = []
    transport: dte_dist.ProcessGroupTransport | None = None

    def step(version: int) -> None:
        nonlocal transport
        transport = transport or dte_dist.ProcessGroupTransport(timeout=TIMEOUT)
        if rank == 0:
            transport.send(
                dte_dist.Payload(version, -1, True, {"w": torch.full((50,), version)}), timeout=TIMEOUT
            )
        else:
            assert transport.receive(version, timeout=TIMEOUT).tensors["w"].tolist() == [version] * 50

    begin = time.monotonic()
    with damage(rank == who, number, 0 if who else 1, 0):
        for version in (1, 2):
            error = outcome(lambda version=version: step(version))
            errors += [] if error is None else [error]
            if errors:  # those that had ended their meeting by then are told in the next one
                break
    took = time.monotonic() - begin
    if transport is not None:
        transport.close()
    transport = None
    torch.distributed.barrier()
    step(3)
    step(4)
    transport.close()
    return errors, took


@pytest.mark.parametrize("who", [0, 2], ids=["sender", "receiver"])
@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=["opening", "sizes", "first vote", "second vote"])
def test_a_damaged_row_of_a_transport_closes_it_on_all_ranks(ranks: Ranks, number: int, who: int) -> None:
    found = ranks.run(in_a_meeting, who, number)
    check_told({errors[0] for errors, _ in found}, who, 0 if who else 1)
    assert all(took < SOON for _, took in found)
