"""The lookout of a rank that waits for long: it looks around once a second, in a thread of its own.

1. Is there a verdict on the channel?
2. Has a connection of it closed, or has a process of this machine ended? Not at the end of a call: a rank
   that has all it came for may end.
3. Where do ranks wait (`liveness.places`)? This one says where it does; a rank that waits for it elsewhere,
   while it is waited for here, will never come.
4. While a channel opens: does a rank compile? Then the wait is given more time.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from dte_dist.errors import OrderMismatch
from dte_dist.liveness.board import Verdict, late
from dte_dist.liveness.deadline import Deadline
from dte_dist.liveness.places import Place, Places, crossing, wait_for_each_other

if TYPE_CHECKING:
    from dte_dist.liveness.rendezvous import Membership
    from dte_dist.liveness.watch import Watch

__all__ = ["looks", "note_opening", "put_right"]

_BENEFIT: Final = 1.0
"""Seconds that a rank has to say why it closed its connections."""

_RARER: Final = 10.0
"""Seconds after which a wait looks at connections less often, and the most between two such looks."""

_log = logging.getLogger(__name__)

_places: dict[int, tuple[str, Place]] = {}
"""Of the waits of this process that are looked at: the group, and where."""

_opened: dict[str, int] = {}
"""By group, the number of the last channel that this rank began to open."""

os.register_at_fork(after_in_child=_places.clear)


def note_opening(membership: Membership) -> None:
    """Note that this rank begins to open a channel."""
    _opened[membership.group] = membership.channel


def looks(watch: Watch, is_waiting: Callable[[], bool]) -> Iterator[Verdict]:
    """Look around while a wait lasts; yield the verdict whenever there is nothing to wait for."""
    begin = time.monotonic()
    probed = -math.inf
    try:
        while is_waiting():
            now = time.monotonic()
            is_due = now - probed >= min((now - begin) / _RARER, _RARER)
            probed = now if is_due else probed
            verdict = _look(watch, watch.broken if is_due else watch.ended)
            if verdict is not None and is_waiting():
                yield verdict
            time.sleep(watch.pause)
    finally:
        if _places.pop(id(watch), None) is not None:
            _say_places(watch)


def _look(watch: Watch, find_gone: Callable[[], set[int]]) -> Verdict | None:
    """Look around once; may block.

    Args:
        watch: of the channel.
        find_gone: returns the ranks that are gone, by their connections or by their processes alone.
    """
    board = watch.board
    rank = watch.membership.rank
    try:
        if watch.is_opening:
            _learn_who_comes(watch)
        found = board.read()
        if found is None and not watch.is_ending and (broken := find_gone()):
            found = board.decide(put_right(watch, Verdict.of(watch.died(broken), rank)))
        if id(watch) not in _places:
            _places[id(watch)] = watch.membership.group, place_of(watch)
            _say_places(watch)
        if watch.is_opening and board.is_busy():
            watch.postpone(watch.pause)
        return found or _crossing(watch)
    except RuntimeError as error:
        _log.debug("the store cannot be reached: %s", error)
        broken = set() if watch.is_ending else find_gone()
        return Verdict.of(watch.died(broken), rank) if broken else None


def _learn_who_comes(watch: Watch) -> None:
    """Learn the processes of ranks that are not known yet; may block."""
    unknown = [rank for rank in watch.members if rank not in watch.processes]
    if unknown:
        watch.processes = {**watch.processes, **watch.membership.processes(unknown)}


def _crossing(watch: Watch) -> Verdict | None:
    """Return a verdict if a rank waits elsewhere for this one, and this one for it; may block."""
    mine = place_of(watch)
    absent = watch.absent
    waited = watch.waited if absent is None else absent()
    for other in _group(watch).read(rank for rank in waited if rank != mine.rank):
        if wait_for_each_other(mine, other):
            ranks, what = crossing(mine, other, _group(watch).read(watch.members))
            hint = "call the channels of a group in the same order on every rank"
            if not (mine.call and other.call):
                hint += ", and pass the module that a channel was opened with, or "
                hint += "dte_dist.close(module, group) on every rank first"
            both = tuple(sorted([mine.channel, other.channel]))
            return _decide_both(watch, Verdict("order", ranks, str(OrderMismatch(what, hint=hint)), both))
    return None


def _decide_both(watch: Watch, mine: Verdict) -> Verdict | None:
    """Give two channels the same verdict, unless one of them has another one already; may block."""
    boards = [watch.membership.board_of(channel) for channel in mine.channels]
    for board in boards:
        found = board.read()
        if found is not None and found.kind != "order":
            return None
    for board in boards:
        mine = board.decide(mine)
    return mine if mine.kind == "order" else None


def put_right(watch: Watch, mine: Verdict) -> Verdict:
    """Return a verdict of this rank as it is to be told, unless another one is there first; may block.

    Connections that have closed may be those of a rank that had waited too long for another one: gloo closes
    them before the rank can say so. So it gets a moment, unless it has surely died. And of ranks that did not
    answer, those that say that they wait in the same call do but wait for others.
    """
    if mine.kind == "died" and mine.ranks:
        patience = Deadline(_BENEFIT)
        while not (patience.passed or watch.board.is_settled() or watch.ended().issuperset(mine.ranks)):
            time.sleep(_BENEFIT / 20)
    if mine.kind != "late":
        return mine
    here = place_of(watch)
    call = here.channel, here.call
    places = _group(watch).read(watch.members)
    waiting = {here.rank, *(place.rank for place in places if (place.channel, place.call) == call)}
    missing = set(mine.ranks) - waiting or set(watch.members) - waiting
    if not missing or missing == set(mine.ranks):
        return mine
    return Verdict.of(late(missing, *watch.missed), here.rank)


def place_of(watch: Watch) -> Place:
    """Return where this rank waits."""
    here = watch.membership
    thread = watch.owner
    siblings = watch.siblings()
    mine = [each for each in siblings if _belongs_to(each, thread)]
    return Place(
        rank=here.rank,
        channel=here.channel,
        name=watch.name,
        call=watch.calls,
        calls={each.membership.channel: each.calls for each in mine if not each.is_opening},
        opened=_opened.get(here.group, 0),
        is_foreground=watch.runner is thread,
        is_alone=len(mine) == len(siblings),
    )


def _belongs_to(watch: Watch, thread: threading.Thread) -> bool:
    """Return whether no other thread is likely to make the next call of a channel.

    All calls came from this one; and if it was only one call, no other thread of the user is there to take
    over.
    """
    if watch.owner is not thread or watch.is_shared:
        return False
    others = [other for other in threading.enumerate() if other is not thread]
    return watch.calls > 1 or all(other.name.startswith("dte_dist") for other in others)


def _say_places(watch: Watch) -> None:
    """Tell the other ranks where the threads of this one wait; may block."""
    places = [place for group, place in list(_places.values()) if group == watch.membership.group]
    try:
        _group(watch).say(watch.membership.rank, places)
    except RuntimeError as error:
        _log.debug("the store cannot be reached: %s", error)


def _group(watch: Watch) -> Places:
    return Places(watch.membership.group_store, watch.membership.size)
