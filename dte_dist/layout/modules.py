"""Walking a module: which tensors it has, by canonical name, and whether it is still the same module.

A parameter is found through the dict of the submodule that owns it: such a dict refers to no module, so it
keeps none alive, and one list comprehension over them reads 20,000 parameters in about a millisecond.
Submodules themselves are only held weakly, because the hooks of FSDP2 lead from a submodule back to the root.

`fully_shard` swaps what is registered there: only after `reshard` is it the sharded parameter that training
updates. A tensor that is registered in between is a copy, and writing to it would be lost. What the older
FullyShardedDataParallel (FSDP1) registers is not looked at: its units say what they hold
(`layout.flattened`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dte_dist._torch_compat import WRAPPERS, registered_by, structure_of
from dte_dist._torch_fsdp import (
    fsdp2_groups,
    fsdp2_module_info,
)
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import fsdp1
from dte_dist.layout.flattened import FlatUnit, FlatView

__all__ = ["Found", "ModuleTree", "is_trained"]


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of a module, by its canonical name.

    Attributes:
        holder: where it is found, up to date.
        keys: of the tensor in the holder, or of each `FlatView` that it consists of here.
    """

    name: str
    container: Any
    keys: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Branch:
    """A module with children, by their names and by the dicts that own their parameters."""

    module: weakref.ref[nn.Module]
    keys: tuple[str, ...]
    owners: list[Any]

    def is_intact(self) -> bool:
        module = self.module()
        if module is None:
            return False
        keys, owners = structure_of(module)
        return keys == self.keys and all(map(is_, owners, self.owners))


class ModuleTree:
    """Remember the structure of a module without keeping the module alive.

    Args:
        module: any module; FSDP2 and FSDP1 modules in it are resharded.

    Attributes:
        module: the module, weakly.
        units: of FSDP1 in it.

    Raises:
        ValueError: it is no module.
        LayoutMismatch: it cannot be resharded now, or has a parameter that FSDP1 keeps elsewhere.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        modules = {id(child): child for _, child in _walk(module, "")}.values()
        self.module = weakref.ref(module)
        self._wrappers = [weakref.ref(child) for child in modules if fsdp1.is_wrapper(child)]
        self._sharded = [weakref.ref(child) for child in modules if isinstance(child, FSDPModule)]
        self.units = [FlatUnit.of(child, self._prefix_of) for child in modules if fsdp1.is_unit(child)]
        self._views: dict[int, dict[str, list[FlatView]]] = defaultdict(dict)
        for unit in self.units:
            for owner, views in unit.views.items():
                self._views[owner] |= views
        known = [(child, registered_by(child)) for child in modules]
        self._branches = [
            _Branch(weakref.ref(child), *structure_of(child)) for child, found in known if found.modules
        ]
        self._dicts: list[dict[str, Any]] = [found.modules for _, found in known if not found.modules]
        self._dicts += [tensors for _, found in known for tensors in (found.parameters, found.buffers)]
        self._keys = _keys(self._dicts)
        self.reshard()

    def tensors(self) -> list[Found]:
        """Return every parameter and persistent buffer; tied ones under each of their names."""
        module = self.module()
        walked = _walk(module, "") if module is not None else ()
        return [found for prefix, owner in walked for found in self._tensors_of(owner, prefix)]

    def _tensors_of(self, owner: nn.Module, prefix: str) -> Iterator[Found]:
        flattened = self._views.get(id(owner), {})
        registered = registered_by(owner)
        for key, parameter in registered.parameters.items():
            if parameter is not None and key not in flattened:
                _refuse_flattened(prefix + key, parameter)
                yield Found(prefix + key, registered.parameters, [key])
        for key, views in flattened.items():
            if views:
                yield Found(prefix + key, views, range(len(views)))
        for key, buffer in registered.buffers.items():
            if buffer is not None and key not in registered.non_persistent:
                yield Found(prefix + key, registered.buffers, [key])

    def changed(self) -> bool:
        """Tell whether modules, parameters or buffers were added, removed or replaced by other modules."""
        return _keys(self._dicts) != self._keys or not all(branch.is_intact() for branch in self._branches)

    def reshard(self) -> None:
        """Register the sharded parameters of all FSDP2 and FSDP1 modules; purely local.

        Raises:
            LayoutMismatch: one stays unsharded because its forward is running; names a parameter.
        """
        for reference in self._sharded:
            module = reference()
            if module is None:
                continue
            module.reshard()
            for group in fsdp2_groups(module):
                if not group.is_sharded:
                    self._refuse_unsharded(fsdp2_module_info(group))
        for wrapper in filter(None, (reference() for reference in self._wrappers)):
            if fsdp1.is_in_use(wrapper):
                what = "FullyShardedDataParallel is in a pass or summoned, so what is registered is a copy"
                hint = "call this after forward, backward and summon_full_params, not inside of them"
                raise LayoutMismatch(what, tensor=self._first_in(wrapper), hint=hint)
        for unit in self.units:
            flat = unit.unit()
            if flat is None:
                continue
            if fsdp1.has_moved(flat):
                what = "FullyShardedDataParallel was moved or cast after a forward: the next one undoes that"
                hint = "move or cast the module before its first forward"
                raise LayoutMismatch(what, tensor=self._first_in(flat), hint=hint)
            fsdp1.reshard(flat)

    def _refuse_unsharded(self, info: Any) -> None:
        raise LayoutMismatch(
            "the parameter stays unsharded after reshard(), so what is registered is a copy",
            tensor=self._prefix_of(id(info.module)) + info.param_name,
            hint="call this after forward and backward, not inside of them",
        )

    def _first_in(self, module: nn.Module) -> str:
        """Return the name of a flattened parameter in a module of the tree, for messages."""
        prefix = self._prefix_of(id(module))
        flat = [
            found.name for found in self.tensors() if isinstance(found.container[found.keys[0]], FlatView)
        ]
        return next((name for name in flat if name.startswith(prefix)), prefix)

    def _prefix_of(self, owner: int) -> str:
        """Return the prefix of canonical names in a module of the tree, by its id."""
        root = self.module()
        found = _walk(root, "") if root is not None else ()
        return next((prefix for prefix, module in found if id(module) == owner), "")


def is_trained(module: nn.Module) -> bool:
    """Return whether a parameter has a gradient, or requires one in a module sharded with FSDP2 or FSDP1.

    Example:
        >>> is_trained(nn.Linear(2, 2))
        False
    """
    if any(parameter.is_leaf and parameter.grad is not None for parameter in module.parameters()):
        return True
    sharded = (
        child for child in module.modules() if isinstance(child, FSDPModule) or fsdp1.is_wrapper(child)
    )
    return any(parameter.requires_grad for child in sharded for parameter in child.parameters())


def _keys(dicts: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the keys of each dict under which something is registered."""
    return [tuple([key for key, found in tensors.items() if found is not None]) for tensors in dicts]


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with the canonical prefix of its names; a shared module once for each of its
    paths.
    """
    yield prefix, module
    wrapped = "module" if isinstance(module, DistributedDataParallel) else None
    for key, child in registered_by(module).modules.items():
        if child is not None:
            yield from _walk(child, prefix if key in WRAPPERS or key == wrapped else f"{prefix}{key}.")


def _refuse_flattened(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that FSDP1 flattened, but not in a unit of this module."""
    if fsdp1.is_flattened(parameter):
        what = "FullyShardedDataParallel flattened the parameter: what is registered is a part without shape"
        hint = (
            "pass the FullyShardedDataParallel module, not what it wraps; tie parameters within a unit only"
        )
        raise LayoutMismatch(what, tensor=name, hint=hint)
