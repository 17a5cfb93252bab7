"""How ranks come together for the first time: all of them, or none.

1.   Each takes the next number of the group (`Membership.join`); long waits are watched from here on.
2. o The roll call over the store of the group: who does not come is known by name. The modules that come must
     not have been in different channels before.
3. o The control group connects.
4. o The steps of whoever opens: what they raise on one rank reaches all.

Steps with a ring (o) are exchanges. Where the others have given a rank up before it came, it goes on to the
number of their next try, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch

from dte_dist.errors import OrderMismatch, PeerLost
from dte_dist.liveness.board import names
from dte_dist.liveness.groups import Group
from dte_dist.liveness.rendezvous import Membership, call_roll, forget_meeting
from dte_dist.liveness.watch import Watch
from dte_dist.transport.all_or_none import AgreedError, agreed, end_together
from dte_dist.transport.communicator import Communicator

__all__ = ["Opening", "open_together"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _GivenUp(Exception):
    """The others gave this rank up before it came."""


def open_together(
    group: Group | None,
    timeout: timedelta,
    steps: Callable[[Opening], _T],
    *,
    name: str | None = None,
    origin: int | None = None,
    keep: bool = True,
) -> _T:
    """Come together with all ranks of a group, and go through some steps with them; all must call.

    Args:
        group: of the caller.
        timeout: of each wait.
        steps: what is done then, on a new `Opening`.
        name: that the caller gave.
        origin: of the channel that the module was in before, see `Watch.origin`.
        keep: the groups stay open when the steps end well; otherwise they are closed.

    Raises:
        DeltaError, ValueError: on every rank, with the same text.
        PeerLost: a rank did not come, or died, or raised what is no error of the family; on every survivor,
            with the same text.
    """
    while True:
        opening = Opening(Membership.join(group, timeout), name, origin)
        try:
            return opening.run(steps, keep=keep)
        except _GivenUp:
            _log.info("the other ranks tried to open a channel before this one came: trying again with them")


class Opening:
    """Ranks that come together.

    Args:
        membership: of this rank in the group.
        name: that the caller gave.
        origin: of the channel that the module was in before.

    Attributes:
        watch: of the waits.
        wires: the groups made so far, the control group first.
        has_met: all ranks have heard of each other.
    """

    def __init__(self, membership: Membership, name: str | None, origin: int | None) -> None:
        self.membership = membership
        self.watch = Watch(membership, name)
        self.watch.origin = origin
        self.wires: list[Communicator] = []
        self.has_met = False

    def run(self, steps: Callable[[Opening], _T], *, keep: bool) -> _T:
        """Go through the steps; leave nothing open that is not to be kept.

        Raises:
            _GivenUp: the others had given this rank up.
            Exception: as `open_together` says.
        """
        is_kept = False
        self.watch.open()
        try:
            result = steps(self)
            is_kept = keep
            return result
        except AgreedError as agreed:
            raise agreed.error from agreed.error.__cause__
        except PeerLost as lost:
            if not self.has_met and not self.watch.ends_here(self.watch.settle(lost)):
                raise _GivenUp from lost
            raise end_together(lost, self.watch, self._drop) from lost
        except Exception as caught:
            raise end_together(caught, self.watch, self._drop) from caught
        except BaseException as caught:
            end_together(caught, self.watch, self._drop)
            raise
        finally:
            if not is_kept:
                self._drop("it was not opened")

    def connect(self) -> Communicator:
        """Call the roll, and connect the control group.

        Raises:
            AgreedError: with an `OrderMismatch`: the modules come from different channels.
            PeerLost: a rank did not come.
        """
        origins = call_roll(self.watch)
        self.watch.origin = agreed(lambda: _one_origin(origins)) or self.membership.channel
        members = range(self.membership.size)
        self.wires.append(Communicator("control", members, self.membership, "gloo", watch=self.watch))
        return self.wires[0]

    def wire(
        self, name: str, backend: str, members: Sequence[int], device: torch.device | None
    ) -> Communicator | None:
        """Make a data group if it has several members and this rank is one."""
        if len(members) < 2 or self.membership.rank not in members:
            return None
        self.wires.append(Communicator(name, members, self.membership, backend, device, watch=self.watch))
        return self.wires[-1]

    def end(self) -> None:
        """Note that all ranks have gone through the steps, and tidy the store up."""
        self.watch.is_opening = False
        forget_meeting(self.watch, self.wires)

    def _drop(self, _: str) -> None:
        self.watch.close()
        for wire in self.wires:
            wire.close()


def _one_origin(origins: Mapping[int, int | None]) -> int | None:
    """Return the origin of the modules that come, None for new ones.

    Raises:
        OrderMismatch: they come from different channels; on every rank, for all see the same.
    """
    known = sorted({origin for origin in origins.values() if origin is not None})
    ranks = {origin: [rank for rank, other in origins.items() if other == origin] for origin in known}
    if len(ranks) > 1:
        said = ", ".join(f"{names(those)} that of channel {origin}" for origin, those in ranks.items())
        hint = "call the channels of a group in the same order on every rank; "
        hint += "dte_dist.close(module, group) lets a module change places"
        raise OrderMismatch(f"a channel opens again, but with different modules: {said}", hint=hint)
    return next(iter(ranks), None)
