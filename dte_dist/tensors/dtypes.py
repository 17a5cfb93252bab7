"""Which element types can be sent, and what they are called between ranks.

Bits are compared and moved as whole integers of 1, 2, 4 or 8 bytes, so every torch dtype of those widths
works alike. complex128 has 16 bytes and is looked at as pairs of float64. All others are refused by name:
quantised tensors, whose scales live elsewhere, and types narrower than a byte.
"""

from __future__ import annotations

import re
from typing import Final

import torch

from dte_dist.errors import LayoutMismatch

__all__ = ["DTYPES", "dtype_name"]

_WHOLE_BYTES: Final = re.compile(
    r"bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|float8_\w+|float4_e2m1fn_x2|complex(32|64)"
)

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and _WHOLE_BYTES.fullmatch(str(dtype).removeprefix("torch."))
}
"""The dtypes that can be sent, by the name that travels in manifests."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(slot: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype in manifests.

    Raises:
        LayoutMismatch: elements of this dtype cannot be sent; names the slot.

    Example:
        >>> dtype_name("w", torch.bfloat16)
        'bfloat16'
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise LayoutMismatch(
            f"elements of {dtype} cannot be sent: quantised types and types below a byte "
            "have no bits of their own",
            tensor=slot,
            hint="give the integers and scales behind it as tensors of their own, or "
            "leave it out with select",
        )
    return name
