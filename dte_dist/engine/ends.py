"""The two ends of an engine: which of the caller's tensors a payload is made of, and where what it says is
written.

Here are the ends for one sender that has every tensor whole, as its receivers have: payloads name the
    caller's own tensors. Those of several senders and receivers, each with its own part of each tensor, are
    in `engine.shared`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.engine.named import NamedTensors, named
from dte_dist.engine.payload import Change, check_changes, write_changes
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout
from dte_dist.tensors.flat import FlatTensors
from dte_dist.transport.base import Payload

__all__ = ["Bundle", "Ends", "Given", "Landed", "Outgoing", "WholeEnds"]

Given = NamedTensors | Layout
"""Tensors as a caller hands them over: pairs or a mapping; with a plan also a `Layout`."""


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """The tensors in which a sender looks for changes.

    Attributes:
        tensors: by their names in payloads.
        wire: by name, the dtypes to send; None for the tensors' own.
    """

    tensors: NamedTensors
    wire: Mapping[str, torch.dtype] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Changed elements of several tensors of one width.

    Attributes:
        flat: the tensors.
        positions, bits: of the elements, in `flat`.
    """

    flat: FlatTensors
    positions: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """Changes to be written, checked.

    Attributes:
        changes: each with the tensor that it is written to.
        bundles: more changes.
    """

    changes: Sequence[tuple[Change, Tensor]]
    bundles: Sequence[Bundle] = ()

    def write(self) -> None:
        """Write it in place."""
        write_changes(self.changes)
        with torch.no_grad():
            for bundle in self.bundles:
                device = bundle.flat.device
                kernels.on(device).scatter(bundle.flat, bundle.positions.to(device), bundle.bits.to(device))


class Ends(Protocol):
    """The two ends of an engine."""

    @property
    def senders(self) -> Sequence[int]:
        """Those whose payloads a receiver waits for."""

    def outgoing(self, given: Given) -> Outgoing:
        """Return what to look for changes in."""

    def address(self, payload: Payload) -> Payload:
        """Return a payload as it is sent."""

    def targets(self, given: Given) -> dict[str, Tensor]:
        """Return a receiver's tensors by name."""

    def land(self, payload: Payload, changes: Sequence[Change], targets: Mapping[str, Tensor]) -> Landed:
        """Check a payload against the targets and return what to write where; nothing is written yet."""


class WholeEnds:
    """One sender, and receivers that have the same tensors."""

    senders: Sequence[int] = (0,)

    def outgoing(self, given: Given) -> Outgoing:
        """Return the tensors as they are."""
        return Outgoing(_no_layout(given))

    def address(self, payload: Payload) -> Payload:
        """Return the payload as it is."""
        return payload

    def targets(self, given: Given) -> dict[str, Tensor]:
        """Return the tensors by name.

        Raises:
            LayoutMismatch, ValueError: see `named`.
        """
        return named(_no_layout(given))

    def land(self, payload: Payload, changes: Sequence[Change], targets: Mapping[str, Tensor]) -> Landed:
        """Check the changes against the targets.

        Raises:
            LayoutMismatch, FrameError: see `check_changes`.
        """
        if payload.plan:
            what = "the payload is the share of one of several senders"
            raise LayoutMismatch(
                what, ranks=[payload.sender], hint="give the engine the plan=, and its rank= in it"
            )
        check_changes(changes, targets, full=payload.full)
        return Landed([(change, targets[change.name]) for change in changes])


def _no_layout(given: Given) -> NamedTensors:
    if isinstance(given, Layout):
        raise ValueError(
            "a Layout says which part of each tensor this rank holds: give the engine "
            "a plan=, or named tensors"
        )
    return given
