"""The objects that a layout finds at a reading: their local tensors, which of them are one memory, and what
changed since the layout was built.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dte_dist._torch_compat import local_tensors
from dte_dist.errors import LayoutMismatch
from dte_dist.layout.entries import wait_collective
from dte_dist.layout.flattened import FlatUnit, FlatView
from dte_dist.layout.manifest import Manifest
from dte_dist.layout.placements import Entry

__all__ = ["REOPEN", "aliases_of", "differing", "locals_of", "raise_changed", "refuse_difference"]

_PLAIN: Final = {Tensor, nn.Parameter}
REOPEN: Final = (
    "call dte_dist.close(module, group) on every rank, and sync again: a new channel opens; "
    "if you passed a Layout, build a new one of the changed tensors, and pass that"
)


def locals_of(objects: Sequence[Any]) -> list[Tensor]:
    """Return the local tensors of objects: of DTensors, FSDP1's views, and what collectives still fill."""
    if not set(map(type, objects)) <= _PLAIN:
        flats: dict[FlatUnit, Tensor] = {}
        objects = [_of_flat(each, flats) if isinstance(each, FlatView) else each for each in objects]
        objects = local_tensors(objects)
    return list(objects) if set(map(type, objects)) <= _PLAIN else list(map(wait_collective, objects))


def _of_flat(view: FlatView, flats: dict[FlatUnit, Tensor]) -> Tensor:
    """Return the tensor of a view; `flats` keeps the ranges of units that were asked before."""
    if view.unit not in flats:
        flats[view.unit] = view.unit.flat()
    return view.of(flats[view.unit])


def differing(differences: Iterable[bool]) -> list[int]:
    """Return the indices of those that differ."""
    return [index for index, differs in enumerate(differences) if differs]


def aliases_of(
    entries: Sequence[Entry], objects: Sequence[Any], local: Sequence[Tensor]
) -> list[tuple[str, ...]]:
    """Return the groups of names whose tensors are the same memory seen the same way, in all regions.

    Raises:
        LayoutMismatch: two names share some regions and not others; names one.
    """
    by_address: dict[int, list[int]] = defaultdict(list)
    for index, tensor in enumerate(local):
        by_address[tensor.data_ptr()].append(index)
    shared: dict[Any, set[str]] = defaultdict(set)
    for alike in by_address.values():
        for index in alike if len(alike) > 1 else ():
            entry = entries[index]
            key = _memory(objects[index], local[index]), entry.shape, entry.dtype, entry.placement
            shared[key].add(entry.name)
    groups = Counter(tuple(sorted(names)) for names in shared.values() if len(names) > 1)
    regions = Counter(entry.name for entry in entries) if groups else {}
    for names, count in groups.items():
        for name in names:
            if regions[name] != count:
                what = f"{' and '.join(names)} share the memory of some regions and not of others"
                raise LayoutMismatch(
                    what, tensor=name, hint="let them share all of their memory, or none of it"
                )
    return list(groups)


def _memory(found: Any, tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells memory apart: address and strides, or for a tensor of no elements its object or its
    padding.
    """
    if tensor.numel():
        return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    padding = tensor.untyped_storage().data_ptr() if isinstance(found, DTensor) else 0
    return tensor.device, padding or id(found)


def refuse_difference(expected: Entry, got: Entry) -> None:
    """Refuse a tensor that is described otherwise than before; names the first difference."""
    for what in ("shape", "dtype", "placement"):
        before, now = getattr(expected, what), getattr(got, what)
        if before != now:
            raise LayoutMismatch(
                f"the tensor has another {what} than before",
                tensor=expected.name,
                expected=before,
                got=now,
                hint=REOPEN,
            )


def raise_changed(before: Manifest, now: Manifest) -> None:
    """Raise for the first way in which a module became another one."""
    mine, theirs = ({entry.name: entry for entry in manifest.entries} for manifest in (before, now))
    for name in sorted(mine.keys() ^ theirs.keys()):
        raise LayoutMismatch("a tensor of the module came or went", tensor=name, hint=REOPEN)
    for name, entry in mine.items():
        refuse_difference(entry, theirs[name])
    raise LayoutMismatch(
        "the meshes or tied tensors of the module changed", expected=before.ties, got=now.ties, hint=REOPEN
    )
