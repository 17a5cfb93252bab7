"""Distributed tier, four ranks over gloo: a verification fails, is interrupted or meets another call on one
rank, and all ranks are told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dte_dist
from dte_dist import Layout
from dte_dist.sync import verification
from dte_dist.sync.channel import Channel
from dte_dist.sync.verification import Verifier
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, model, nudge, parts_of, prints, same, sync
from tests.distributed.verifying import found, why

pytestmark = pytest.mark.slow

LONG = 60.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def not_open(rank: int, world: int) -> Any:
    module, group = model(rank), dist.new_group(list(range(world)))
    errors = [caught(lambda: dte_dist.verify(module)), caught(lambda: dte_dist.verify(module, group))]
    sync(module, group)
    errors += [caught(lambda: dte_dist.verify(module)), caught(lambda: dte_dist.verify(model(rank), group))]
    good = dte_dist.verify(module, group).equal
    dte_dist.close(module, group)
    errors += [
        caught(lambda: dte_dist.verify(module, group)),
        *(caught(lambda no=no: dte_dist.verify(no)) for no in (None, 3, {}, "w")),
    ]
    return good, errors


def test_without_a_channel_it_is_a_value_error(ranks: Ranks) -> None:
    good, errors = same(ranks.run(not_open))
    assert (
        good
        and {name for name, _ in errors} == {"ValueError"}
        and all("no open channel" in text for _, text in errors)
    )


def crossed(rank: int, world: int, who: int, background: bool) -> Any:
    module = model(rank)
    sync(module)
    if rank == 0:
        nudge(module, "0.weight", 4)

    def other() -> Any:
        return sync(module, async_op=True).wait() if background else sync(module)

    error = caught((lambda: dte_dist.verify(module)) if rank == who else other)
    broken = parts_of(module) is None
    report, verified = why(sync(module)), found(dte_dist.verify(module))
    return error, broken, report, verified, prints(module)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("who", [0, 2], ids=["the source verifies", "a receiver verifies"])
def test_a_verification_that_meets_a_sync_is_one_error_on_all_and_the_channel_goes_on(
    ranks: Ranks, who: int, background: bool
) -> None:
    (name, text), broken, report, verified, _ = same(ranks.run(crossed, who, background))
    assert (
        name == "LayoutMismatch"
        and "ranks make different calls" in text
        and f"dte_dist.verify on rank {who}" in text
    )
    assert not broken and report == (2, "delta", "", ()) and verified == (2, 0, None, (), (1, 2, 3), 0)


def crossed_on_p2p(rank: int, world: int) -> Any:
    """A sync on the other route, with more frames than a control row has room for."""
    weights = {f"w{index:03}": torch.full((64,), float(rank)) for index in range(200)}
    layout = Layout.from_tensors(weights)
    sync(layout, bucket_bytes=64, route="p2p")
    error = caught(
        (lambda: dte_dist.verify(layout))
        if rank == 2
        else (lambda: sync(layout, bucket_bytes=64, route="p2p"))
    )
    return error, why(sync(layout, bucket_bytes=64, route="p2p")), dte_dist.verify(layout).equal


def test_a_verification_that_meets_a_sync_of_many_frames(ranks: Ranks) -> None:
    (name, text), report, equal = same(ranks.run(crossed_on_p2p))
    assert (
        name == "LayoutMismatch"
        and "ranks make different calls" in text
        and report == (2, "delta", "", ())
        and equal
    )


def failing(rank: int, world: int, who: int, interval: int | None) -> Any:
    module = model(rank)
    sync(module, verify_interval=interval)
    if rank == 0:
        nudge(module, "0.weight", 2)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(verification, "digests", fail)
        error = caught(
            (lambda: dte_dist.verify(module))
            if interval is None
            else (lambda: sync(module, verify_interval=interval))
        )
    report = sync(module, verify_interval=interval)
    return error, why(report), dte_dist.verify(module).equal, prints(module)


@pytest.mark.parametrize("interval", [None, 2], ids=["verify", "verify_interval"])
@pytest.mark.parametrize("who", [0, 2], ids=["on the source", "on a receiver"])
def test_an_error_while_one_rank_digests_is_raised_on_all(
    ranks: Ranks, who: int, interval: int | None
) -> None:
    (name, text), report, equal, _ = same(ranks.run(failing, who, interval))
    assert name == "SyncFailed" and "MemoryError: no room" in text and f"rank {who} of the group" in text
    assert report[0] == (2 if interval is None else 3) and report[1:] == ("delta", "", ()) and equal


def interrupted(rank: int, world: int, place: str) -> Any:
    module = model(rank)
    sync(module, timeout=LONG)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    error, begin = ("", ""), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(*((Verifier, "verify") if place == "digesting" else (Channel, "_row")), interrupt)
        try:
            dte_dist.verify(module)
        except BaseException as caught_error:
            error = type(caught_error).__name__, str(caught_error)
    prompt = time.monotonic() - begin < 0.8 * LONG
    closed = caught(lambda: dte_dist.verify(module))
    if rank == 0:
        nudge(module, "0.weight", 3)
    return error, (
        prompt,
        closed[0],
        why(sync(module, timeout=LONG)),
        dte_dist.verify(module).equal,
        prints(module),
    )


@pytest.mark.parametrize("place", ["before the ranks meet", "digesting"])
def test_an_interrupt_of_a_verification_is_known_to_the_others_and_the_next_sync_opens_a_channel(
    ranks: Ranks, place: str
) -> None:
    errors, found_by_all = zip(*ranks.run(interrupted, place), strict=True)
    assert errors[2] == ("KeyboardInterrupt", "")
    name, text = same([error for rank, error in enumerate(errors) if rank != 2])
    assert name == "PeerLost" and "rank 2" in text and "KeyboardInterrupt" in text
    prompt, closed, report, equal, _ = same(list(found_by_all))
    assert prompt and closed == "ChannelClosed" and report == (2, "delta", "", ()) and equal


def closed_by_one(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module)
    if rank == 2:
        dte_dist.close(module)
    dist.barrier()
    error = caught(lambda: dte_dist.verify(module))
    return error, why(sync(module))[1:], dte_dist.verify(module).equal, prints(module)


def test_a_channel_that_another_rank_closed(ranks: Ranks) -> None:
    errors, reports, equal, _ = zip(*ranks.run(closed_by_one), strict=True)
    assert [name for name, _ in errors] == ["ChannelClosed", "ChannelClosed", "ValueError", "ChannelClosed"]
    assert same(list(reports)) == ("delta", "rank 2 seeded: it had no version", (2,)) and all(equal)
