"""The bits that receivers are known to hold, and what differs from them now.

A source keeps one array per width for the blocks it contributes, in wire dtype. It is filled by a seed, compared segment by segment
with the live tensors, and written at changed positions only, and only once every receiver has what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.change.flat import BITS
from dte_dist.change.live import LiveSpace

__all__ = ["Detector", "Snapshot"]

Detector = Callable[[Tensor, Tensor], Tensor]
"""A caller's own search for changes: (live bits, known bits) of one segment, 1-D integer views in wire dtype, to the ascending int32
or int64 positions of all elements that may differ. It may name too many elements; one it forgets stays stale. It gets copies.

Example:
    >>> def everywhere(live, known):
    ...     return (live != known).nonzero().view(-1)
    >>> report = delta_broadcast(module, group, detector=everywhere)
"""


class Snapshot:
    """Known bits of one rank's flat spaces.

    Args:
        totals: elements of each width.
        device: of the live tensors, where the snapshot lies too.
        most: most elements of a segment.

    Attributes:
        bits: by width, the known bits; undefined until the first `refresh`.
    """

    def __init__(self, totals: Mapping[int, int], device: torch.device, most: int) -> None:
        self.device = device
        self._kernels = kernels.on(device)
        self.bits = {width: torch.empty(total, dtype=BITS[width], device=device) for width, total in totals.items()}
        room = {width: min(total, most) for width, total in totals.items()}
        self._positions = torch.empty(max(room.values(), default=0), dtype=torch.int32, device=device)
        self._found = torch.empty(max((width * n for width, n in room.items()), default=0), dtype=torch.uint8, device=device)

    def move(self, device: torch.device) -> None:
        """Move to another device, as the live tensors did."""
        self.device, self._kernels = device, kernels.on(device)
        self.bits = {width: bits.to(device) for width, bits in self.bits.items()}
        self._positions, self._found = self._positions.to(device), self._found.to(device)

    def changes(self, live: LiveSpace, width: int, first: int, length: int, detector: Detector | None = None) -> tuple[Tensor, Tensor]:
        """Return the sorted positions (int32, counted from `first`) that differ from the snapshot, and their live bits.

        Both are views of buffers that the next call uses again. `detector` is the caller's own search, None compares all.

        Raises:
            ValueError: the caller's detector returned something else than ascending positions of the segment.
        """
        known = self.bits[width][first : first + length]
        found = self._found[: length * width].view(BITS[width])
        if detector is None:
            count = self._kernels.diff(live.flat, first, first + length, known, self._positions, found)
            return self._positions[:count], found[:count]
        self._kernels.read(live.flat, first, found)
        positions = detector(found.clone(), known.clone())
        if positions.dim() != 1 or positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"a detector returns int32 or int64 positions in one dimension, got {positions.dtype}{list(positions.shape)}")
        positions = positions.to(found.device).contiguous()
        if not self._kernels.sorted_below(positions, length):
            raise ValueError(f"a detector returns ascending positions within [0, {length})")
        return positions.to(torch.int32), self._kernels.gather(found, positions)

    def refresh(self, live: LiveSpace, width: int, segments: Iterable[tuple[int, int]]) -> None:
        """Take over the live bits of whole segments, given as (first, length)."""
        for first, length in segments:
            self._kernels.read(live.flat, first, self.bits[width][first : first + length])

    def write(self, width: int, first: int, positions: Tensor | None, bits: Tensor) -> None:
        """Take over bits at positions counted from `first`, or of all elements from `first` on if positions is None."""
        if positions is None:
            self.bits[width][first : first + len(bits)].copy_(bits)
        else:
            self._kernels.put(self.bits[width][first:], positions, bits)
