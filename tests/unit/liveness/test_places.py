"""Places of ranks in their calls: who waits for whom in vain, and the text that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dte_dist.liveness.places import Place, Places, crossing, wait_for_each_other


def place(rank: int, channel: int, call: int, **changed: Any) -> Place:
    """Rank 0 waits in call 4 of channel 1, rank 1 in call 4 of channel 2, each behind the other."""
    calls = {1: 4, 2: 3} if rank == 0 else {1: 3, 2: 4}
    said = {"name": None, "calls": calls, "opened": 2, "is_foreground": True, "is_alone": True}
    return Place(**{**said, "rank": rank, "channel": channel, "call": call, **changed})


A, B = place(0, 1, 4), place(1, 2, 4)


def test_two_ranks_that_are_before_each_others_calls_wait_for_ever() -> None:
    assert wait_for_each_other(A, B) and wait_for_each_other(B, A)
    opening = place(1, 3, 0, opened=3)
    assert wait_for_each_other(A, opening) and wait_for_each_other(opening, A)


NOT: dict[str, Place] = {
    "the same channel": place(1, 1, 4),
    "it has made the call, and waits for something else": place(1, 2, 4, calls={1: 4, 2: 4}),
    "it is two calls behind": place(1, 2, 4, calls={1: 2, 2: 4}),
    "a call that this rank has made": place(1, 2, 3),
    "a call after the next": place(1, 2, 5),
    "the channel belongs to another thread there": place(1, 2, 4, calls={2: 4}),
    "in the background": place(1, 2, 4, is_foreground=False),
    "an opening that this rank has come to": place(1, 2, 0, opened=2),
}


@pytest.mark.parametrize("other", NOT.values(), ids=NOT)
def test_others_may_come(other: Place) -> None:
    assert not wait_for_each_other(A, other) and not wait_for_each_other(other, A)


def test_an_opening_is_waited_for_in_vain_only_if_no_other_thread_may_come_to_it() -> None:
    opening = place(1, 3, 0, opened=3)
    assert not wait_for_each_other(place(0, 1, 4, is_alone=False), opening)
    assert not wait_for_each_other(place(0, 3, 0, opened=3), place(1, 4, 0, opened=4))


def test_the_text_names_all_ranks_that_wait_in_either_call() -> None:
    others = [place(2, 1, 4), place(3, 2, 4), place(4, 5, 1), place(5, 1, 3)]
    named = place(1, 2, 4, name="reference")
    ranks, text = crossing(named, A, others)
    assert (ranks, text) == (
        (0, 1, 2, 3),
        "ranks 0 and 2 wait in channel 1, ranks 1 and 3 in channel 2 'reference'",
    )


def test_places_come_back_as_they_were_said() -> None:
    places = Places(dist.HashStore(), 3)
    assert places.read() == []
    places.say(1, [B, place(1, 3, 0)])
    places.say(0, [A])
    assert places.read() == [A, B, place(1, 3, 0)] and places.read([0]) == [A]
    places.say(1, [])
    assert places.read() == [A]
