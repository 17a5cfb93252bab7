"""A receiver's side of the version chain: frames are checked and staged as they came, in the positions of
their sender; after the vote all of them are translated and written in one pass, or none is.

1. `begin` finds the live tensors of this sync (`sync.versioned_copy`).
2. `take` checks a frame to the last bit and stages it (a delta), or writes it straight into place (a seed).
   The first frame of a seed finds the live tensors once more, and keeps their memory until the end: it may
   come long after `begin`. The first error is kept in `error` and the rest of the sync is only drained, so
   that the ranks stay in step.
3. `apply`, after the vote, writes what is staged; `commit` moves to the new version; `rollback` forgets what
   is staged.

Where frames ask for it, the positions of the last delta stay known (`codec.previous_delta`), for the next one
to count on.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dte_dist.codec import FrameHead, PreviousDelta, Segment, read_frame
from dte_dist.errors import FrameError
from dte_dist.layout import Layout, LiveTensors
from dte_dist.plan.index_map import build_index_maps
from dte_dist.plan.model_map import ModelMap
from dte_dist.sync.versioned_copy import IndexMaps, VersionedCopy
from dte_dist.tensors.flat import FlatTensors

__all__ = ["Receiver"]


class Receiver(VersionedCopy):
    """The state of one receiver between syncs.

    Args:
        layout: where the live tensors are.
        model, rank: which blocks this rank holds, and what every source sends.

    Attributes:
        error: the first error of this sync, or None.
        index_maps: tables from the sources' own spaces.
    """

    def __init__(self, layout: Layout, model: ModelMap, rank: int) -> None:
        manifest = layout.manifest
        names = [entry.name for entry in manifest.entries]
        super().__init__(model.receiver_spaces[rank], names, ties=manifest.ties)
        self._layout = layout
        self.error: Exception | None = None
        self.index_maps: IndexMaps = {
            width: {
                source: build_index_maps(spaces[width], space)
                for source, spaces in model.source_spaces.items()
                if width in spaces
            }
            for width, space in self._spaces.items()
        }
        self._tables: IndexMaps = self.index_maps
        self._history = PreviousDelta()
        self._is_seeded = False

    def begin(self, index_maps: IndexMaps | None = None) -> None:
        """Find the live tensors, as they are at this moment; nothing is staged yet.

        Args:
            index_maps: by width and source, tables from the space that frames count in; None for the sources'
                own spaces.
        """
        self._history.discard()
        self.error, self._is_seeded = None, False
        self._tables = self.index_maps if index_maps is None else index_maps
        self.begin_with(self._read, self._tables)

    def _read(self) -> LiveTensors:
        return self._layout.read(watch=True)

    def live(self) -> dict[int, FlatTensors]:
        """Return the live tensors by width, each in the order of this receiver's space."""
        return self.flat_tensors(self._layout.read())

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
        # Elsewhere than on the CPU, to check a stream is to read it.
        segments = read_frame(frame, expected, self._history, packed=frame.is_cpu)
        if expected.width not in self._targets:
            return
        if expected.seed:
            self._place(segments, expected)
            return
        for segment in segments:
            self.stage(expected.width, expected.source, segment)

    def _place(self, segments: Sequence[Segment], expected: FrameHead) -> None:
        """Write a seed into place; it must be the whole chunk."""
        if (
            any(segment.positions is not None for segment in segments)
            or sum(segment.length for segment in segments) != expected.length
        ):
            raise FrameError(
                "a seed is not the whole chunk", expected=f"{expected.length} elements", hint="sync again"
            )
        self.begin_to_write()
        if not self._is_seeded:
            # Others may have written since `begin`, or moved tensors: all is overwritten where it is now.
            self.locate(self._read, self._tables)
            self._is_seeded = True
        target = self._targets[expected.width]
        for segment in segments:
            target.place(expected.source, segment.first, segment.values)
        self.write_back()

    def is_written(self) -> bool:
        """Return whether somebody wrote to the live copy, or moved it, since `begin`; it has no version
        then, and waits for a seed.
        """
        written = super().is_written()
        if written:
            self._history.discard()
        return written

    def commit(self, version: int, lineage: int, *, full: bool = False) -> None:
        """Move to `version`, and keep the positions of the delta for the next one.

        Raises:
            DeltaError: as `check_own`, if that was not asked before.
        """
        self.confirm()
        self._history.commit(version, lineage)
        super().commit(version, lineage, full=full)

    def rollback(self) -> None:
        """Forget what is staged."""
        super().rollback()
        self._history.discard()
        self.error, self._is_seeded = None, False
