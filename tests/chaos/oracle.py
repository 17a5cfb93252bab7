"""Whether receivers hold the bits of the sources: plain numpy on what all ranks sent to the parent.

Nothing of the package is used here.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.chaos.model import Bits

__all__ = ["differences", "pack", "whole"]

Full = dict[str, np.ndarray]


def array_of(said: Mapping[str, Any]) -> np.ndarray:
    """Read one tensor as unsigned integers."""
    return np.frombuffer(base64.b64decode(said["data"]), f"u{said['width']}").reshape(said["shape"])


def whole(parts: Sequence[Bits], axis: int = 0) -> Full:
    """Put the parts of all sources, or of all receivers that hold columns, together."""
    return {name: np.concatenate([array_of(part[name]) for part in parts], axis) for name in parts[0]}


def pack(full: Full) -> Bits:
    """Write full tensors for `Model.fill`."""
    return {
        name: {
            "width": array.itemsize,
            "shape": list(array.shape),
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
        }
        for name, array in full.items()
    }


def differences(truth: Full, receivers: Sequence[Bits], cut: str) -> list[str]:
    """Say where receivers hold other bits than `truth`; nothing if they are equal."""
    copies = (
        [("receivers", whole(receivers, 1))]
        if cut == "columns"
        else [(f"receiver {i}", whole([part])) for i, part in enumerate(receivers)]
    )
    found = []
    for who, copy in copies:
        for name, array in truth.items():
            if array.shape != copy[name].shape or array.dtype != copy[name].dtype:
                found.append(
                    f"{who}: {name} is {copy[name].dtype}{copy[name].shape}, not {array.dtype}{array.shape}"
                )
            elif (wrong := np.argwhere(array != copy[name])).size:
                found.append(
                    f"{who}: {name} differs in {len(wrong)} of {array.size} elements, as {wrong[0].tolist()}"
                )
    return found
