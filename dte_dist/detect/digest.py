"""Digests of tensors: 64 bits for each, a sum over its elements of a hash of position and bits.

Since it is a sum, parts of a tensor that several ranks hold are digested by each of them and added: what the
digest says depends on the elements and on where they belong, not on who holds them. Sums wrap around modulo
2^64; docs/protocol.md has the hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from dte_dist import kernels
from dte_dist.kernels import BITS, Tables
from dte_dist.kernels.cpu.threads import parallel_for
from dte_dist.tensors.flat import FlatTensors

__all__ = ["Space", "digests", "own_digests"]

_CHUNK: Final = 1 << 20
"""Elements that are copied at once, to be hashed while they are in the cache."""

_DEVICE_CHUNK: Final = 1 << 24
"""The same on an accelerator, which is waited for once a chunk."""


Space = tuple[Sequence[Tables], np.ndarray]
"""Another space: tables from the positions of some tensors to its own, and int64[pieces + 1], where each of
its pieces begins.
"""


def digests(flat: FlatTensors, spaces: Sequence[Space]) -> list[np.ndarray]:
    """Return what `flat` adds to the digest of every piece of some other spaces; each element is read once.

    Args:
        flat: tensors of one element width, read as the dtypes that it says.
        spaces: elements that the tables of a space drop are left out; positions are hashed as counted from
            where their piece begins.

    Returns:
        For each space int64[pieces].

    Example:
        >>> flat = FlatTensors([torch.zeros(3), torch.ones(2)], 4)
        >>> [(zeros, ones)] = digests(flat, [([kernels.Identity(5)], flat.starts)])
        >>> bool(zeros == ones)
        False
    """

    def part(low: int, high: int) -> list[np.ndarray]:
        sums = [np.zeros(len(starts) - 1, np.int64) for _, starts in spaces]
        kernel = kernels.on(flat.device)
        room = kernels.empty(min(chunk, high - low), BITS[flat.width], flat.device)
        for first in range(low, high, chunk):
            bits = room[: min(chunk, high - first)]
            kernel.read(flat, first, bits)
            for (index_maps, starts), added in zip(spaces, sums, strict=True):
                for index_map in index_maps:
                    kernel.digest(index_map, first, bits, starts, added)
        return sums

    is_cpu = flat.device.type == "cpu"
    chunk = _CHUNK if is_cpu else _DEVICE_CHUNK
    parts = parallel_for(part, len(flat), least=_CHUNK, align=_CHUNK) if is_cpu else [part(0, len(flat))]
    return [np.stack(sums).sum(axis=0, dtype=np.int64) for sums in zip(*parts, strict=True)]


def own_digests(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Return int64[tensors]: the digest of each, by the bits that it holds, in row-major order.

    Args:
        tensors: any shapes, strides and dtypes of 1, 2, 4 or 8 bytes, on any devices.

    Example:
        >>> one, other, third = own_digests([torch.zeros(3), torch.tensor([0.0, -0.0, 0.0]), torch.zeros(3)])
        >>> bool(one == third), bool(one == other)
        (True, False)
    """
    found = np.zeros(len(tensors), np.int64)
    kinds: dict[tuple[torch.device, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.element_size()), []).append(index)
    for (_, width), indices in kinds.items():
        flat = FlatTensors([tensors[index] for index in indices], width)
        found[indices] = digests(flat, [([kernels.Identity(len(flat))], flat.starts)])[0]
    return found
