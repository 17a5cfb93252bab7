"""What a source would send now: its flat space of one width, in wire dtype, read from the live tensors.

Where the wire dtype is the dtype of the tensor, the live memory itself is looked at. Where it is not (fp32 master weights, bf16 on
the wire), a window is cast into a small buffer first: the patch is what differs *after* the cast, never before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dte_dist.change.flat import BITS, FlatTensors

__all__ = ["LiveSpace"]


class LiveSpace:
    """Local tensors of one width on the wire, laid end to end.

    Args:
        flat: the local tensors as they are now, of one device; its width is that of an element on the wire.
        dtypes: of each on the wire, all of one element size.
    """

    def __init__(self, flat: FlatTensors, dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes = dtypes
        self._width = flat.width
        self._flat = flat
        self._cast = [tensor.dtype for tensor in flat.tensors] != list(dtypes)

    def window(self, begin: int, end: int, scratch: Tensor) -> tuple[FlatTensors, int]:
        """Return a table that holds elements [begin, end) in wire dtype, and the position of `begin` in it.

        Args:
            begin, end: range of the flat space.
            scratch: uint8 buffer of at least (end - begin) * width bytes; may be used, so a window ends with the next.
        """
        if not self._cast:
            return self._flat, begin
        bits = scratch[: (end - begin) * self._width].view(BITS[self._width])
        done = 0
        with torch.no_grad():
            for index, low, high in self._flat.spans(begin, end):
                tensor = self._flat.tensors[index].detach()
                bits[done : done + high - low].view(self._dtypes[index]).copy_(tensor.reshape(-1)[low:high])
                done += high - low
        return FlatTensors((bits,), self._width), 0
