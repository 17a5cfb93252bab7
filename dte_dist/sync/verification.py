"""Do receivers hold the bits that sources believe they hold? Digests of live bits, compared across ranks.

A verification is a meeting of all ranks of a channel, like a sync (`sync.protocol`), and may end one
(`verify_interval=`):

1.   Sources digest their snapshot, which is what the receivers are to hold, for every kind of receiver (those
     placed alike): for each tensor the elements that such a receiver has, by their places there. Then their
     live tensors, to see what moved since.
2.   Receivers digest their live tensors. All of it is one read of the weights on every rank, and one of the
     snapshot on a source.
3. o One row per rank with all digests goes round. Those of the sources add up, whoever holds which part.
4.   All ranks compare, and come to the same report. A receiver that differs gives up its version: the next
     sync seeds it.

The step with a ring (o) is an exchange.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dte_dist import kernels
from dte_dist.detect.digest import Space, digests
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.intersections import lanes_of
from dte_dist.plan.model_map import ModelMap
from dte_dist.report import VerifyReport
from dte_dist.sync.control import DIFFERENT
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.source import Source
from dte_dist.sync.version import NONE
from dte_dist.tensors.flat import FlatTensors
from dte_dist.transport.all_or_none import capture, raise_if_any
from dte_dist.transport.communicator import Communicator

__all__ = ["Verifier"]

_MOVED: Final = 0
"""Column of a row: how many shards of a source have moved; the digests follow."""


class Verifier:
    """Compares digests for a channel.

    Args:
        model: who holds what.
        control: the channel's group for rows.
        source, receiver: what this rank is.
    """

    def __init__(
        self, model: ModelMap, control: Communicator, source: Source | None, receiver: Receiver | None
    ) -> None:
        self._model = model
        self._control = control
        self._source = source
        self._receiver = receiver
        self._lane = lanes_of(model.receiver_spaces)
        self._kinds = {lane: model.receiver_spaces[rank] for rank, lane in reversed(self._lane.items())}
        self._slots = {lane: _slots_of(kind) for lane, kind in sorted(self._kinds.items())}
        self._spaces: dict[int, dict[int, Space]] | None = None

    def verify(self, version: int, ranks: Sequence[int], *, live: bool) -> VerifyReport:
        """Compare; all ranks of the channel must call, in step.

        Args:
            version: of the sources' snapshots, the same on all of them; NONE if there is none.
            ranks: receivers that hold it.
            live: sources look at their live tensors, too; these may move while a background sync runs.

        Raises:
            AgreedError: with the error of a rank that could not digest its tensors.
            PeerLost: a rank did not answer.
        """
        begin = time.perf_counter()
        row, error = capture(lambda: self._row(live)) if version != NONE else (None, None)
        table = raise_if_any(
            self._control, error, np.zeros(self._columns(), np.int64) if row is None else row
        )
        different = {rank: names for rank in ranks if (names := self._different(table, rank))}
        if self._receiver is not None and self._control.rank in different:
            self._receiver.state.invalidate(DIFFERENT)
        names = [name for found in different.values() for name in found]
        return VerifyReport(
            version=None if version == NONE else version,
            tensors=len(self._model.slots),
            different=len(set(names)),
            first=min(names, default=None),
            ranks=tuple(different),
            compared=tuple(ranks),
            moved=int(table[:, _MOVED].sum()) if live else None,
            seconds=time.perf_counter() - begin,
        )

    def _different(self, table: np.ndarray, rank: int) -> list[str]:
        """Return the names of tensors whose digests on a receiver are not those of the sources."""
        lane = self._lane[rank]
        first = 1
        for before in range(lane):
            first += len(self._slots[before])
        slots = self._slots[lane]
        expected = table[:, first : first + len(slots)].sum(axis=0, dtype=np.int64)
        begin = self._columns() - max(map(len, self._slots.values()))
        wrong = np.flatnonzero(table[rank, begin : begin + len(slots)] != expected)
        return [self._model.slots[slots[index]].name for index in wrong.tolist()]

    def _columns(self) -> int:
        sizes = [len(slots) for slots in self._slots.values()]
        return 1 + sum(sizes) + max(sizes)

    def _row(self, live: bool) -> np.ndarray:
        """Return what this rank says: shards that moved, digests for every kind of receiver, digests of its
        own copy.
        """
        row = np.zeros(self._columns(), np.int64)
        first = 1
        if self._source is not None:
            row[_MOVED], found = self._of_source(self._source, live)
            for digest in found:
                row[first : first + len(digest)] = digest
                first += len(digest)
        if self._receiver is not None:
            first = len(row) - max(map(len, self._slots.values()))
            for _, flat in sorted(self._receiver.live().items()):
                row[first : first + len(flat.tensors)] = digests(flat, [_itself(flat)])[0]
                first += len(flat.tensors)
        return row

    def _of_source(self, source: Source, live: bool) -> tuple[int, list[np.ndarray]]:
        """Return how many shards have moved, and by lane the digests of what its receivers are to hold."""
        found = {lane: np.zeros(len(slots), np.int64) for lane, slots in self._slots.items()}
        known = source.known()
        moved = 0
        for width, spaces in self._tables(source).items():
            flat = FlatTensors([known[width]], width)
            own = [kernels.Identity(len(flat))], source.spaces[width].starts
            ours, *theirs = digests(flat, [own, *spaces.values()])
            for lane, digest in zip(spaces, theirs, strict=True):
                found[lane][self._places(lane, width)] += digest
            if live:
                moved += int((digests(source.live()[width], [own])[0] != ours).sum())
        return moved, list(found.values())

    def _places(self, lane: int, width: int) -> slice:
        """Return where the pieces of one width stand among those of a kind of receiver."""
        kind = self._kinds[lane]
        first = 0
        for each, space in sorted(kind.items()):
            if each == width:
                return slice(first, first + len(space.pieces))
            first += len(space.pieces)
        return slice(first, first)

    def _tables(self, source: Source) -> Mapping[int, Mapping[int, Space]]:
        """Return, by width and lane, the space of what a source and a kind of receiver have in common; made
        once.
        """
        if self._spaces is None:
            self._spaces = {
                width: {
                    lane: (build_index_maps(space, kind[width]), kind[width].starts)
                    for lane, kind in sorted(self._kinds.items())
                    if width in kind
                }
                for width, space in source.spaces.items()
            }
        return self._spaces


def _slots_of(kind: Mapping[int, FlatSpace]) -> list[int]:
    """Return the slot of every piece of a kind of receiver, width by width."""
    return [slot for _, space in sorted(kind.items()) for slot in space.pieces.slot.tolist()]


def _itself(flat: FlatTensors) -> Space:
    return [kernels.Identity(len(flat))], flat.starts
