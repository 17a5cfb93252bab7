"""A sender's side of an engine over a transport: what leads from the version committed last to the next, as
named tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dte_dist.codec.header import NONE
from dte_dist.codec.named_tensors import Change, Payload, check_version, refuse_reserved, write_payload
from dte_dist.detect.snapshot import Snapshot
from dte_dist.errors import VersionReplay
from dte_dist.layout import LiveTensors
from dte_dist.layout.named import NamedTensors, named, read_named, refuse_difference, slots_of
from dte_dist.plan.chunks import Chunk
from dte_dist.plan.sender_space import SenderSpace
from dte_dist.report import Phases
from dte_dist.sync.named_changes import NamedTensorBuilder, whole_part
from dte_dist.sync.version import VersionState
from dte_dist.sync.versioned_snapshot import VersionedSnapshot

__all__ = ["DeltaTracker"]


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
        self._ratio = sparse_bytes_ratio
        self._keep = keep
        self._header = header
        self._state = VersionState(lineage=_draw())
        self._source: VersionedSnapshot | None = None
        self._space: SenderSpace | None = None
        self._pending: Payload | None = None

    @property
    def version(self) -> int:
        """The version committed last, from which the next delta starts; -1 if there is none, or its bits are
        not kept any more, as after a full `diff`: the next payload is full then.

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
            ValueError: an argument makes no sense.
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
        _refuse_options(full, wire)
        self._refuse_old(version)
        tensors = named(named_tensors)
        refuse_reserved(tensors)
        own = slots_of(tensors)
        slots = {name: (shape, (wire or {}).get(name, dtype)) for name, (shape, dtype) in own.items()}
        space = self._space
        if space is None or space.slots != slots:  # neither asks for the order
            space = SenderSpace.of_whole(slots)
        in_order = {name: tensors[name] for name in space.slots}
        return self.diff_space(read_named(in_order), space, version, full=full)

    def diff_space(
        self, local: LiveTensors, space: SenderSpace, version: int, *, full: bool = False
    ) -> Payload:
        """Do what `diff` does, for tensors that have been read.

        Args:
            local: the tensors, in the order of the parts.
            space: what is sent of them.
            version, full: as for `diff`.

        Example:
            >>> from dte_dist.layout.named import read_named, slots_of
            >>> from dte_dist.plan.sender_space import SenderSpace
            >>> tensors = {"w": torch.zeros(3)}
            >>> space = SenderSpace.of_whole(slots_of(tensors))
            >>> dte_dist.DeltaTracker().diff_space(read_named(tensors), space, version=1).full
            True
        """
        self.rollback()
        self._refuse_old(version)
        full = full or self._state.version == NONE or self._source is None
        with torch.inference_mode(False), torch.no_grad():
            changes = self._everything(local, space) if full else self._changes(local, space)
        state = self._state
        lineage = _draw() if state.aborted else state.lineage
        base, base_lineage = (NONE, 0) if full else (state.version, state.lineage)
        self._pending = write_payload(
            version, base, changes, lineage=lineage, base_lineage=base_lineage, header=self._header
        )
        return self._pending

    def _refuse_old(self, version: int) -> None:
        check_version(version)
        if version <= self._state.newest:
            raise VersionReplay(
                "the version is not newer than the one pushed last",
                expected=f"> {self._state.newest}",
                got=version,
                hint="count upwards",
            )

    def _everything(self, local: LiveTensors, space: SenderSpace) -> Sequence[Change]:
        """Take over all bits; return them by part, copied if the snapshot is kept."""
        source = self._source
        if not self._keep:
            source = _source(space, VersionState())
        elif source is None or space is not self._space:
            source, self._space = _source(space, self._state), space
            self._source = source
        source.take_over_all(local, Phases())
        known = source.held()
        found = dict[str, Tensor]()
        for held in space.widths.values():
            for number, part in enumerate(held.parts):
                whole = whole_part(known, held, number)
                found[part.name] = whole.clone() if self._keep else whole
        nothing = {
            name: torch.empty(part.block.shape, dtype=part.slot.torch_dtype, device=local.device)
            for name, part in space.parts.items()
            if name not in found
        }
        return [Change(name, None, found[name] if name in found else nothing[name]) for name in space.parts]

    def _changes(self, local: LiveTensors, space: SenderSpace) -> Sequence[Change]:
        if self._source is None or self._space is None:
            raise RuntimeError("a delta has nothing to start from")
        refuse_difference(self._space.slots, space.slots, what="the tensors pushed before and now")
        builder = NamedTensorBuilder(self._space, self._source.open(local.device), self._ratio)
        self._source.take_over_changes(local, builder, Phases())
        return builder.collect()

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
        payload = self._pending
        self._state.version = NONE  # if the snapshot cannot be settled, everything is sent next
        if self._source is not None:
            self._source.settle()
        self._state.advance_to(payload.version, payload.lineage, full=payload.full)
        # Last: until then an interrupt leaves it to `rollback`, which draws a new lineage.
        self._pending = None

    def rollback(self) -> None:
        """Forget the last `diff`, whose payload may or may not have arrived; the next one contains its
        changes. After a full one the next is full, too.

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
        if self._source is not None:
            self._source.rollback()

    @property
    def _snapshot(self) -> Snapshot | None:
        return None if self._source is None else self._source.snapshot


def _refuse_options(full: bool, wire: Mapping[str, torch.dtype] | None) -> None:
    """Refuse options of a diff that make no sense."""
    if not isinstance(full, bool):
        raise ValueError(f"full is True or False, not {full!r}")
    is_mapping = isinstance(wire, Mapping) and all(
        isinstance(name, str) and isinstance(dtype, torch.dtype) for name, dtype in wire.items()
    )
    if wire is not None and not is_mapping:
        raise ValueError(f"wire is a mapping from names to dtypes, or None, not {wire!r}")


def _source(space: SenderSpace, state: VersionState) -> VersionedSnapshot:
    """Return a source that sends all parts, with nothing in its snapshot yet."""
    spaces = {width: held.held for width, held in space.widths.items()}
    chunks = [Chunk(number, width, 0, each.numel) for number, (width, each) in enumerate(spaces.items())]
    return VersionedSnapshot(spaces, space.dtypes(), chunks, state)


def _draw() -> int:
    return secrets.randbits(62) | 1
