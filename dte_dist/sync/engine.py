"""The engine over any transport: push named tensors as versions, pull them into place, one version after the
other.

Senders and receivers of one engine know nothing of each other but the plan, if there is one, and what the
transport carries: they may be one object in one process, or many on many machines. An engine is used by one
thread per side.

1. `push` finds what changed since the version pushed last (`sync.tracker`), gives it to the transport, and
   only then moves on.
2. `pull` waits for the payload of every sender that this rank needs. The transport has each checked by itself
   and against the targets (`sync.named_sides`) before its sender is told that it came, so that where senders
   wait, what is wrong with the targets of one receiver is raised on all ranks. Then each is checked against
   the version held, which is this rank's own affair (`sync.payload_chain`).
3. Only if all of them are sound it writes (`sync.versioned_copy`). A receiver that fails while writing, or
   whose targets somebody else wrote to, has no version; full payloads of all its senders give it one again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from dte_dist.codec.header import NONE
from dte_dist.codec.named_tensors import Change, Payload, check_version, read_payload
from dte_dist.errors import ApplyFailed, VersionError, VersionGap
from dte_dist.layout import LiveTensors
from dte_dist.layout.named import Slots, refuse_difference
from dte_dist.plan import Plan
from dte_dist.sync.named_sides import Given, Incoming, side_of
from dte_dist.sync.payload_apply import stage
from dte_dist.sync.payload_chain import IN_FULL, chain_fault, check_sender
from dte_dist.sync.tracker import DeltaTracker
from dte_dist.sync.version import VersionState
from dte_dist.sync.versioned_copy import VersionedCopy
from dte_dist.transport.base import TIMEOUT, Transport, check_timeout

__all__ = ["Arrived", "DeltaEngine"]


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
        self._transport = transport
        self._timeout = TIMEOUT.total_seconds()
        with self._telling():
            self._timeout = check_timeout(timeout)
            self._mode, self._anchor = _mode(mode), _anchor(anchor_interval)
            self._side = side_of(plan, rank)
            transport.check_plan(b"" if plan is None else plan.digest(), rank)
            keep = mode == "delta"
            self.tracker = DeltaTracker(sparse_bytes_ratio=sparse_bytes_ratio, keep=keep, header=header)
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
        with self._telling(version):
            if not isinstance(full, bool):
                raise ValueError(f"full is True or False, not {full!r}")
            is_full = full or anchor or self._mode == "full"
            payload = self._side.payload(self.tracker, tensors, version, full=is_full)
        try:
            self._transport.send(payload, timeout=self._timeout)
        except BaseException:
            self.tracker.rollback()
            raise
        self.tracker.commit()

    @contextmanager
    def _telling(self, version: int | None = None) -> Iterator[None]:
        """Tell an error that comes before the transport is asked to those who wait for this rank."""
        try:
            yield
        except Exception as error:
            self._transport.fail(error, timeout=self._timeout, version=version)
            raise

    def pull(self, targets: Given, version: int) -> None:
        """Wait for a version and write it into place: the payloads of all senders that this rank needs, or
        nothing.

        Over a `ProcessGroupTransport` a `FrameError` or a `LayoutMismatch` is raised on all ranks, and nobody
        has got the version. On a rank that pushes, too, the payloads came with the push: it is raised there
        alone, as it is by `commit_live_apply`, which comes after the meeting. The chain of versions is this
        rank's own affair in any case.

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
        looked: list[tuple[LiveTensors, Incoming]] = []

        def check(payload: Payload, changes: Sequence[Change]) -> None:
            if not looked:
                looked.append(self._side.targets(targets))
            if self._chain_fault(payload) is None:
                self._check_targets(payload, changes, *looked[0])

        arrived = self._arrive(version, check)
        local, incoming = looked[0] if looked else self._side.targets(targets)
        now = local.again()
        moved = now.changed_since(local).tolist()
        if moved:
            names = [list(incoming.slots)[index] for index in moved]
            what = "somebody else moved the targets while a version was on its way"
            raise VersionGap(what, tensor=names[0], got=f"{len(names)} tensors", hint=IN_FULL)
        self._commit(arrived, now, incoming)

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
        return self._arrive(version, lambda *_: None)

    def _arrive(self, version: int, check: Callable[[Payload, Sequence[Change]], None]) -> Arrived:
        """Wait for the payloads of a version; each is checked before its sender is told that it came."""
        with self._telling(version):
            check_version(version)
        deadline = time.monotonic() + self._timeout
        read: dict[int, tuple[Payload, tuple[Change, ...]]] = {}

        def accept(payload: Payload) -> None:
            check_sender(payload, version, self._side.senders)
            if payload.sender not in read or read[payload.sender][0] is not payload:
                changes = read_payload(payload)
                check(payload, changes)
                read[payload.sender] = payload, changes

        for sender in self._side.senders:
            left = max(deadline - time.monotonic(), 1e-3)
            payload = self._transport.receive_checked(version, accept, sender=sender, timeout=left)
            check_sender(payload, version, [sender])
        parts = tuple(read[sender] for sender in self._side.senders)
        for payload, _ in parts:
            self._check_chain(payload)
        return Arrived(version, parts)

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
        for payload, _ in arrived.parts:
            self._check_chain(payload)
        local, incoming = self._side.targets(targets)
        for payload, changes in arrived.parts:
            self._check_targets(payload, changes, local, incoming)
        self._commit(arrived, local, incoming)

    def _check_targets(
        self, payload: Payload, changes: Sequence[Change], local: LiveTensors, incoming: Incoming
    ) -> None:
        """Check that a payload can be written to the targets."""
        if not payload.full:
            held: Slots = {} if self._incoming is None else self._incoming.slots
            refuse_difference(held, incoming.slots, what="the targets of the pull before and of this one")
        self._side.check(payload, changes, incoming, local.live.tensors)

    def _commit(self, arrived: Arrived, local: LiveTensors, incoming: Incoming) -> None:
        """Write what has arrived, all of which is checked."""
        copy = self._copy_of(incoming)
        try:
            copy.begin_with(lambda: local, incoming.index_maps)
            if not all(payload.full for payload, _ in arrived.parts):
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
                hint=IN_FULL,
            ) from error
        self._lineages = {payload.sender: payload.lineage for payload, _ in arrived.parts}
        copy.commit(arrived.version, 0, full=all(payload.full for payload, _ in arrived.parts))

    def _refuse_written(self, copy: VersionedCopy) -> None:
        """Refuse targets that are not what the last pull left; they hold no version then."""
        if self._state.version == NONE:
            written = copy.written()
            what = "somebody else wrote to the targets since the last pull, or replaced them"
            raise VersionGap(
                what, tensor=min(written, default=None), got=f"{len(written)} tensors", hint=IN_FULL
            )

    def _check_chain(self, payload: Payload) -> None:
        """Check that a payload leads from the version held to a later one."""
        fault = self._chain_fault(payload)
        if fault is not None:
            raise fault

    def _chain_fault(self, payload: Payload) -> VersionError | None:
        return chain_fault(payload, self._state.version, self._lineages.get(payload.sender, 0))


def _mode(mode: str) -> str:
    if not isinstance(mode, str) or mode not in ("delta", "full"):
        raise ValueError(f"mode is 'delta' or 'full', not {mode!r}")
    return mode


def _anchor(interval: int | None) -> int | None:
    is_int = isinstance(interval, int) and not isinstance(interval, bool)
    if interval is not None and not (is_int and interval >= 1):
        raise ValueError(f"anchor_interval is a positive int or None, not {interval!r}")
    return interval
