# ruff: noqa: E501
"""The inner loops of dte_dist, one module per kind of device, all with the same functions; those for the CPU
have in addition what is worked out on the host for every device (`best_low`, `choose_planes`), and what
compiles their loops (`kernels.warming`).

`on(device)` returns `kernels.cpu` (numba loops over CPU memory) or `kernels.torch_ops` (plain torch ops, any
device):

| function | does |
|---|---|
| `advance(flat, begin, end, known, positions, old, new) -> int` | compare elements [begin, end) of `flat` with `known`, which is brought up to date; write sorted positions (relative to `begin`; not if everything differs) and the bits before and after; return how many |
| `read(flat, begin, out)` | copy elements [begin, begin + len(out)) of `flat` to `out` |
| `write(flat, begin, bits)` | copy `bits` to elements [begin, begin + len(bits)) of `flat` |
| `scatter(flat, positions, bits)` | write each bit pattern to its position in `flat`; positions in any order, each at most once |
| `put(array, positions, bits)` | the same into one contiguous array |
| `gather(array, positions) -> bits` | the reverse of `put` |
| `borders(positions, starts) -> list[int]` | how many of the ascending positions are below each of `starts` |
| `encode_u16(positions, length) -> Tensor` | blocks of 65536: uint32 counts, then uint16 offsets, as bytes |
| `check_u16(stream, count, length) -> bool` | whether the size, the counts and the order are sound |
| `decode_u16(stream, count, length, positions) -> bool` | the reverse; False if it is not sound |
| `sorted_below(positions, length) -> bool` | strictly increasing, none negative, none >= length |
| `checksum(frame, skip) -> int` | 64 bits over all 8-byte words; word number `skip` counts as zero |

`remaps_on(device)` returns those that need a table of translation (`plan.IndexMap`), from `kernels.cpu_remap`
or `kernels.torch_remap`:

| function | does |
|---|---|
| `translate(index_map, first, positions, bits) -> (positions, bits)` | positions `first + p` of a source's flat space into a receiver's, dropping what it does not hold |
| `place(index_map, first, bits, flat)` | copy dense bits of a source's positions from `first` on to where `flat`, a receiver's space, holds them |
| `fetch(index_map, first, bits, array)` | the reverse: fill `bits` from a receiver's space that is one contiguous array |
| `digest(index_map, first, bits, starts, sums)` | add hashes of dense bits, mixed with their places in a receiver's pieces, to the sums of these pieces |

`codecs_on(device)` returns those of the codecs, from `kernels.cpu_codecs` or `kernels.torch_codecs`;
docs/protocol.md says what the streams are, `kernels.planes` how large they are. Distances are those of bit
patterns in their order, modulo the range of their dtype:

| function | does |
|---|---|
| `encode_ef(positions, length, low) -> stream` | positions below `length`, `low` bits of each as they are |
| `decode_ef(stream, count, length, low) -> (positions, bool)` | the reverse, and whether the stream is sound |
| `encode_bitmap(positions, length)`, `decode_bitmap(stream, count, length)` | the same as a bit for each element |
| `split_again(previous, positions) -> (plane, fresh)` | which of some previous positions are among others, as bits, and which of the others are new |
| `count_again(plane, size)`, `join_again(previous, plane, fresh, count) -> positions` | how many bits are set; the reverse |
| `distances(old, new) -> distances` | how far bits have moved, element by element, as int32 |
| `measure(distances) -> Classes`, `choose_planes(classes, width, zeros) -> Planes` | how many there are of each size, and how they, and as many distances of 0, are best written as planes; `choose_planes` and `best_low` are the host's, `codecs_on("cpu")` |
| `encode_planes(classes, width, plan)`, `decode_planes(stream, count, dtype, plan) -> (distances, bool)` | distances as planes of bits |
| `narrow(distances, dtype)`, `widen(distances)` | int32 distances, which encoders take, to the dtype of bits, and back |
| `count_ulp8(distances)`, `encode_ulp8(distances, width, others)`, `decode_ulp8(stream, count, dtype, escapes)` | distances as a byte each |
| `scatter_add(flat, positions, distances)` | the same in a flat space; int64 positions in any order, each at most once |
| `patch(index_map, first, positions, values, flat, relative, length)` | `translate`, then `scatter` or `scatter_add`; positions may be as `encode_u16` wrote them |
| `moved(flat, positions, distances) -> bits` | what `scatter_add` would write |
| `collect(index_map, first, bits, flat)` | the reverse of `place`: copy to `bits` what `flat` holds of a source's positions from `first` on |
| `add(bits, distances)`, `subtract(bits, known)` | element by element |

`flat` is a `FlatTensors` (tensors/flat.py): many tensors seen as one array of elements of one width;
`advance` and `read` cast those that it says are read as another dtype. Bits are uint8, int16, int32 or int64
by width (`BITS`); positions are int32, and where they count in a whole flat space (`scatter`, `put`,
`gather`, `sorted_below`) also int64. Arrays are 1-D and contiguous.

The CPU kernels split large work over `torch.get_num_threads()` threads (`kernels.threads`); what they write
is what one would write.

The `bool` and `int` of `torch_ops` are tensors of no dimension on the device: `bool(...)` or `int(...)` waits
    for the device, so a caller may collect many and ask once. Only its `advance` (to learn the count), its
    `borders` and its `scatter` (to learn which tensors are touched, and again if the positions are not
    ascending) wait themselves, once a call, and so does `translate` of `torch_remap`, which `place` and
    `fetch` go through.

Whatever writes to a tensor of `flat` moves its version counter by 1, as an in-place op does, and counts that
in `flat.writes`: a counter that has moved further was moved by somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from dte_dist.kernels.identity import Identity
from dte_dist.kernels.table import Table
from dte_dist.kernels.warming import warm

__all__ = [
    "BITS",
    "Flat",
    "Identity",
    "Tables",
    "codecs_on",
    "empty",
    "on",
    "remaps_on",
    "rounds_as_torch",
    "warm",
]

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype that bits of one width are looked at through."""


_MUCH: Final = 4 << 20
"""Bytes from which numpy asks for huge pages."""

_PAGE: Final = 2 << 20
"""Bytes of a huge page."""


class Flat(Protocol):
    """The part of `tensors.flat.FlatTensors` that kernels use; it stands above them and is described there."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...
    @property
    def starts(self) -> np.ndarray: ...
    @property
    def table(self) -> Table: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype] | None: ...
    @property
    def cast(self) -> np.ndarray: ...
    @property
    def writes(self) -> np.ndarray: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def width(self) -> int: ...

    def __len__(self) -> int: ...
    def view(self, index: int) -> Tensor: ...
    def spans(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


class Tables(Protocol):
    """The part of `plan.index_map.IndexMap` that kernels use; it stands above them and is described there."""

    @property
    def begin(self) -> np.ndarray: ...
    @property
    def end(self) -> np.ndarray: ...
    @property
    def shift(self) -> np.ndarray: ...
    @property
    def origin(self) -> np.ndarray: ...
    @property
    def axis(self) -> np.ndarray: ...
    @property
    def axes(self) -> np.ndarray: ...
    @property
    def extent(self) -> np.ndarray: ...
    @property
    def stride(self) -> np.ndarray: ...
    @property
    def segment(self) -> np.ndarray: ...
    @property
    def low(self) -> np.ndarray: ...
    @property
    def high(self) -> np.ndarray: ...
    @property
    def target(self) -> np.ndarray: ...

    def tables(self) -> tuple[np.ndarray, ...]: ...


def empty(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return room for `count` elements, in one dimension.

    Much of it on the CPU comes from numpy, which asks Linux for huge pages, as torch does not: else the first
        write to each page of 4 KiB costs several times what is written.

    Example:
        >>> empty(3, torch.int32).shape
        torch.Size([3])
    """
    size = count * dtype.itemsize
    if size < _MUCH or not _is_cpu(device):
        return torch.empty(count, dtype=dtype, device=device)
    room = np.empty(
        size + 2 * _PAGE, np.uint8
    )  # so that whole pages can begin and end it; what is not touched costs nothing
    first = -room.ctypes.data % _PAGE
    return torch.from_numpy(room[first : first + size]).view(dtype)


@cache
def on(device: torch.device | str) -> ModuleType:
    """Return the module of kernels for tensors of a device.

    The numba loops are imported at the first call for the CPU.

    Example:
        >>> on("cpu").__name__
        'dte_dist.kernels.cpu'
    """
    return _module("cpu" if _is_cpu(device) else "torch_ops")


@cache
def remaps_on(device: torch.device | str) -> ModuleType:
    """Return the module of the kernels `translate`, `place` and `fetch` for tensors of a device."""
    return _module("cpu_remap" if _is_cpu(device) else "torch_remap")


@cache
def codecs_on(device: torch.device | str) -> ModuleType:
    """Return the module of the kernels of the codecs for tensors of a device."""
    return _module("cpu_codecs" if _is_cpu(device) else "torch_codecs")


def _is_cpu(device: torch.device | str) -> bool:
    return (device if isinstance(device, torch.device) else torch.device(device)).type == "cpu"


def rounds_as_torch() -> bool:
    """Return whether the CPU loops cast fp32 to bf16 as torch does on this processor; `advance` and `read` do
    it themselves then.
    """
    return bool(_module("cpu_arrays").rounds_as_torch())


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"dte_dist.kernels.{name}")
