"""A sender's side of an engine over a transport: the bits that were sent last, and what differs from them
now.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect.live_space import LiveSpace
from dte_dist.detect.snapshot import Snapshot
from dte_dist.engine.named import NamedTensors, Slots, named, refuse_difference, slots_of
from dte_dist.engine.payload import (
    Change,
    check_version,
    flat_bits,
    index_dtype,
    refuse_reserved,
    write_payload,
)
from dte_dist.errors import VersionReplay
from dte_dist.layout import brought_home
from dte_dist.plan.chunks import SEGMENT
from dte_dist.sync.version import NONE, VersionState
from dte_dist.tensors.flat import BITS, FlatTensors, starts_of
from dte_dist.transport.base import Payload

__all__ = ["DeltaTracker"]


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """The tensors of one width, laid end to end."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    starts: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """The changes that `diff` found, until it is known whether they were sent."""

    payload: Payload
    changes: Sequence[Change]
    slots: Slots
    device: torch.device


class DeltaTracker:
    """Find what changed since the version that was committed last; nothing advances before `commit`.

    Args:
        sparse_bytes_ratio: a tensor of n elements of s bytes, k of them changed, is sent in part if
            k * (4 + s) <= sparse_bytes_ratio * n * s.
        keep: keep a copy of all bits; without it every payload is full.
        header: give full payloads a header, too. False writes them as the Delta Transfer Engine does, whose
            receivers take whatever has a header for a delta; then only the `Payload` says which version they
            make.

    Raises:
        ValueError: `sparse_bytes_ratio` is negative or no number, or `header` is neither True nor False.

    Example:
        >>> tracker, weights = dte_dist.DeltaTracker(), {"w": torch.zeros(1000)}
        >>> tracker.diff(weights, version=1).full  # there is nothing to start from
        True
        >>> tracker.commit()
        >>> weights["w"][7] = -0.0
        >>> tracker.diff(weights, version=2).tensors["w@delta_idx"].tolist()
        [7]
    """

    def __init__(self, *, sparse_bytes_ratio: float = 1.0, keep: bool = True, header: bool = True) -> None:
        if (
            isinstance(sparse_bytes_ratio, bool)
            or not isinstance(sparse_bytes_ratio, int | float)
            or not 0 <= sparse_bytes_ratio < float("inf")
        ):
            raise ValueError(f"sparse_bytes_ratio is a number of at least 0, not {sparse_bytes_ratio!r}")
        if not isinstance(header, bool):
            raise ValueError(f"header is True or False, not {header!r}")
        self._ratio, self._keep, self._header = sparse_bytes_ratio, keep, header
        self._state = VersionState(lineage=_draw())
        self._snapshot: Snapshot | None = None
        self._slots: Slots = {}
        self._spaces: dict[int, _Space] = {}
        self._pending: _Pending | None = None

    @property
    def version(self) -> int:
        """The version committed last; -1 if there is none.

        Example:
            >>> tracker = dte_dist.DeltaTracker()
            >>> payload = tracker.diff({"w": torch.zeros(3)}, version=5)
            >>> tracker.version
            -1
            >>> tracker.commit()
            >>> tracker.version
            5
        """
        return self._state.version

    @property
    def deltas(self) -> int:
        """How many deltas were committed since the last full payload.

        Example:
            >>> tracker = dte_dist.DeltaTracker()
            >>> for version in (1, 2, 3):  # full, delta, delta
            ...     payload = tracker.diff({"w": torch.zeros(3)}, version)
            ...     tracker.commit()
            >>> tracker.deltas
            2
        """
        return self._state.deltas

    def diff(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        full: bool = False,
        wire: Mapping[str, torch.dtype] | None = None,
    ) -> Payload:
        """Return what leads from the committed version to `version`: a delta, or everything if there is none.

        Args:
            named_tensors: plain tensors on one device, or on the CPU and one accelerator; any dtype of 1, 2,
                4 or 8 bytes. They may change as soon as this returns.
            version: to make; above every version committed so far.
            full: everything, though there is a version to start from; names, shapes and dtypes may then be
                new.
            wire: by name, dtypes to send instead of the tensors' own: what differs is found after the cast.

        Raises:
            VersionReplay: `version` is not above the one committed.
            LayoutMismatch: names, shapes or dtypes are not those of the version committed, or a tensor cannot
                be sent; names it.

        Example:
            >>> tracker, weights = dte_dist.DeltaTracker(), {"w": torch.zeros(1000)}
            >>> payload = tracker.diff(weights, version=1)
            >>> payload.full, sorted(payload.tensors)
            (True, ['__awex_delta_header__', 'w'])
            >>> tracker.commit()
            >>> weights["w"][3] = 1
            >>> payload = tracker.diff(weights, version=2)
            >>> payload.full, sorted(payload.tensors)
            (False, ['__awex_delta_header__', 'w@delta_idx', 'w@delta_val'])
        """
        self.rollback()
        check_version(version)
        if version <= self._state.newest:
            newest = f"> {self._state.newest}"
            raise VersionReplay(
                "the version is not newer than the one pushed last",
                expected=newest,
                got=version,
                hint="count upwards",
            )
        tensors = named(named_tensors)
        refuse_reserved(tensors)
        full = full or self._state.version == NONE or self._snapshot is None
        device, tensors = brought_home(tensors)
        slots = {
            name: (shape, (wire or {}).get(name, dtype)) for name, (shape, dtype) in slots_of(tensors).items()
        }
        with torch.inference_mode(False), torch.no_grad():
            whole = (_whole(name, tensor, slots[name][1]) for name, tensor in tensors.items())
            changes = list(whole if full else self._changes(tensors, slots, device))
        payload = self._payload(version, changes, full)
        self._pending = _Pending(payload, changes, slots, device)
        return payload

    def _payload(self, version: int, changes: Sequence[Change], full: bool) -> Payload:
        state = self._state
        lineage = _draw() if state.aborted else state.lineage
        base, base_lineage = (NONE, 0) if full else (state.version, state.lineage)
        return write_payload(
            version, base, changes, lineage=lineage, base_lineage=base_lineage, header=self._header
        )

    def commit(self) -> None:
        """Move to the version of the last `diff`, whose payload was sent.

        Raises:
            RuntimeError: there was no `diff`.

        Example:
            >>> tracker = dte_dist.DeltaTracker()
            >>> payload = tracker.diff({"w": torch.zeros(3)}, version=1)
            >>> tracker.commit()  # the payload was sent
            >>> tracker.version
            1
        """
        if self._pending is None:
            raise RuntimeError("there is nothing to commit: call diff first")
        pending, payload = self._pending, self._pending.payload
        self._state.version = NONE  # if the copy cannot be written, everything is sent next
        if self._keep:
            with torch.inference_mode(False), torch.no_grad():
                self._write(pending)
        self._state.advance_to(payload.version, payload.lineage, full=payload.full)
        self._pending = None  # last: until then an interrupt leaves it to `rollback`, which starts a new run

    def rollback(self) -> None:
        """Forget the last `diff`, whose payload may or may not have arrived; the next one contains its
        changes.

        Example:
            >>> tracker, weights = dte_dist.DeltaTracker(), {"w": torch.zeros(1000)}
            >>> payload = tracker.diff(weights, version=1)
            >>> tracker.commit()
            >>> weights["w"][3] = 1
            >>> payload = tracker.diff(weights, version=2)
            >>> tracker.rollback()  # the payload was lost
            >>> weights["w"][5] = 1
            >>> tracker.diff(weights, version=3).tensors["w@delta_idx"].tolist()
            [3, 5]
        """
        if self._pending is not None:
            self._state.aborted = True  # first: an interrupt may come between the two
            self._pending = None
        self._state.roll_back(self._snapshot)

    def _write(self, pending: _Pending) -> None:
        if pending.payload.full:
            self._arrange(pending.slots, pending.device)
        if self._snapshot is None:
            raise RuntimeError("a delta has nothing to start from")
        if not pending.payload.full:
            self._snapshot.commit()
            return
        values = {change.name: flat_bits(change.values) for change in pending.changes}
        for width, space in self._spaces.items():
            for name, start in zip(space.names, space.starts.tolist(), strict=False):
                self._snapshot.bits[width][start : start + len(values[name])].copy_(values[name])

    def _arrange(self, slots: Slots, device: torch.device) -> None:
        """Make room for the bits of these tensors, unless there is."""
        kept = self._snapshot
        if kept is not None and not kept.inconsistent and slots == self._slots and device == kept.device:
            return
        self._snapshot = None
        by_width: dict[int, list[str]] = {}
        for name, (_, dtype) in slots.items():
            by_width.setdefault(dtype.itemsize, []).append(name)
        self._slots, self._spaces = slots, {}
        for width, names in by_width.items():
            starts = starts_of([int(np.prod(slots[name][0], dtype=np.int64)) for name in names])
            self._spaces[width] = _Space(tuple(names), tuple(slots[name][1] for name in names), starts)
        self._snapshot = Snapshot(
            {width: int(space.starts[-1]) for width, space in self._spaces.items()}, device, SEGMENT
        )

    def _changes(self, tensors: Mapping[str, Tensor], slots: Slots, device: torch.device) -> Iterator[Change]:
        refuse_difference(self._slots, slots, what="the tensors pushed before and now")
        if self._snapshot is None:
            raise RuntimeError("a delta has nothing to start from")
        if self._snapshot.device != device:
            self._snapshot.move(device)
        for width, space in self._spaces.items():
            live = LiveSpace(
                FlatTensors([tensors[name] for name in space.names], width, space.starts), space.dtypes
            )
            for index, parts in _found(self._snapshot, live, width, space).items():
                start, stop = space.starts[index : index + 2].tolist()
                whole = (
                    self._snapshot.bits[width][start:stop]
                    .view(space.dtypes[index])
                    .view(tensors[space.names[index]].shape)
                )
                yield self._change(space.names[index], whole, parts)

    def _change(self, name: str, whole: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Change:
        """Return the changes of one tensor in part or whole, whichever the rule says: the bits that the
        snapshot has taken over.
        """
        count, size, numel = (
            sum(len(positions) for positions, _ in parts),
            whole.element_size(),
            whole.numel(),
        )
        if count * (4 + size) > self._ratio * numel * size:
            return Change(name, None, whole.clone())
        positions = torch.cat([positions for positions, _ in parts]).to(index_dtype(numel))
        return Change(name, positions, torch.cat([bits for _, bits in parts]).view(whole.dtype))


def _found(
    known: Snapshot, live: LiveSpace, width: int, space: _Space
) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Return changed positions and bits by tensor, in order; the space is compared across tensor borders."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for changed in itertools.chain.from_iterable(
        known.diff_and_update(live, width, [(0, int(space.starts[-1]))])
    ):
        first, end, positions = changed.first, changed.first + changed.length, changed.listed()
        low, high = (
            int(np.searchsorted(space.starts, first, "right")) - 1,
            int(np.searchsorted(space.starts, end)),
        )
        edges = (space.starts[low : high + 1] - first).clip(0, changed.length).tolist()
        bounds = kernels.on(positions.device).borders(positions, edges)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            here = slice(bounds[index], bounds[index + 1])
            moved = positions[here].to(torch.int64) + (first - int(space.starts[low + index]))
            found.setdefault(low + index, []).append((moved, changed.new[here].clone()))
    return found


def _whole(name: str, tensor: Tensor, dtype: torch.dtype) -> Change:
    """Return a copy of a tensor in the dtype to send; cast in one dimension, as it is when changes are looked
    for.
    """
    if tensor.dtype != dtype:
        return Change(name, None, tensor.detach().reshape(-1).to(dtype).view(tensor.shape))
    bits = tensor.detach().view(BITS[tensor.element_size()])
    return Change(name, None, bits.clone(memory_format=torch.contiguous_format).view(dtype))


def _draw() -> int:
    return secrets.randbits(62) | 1
