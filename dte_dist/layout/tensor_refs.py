"""Tensor references: where the tensors of a layout are found, and what the user said about them.

A layout reads its tensors anew at every sync, so it keeps the dict and the key under which each one is
registered rather than the tensor. Tensors that a user hands over one by one get a dict of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dte_dist._torch_compat import ShardedTensor, preferred_device
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import fsdp1
from dte_dist.layout.blocks import Block, Runs
from dte_dist.layout.names import NameRule, canonical_name, refuse_duplicates
from dte_dist.layout.placements import MeshSpec
from dte_dist.layout.run_steps import Step, step_runs
from dte_dist.layout.sharding import ShardSpec
from dte_dist.layout.untrained_copies import is_clone

__all__ = ["Region", "TensorRef", "View", "refs_of_shards", "refs_of_tensors", "refs_of_views"]

View = (
    tuple[str, Tensor, Sequence[int], Sequence[int]]
    | tuple[str, Tensor, Sequence[int], Sequence[int], Sequence[Step]]
)
"""A named region: (name, local_view, full_shape, offsets), and steps if its indices have gaps."""


@dataclass(frozen=True, slots=True)
class Region:
    """State that a local tensor is `block` of a tensor of `full_shape`.

    Args:
        full_shape: of the tensor.
        block: what this rank holds.
        mesh: ranks that hold the same block as replicas of each other, this one among them.
    """

    full_shape: tuple[int, ...]
    block: Block
    mesh: MeshSpec | DeviceMesh | None = None


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Say where the tensor of a slot is found: under `key` of `holder`.

    Args:
        name: name of the slot.
        holder: a mapping that a module or a user keeps up to date.
        key: the tensor's key in it.
        given: where the tensor lies, if the tensor itself does not say.
        is_clone: torch is known to have cloned the tensor for a state dict.
    """

    name: str
    container: Any
    key: Any
    declared: ShardSpec | Region | None = None
    is_clone: bool = False

    @property
    def order(self) -> tuple[str, tuple[Runs, ...]]:
        """Sort key: by name, then by region; the same order as that of the entries."""
        return self.name, self.declared.block.runs if isinstance(self.declared, Region) else ()


def refs_of_tensors(
    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], rule: NameRule
) -> list[TensorRef]:
    """Return the tensor references of plain tensors, DTensors and ShardedTensors.

    Raises:
        LayoutMismatch: two have the same name.
        ValueError: an item is no pair of a name and a tensor.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    named = [
        (slot, tensor)
        for name, tensor in map(_pair, items)
        if (slot := rule(canonical_name(name))) is not None
    ]
    refuse_duplicates(slot for slot, _ in named)
    return [ref for slot, tensor in named for ref in _refs_of(slot, tensor)]


def refs_of_shards(shards: Iterable[tuple[str, Tensor, ShardSpec]]) -> list[TensorRef]:
    """Return the tensor references of local shards with their specs.

    Raises:
        LayoutMismatch: two have the same name.
        ValueError: an item is not (name, local_shard, ShardSpec).
    """
    refs = []
    for item in shards:
        match item:
            case (str(name), Tensor() as local, ShardSpec() as spec):
                refs.append(TensorRef(name, {0: local}, 0, spec))
            case _:
                raise ValueError(f"a shard is (name, local_shard, ShardSpec), not {_shown(item)}")
    refuse_duplicates(ref.name for ref in refs)
    return refs


def refs_of_views(views: Iterable[View]) -> list[TensorRef]:
    """Return the tensor references of local tensors that are named regions of slots.

    An empty region that comes twice counts once.

    Raises:
        LayoutMismatch: a region leaves its slot, or the regions of a slot overlap or disagree on its full
            shape.
        ValueError: an item is not (name, local_view, full_shape, offsets) or one with steps behind these, or
            a step takes nothing.
    """
    by_name: dict[str, list[TensorRef]] = defaultdict(list)
    for item in views:
        match item:
            case (str(name), Tensor() as view, full_shape, offsets, *steps) if len(steps) < 2:
                given = tuple(steps[0]) if steps else (1,) * view.dim()
                by_name[name].append(_ref_of_view(name, view, tuple(full_shape), tuple(offsets), given))
            case _:
                form = "(name, local_view, full_shape, offsets), with steps behind these if it has some"
                raise ValueError(f"a view is {form}, not {_shown(item)}")
    for name, refs in by_name.items():
        _refuse_conflicts(name, refs)
    return [ref for refs in by_name.values() for ref in _distinct(refs)]


def _distinct(refs: Sequence[TensorRef]) -> list[TensorRef]:
    """Return the tensor references of a slot without those of empty regions that are there already."""
    return list({ref.order: ref for ref in reversed(refs)}.values())[::-1]


def _pair(item: Any) -> tuple[str, Any]:
    match item:
        case (str(name), Tensor() as tensor):
            return name, tensor
    raise ValueError(f"a named tensor is (name, tensor), not {_shown(item)}")


def _shown(item: Any) -> str:
    parts = item if isinstance(item, tuple) else (item,)
    return ", ".join(repr(part) if isinstance(part, str) else type(part).__name__ for part in parts)


def _refs_of(name: str, tensor: Tensor) -> Iterator[TensorRef]:
    """Yield one tensor reference, or for a ShardedTensor one for each of its local shards."""
    if not isinstance(tensor, ShardedTensor):
        _refuse_flattened(name, tensor)
        yield TensorRef(name, {0: tensor}, 0, is_clone=is_clone(tensor))
        return
    metadata, shards = tensor.metadata(), tensor.local_shards()
    full_shape = tuple(metadata.size)
    for shard in shards:
        block = Block.rectangle(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
        cloned = is_clone(shard.tensor, is_shard=True)
        yield TensorRef(name, {0: shard.tensor}, 0, Region(full_shape, block), cloned)
    if not shards:  # the slot must still be known here, as it is on the ranks that hold some of it
        nothing = torch.empty(
            (0,) * len(full_shape),
            dtype=metadata.tensor_properties.dtype,
            device=preferred_device(tensor),
        )
        yield TensorRef(name, {0: nothing}, 0, Region(full_shape, Block(((),) * len(full_shape))))


def _refuse_flattened(name: str, tensor: Tensor) -> None:
    if fsdp1.is_flattened(tensor):
        what = "FullyShardedDataParallel flattened the parameter: what is given is a part without its shape"
        hint = "pass the module itself, to the call or to Layout.from_module"
        raise LayoutMismatch(what, tensor=name, hint=hint)


def _ref_of_view(
    name: str,
    view: Tensor,
    full_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    steps: tuple[Step, ...],
) -> TensorRef:
    if not len(full_shape) == len(offsets) == len(steps) == view.dim():
        raise LayoutMismatch(
            "a view, its full shape, its offsets and its steps need the same number of dimensions",
            tensor=name,
            got=f"view {tuple(view.shape)}, full shape {full_shape}, offsets {offsets}, steps {steps}",
        )
    lines = tuple(map(step_runs, offsets, view.shape, steps))
    ends = [sum(runs[-1]) if runs else offset for runs, offset in zip(lines, offsets, strict=True)]
    if min(offsets, default=0) < 0 or any(end > size for end, size in zip(ends, full_shape, strict=True)):
        raise LayoutMismatch(
            "the region leaves the slot",
            tensor=name,
            expected=f"inside {full_shape}",
            got=f"{offsets} to {tuple(ends)}",
        )
    return TensorRef(name, {0: view}, 0, Region(full_shape, Block(lines)))


def _refuse_conflicts(name: str, refs: list[TensorRef]) -> None:
    regions = [ref.declared for ref in refs if isinstance(ref.declared, Region)]
    for what, values in (
        ("full shape", [region.full_shape for region in regions]),
        ("dtype", [ref.container[ref.key].dtype for ref in refs]),
    ):
        for value in values:
            if value != values[0]:
                raise LayoutMismatch(
                    f"the regions of a slot disagree on its {what}",
                    tensor=name,
                    expected=values[0],
                    got=value,
                )
    for one, other in combinations(regions, 2):
        if one.block.overlaps(other.block):
            raise LayoutMismatch(
                "two regions of a slot overlap", tensor=name, got=f"{one.block} and {other.block}"
            )
