"""Whether a payload is the one asked for, and whether it continues what a receiver holds.

A delta must start from the version held, and from the same lineage where both are known. A full payload may
come from another lineage, but not with a version that is held already. A `Payload` made of the bare tensors
of a Delta Transfer Engine has no lineage, and goes by its version alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from dte_dist.codec.header import NONE
from dte_dist.codec.named_tensors import Payload
from dte_dist.errors import FrameError, VersionError, VersionGap, VersionReplay, VersionRestart

__all__ = ["IN_FULL", "chain_fault", "check_sender"]

IN_FULL: Final = "push a full version: push(..., full=True)"
"""The hint where only a full version helps."""

_ANEW: Final = "make a new engine, or push a full version above the one held"


def chain_fault(payload: Payload, held: int, lineage: int) -> VersionError | None:
    """Return why a payload does not lead from the version held to a later one; None if it does.

    Args:
        payload: that came.
        held: version of the receiver; -1 if it has none.
        lineage: of the payload before from the same sender; 0 if it is not known.

    Example:
        >>> payload = dte_dist.Payload(8, 7, False, {})
        >>> chain_fault(payload, held=7, lineage=0) is None
        True
        >>> print(chain_fault(payload, held=6, lineage=0))
        a delta starts from a later version than is held [expected from 6 on; got 7 -> 8]. Hint: push a full
        version: push(..., full=True).
    """
    fault = _fault(payload, held, lineage)
    if fault is None:
        return None
    kind, what = fault
    hint = IN_FULL if kind is VersionGap else _ANEW
    if kind is VersionReplay:  # without a lineage, a new run looks like an old version
        hint = "drop it" if payload.lineage else f"drop it; if its sender started anew, {_ANEW}"
    ranks = [payload.sender] if payload.plan else None
    got = f"{'full' if payload.full else payload.base_version} -> {payload.version}"
    return kind(what, ranks=ranks, expected=f"from {held} on", got=got, hint=hint)


def _fault(payload: Payload, held: int, lineage: int) -> tuple[type[VersionError], str] | None:
    if payload.version <= held:
        if _differ(payload.lineage, lineage):
            return VersionRestart, "a version comes from another run, which counts anew"
        return VersionReplay, "a version came that is held already, or a newer one"
    return None if payload.full else _delta_fault(payload, held, lineage)


def _delta_fault(payload: Payload, held: int, lineage: int) -> tuple[type[VersionError], str] | None:
    if held == NONE:
        return VersionGap, "a delta came before anything it could start from"
    if payload.base_version > held:
        return VersionGap, "a delta starts from a later version than is held"
    if payload.base_version < held or _differ(payload.base_lineage, lineage):
        return VersionRestart, "a delta comes from another run, or from before a push that broke off"
    return None


def _differ(one: int, other: int) -> bool:
    """Return whether two lineages are known to be different ones."""
    return one != other and 0 not in (one, other)


def check_sender(payload: Payload, version: int, senders: Collection[int]) -> None:
    """Check that a transport returned what it was asked for: a version of one of these senders.

    Raises:
        FrameError: it is something else.

    Example:
        >>> check_sender(dte_dist.Payload(8, 7, False, {}), 8, [0])
    """
    if isinstance(payload, Payload) and payload.version == version and payload.sender in senders:
        return
    got = type(payload).__name__
    if isinstance(payload, Payload):
        got = f"v{payload.version} of rank {payload.sender}"
    what = "the transport returned something else"
    expected = f"v{version} of rank {', '.join(map(str, senders))}"
    raise FrameError(what, expected=expected, got=got, hint="pull again")
