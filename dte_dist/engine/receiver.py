"""A receiver's side of the version chain: frames are checked, translated and staged, then applied all or not at all.

1. `begin` finds the live tensors of this sync. If somebody else wrote to them since the last commit, they have no version.
2. `take` checks a frame to the last bit and stages it (a delta), or writes it straight into place (a seed).
   The first error is kept in `error` and the rest of the sync is only drained, so that the ranks stay in step.
3. `apply`, after the vote, writes what is staged. A receiver that fails inside it is dirty: it has no version until it is seeded.
4. `commit` moves to the new version; `rollback` forgets what is staged.

Where frames ask for it, the positions of the last delta stay known (`codec.history`), for the next one to count on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dte_dist.change.flat import FlatTensors
from dte_dist.codec import FrameHead, History, Segment, read_frame
from dte_dist.engine.chain import NONE, Chain
from dte_dist.errors import FrameError
from dte_dist.layout import Layout, LocalTensors
from dte_dist.patch import StagedPatch, Target
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.remap import Remap, build_remaps

__all__ = ["ReceiverState"]


class ReceiverState:
    """What one receiver holds between syncs.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank holds, and what every source sends.

    Attributes:
        error: the first error of this sync, or None.
        remaps: tables from the sources' own spaces.
        disturbed: True if somebody else wrote to the live copy, or replaced it, since the last commit: it is seeded then.
        chain: version and lineage; version NONE means never seeded, being seeded, or dirty.
    """

    def __init__(self, layout: Layout, model: ModelMap, rank: int) -> None:
        self._layout = layout
        self.chain = Chain()
        self.error: Exception | None = None
        self._spaces = model.receiver_spaces[rank]
        self.remaps: Mapping[int, Mapping[int, Sequence[Remap]]] = {
            width: {
                source: build_remaps(spaces[width], space) for source, spaces in model.source_spaces.items() if width in spaces
            }
            for width, space in self._spaces.items()
        }  # fmt: skip
        self._staged = StagedPatch()
        self._history = History()
        self._targets: Mapping[int, Target] = {}
        self._local: LocalTensors | None = None
        self.disturbed = False

    def begin(self, remaps: Mapping[int, Mapping[int, Sequence[Remap]]] | None = None) -> None:
        """Find the live tensors, as they are at this moment; nothing is staged yet.

        Args:
            remaps: by width and source, tables from the space that frames count in; None for the sources' own spaces.
        """
        self._staged.clear()
        self._history.forget()
        self.error = None
        local = self._local = self._layout.read()
        self.disturbed = self.chain.version != NONE and self.chain.marks not in (None, local.marks())
        if self.disturbed:
            self.chain.version = NONE
        tables = self.remaps if remaps is None else remaps
        self._targets = {
            width: Target(FlatTensors.part(local, space.pieces.entry, width, space.starts), tables[width])
            for width, space in self._spaces.items()
        }

    def take(self, frame: Tensor, expected: FrameHead) -> None:
        """Check a frame and stage it, or write it into place if it is a seed; never raises, see `error`.

        What is staged are views of the frame, which is to stay as it is until `commit` or `rollback`.
        """
        if self.error is not None:
            return
        try:
            self._take(frame, expected)
        except Exception as error:  # it is raised on all ranks after the vote
            self.error = error

    def _take(self, frame: Tensor, expected: FrameHead) -> None:
        segments = read_frame(frame, expected, self._history, packed=frame.is_cpu)  # elsewhere to check a stream is to read it
        target = self._targets.get(expected.width)
        if target is None:
            return
        if expected.seed:
            self._place(target, segments, expected)
        else:
            for segment in segments:
                self._staged.add(target, expected.source, segment)

    def _place(self, target: Target, segments: Sequence[Segment], expected: FrameHead) -> None:
        """Write a seed into place; it must be the whole chunk."""
        if any(segment.positions is not None for segment in segments) or sum(segment.length for segment in segments) != expected.length:
            raise FrameError("a seed is not the whole chunk", expected=f"{expected.length} elements", fix="sync again")
        self.chain.version = NONE
        for segment in segments:
            target.place(expected.source, segment.first, segment.values)

    def apply(self) -> None:
        """Write what is staged into the live tensors; without a version from here to `commit`, and dirty if it fails."""
        self.chain.version = NONE
        self._staged.apply(self._targets)

    def commit(self, version: int, stream: int, *, full: bool = False) -> None:
        """Move to `version`."""
        self.chain.move(version, stream, full=full)
        self._history.commit(version, stream)
        self.chain.marks = self._local.marks() if self._local is not None else None
        self.rollback()

    def rollback(self) -> None:
        """Forget what is staged."""
        self._staged.clear()
        self._history.forget()
        self._targets = {}
        self._local = None
        self.error = None
