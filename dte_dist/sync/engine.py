"""The engine over any transport: push named tensors as versions, pull them into place, one version after the
other.

Senders and receivers of one engine know nothing of each other but the plan, if there is one, and what the
transport carries: they may be one object in one process, or many on many machines. An engine is used by one
thread per side.

1. `push` finds what changed since the version pushed last (`sync.tracker`), gives it to the transport, and
   only then moves on.
2. `pull` waits for the payload of every sender that this rank needs, and checks each by itself, against the
   version held, and against the targets (`sync.named_sides`). A delta must start from the version held, and
   from the same lineage where both are known. A `Payload` made of the bare tensors of a Delta Transfer Engine
   has none, and goes by its version alone.
3. Only if all of them are sound it writes (`sync.versioned_copy`). A receiver that fails while writing, or
   whose targets somebody else wrote to, has no version; full payloads of all its senders give it one again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from dte_dist.codec.header import NONE
from dte_dist.codec.named_tensors import Change, Payload, check_version, read_payload
from dte_dist.errors import ApplyFailed, FrameError, VersionError, VersionGap, VersionReplay, VersionRestart
from dte_dist.layout import LiveTensors
from dte_dist.layout.named import Slots, refuse_difference
from dte_dist.plan import Plan
from dte_dist.sync.named_sides import Given, Incoming, side_of
from dte_dist.sync.payload_apply import stage
from dte_dist.sync.tracker import DeltaTracker
from dte_dist.sync.version import VersionState
from dte_dist.sync.versioned_copy import VersionedCopy
from dte_dist.transport.base import TIMEOUT, Transport, check_timeout

__all__ = ["Arrived", "DeltaEngine"]

_IN_FULL = "push a full version: push(..., full=True)"


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """The payloads of a version, arrived and checked, waiting to be applied.

    Attributes:
        version: that they make.
        parts: each payload as it came, and what it says; one for each sender.
    """

    version: int
    parts: tuple[tuple[Payload, tuple[Change, ...]], ...]


class DeltaEngine:
    """Keep copies of named tensors bit-identical, over any transport, moving only what changed.

    Without a plan one sender has every tensor whole, and so have the receivers. With a plan any number of
    senders and receivers each have their own parts of the tensors: each calls with what it holds, and
    positions are translated on the receiver.

    Args:
        transport: carries the payloads; it stays the caller's to close.
        plan: which part of which tensor each rank has, equal on all ranks; None if all have them whole.
        rank: of this process in the plan; needed with one.
        mode: "delta", or "full" to send everything at every push.
        anchor_interval: send everything after so many deltas; None for never.
        sparse_bytes_ratio: when a tensor is sent in part, see `DeltaTracker`.
        timeout: seconds, or a timedelta, that a push or a pull may wait for the transport.
        header: give full payloads a header, too. Pass False where the receivers are those of a Delta Transfer
            Engine, which takes whatever has a header for a delta. Receivers of this class read both. See
            `DeltaTracker`.

    Raises:
        ValueError: an option is wrong.
        LayoutMismatch: the plan does not fill its receivers.

    Example:
        >>> model, rollout = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        >>> engine = dte_dist.DeltaEngine(dte_dist.LoopbackTransport(), anchor_interval=10)
        >>> for version in range(1, 4):  # the model trains here
        ...     engine.push(model.named_parameters(), version)
        ...     engine.pull(rollout.named_parameters(), version)
        >>> torch.equal(model.weight, rollout.weight)
        True

        Two senders with half of the rows each, and a receiver with all of them:

        >>> halves, whole = torch.rand(4, 3).chunk(2), torch.zeros(4, 3)
        >>> upper, lower = (dte_dist.Layout.from_views([("w", half, (4, 3), (row, 0))])
        ...     for half, row in zip(halves, (0, 2)))
        >>> target = dte_dist.Layout.from_tensors({"w": whole})
        >>> plan = dte_dist.Plan.between({0: upper, 1: lower}, {2: target})
        >>> transport = dte_dist.LoopbackTransport()
        >>> engines = [dte_dist.DeltaEngine(transport, plan=plan, rank=rank) for rank in range(3)]
        >>> engines[0].push(upper, version=1)
        >>> engines[1].push(lower, version=1)
        >>> engines[2].pull(target, version=1)
        >>> torch.equal(torch.cat(halves), whole)
        True
    """

    def __init__(
        self,
        transport: Transport,
        *,
        plan: Plan | None = None,
        rank: int | None = None,
        mode: Literal["delta", "full"] = "delta",
        anchor_interval: int | None = None,
        sparse_bytes_ratio: float = 1.0,
        timeout: timedelta | float = TIMEOUT,
        header: bool = True,
    ) -> None:
        if not isinstance(transport, Transport):
            raise ValueError(f"transport is a Transport, not a {type(transport).__name__}")
        if mode not in ("delta", "full"):
            raise ValueError(f"mode is 'delta' or 'full', not {mode!r}")
        wrong = isinstance(anchor_interval, bool) or not isinstance(anchor_interval, int | None)
        if wrong or (anchor_interval is not None and anchor_interval < 1):
            raise ValueError(f"anchor_interval is a positive int or None, not {anchor_interval!r}")
        self._transport = transport
        self._mode = mode
        self._anchor = anchor_interval
        self._timeout = check_timeout(timeout)
        self._side = side_of(plan, rank)
        self.tracker = DeltaTracker(
            sparse_bytes_ratio=sparse_bytes_ratio, keep=mode == "delta", header=header
        )
        self._state = VersionState()
        self._lineages: Mapping[int, int] = {}
        self._copy = VersionedCopy({}, [], self._state)
        self._incoming: Incoming | None = None

    @property
    def version(self) -> int:
        """The version that the targets of this engine hold; -1 if there is none, applying one failed, or
        others wrote to them.

        Example:
            >>> engine, weights = dte_dist.DeltaEngine(dte_dist.LoopbackTransport()), {"w": torch.ones(3)}
            >>> engine.push(weights, version=7)
            >>> engine.version  # nothing is pulled yet
            -1
            >>> engine.pull({"w": torch.zeros(3)}, version=7)
            >>> engine.version
            7
        """
        return self._state.version

    @property
    def changed_names(self) -> tuple[str, ...]:
        """Names of the targets that the last pull wrote to, sorted; see `SyncReport.changed_names`.

        Example:
            >>> dte_dist.DeltaEngine(dte_dist.LoopbackTransport()).changed_names  # nothing is pulled yet
            ()
        """
        return self._copy.changed_names.listed()

    def push(self, tensors: Given, version: int, *, full: bool = False) -> None:
        """Send what leads from the version pushed last to `version`; everything if there is none, or an
        anchor is due.

        With a plan every sender of it must push every version.

        Args:
            tensors: pairs or a mapping; plain tensors on one device, or on the CPU and one accelerator, any
                dtype of 1, 2, 4 or 8 bytes, any strides. With a plan the `Layout` that it was made from, or
                tensors of which `Layout.from_tensors` makes that layout (a new one at every call).
            version: above the one pushed last; a version in which nothing changed is one, too.
            full: send everything, for receivers that lost their version; names, shapes and dtypes may then be
                new.

        Raises:
            VersionReplay: `version` is not above the one pushed last.
            LayoutMismatch: names, shapes or dtypes differ from those pushed last or from the plan, or a
                tensor cannot be sent; names it.
            ValueError: this rank is no sender of the plan.
            Exception: whatever the transport raised; the engine is where it was, and the next delta contains
                this one.

        Example:
            >>> engine, weights = dte_dist.DeltaEngine(dte_dist.LoopbackTransport()), {"w": torch.ones(3)}
            >>> engine.push(weights, version=1)
            >>> engine.push(weights, version=1)
            Traceback (most recent call last):
                ...
            dte_dist.errors.VersionReplay: the version is not newer than the one pushed last ...
        """
        anchor = self._anchor is not None and self.tracker.deltas >= self._anchor
        with self._telling():
            payload = self._side.payload(
                self.tracker, tensors, version, full=full or anchor or self._mode == "full"
            )
        try:
            self._transport.send(payload, timeout=self._timeout)
        except BaseException:
            self.tracker.rollback()
            raise
        self.tracker.commit()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell an error that comes before the transport is asked to those who wait for this rank."""
        try:
            yield
        except Exception as error:
            self._transport.fail(error, timeout=self._timeout)
            raise

    def pull(self, targets: Given, version: int) -> None:
        """Wait for a version and write it into place: the payloads of all senders that this rank needs, or
        nothing.

        Args:
            targets: pairs or a mapping; the same tensors, names, shapes and dtypes at every pull. Addresses
                stay. With a plan a `Layout` or what makes one, as for `push`.
            version: that the targets hold afterwards.

        Raises:
            PeerLost: it did not come in time.
            VersionGap: it starts from a version that the targets do not hold: not yet, or not any more,
                because somebody else wrote to them since the last pull, or replaced them. A full version of
                every sender is the way out.
            VersionReplay: the targets hold it already, or a newer one.
            VersionRestart: it does not continue the run that the targets follow.
            FrameError, LayoutMismatch: it is damaged or does not fit the targets, which are as they were;
                names the tensor.
            ApplyFailed: writing broke off; the targets hold no version until the next full one.

        Example:
            >>> engine, copy = dte_dist.DeltaEngine(dte_dist.LoopbackTransport()), torch.zeros(3)
            >>> engine.push({"w": torch.ones(3)}, version=1)
            >>> engine.pull({"w": copy}, version=1)
            >>> copy
            tensor([1., 1., 1.])
        """
        with self._telling():
            local, incoming = self._side.targets(targets)
        arrived = self.decode_for_live_apply(version)
        # Asked again: whoever uses the targets while this rank waits may give one other memory.
        self._apply(arrived, local.again(), incoming)

    def decode_for_live_apply(self, version: int) -> Arrived:
        """Wait for a version and check it, while the targets are in use: nothing is written.

        Raises:
            PeerLost, VersionGap, VersionReplay, VersionRestart, FrameError, LayoutMismatch: see `pull`.

        Example:
            >>> engine, copy = dte_dist.DeltaEngine(dte_dist.LoopbackTransport()), torch.zeros(3)
            >>> engine.push({"w": torch.ones(3)}, version=1)
            >>> arrived = engine.decode_for_live_apply(version=1)
            >>> copy  # still in use
            tensor([0., 0., 0.])
        """
        with self._telling():
            check_version(version)
        deadline = time.monotonic() + self._timeout
        payloads = [self._receive(version, sender, deadline) for sender in self._side.senders]
        parts = tuple((payload, read_payload(payload)) for payload in payloads)
        for payload in payloads:
            self._check_chain(payload)
        return Arrived(version, parts)

    def _receive(self, version: int, sender: int, deadline: float) -> Payload:
        left = max(deadline - time.monotonic(), 1e-3)
        payload = self._transport.receive(version, sender=sender, timeout=left)
        if not isinstance(payload, Payload) or (payload.version, payload.sender) != (version, sender):
            got = (
                f"v{payload.version} of rank {payload.sender}"
                if isinstance(payload, Payload)
                else type(payload).__name__
            )
            raise FrameError(
                "the transport returned something else",
                expected=f"v{version} of rank {sender}",
                got=got,
                hint="pull again",
            )
        return payload

    def commit_live_apply(self, arrived: Arrived, targets: Given) -> None:
        """Write into place what `decode_for_live_apply` returned; all checks come first.

        Args:
            arrived: of this engine, not applied yet.
            targets: see `pull`.

        Raises:
            VersionGap, VersionReplay, VersionRestart, FrameError, LayoutMismatch, ApplyFailed: see `pull`.

        Example:
            >>> engine, copy = dte_dist.DeltaEngine(dte_dist.LoopbackTransport()), torch.zeros(3)
            >>> engine.push({"w": torch.ones(3)}, version=1)
            >>> arrived = engine.decode_for_live_apply(version=1)
            >>> engine.commit_live_apply(arrived, {"w": copy})
            >>> copy
            tensor([1., 1., 1.])
        """
        local, incoming = self._side.targets(targets)
        self._apply(arrived, local, incoming)

    def _apply(self, arrived: Arrived, local: LiveTensors, incoming: Incoming) -> None:
        """Check what arrived against these targets, and write it into place."""
        for payload, _ in arrived.parts:
            self._check_chain(payload)
        is_full = all(payload.full for payload, _ in arrived.parts)
        if not is_full:
            held: Slots = {} if self._incoming is None else self._incoming.slots
            refuse_difference(held, incoming.slots, what="the targets of the pull before and of this one")
        for payload, changes in arrived.parts:
            self._side.check(payload, changes, incoming, local.live.tensors)
        copy = self._copy_of(incoming)
        try:
            copy.begin_with(lambda: local, incoming.index_maps)
            if not is_full:
                self._refuse_written(copy)
            for payload, changes in arrived.parts:
                stage(copy, incoming, payload.sender, changes)
            self._write(copy, incoming, arrived)
        finally:
            copy.rollback()

    def _copy_of(self, incoming: Incoming) -> VersionedCopy:
        """Return the copy that targets like these are; it takes over the version."""
        if incoming is self._incoming:
            return self._copy
        return VersionedCopy(incoming.spaces, incoming.names, self._state, incoming.ties)

    def _write(self, copy: VersionedCopy, incoming: Incoming, arrived: Arrived) -> None:
        """Write what is staged into place, and move to its version."""
        # First: whatever these targets are, they hold no version until all is written.
        self._state.version = NONE
        self._copy, self._incoming = copy, incoming
        try:
            copy.apply()
        except Exception as error:
            raise ApplyFailed(
                "writing a payload into place broke off",
                got=f"{type(error).__name__}: {error}",
                hint=_IN_FULL,
            ) from error
        self._lineages = {payload.sender: payload.lineage for payload, _ in arrived.parts}
        copy.commit(arrived.version, 0, full=all(payload.full for payload, _ in arrived.parts))

    def _refuse_written(self, copy: VersionedCopy) -> None:
        """Refuse targets that are not what the last pull left; they hold no version then."""
        if self._state.version == NONE:
            written = copy.written()
            what = "somebody else wrote to the targets since the last pull, or replaced them"
            raise VersionGap(
                what, tensor=min(written, default=None), got=f"{len(written)} tensors", hint=_IN_FULL
            )

    def _check_chain(self, payload: Payload) -> None:
        """Check that a payload leads from the version held to a later one; a full one may come from another
        lineage.
        """
        fault: tuple[type[VersionError], str] | None = None
        held = self._state.version
        lineage = self._lineages.get(payload.sender, 0)
        if held == NONE:
            fault = None if payload.full else (VersionGap, "a delta came before anything it could start from")
        elif payload.version <= held and _differ(payload.lineage, lineage):
            fault = VersionRestart, "a version comes from another run, which counts anew"
        elif payload.version <= held:
            fault = VersionReplay, "a version came that is held already, or a newer one"
        elif payload.full:
            fault = None
        elif payload.base_version > held:
            fault = VersionGap, "a delta starts from a later version than is held"
        elif payload.base_version < held or _differ(payload.base_lineage, lineage):
            fault = VersionRestart, "a delta comes from another run, or from before a push that broke off"
        if fault is not None:
            kind, what = fault
            hint = "make a new engine, or push a full version above the one held"
            if kind is VersionReplay:  # without a lineage, a new run looks like an old version
                hint = "drop it" if payload.lineage else f"drop it; if its sender started anew, {hint}"
            raise kind(
                what,
                ranks=[payload.sender] if payload.plan else None,
                expected=f"from {held} on",
                got=f"{'full' if payload.full else payload.base_version} -> {payload.version}",
                hint=_IN_FULL if kind is VersionGap else hint,
            )


def _differ(one: int, other: int) -> bool:
    """Return whether two lineages are known to be different ones."""
    return one != other and 0 not in (one, other)
