"""The live tensors of a source as they would be sent now: its flat space of one width, in wire dtype, read
from the live tensors.

Where the wire dtype is the dtype of the tensor, the live memory itself is looked at. Where it is not (fp32
master weights, bf16 on the wire), it is cast as it is read: the patch is what differs *after* the cast, never
before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dte_dist.tensors.flat import FlatTensors

__all__ = ["LiveSpace"]


class LiveSpace:
    """Local tensors of one width on the wire, laid end to end.

    Args:
        flat: the local tensors as they are now, of one device; its width is that of an element on the wire.
        dtypes: of each on the wire, all of one element size.

    Attributes:
        flat: the same tensors, read as these dtypes; only to be read.
    """

    __slots__ = ("flat",)

    def __init__(self, flat: FlatTensors, dtypes: Sequence[torch.dtype]) -> None:
        self.flat = flat.read_as(dtypes)
