"""Walking a module: which tensors it has, by canonical name, and whether it is still the same module.

A parameter is found through the dict of the submodule that owns it: such a dict refers to no module, so it keeps none
alive, and one list comprehension over them reads 20,000 parameters in about a millisecond. Submodules themselves are
only held weakly, because the hooks of FSDP2 lead from a submodule back to the root.

`fully_shard` swaps what is registered there: only after `reshard` is it the sharded parameter that training updates.
What else is registered in between is a copy, and writing to it would be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.names import WRAPPERS

__all__ = ["ModuleTree", "is_trained"]


@dataclass(frozen=True, slots=True)
class _Branch:
    """A module with children, by their names and by the dicts that own their parameters."""

    module: weakref.ref[nn.Module]
    keys: tuple[str, ...]
    owners: list[Any]

    def is_intact(self) -> bool:
        module = self.module()
        return module is not None and tuple(module._modules) == self.keys and all(map(is_, _owners(module), self.owners))


class ModuleTree:
    """Remember the structure of a module without keeping the module alive.

    Args:
        module: any module; FSDP2 modules in it are resharded.

    Raises:
        ValueError: it is no module.
        LayoutMismatch: it is wrapped by the older FullyShardedDataParallel, or cannot be resharded now.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        found = list(_walk(module, ""))
        _refuse_flat_parameters(found)
        self.module = weakref.ref(module)
        modules = {id(child): child for _, child in found}.values()
        self._sharded = [weakref.ref(child) for child in modules if isinstance(child, FSDPModule)]
        self._branches = [_Branch(weakref.ref(child), tuple(child._modules), _owners(child)) for child in modules if child._modules]
        self._dicts: list[dict[str, Any]] = [child._modules for child in modules if not child._modules]
        self._dicts += [tensors for child in modules for tensors in (child._parameters, child._buffers)]
        self._keys = _keys(self._dicts)
        self.reshard()

    def tensors(self) -> list[tuple[str, dict[str, Any], str]]:
        """Return (canonical name, dict, key) of every parameter and persistent buffer; tied ones under each of their names."""
        module = self.module()
        return [] if module is None else [tensor for prefix, owner in _walk(module, "") for tensor in _tensors_of(owner, prefix)]

    def changed(self) -> bool:
        """Tell whether modules, parameters or buffers were added, removed or replaced by other modules."""
        return _keys(self._dicts) != self._keys or not all(branch.is_intact() for branch in self._branches)

    def reshard(self) -> None:
        """Register the sharded parameters of all FSDP2 modules; purely local.

        Raises:
            LayoutMismatch: one stays unsharded because its forward is running; names a parameter.
        """
        for reference in self._sharded:
            module = reference()
            if module is None:
                continue
            module.reshard()
            for group in _parameter_groups(module):
                if not group.is_sharded:
                    self._refuse_unsharded(group.fsdp_params[0]._module_info)

    def _refuse_unsharded(self, info: Any) -> None:
        root = self.module()
        prefixes = [prefix for prefix, module in _walk(root, "") if module is info.module] if root is not None else []
        raise LayoutMismatch(
            "the parameter stays unsharded after reshard(), so what is registered is a copy",
            slot=(prefixes or [""])[0] + info.param_name, fix="call this after forward and backward, not inside of them",
        )  # fmt: skip


def is_trained(module: nn.Module) -> bool:
    """Return whether a parameter has a gradient, or requires one in a module sharded with FSDP2 or FSDP1.

    Example:
        >>> is_trained(nn.Linear(2, 2))
        False
    """
    if any(parameter.is_leaf and parameter.grad is not None for parameter in module.parameters()):
        return True
    kinds = FSDPModule | FullyShardedDataParallel
    sharded = (child for child in module.modules() if isinstance(child, kinds))
    return any(parameter.requires_grad for child in sharded for parameter in child.parameters())


def _keys(dicts: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the keys of each dict under which something is registered."""
    return [tuple([key for key, found in tensors.items() if found is not None]) for tensors in dicts]


def _owners(module: nn.Module) -> list[Any]:
    return [None if child is None else child._parameters for child in module._modules.values()]


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with the canonical prefix of its names; a shared module once for each of its paths."""
    yield prefix, module
    wrapped = "module" if isinstance(module, DistributedDataParallel) else None
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if key in WRAPPERS or key == wrapped else f"{prefix}{key}.")


def _tensors_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + key, module._parameters, key
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield prefix + key, module._buffers, key


def _parameter_groups(module: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 module: several since torch 2.12, at most one before."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _refuse_flat_parameters(found: list[tuple[str, nn.Module]]) -> None:
    for prefix, module in found:
        if isinstance(module, FullyShardedDataParallel):
            raise LayoutMismatch(
                "FullyShardedDataParallel flattens parameters, which leaves no shape to tell what a rank holds",
                slot=prefix.removesuffix(".") or type(module).__name__,
                fix="shard the module with fully_shard, or give its SHARDED_STATE_DICT to Layout.from_tensors",
            )
