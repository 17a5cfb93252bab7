"""Kernels in plain torch ops that go over live tensors, for tensors of any device; `interface.Kernels` says
what they do.

On an accelerator the host must not wait for the device more than it has to. So truth values and checksums
stay on the device as tensors of no dimension, and nothing here depends on what is in the data, except how
many changes `advance` found and which tensors a `scatter` touches. Nor does the host work in proportion to
the tensors: many are gathered or written by one op, and changes to many small tensors go through a copy of
them. Only large ones (`_SMALL`) are written one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from dte_dist._torch_compat import flatten, foreach_copy_, unflatten
from dte_dist.kernels.interface import BITS, Flat

__all__ = [
    "advance",
    "checksum",
    "coordinates",
    "gather_1d",
    "gathered",
    "mixed",
    "read",
    "scatter",
    "scatter_1d",
    "searchsorted",
    "strictly_increasing",
    "write",
]

Kind = TypeVar("Kind", bound=Hashable)

_USUAL: Final = {
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
}
"""Dtypes that any device can copy and join; others are taken for integers."""

_SMALL: Final = (
    1 << 16
)  # elements of a tensor: launching work for it alone takes longer than copying it there and back
_BATCH: Final = 1 << 24  # elements of small tensors that are copied at once
_FIRST: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_SECOND: Final = 0xFF51AFD7ED558CCD - (1 << 64)
_THIRD: Final = 0xC4CEB9FE1A85EC53 - (1 << 64)


@torch.no_grad()
def advance(  # noqa: PLR0917
    flat: Flat, begin: int, end: int, known: Tensor, positions: Tensor, old: Tensor, new: Tensor
) -> int:
    """Compare elements [begin, end) of `flat` with `known`, write positions and bits, bring `known` up to
    date. Waits once.
    """
    live = _live(flat, begin, end)
    changed = torch.nonzero(live != known).view(-1)
    count = changed.numel()
    positions[:count] = changed
    torch.index_select(known, 0, changed, out=old[:count])
    torch.index_select(live, 0, changed, out=new[:count])
    known.copy_(live)
    return count


@torch.no_grad()
def read(flat: Flat, begin: int, out: Tensor) -> None:
    """Copy elements [begin, begin + len(out)) of `flat` to `out`."""
    out.copy_(_live(flat, begin, begin + out.numel()))


def write(flat: Flat, begin: int, bits: Tensor) -> None:
    """Copy `bits` to elements [begin, begin + len(bits)) of `flat`."""
    indices, low, high = flat.spans(begin, begin + bits.numel())
    sizes = np.diff(flat.starts)[indices]
    whole = high - low == sizes  # all but the first and the last, which may be cut
    for place in np.flatnonzero(~whole).tolist():
        at = int(flat.starts[indices[place]] + low[place]) - begin
        _write_part(flat, int(indices[place]), int(low[place]), bits[at : at + int(high[place] - low[place])])
    if whole.any():
        first = int(flat.starts[indices[whole][0]]) - begin
        _assign(flat, indices[whole], bits[first : first + int(sizes[whole].sum())])


def scatter(flat: Flat, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position in `flat`. Waits once, or twice if the positions are not
    ascending.

    Raises:
        IndexError: a position is outside `flat`; nothing has been written.
    """
    positions, bounds, order = _by_tensor(flat, positions)
    bits = bits if order is None else bits[order]
    counts, sizes = np.diff(bounds), np.diff(flat.starts)
    small = (counts > 0) & (sizes <= _SMALL)
    for index in np.flatnonzero((counts > 0) & ~small).tolist():
        here = slice(bounds[index], bounds[index + 1])
        _put_into(flat, index, positions[here] - int(flat.starts[index]), bits[here])
    for indices in _batches(np.flatnonzero(small), sizes):
        _put_together(flat, indices, (bounds[indices], counts[indices]), positions, bits)


def _by_tensor(flat: Flat, positions: Tensor) -> tuple[Tensor, np.ndarray, Tensor | None]:
    """Return positions in ascending order, where those of each tensor begin among them, and their order if it
    was another.
    """
    starts, order = _on(positions.device, flat.starts), None
    positions = positions.to(torch.int64)
    ascending = (positions[1:] > positions[:-1]).all().view(1)
    told = torch.cat([torch.searchsorted(positions, starts), ascending]).cpu().numpy()
    if not told[-1]:
        positions, order = positions.sort()
        told = torch.searchsorted(positions, starts).cpu().numpy()
    bounds = told[: len(starts)]
    if bounds[0] != 0 or bounds[-1] != len(positions):
        raise IndexError(f"positions are not all within [0, {len(flat)})")
    return positions, bounds, order


def scatter_1d(array: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position in one contiguous array; a position outside it is an error of
    the device.
    """
    with torch.inference_mode(array.is_inference()):
        array.index_copy_(0, positions.to(torch.int64), bits)


def gather_1d(array: Tensor, positions: Tensor) -> Tensor:
    """Return the elements of an array at these positions; a position outside it is an error of the device."""
    return array.index_select(0, positions)


def searchsorted(positions: Tensor, starts: Sequence[int]) -> list[int]:
    """Return how many of some ascending positions are below each of `starts`. Waits once."""
    found: list[int] = torch.searchsorted(
        positions, torch.tensor(starts, dtype=positions.dtype, device=positions.device)
    ).tolist()
    return found


def strictly_increasing(positions: Tensor, length: int) -> Tensor:
    """Return whether positions strictly increase within [0, length)."""
    if not positions.numel():
        return torch.ones((), dtype=torch.bool, device=positions.device)
    first, last = positions[0].to(torch.int64), positions[-1].to(torch.int64)
    return (positions[1:] > positions[:-1]).all() & (first >= 0) & (last < length)


def checksum(frame: Tensor, skip: int = -1) -> Tensor:
    """Return 64 bits over the 8-byte words of a uint8 tensor, as an int64 tensor of no dimension; word `skip`
    counts as zero.
    """
    if frame.numel() % 8:
        raise ValueError(f"a checksum needs whole words of 8 bytes, not {frame.numel()} bytes")
    words = (frame if frame.data_ptr() % 8 == 0 and frame.storage_offset() % 8 == 0 else frame.clone()).view(
        torch.int64
    )
    places = torch.arange(words.numel(), device=frame.device)
    total = mixed(places, words).sum()
    if skip >= 0:  # exchanged afterwards, as in the loop
        place, word = places[skip : skip + 1], words[skip : skip + 1]
        total += (mixed(place, torch.zeros_like(word)) - mixed(place, word)).sum()
    return total


def mixed(places: Tensor, words: Tensor) -> Tensor:
    """Return int64 hashes of int64 words, each mixed with its place."""
    hashes = (places + 1).mul_(_FIRST).add_(words)
    hashes = _fold(hashes).mul_(_SECOND)
    hashes = _fold(hashes).mul_(_THIRD)
    return _fold(hashes)


@torch.no_grad()
def gathered(flat: Flat, indices: np.ndarray, low: np.ndarray, high: np.ndarray) -> Tensor:
    """Return part [low, high) of each of some tensors, end to end, as bits of what they are read as; one that
    is whole is a view.

    Args:
        flat: the tensors.
        indices, low, high: which tensors, and parts that count from their own start; only the first and the
            last may be cut.
    """
    parts = [flat.tensors[index] for index in indices.tolist()]
    sizes = np.diff(flat.starts)[indices]
    for place in np.flatnonzero(high - low < sizes).tolist():
        parts[place] = _part(parts[place], int(low[place]), int(high[place]))
    kinds = [(part.dtype, part.dtype) for part in parts]
    if flat.dtypes is not None:
        kinds = [(own, flat.dtypes[index]) for (own, _), index in zip(kinds, indices.tolist(), strict=True)]
    bits = BITS[flat.width]
    if len(set(kinds)) <= 1:
        return (
            _joined(parts, kinds[0][1]).view(bits)
            if parts
            else torch.empty(0, dtype=bits, device=flat.device)
        )
    out = torch.empty(int((high - low).sum()), dtype=bits, device=parts[0].device)
    pieces = out.split((high - low).tolist())
    for places, (_, dtype) in _alike(kinds):
        joined = _joined([parts[place] for place in places], dtype).view(bits)
        foreach_copy_(
            [pieces[place] for place in places], joined.split([len(pieces[place]) for place in places])
        )
    return out


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return tensors of one dtype end to end, cast in one dimension."""
    if tensors[0].dtype == dtype and dtype not in _USUAL:
        tensors = [tensor.view(BITS[dtype.itemsize]) for tensor in tensors]
        dtype = tensors[0].dtype
    with torch.autocast(tensors[0].device.type, enabled=False):  # it has a say in torch.cat
        return flatten(tensors).to(dtype)


def _alike(kinds: Sequence[Kind]) -> list[tuple[list[int], Kind]]:
    """Return the places of each kind."""
    places: dict[Kind, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return [(several, kind) for kind, several in places.items()]


def _assign(flat: Flat, indices: np.ndarray, bits: Tensor) -> None:
    """Write bits that lie end to end into whole tensors, of any strides.

    As integers: on a GPU `torch._foreach_copy_` copies bfloat16 by way of float32, to which all NaNs are one.
    """
    with torch.inference_mode(False):  # see `_writable`
        views = [flat.view(index) for index in indices.tolist()]
    kinds = _alike(list(map(Tensor.is_inference, views)))
    pieces = bits.split([view.numel() for view in views]) if len(kinds) > 1 else (bits,)
    for places, inference in kinds:
        into = [views[place] for place in places]
        mine = torch.cat([pieces[place] for place in places]) if len(kinds) > 1 else bits
        with torch.inference_mode(inference), torch.no_grad():
            foreach_copy_(into, unflatten(mine, into))
    flat.writes[indices] += 1


def _put_together(
    flat: Flat, indices: np.ndarray, where: tuple[np.ndarray, np.ndarray], positions: Tensor, bits: Tensor
) -> None:
    """Write to several small tensors at once, through a copy of them: launching work for each would cost
    more.

    Args:
        flat: the tensors.
        indices: which of them.
        where: the place among `positions` of the first of each, and how many it has.
        positions, bits: all of them, the positions int64 and ascending.
    """
    first, counts = where
    sizes = np.diff(flat.starts)[indices]
    device, total = positions.device, int(counts.sum())
    moves = np.stack([first - np.cumsum(counts) + counts, np.cumsum(sizes) - sizes - flat.starts[indices]])
    place, shift = _on(device, moves).repeat_interleave(_on(device, counts), dim=1, output_size=total)
    place = place + torch.arange(total, device=device)
    joined = gathered(flat, indices, np.zeros_like(sizes), sizes)
    joined = joined.clone() if len(indices) == 1 else joined
    joined.index_copy_(0, positions[place] + shift, bits[place])
    _assign(flat, indices, joined)


def _write_part(flat: Flat, index: int, low: int, bits: Tensor) -> None:
    """Copy `bits` to elements [low, low + len(bits)), in row-major order, of tensor `index`, of any
    strides.
    """
    view = _writable(flat, index)
    rows, at = _around(view, low, low + bits.numel())
    if rows.numel() != bits.numel():
        merged = rows.flatten().clone()
        merged[at : at + bits.numel()] = bits
        bits = merged
    with torch.inference_mode(view.is_inference()):
        rows.copy_(bits.view(rows.shape))
    flat.writes[index] += 1


def _put_into(flat: Flat, index: int, positions: Tensor, bits: Tensor) -> None:
    """Write each bit pattern to its position (int64, in row-major order) of tensor `index`, of any
    strides.
    """
    view = _writable(flat, index)
    with torch.inference_mode(view.is_inference()):
        if view.is_contiguous():
            view.view(-1).index_copy_(0, positions, bits)
        else:
            view.index_put_(coordinates(positions, view.shape), bits)
    flat.writes[index] += 1


def _writable(flat: Flat, index: int) -> Tensor:
    """Return a view that moves the version counter of its tensor when written: one made in inference mode has
    its own.
    """
    with torch.inference_mode(False):
        return flat.view(index)


def _part(tensor: Tensor, low: int, high: int) -> Tensor:
    """Return elements [low, high), in row-major order, of one tensor of any strides, contiguous: a view if
    the tensor is.
    """
    rows, at = _around(tensor.detach(), low, high)
    return rows.contiguous().view(-1)[at : at + high - low]


def _around(view: Tensor, low: int, high: int) -> tuple[Tensor, int]:
    """Narrow a tensor to rows that hold elements [low, high); return them and where `low` is among them."""
    if view.is_contiguous():
        return view.view(-1)[low:high], 0
    row = view[0].numel()
    first, last = low // row, -(-high // row)
    low, high = low - first * row, high - first * row
    if last - first == 1 and view.dim() > 1:
        return _around(view[first], low, high)
    return view[first:last], low


def coordinates(positions: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return what `torch.unravel_index` returns, which waits for the device."""
    coordinates = []
    for size in reversed(shape):
        coordinates.append(positions % size)
        positions = positions // size
    return tuple(reversed(coordinates))


def _on(device: torch.device, numbers: np.ndarray) -> Tensor:
    """Copy numbers to a device without waiting for it."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def _live(flat: Flat, begin: int, end: int) -> Tensor:
    """Return elements [begin, end) as one contiguous tensor of bits: a view if they lie in one contiguous
    tensor.
    """
    return gathered(flat, *flat.spans(begin, end))


def _batches(places: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Cut places into batches of about `_BATCH` elements."""
    return (
        np.split(places, np.flatnonzero(np.diff(np.cumsum(sizes[places]) // _BATCH)) + 1)
        if len(places)
        else []
    )


def _fold(words: Tensor) -> Tensor:
    """Return x ^ (x >> 33), the shift being logical: torch shifts int64 with its sign, which the mask
    removes.
    """
    return words ^ ((words >> 33) & 0x7FFFFFFF)
