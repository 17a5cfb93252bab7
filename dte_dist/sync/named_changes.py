"""Changes of flat spaces as changes of named tensors, and back.

1. `NamedTensorBuilder` takes what a source finds in its own spaces. It sends each part in part or whole,
   whichever is fewer bytes, and counts positions in the whole slot (`plan.sender_space`).
2. `check_changes` holds what a payload says against the parts of its sender.
3. `segments_of` turns changes into segments of the sender's spaces, which a receiver stages like those of a
   frame. A position that the sender does not hold is refused.

Positions are translated in one go for all parts of a width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import Segment
from dte_dist.codec.named_tensors import Change, flat_bits, index_dtype
from dte_dist.detect.detector import Changed
from dte_dist.detect.snapshot import Snapshot
from dte_dist.errors import FrameError
from dte_dist.layout.named import refuse_difference
from dte_dist.plan.index_map import IndexMap
from dte_dist.plan.sender_space import PartSpace, SenderSpace

__all__ = ["NamedTensorBuilder", "check_changes", "segments_of", "translate"]

_WINDOW: Final = 1 << 30
"""Elements whose positions are translated at once: counted from the first, they fit int32."""

_MANY: Final = 1 << 15
"""Changes of one tensor that are written by themselves; fewer are written together with those of others."""

_AGAIN: Final = "nothing of it was applied; push again, in full if it stays"


@dataclass(slots=True)
class _Found:
    """Changes of one width: int64 positions in what the source holds, and their bits."""

    positions: list[Tensor] = field(default_factory=list)
    bits: list[Tensor] = field(default_factory=list)


class NamedTensorBuilder:
    """Takes the changes of one version, in order, and makes changes of named tensors of them.

    Args:
        space: of the sender.
        known: its snapshot.
        sparse_bytes_ratio: a part of n elements of s bytes, k of them changed, is sent in part if
            k * (4 + s) <= sparse_bytes_ratio * n * s.
    """

    def __init__(self, space: SenderSpace, known: Snapshot, sparse_bytes_ratio: float) -> None:
        self._space = space
        self._known = known
        self._ratio = sparse_bytes_ratio
        self._found: dict[int, _Found] = {}

    def add(self, width: int, changed: Changed) -> None:
        """Add what changed in a range of the source's space of one width; it is copied."""
        found = self._found.setdefault(width, _Found())
        found.positions.append(changed.listed().to(torch.int64) + changed.first)
        found.bits.append(changed.new.clone())

    def collect(self) -> list[Change]:
        """Return the changes by width and part; the tensors are nobody else's."""
        return [change for width, found in self._found.items() for change in self._of_width(width, found)]

    def _of_width(self, width: int, found: _Found) -> Iterator[Change]:
        space = self._space.widths[width]
        positions = torch.cat(found.positions)
        bits = torch.cat(found.bits)
        bounds = kernels.on(positions.device).searchsorted(positions, space.held.starts.tolist())
        counts = np.diff(bounds)
        changed = np.flatnonzero(counts).tolist()
        in_slots = _in_slots(space, positions, counts)
        for number in changed:
            part = space.parts[number]
            here = slice(bounds[number], bounds[number + 1])
            numel = part.block.numel
            dtype = part.slot.torch_dtype
            if counts[number] * (4 + width) > self._ratio * numel * width:
                yield Change(part.name, None, whole_part(self._known, space, number).clone())
            else:
                where = in_slots[here].to(index_dtype(part.slot.numel))
                yield Change(part.name, where, bits[here].view(dtype))


def whole_part(known: Snapshot, space: PartSpace, number: int) -> Tensor:
    """Return the known bits of a part as the sender holds it; a view of the snapshot."""
    part = space.parts[number]
    start, stop = space.held.starts[number : number + 2].tolist()
    return known.bits[space.held.width][start:stop].view(part.slot.torch_dtype).view(part.block.shape)


def _in_slots(space: PartSpace, positions: Tensor, counts: np.ndarray) -> Tensor:
    """Return positions in what is held as positions in the slots, each counted from its slot's start."""
    starts = space.held.starts
    if space.is_whole and len(space.parts) == 1:
        return positions
    if not space.is_whole:
        positions, _ = translate(space.outward, positions, positions, space.held.numel)
        starts = space.whole.starts
    return positions - _repeat(starts[:-1], counts, positions.device)


def _repeat(values: np.ndarray, counts: np.ndarray, device: torch.device) -> Tensor:
    """Return values[n], counts[n] times, for each n."""
    return torch.from_numpy(np.repeat(values, counts)).to(device)


def translate(
    index_maps: Sequence[IndexMap], positions: Tensor, bits: Tensor, total: int
) -> tuple[Tensor, Tensor]:
    """Translate positions of one space into another; what the other does not hold is dropped.

    Args:
        index_maps: between spaces in which no element comes twice.
        positions: int64, strictly ascending, below `total`.
        bits: an integer of any width for each position.

    Returns:
        int64 positions, and the bits of each.
    """
    kernel = kernels.on(positions.device).translate
    found = [
        kernel(index_map, first, (positions[here] - first).to(torch.int32), bits[here])
        for first, here in _windows(positions, total)
        for index_map in index_maps
        if index_map.meets(first, min(first + _WINDOW, total))
    ]
    if len(found) == 1:
        return found[0]
    nothing = positions[:0], bits[:0]
    where, held = zip(nothing, *found, strict=True)
    return torch.cat(where), torch.cat(held)


def _windows(positions: Tensor, total: int) -> list[tuple[int, slice]]:
    """Return (first position, places) of parts whose positions, counted from the first, fit int32; waits if
    there are several.
    """
    if total <= _WINDOW:
        return [(0, slice(0, len(positions)))]
    firsts = torch.arange(0, total + _WINDOW, _WINDOW, device=positions.device)
    bounds = torch.searchsorted(positions, firsts).tolist()
    windows = enumerate(pairwise(bounds))
    return [(number * _WINDOW, slice(begin, end)) for number, (begin, end) in windows if end > begin]


def check_changes(
    changes: Sequence[Change],
    space: SenderSpace,
    *,
    needed: Collection[str],
    what: str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check what `read_payload` returned against the parts of its sender.

    Args:
        changes: of one payload.
        space: of its sender.
        needed: names that must be there: for a full payload those that the receiver holds something of.
        what: the two that are compared, for the text of an error.
        ranks: the sender, for the same.

    Raises:
        LayoutMismatch: names, shapes or dtypes differ; names the tensor.
        FrameError: a position is outside its tensor, or of the wrong dtype; names the tensor.
    """
    slots = space.slots
    said = {}
    for change in changes:
        whole = change.positions is None or change.name not in slots
        shape = tuple(change.values.shape) if whole else slots[change.name][0]  # a pair says nothing of it
        said[change.name] = shape, change.values.dtype
    expected = {name: slots[name] for name in slots if name in said or name in needed}
    refuse_difference(expected, said, what=what, ranks=ranks)
    _check_positions(changes, {name: part.slot.numel for name, part in space.parts.items()})


def _check_positions(changes: Sequence[Change], numels: Mapping[str, int]) -> None:
    """Check dtypes of positions and the last of each; waits for an accelerator once."""
    for change in changes:
        if change.positions is not None and change.positions.dtype is not index_dtype(numels[change.name]):
            wanted = index_dtype(numels[change.name])
            raise _bad("positions of another dtype", change.name, wanted, change.positions.dtype)
    pairs = [(change.name, change.positions) for change in changes if change.positions is not None]
    held = [(name, positions) for name, positions in pairs if len(positions)]
    if not held:
        return
    lasts = torch.stack([positions[-1].to(torch.int64) for _, positions in held]).tolist()
    for (name, _), last in zip(held, lasts, strict=True):
        if last >= numels[name]:
            raise _bad("a position is outside its tensor", name, f"below {numels[name]}", last)


def segments_of(changes: Sequence[Change], space: SenderSpace) -> Iterator[tuple[int, Segment]]:
    """Yield the width and a segment of the sender's space for what changed; `check_changes` comes before.

    Raises:
        FrameError: a position is one that the sender does not hold; names the first tensor.
    """
    by_name = {change.name: change for change in changes}
    for width, held in space.widths.items():
        numbers = [number for number, part in enumerate(held.parts) if part.name in by_name]
        found = [(number, by_name[held.parts[number].name]) for number in numbers]
        starts = held.held.starts
        for number, change in found:
            if change.positions is None:
                yield (
                    width,
                    Segment(int(starts[number]), change.values.numel(), None, flat_bits(change.values)),
                )
        pairs = []
        for number, change in found:
            alone = _alone(held, number, change)
            if alone is not None:
                yield width, alone
            elif change.positions is not None:
                pairs.append((number, change))
        if pairs:
            for segment in _sparse(held, *zip(*pairs, strict=True)):
                yield width, segment


def _alone(space: PartSpace, number: int, change: Change) -> Segment | None:
    """Return the many changes of one whole tensor as a segment of their own, which needs no copy of them."""
    positions = change.positions
    if positions is None or len(positions) < _MANY or positions.dtype != torch.int32 or not space.is_whole:
        return None
    start, stop = space.held.starts[number : number + 2].tolist()
    return Segment(start, stop - start, positions, flat_bits(change.values))


def _sparse(space: PartSpace, numbers: Sequence[int], changes: Sequence[Change]) -> Iterator[Segment]:
    """Yield segments of what the sender holds for changes whose positions count in slots."""
    positions = [change.positions for change in changes if change.positions is not None]
    counts = np.array([len(each) for each in positions], np.int64)
    bits = torch.cat([flat_bits(change.values) for change in changes])
    starts = (space.held if space.is_whole else space.whole).starts[np.array(numbers, np.int64)]
    flat = torch.cat([each.to(torch.int64) for each in positions])
    flat = flat + _repeat(starts, counts, flat.device)
    if not space.is_whole:
        count = len(flat)
        flat, bits = translate(space.inward, flat, bits, space.whole.numel)
        if len(flat) != count:
            what = "a sender writes elements that it does not send by the plan"
            raise _bad(what, changes[0].name, f"{len(flat)} positions", f"{count}")
    total = space.held.numel
    for first, here in _windows(flat, total):
        length = min(_WINDOW, total - first)
        yield Segment(first, length, (flat[here] - first).to(torch.int32), bits[here])


def _bad(what: str, name: str, expected: object, got: object) -> FrameError:
    return FrameError(what, tensor=name, expected=expected, got=got, hint=_AGAIN)
