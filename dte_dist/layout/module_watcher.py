"""A module that a layout follows: its tensors by the names that a rule gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from dte_dist._torch_compat import registered_by
from dte_dist.errors import LayoutMismatch
from dte_dist.layout.flattened import FlatUnit, FlatView
from dte_dist.layout.modules import ModuleTree
from dte_dist.layout.names import NameRule, refuse_duplicates
from dte_dist.layout.tensor_refs import TensorRef

__all__ = ["ModuleWatcher"]


class ModuleWatcher:
    """Find the tensors of a module by the names that a rule gives them, and notice when the module
    changed.
    """

    __slots__ = ("_rule", "_tree")

    def __init__(self, tree: ModuleTree, rule: NameRule) -> None:
        self._tree = tree
        self._rule = rule

    def __iter__(self) -> Iterator[TensorRef]:
        ruled = ((self._rule(found.name), found) for found in self._tree.tensors())
        named = [(slot, found) for slot, found in ruled if slot is not None]
        refuse_duplicates(slot for slot, _ in named)
        for slot, found in named:
            for key in found.keys:
                view = found.container[key]
                yield TensorRef(
                    slot, found.container, key, view.region if isinstance(view, FlatView) else None
                )

    @property
    def units(self) -> Sequence[FlatUnit]:
        """The units of FSDP1 in the module."""
        return self._tree.units

    def changed(self) -> bool:
        """Reshard the module as it was, unless its structure changed."""
        changed = self._tree.changed()
        if not changed:
            self._tree.reshard()
        return changed

    def module(self) -> nn.Module | None:
        """Return the module, unless it is gone."""
        return self._tree.module()

    def are_buffers(self, homes: Sequence[tuple[Any, Any]]) -> list[bool]:
        """Return for each (dict, key) that holds a tensor whether it is a buffer of the module."""
        module = self.module()
        owned = set() if module is None else {id(registered_by(child).buffers) for child in module.modules()}
        return [id(container) in owned for container, _ in homes]

    def again(self) -> ModuleWatcher:
        """Return a follower of the module as it is now."""
        module = self.module()
        if module is None:
            raise LayoutMismatch(
                "the module of this layout no longer exists",
                hint="keep a reference to the module, or build a new Layout",
            )
        return ModuleWatcher(ModuleTree(module), self._rule)
