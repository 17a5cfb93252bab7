"""Where ranks wait: two that wait for each other in different channels of one group wait for ever.

Whoever waits for more than a second writes down in which channel, in which of its calls, and how many calls
of the other channels this thread has made. From the numbers alone it follows whether two ranks are each
before the call that the other one is in, and stuck in one that the other one has not made. It follows for
sure: a place that was written a while ago is still taken, since whoever is in it waits for the reader. Only
threads are taken for what they have been: a channel belongs to the thread that called it last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from dte_dist.liveness.board import names
from dte_dist.liveness.notes import checked, number, read_note

__all__ = ["Place", "Places", "crossing", "wait_for_each_other"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank waits, and what it cannot do meanwhile.

    Attributes:
        rank: in the group.
        channel: number of the channel in the group.
        name: of the channel, as the user calls it.
        call: number of the call of the channel; 0 while the channel opens.
        calls: for the open channels that this thread uses, by number, how many calls it has made.
        opened: number of the last channel that this rank began to open.
        is_foreground: the thread of the user waits, not one in the background.
        is_alone: no other thread of the rank uses channels of this group.
    """

    rank: int
    channel: int
    name: str | None
    call: int
    calls: Mapping[int, int]
    opened: int
    is_foreground: bool
    is_alone: bool

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Place:
        """Read what `dataclasses.asdict` and JSON made of one.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it cannot be one.
        """
        rank, channel, call, opened = (number(said[name]) for name in ("rank", "channel", "call", "opened"))
        calls = {int(each): number(count) for each, count in said["calls"].items()}
        name = said["name"] if said["name"] is None else checked(said["name"], str)
        flags = (checked(said[name], bool) for name in ("is_foreground", "is_alone"))
        return cls(rank, channel, name, call, calls, opened, *flags)

    def __str__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        return (
            f"channel {self.channel}{name}" if self.call else f"the opening of channel {self.channel}{name}"
        )

    def is_before(self, other: Place) -> bool:
        """Return whether this rank has yet to make the call that another is in, and cannot before its own
        ends.
        """
        if not self.is_foreground:
            return False
        if other.call == 0:
            return self.is_alone and self.opened < other.channel
        return self.calls.get(other.channel) == other.call - 1


def wait_for_each_other(a: Place, b: Place) -> bool:
    """Return whether two ranks wait for each other for ever.

    Example:
        >>> a = Place(0, 1, None, 4, {1: 4, 2: 3}, 2, True, True)
        >>> b = Place(1, 2, None, 4, {1: 3, 2: 4}, 2, True, True)
        >>> wait_for_each_other(a, b)
        True
    """
    return a.channel != b.channel and a.is_before(b) and b.is_before(a)


def crossing(a: Place, b: Place, others: Iterable[Place]) -> tuple[tuple[int, ...], str]:
    """Return which ranks wait in the calls of two that wait for each other, and a text that says so.

    Example:
        >>> a = Place(0, 1, "actor", 4, {1: 4, 2: 3}, 2, True, True)
        >>> b = Place(1, 2, None, 4, {1: 3, 2: 4}, 2, True, True)
        >>> crossing(a, b, [])
        ((0, 1), "rank 0 waits in channel 1 'actor', rank 1 in channel 2")
    """
    found = {place.rank: place for place in others}
    found.update({place.rank: place for place in (a, b)})
    first, second = sorted((a, b), key=lambda place: place.channel)
    groups = [
        (
            place,
            sorted(
                rank
                for rank, other in found.items()
                if (other.channel, other.call) == (place.channel, place.call)
            ),
        )
        for place in (first, second)
    ]
    (_, those), (_, these) = groups
    verb = "waits" if len(those) == 1 else "wait"
    return tuple(sorted([*those, *these])), f"{names(those)} {verb} in {first}, {names(these)} in {second}"


class Places:
    """The places of the ranks of one group.

    Args:
        store: of the group.
        size: of the group.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = dist.PrefixStore("at", store)
        self._size = size

    def say(self, rank: int, places: Sequence[Place]) -> None:
        """Write where the threads of this rank wait; may block."""
        self._store.set(str(rank), json.dumps([asdict(place) for place in places]))

    def read(self, ranks: Iterable[int] | None = None) -> list[Place]:
        """Return where ranks wait, by default all; may block."""
        keys = [str(rank) for rank in (range(self._size) if ranks is None else ranks)]
        said = [self._store.get(key) for key in keys if self._store.check([key])]
        return [
            place
            for places in said
            for place in read_note(
                "where a rank waits", places, lambda all_of_it: [*map(Place.parse, all_of_it)]
            )
        ]
