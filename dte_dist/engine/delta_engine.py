"""The engine over any transport: push named tensors as versions, pull them into place, one version after the other.

The sender and the receiver of one engine know nothing of each other but what the transport carries, so that both may be one object
in one process, or two objects on two machines. An engine is used by one thread per side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dte_dist.engine.chain import NONE, Chain
from dte_dist.engine.named import NamedTensors, Slots, named, refuse_difference, slots_of
from dte_dist.engine.payload import Change, apply_changes, check_changes, read_payload
from dte_dist.engine.tracker import DeltaTracker, check_version
from dte_dist.errors import ApplyFailed, FrameError, VersionError, VersionGap, VersionReplay, VersionRestart
from dte_dist.layout import refuse_overlaps
from dte_dist.transport.base import Payload, Transport, check_timeout

__all__ = ["DeltaEngine", "DeltaTracker", "Staged", "reconstruct_against_base"]

_IN_FULL = "push a full version: push(..., full=True)"


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A payload that has arrived and been checked, waiting to be applied.

    Attributes:
        payload: as it came.
        changes: what it says.
    """

    payload: Payload
    changes: tuple[Change, ...]

    @property
    def version(self) -> int:
        """The version that it makes."""
        return self.payload.version


class DeltaEngine:
    """Keep copies of named tensors bit-identical, over any transport, moving only what changed.

    Args:
        transport: carries the payloads; it stays the caller's to close.
        mode: "delta", or "full" to send everything at every push.
        anchor_interval: send everything after so many deltas; None for never.
        ratio: when a tensor is sent in part, see `DeltaTracker`.
        timeout: seconds that a push or a pull may wait for the transport.

    Raises:
        ValueError: an option is wrong.

    Example:
        >>> model, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        >>> engine = DeltaEngine(transport=dte_dist.LoopbackTransport(), mode="delta", anchor_interval=10)
        >>> for step in range(3):
        ...     engine.push(model.named_parameters(), version=step)
        ...     engine.pull(target.named_parameters(), version=step)
        >>> torch.equal(model.weight, target.weight)
        True
    """

    def __init__(
        self,
        transport: Transport,
        *,
        mode: Literal["delta", "full"] = "delta",
        anchor_interval: int | None = None,
        ratio: float = 1.0,
        timeout: float = 300.0,
    ) -> None:
        if not isinstance(transport, Transport):
            raise ValueError(f"transport is a Transport, not a {type(transport).__name__}")
        if mode not in ("delta", "full"):
            raise ValueError(f"mode is 'delta' or 'full', not {mode!r}")
        wrong = isinstance(anchor_interval, bool) or not isinstance(anchor_interval, int | None)
        if wrong or (anchor_interval is not None and anchor_interval < 1):
            raise ValueError(f"anchor_interval is a positive int or None, not {anchor_interval!r}")
        self._transport, self._mode, self._anchor = transport, mode, anchor_interval
        self._timeout = check_timeout(timeout)
        self.tracker = DeltaTracker(ratio=ratio, keep=mode == "delta")
        self._held = Chain()
        self._slots: Slots = {}

    @property
    def version(self) -> int:
        """The version that the targets of this engine hold; -1 if there is none, or applying one failed."""
        return self._held.version

    def push(self, named_tensors: NamedTensors, version: int, *, full: bool = False) -> None:
        """Send what leads from the version pushed last to `version`; everything if there is none, or an anchor is due.

        Args:
            named_tensors: pairs or a mapping; plain tensors of one device, any dtype of 1, 2, 4 or 8 bytes, any strides.
            version: above the one pushed last; a version in which nothing changed is one, too.
            full: send everything, for receivers that lost their version; names, shapes and dtypes may then be new.

        Raises:
            VersionReplay: `version` is not above the one pushed last.
            LayoutMismatch: names, shapes or dtypes differ from those pushed last, or a tensor cannot be sent; names it.
            Exception: whatever the transport raised; the engine is where it was, and the next delta contains this one.

        Example:
            >>> engine.push(model.named_parameters(), version=step)
        """
        anchor = self._anchor is not None and self.tracker.deltas >= self._anchor
        payload = self.tracker.diff(named_tensors, version, full=full or anchor or self._mode == "full")
        try:
            self._transport.send(payload, timeout=self._timeout)
        except BaseException:
            self.tracker.rollback()
            raise
        self.tracker.commit()

    def pull(self, target_params: NamedTensors, version: int) -> None:
        """Wait for a version and write it into place.

        Args:
            target_params: pairs or a mapping; the same tensors, names, shapes and dtypes at every pull. Addresses stay.
            version: that the targets hold afterwards.

        Raises:
            PeerLost: it did not come in time.
            VersionGap: it starts from a version that the targets do not hold yet.
            VersionReplay: the targets hold it already, or a newer one.
            VersionRestart: it does not continue the run that the targets follow.
            FrameError, LayoutMismatch: it is damaged or does not fit the targets, which are as they were; names the tensor.
            ApplyFailed: writing broke off; the targets hold no version until the next full one.

        Example:
            >>> engine.pull(rollout.named_parameters(), version=step)
        """
        self.commit_live_apply(self.decode_for_live_apply(version), target_params)

    def decode_for_live_apply(self, version: int) -> Staged:
        """Wait for a version and check it, while the targets are in use: nothing is written.

        Raises:
            PeerLost, VersionGap, VersionReplay, VersionRestart, FrameError, LayoutMismatch: see `pull`.

        Example:
            >>> staged = engine.decode_for_live_apply(version=step)
            >>> engine.commit_live_apply(staged, rollout.named_parameters())
        """
        check_version(version)
        payload = self._transport.receive(version, timeout=self._timeout)
        if not isinstance(payload, Payload) or payload.version != version:
            got = f"v{payload.version}" if isinstance(payload, Payload) else type(payload).__name__
            raise FrameError("the transport returned something else", expected=f"v{version}", got=got, fix="pull again")
        changes = read_payload(payload)
        _check_chain(payload, self._held)
        return Staged(payload, changes)

    def commit_live_apply(self, staged: Staged, target_params: NamedTensors) -> None:
        """Write into place what `decode_for_live_apply` returned; all checks come first.

        Args:
            staged: of this engine, not applied yet.
            target_params: see `pull`.

        Raises:
            VersionGap, VersionReplay, VersionRestart, FrameError, LayoutMismatch, ApplyFailed: see `pull`.
        """
        payload, held = staged.payload, self._held
        _check_chain(payload, held)
        targets = named(target_params)
        _refuse_overlaps(targets)
        slots = slots_of(targets)
        if not payload.full:
            refuse_difference(self._slots, slots, what="the targets of the pull before and of this one")
        check_changes(staged.changes, targets, full=payload.full)
        held.version = NONE
        try:
            apply_changes(staged.changes, targets)
        except Exception as error:
            raise ApplyFailed("writing a payload into place broke off", got=f"{type(error).__name__}: {error}", fix=_IN_FULL) from error
        held.move(payload.version, payload.stream, full=payload.full)
        self._slots = slots


def reconstruct_against_base(payload: Payload, base_tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors that a payload makes of a base, in full.

    Args:
        payload: full or a delta; that the base is its base version is the caller's to know.
        base_tensors: pairs or a mapping; they are left as they are.

    Returns:
        By name, new contiguous tensors on the devices of the base, which share no memory with base or payload.

    Raises:
        FrameError, LayoutMismatch: the payload is damaged or does not fit the base; names the tensor.

    Example:
        >>> tracker, weights = DeltaTracker(), {"w": torch.ones(2)}
        >>> reconstruct_against_base(tracker.diff(weights, 1), {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    base, changes = named(base_tensors), read_payload(payload)
    check_changes(changes, base, full=payload.full)
    whole = {change.name for change in changes if change.positions is None}
    made = {name: _copy(tensor, filled=name not in whole) for name, tensor in base.items()}
    apply_changes(changes, made)
    return made


def _copy(tensor: Tensor, *, filled: bool) -> Tensor:
    """Return a contiguous tensor of the same kind, with the same bits if it is to be filled."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if filled:
        copy.copy_(tensor.detach())
    return copy


def _refuse_overlaps(targets: Mapping[str, Tensor]) -> None:
    for device in {tensor.device for tensor in targets.values()}:
        names = [name for name, tensor in targets.items() if tensor.device == device]
        refuse_overlaps(names, [targets[name] for name in names])


def _check_chain(payload: Payload, held: Chain) -> None:
    """Check that a payload leads from the version held to a later one; a full one may come from another run."""
    fault: tuple[type[VersionError], str] | None = None
    if held.version == NONE:
        fault = None if payload.full else (VersionGap, "a delta came before anything it could start from")
    elif payload.version <= held.version and _differ(payload.stream, held.stream):
        fault = VersionRestart, "a version comes from another run, which counts anew"
    elif payload.version <= held.version:
        fault = VersionReplay, "a version came that is held already, or a newer one"
    elif payload.full:
        fault = None
    elif payload.base_version > held.version:
        fault = VersionGap, "a delta starts from a later version than is held"
    elif payload.base_version < held.version or _differ(payload.base_stream, held.stream):
        fault = VersionRestart, "a delta comes from another run, or from before a push that broke off"
    if fault is not None:
        kind, what = fault
        fix = "drop it" if kind is VersionReplay else "make a new engine, or push a full version above the one held"
        got = f"{'full' if payload.full else payload.base_version} -> {payload.version}"
        raise kind(what, expected=f"from {held.version} on", got=got, fix=_IN_FULL if kind is VersionGap else fix)


def _differ(one: int, other: int) -> bool:
    """Return whether two runs are known to be different ones."""
    return one != other and 0 not in (one, other)
