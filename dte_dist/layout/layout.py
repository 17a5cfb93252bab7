"""Layouts: what one rank holds of a model, and the tensors that hold it right now.

A layout is built once, when a channel opens, and read at every sync. Between syncs a module may move, be
resharded or get other parameters, so `tensors` resolves them anew each time; what changed since the last
reading is described again and must still be what the manifest, which all ranks rely on, says it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.entries import EntryBuilder
from dte_dist.layout.flattened import FlatUnit, FlatView, beside
from dte_dist.layout.live_objects import (
    REOPEN,
    aliases_of,
    differing,
    locals_of,
    raise_changed,
    refuse_difference,
)
from dte_dist.layout.manifest import Manifest
from dte_dist.layout.module_watcher import ModuleWatcher
from dte_dist.layout.modules import ModuleTree, is_trained
from dte_dist.layout.names import (
    NameRule,
    Rename,
    Select,
    canonical_name,
    refuse_unencodable,
)
from dte_dist.layout.sharding import ShardSpec
from dte_dist.layout.tensor_refs import TensorRef, View, refs_of_shards, refs_of_tensors, refs_of_views
from dte_dist.layout.untrained_copies import CopyCheck, Counted
from dte_dist.tensors.devices import home_of
from dte_dist.tensors.live import LiveTensors

__all__ = ["Layout"]


class Layout:
    """List what one rank holds of a model.

    Build one with `from_module`, `from_tensors`, `from_shards` or `from_views`.

    Attributes:
        manifest: what other ranks need to know of it.
        coordinates: this rank's coordinate on each mesh of the manifest, None where it is not in the mesh.
        is_partial: True if a receiver with this layout asks for some of the model's tensors only.

    Example:
        >>> layout = dte_dist.Layout.from_module(torch.nn.Linear(3, 2))
        >>> [entry.name for entry in layout.manifest.entries], [tuple(tensor.shape)
        ...     for tensor in layout.tensors()]
        (['bias', 'weight'], [(2,), (2, 3)])
    """

    def __init__(self, source: ModuleWatcher | Iterable[TensorRef], *, partial: bool = False) -> None:
        self.is_partial = partial
        self._follow = source if isinstance(source, ModuleWatcher) else None
        self._spots = sorted(source, key=lambda ref: ref.order)
        self._homes = [(ref.container, ref.key) for ref in self._spots]
        self._names = [ref.name for ref in self._spots]
        refuse_unencodable(self._names)
        self._describer = EntryBuilder()
        self._units: Sequence[FlatUnit] = source.units if isinstance(source, ModuleWatcher) else ()
        for unit in self._units:
            for mesh in unit.meshes:  # whose ranks train together, also where no entry says so
                self._describer.number_of(mesh)
        self._objects = self._resolve()
        self._beside = beside(self._objects) if self._units else {}
        entries = [
            self._describer.entry(ref.name, found, ref.declared)
            for ref, found in zip(self._spots, self._objects, strict=True)
        ]
        local = locals_of(self._objects)
        read = LiveTensors.of(local)
        self._before = read.forget()
        clones = [index for index, ref in enumerate(self._spots) if ref.is_clone]
        self._copies = CopyCheck(read, clones) if self._follow is None else None
        self._device: torch.device | None = None
        self._away: Sequence[int] = ()
        self._device_types = [tensor.device.type for tensor in local]
        self._pairs = [index for index, tensor in enumerate(local) if tensor.dtype is torch.complex128]
        self.manifest = Manifest.build(
            entries, self._describer.meshes, aliases_of(entries, self._objects, local)
        )
        self.coordinates = tuple(self._describer.coordinates)

    @classmethod
    def from_module(cls, module: nn.Module, *, select: Select = None, rename: Rename = None) -> Layout:
        """Describe the parameters and persistent buffers of a module, tied ones under each of their names.

        The module is not kept alive. FSDP2 and FSDP1 modules in it are resharded, here and at every reading.

        Args:
            module: any module, wrapped or not; its tensors may be plain or DTensors. What the older
                FullyShardedDataParallel (FSDP1) flattened is the regions of it that this rank holds.
            select: predicate on canonical names, or one or several fnmatch patterns; None for all.
            rename: from canonical names to the names that all ranks agree on.

        Raises:
            LayoutMismatch: a tensor cannot be synchronised, or two have the same name; names them.
            ValueError: an argument is of the wrong type, `select` chooses no tensor, or a name cannot be
                written as UTF-8.

        Example:
            >>> dte_dist.Layout.from_module(torch.nn.Linear(3, 2), select=["w*"],
            ...     rename="head.{}".format).manifest.entries[0].name
            'head.weight'
        """
        tree, rule = ModuleTree(module), NameRule.of(select, rename)
        layout = cls(ModuleWatcher(tree, rule), partial=select is not None)
        if not layout._spots or rule.patterns is not None:
            rule.refuse_no_match([found.name for found in tree.tensors()])
        return layout

    @classmethod
    def from_tensors(
        cls,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        select: Select = None,
        rename: Rename = None,
    ) -> Layout:
        """Describe plain tensors (held whole), DTensors and ShardedTensors by what they say of themselves.

        Args:
            named_tensors: a mapping, or pairs of name and tensor, such as a state dict. On a source they are
                the tensors that training writes to: copies are refused at the second sync if they are known.
            select: as in `from_module`.
            rename: as in `from_module`.

        Raises:
            LayoutMismatch: a tensor cannot be synchronised, or two have the same name; names them.
            ValueError: an argument is of the wrong type, `select` chooses no tensor, or a name cannot be
                written as UTF-8.

        Example:
            >>> dte_dist.Layout.from_tensors({"w": torch.zeros(2, 3)}).manifest.entries[0].shape
            (2, 3)
        """
        items = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        rule = NameRule.of(select, rename)
        layout = cls(refs_of_tensors(items, rule), partial=select is not None)
        if not layout._spots or rule.patterns is not None:
            rule.refuse_no_match([canonical_name(name) for name, _ in items])
        return layout

    @classmethod
    def from_shards(cls, shards: Iterable[tuple[str, Tensor, ShardSpec]], *, partial: bool = False) -> Layout:
        """Describe local shards that are plain tensors, each with the placement of its full tensor.

        Args:
            shards: (name, local_shard, ShardSpec) of each.
            partial: a receiver asks for these tensors only, though the model has more.

        Raises:
            LayoutMismatch: a shard has not the shape that its placement gives it, or two have the same name.
            ValueError: an argument is of the wrong type.

        Example:
            >>> dte_dist.Layout.from_shards([("w", torch.zeros(2, 3), dte_dist.ShardSpec((2, 3), None,
            ...     ()))]).manifest.block(0, ()).shape
            (2, 3)
        """
        return cls(refs_of_shards(shards), partial=partial)

    @classmethod
    def from_views(cls, views: Iterable[View], *, partial: bool = False) -> Layout:
        """Describe named regions of local tensors, such as the parts of a fused projection.

        The views must stay valid: they are read and written for as long as the layout lives.

        Args:
            views: (name, local_view, full_shape, offsets) of each: the view, contiguous or not, holds the
                hyper-rectangle of slot `name` that starts at `offsets`. A name may come again with another
                region. A fifth item, one step per dimension, says which indices of the slot the view holds
                where these have gaps: 1 for one after the other, n for every n-th, (length, n) for the first
                `length` of every n. The steps of a layout may stand for 2^20 runs.
            partial: a receiver asks for these tensors only, though the model has more.

        Raises:
            LayoutMismatch: a region leaves its slot, or regions of one slot overlap or disagree.
            ValueError: an argument is of the wrong type.

        Example:
            >>> qkv = torch.zeros(6, 4)
            >>> layout = dte_dist.Layout.from_views([("q", qkv[:2], (4, 4), (2, 0)), ("k", qkv[2:4], (4,
            ...     4), (2, 0))])
            >>> layout.manifest.block(0, ()).runs
            (((2, 2),), ((0, 4),))

            The sources interleave the rows of two projections, this rank has each by itself:

            >>> gate, up = torch.zeros(2, 3, 4)
            >>> layout = dte_dist.Layout.from_views([("gate_up", gate, (6, 4), (0, 0), (2, 1)), ("gate_up",
            ...     up, (6, 4), (1, 0), (2, 1))])
            >>> layout.manifest.block(1, ()).runs
            (((1, 1), (3, 1), (5, 1)), ((0, 4),))
        """
        return cls(refs_of_views(views), partial=partial)

    def tensors(self) -> list[Tensor]:
        """Return the local tensors as they are now, in the order of the manifest's entries.

        Each has the shape of its block; a tensor of no elements may have any shape without elements, and one
        that is seen in another shape where it lies is still the same array. complex128 comes as pairs of
        float64. The tensors may require grad: read and write them under `no_grad`.

        Raises:
            LayoutMismatch: a tensor no longer fits its entry, by shape, dtype, placement, device type or
                ties; names the slot. Or the tensors are on several accelerators.

        Example:
            >>> layer = torch.nn.Linear(3, 2)
            >>> bias, weight = dte_dist.Layout.from_module(layer).tensors()
            >>> weight is layer.weight
            True
        """
        return list(self.read().live.tensors)

    def read(self, *, watch: bool = False) -> LiveTensors:
        """Return what `tensors` does, and what was learnt on the way; on one device, see `tensors.devices`.

        Args:
            watch: for who writes to them; see `LiveTensors.of`.

        Example:
            >>> read = dte_dist.Layout.from_tensors({"w": torch.zeros(2, 3)}).read()
            >>> [tuple(tensor.shape) for tensor in read.tensors], read.dtypes
            ([(2, 3)], [torch.float32])
        """
        if self._follow is not None:
            self._follow_module(self._follow)
        objects = self._resolve()
        replaced = (
            [] if all(map(is_, objects, self._objects)) else differing(map(is_not, objects, self._objects))
        )
        for index in replaced:
            self._check(index, objects[index])
        read = LiveTensors.of(objects, locals_of, watch=watch)
        local = list(read.tensors)
        moved = read.changed_since(self._before).tolist()
        for index in moved:
            self._check(index, objects[index])
        if replaced or moved:
            self._check_ties(objects, local)
        if replaced or moved or self._device is None:
            self._device, self._away = home_of(local, self._names)
        self._objects, self._before = objects, read.forget()
        for index in self._pairs:
            local[index] = torch.view_as_real(local[index].detach())
        dtypes = [tensor.dtype for tensor in local] if self._pairs else read.dtypes
        read = replace(read, tensors=local, dtypes=dtypes, device=self._device, twins=self._twins())
        return read.at_home(self._away) if self._away else read

    def buffers(self) -> list[bool]:
        """Return for each entry whether it is a buffer of a module; never for tensors given one by one.

        Example:
            >>> norm = torch.nn.BatchNorm1d(3)
            >>> layout = dte_dist.Layout.from_module(norm)
            >>> [entry.name for entry, is_buffer in zip(layout.manifest.entries,
            ...     layout.buffers()) if is_buffer]
            ['num_batches_tracked', 'running_mean', 'running_var']
        """
        return [False] * len(self._spots) if self._follow is None else self._follow.are_buffers(self._homes)

    def homes(self) -> list[tuple[int, Any]]:
        """Return for each entry what tells where in the module it is found, whatever `rename=` calls it.

        Example:
            >>> layer = torch.nn.Linear(3, 2)
            >>> layout = dte_dist.Layout.from_module(layer, rename="head.{}".format)
            >>> layout.homes() == [(id(layer._parameters), "bias"), (id(layer._parameters), "weight")]
            True
        """
        return [
            found.home if isinstance(found, FlatView) else (id(container), key)
            for (container, key), found in zip(self._homes, self._objects, strict=True)
        ]

    def is_trained(self) -> bool:
        """Return whether the module, or what was given instead, is trained; see `modules.is_trained`.

        Example:
            >>> layer = torch.nn.Linear(3, 2)
            >>> layout = dte_dist.Layout.from_module(layer)
            >>> layout.is_trained()
            False
            >>> layer(torch.ones(1, 3)).sum().backward()
            >>> layout.is_trained()
            True
        """
        module = None if self._follow is None else self._follow.module()
        if module is not None:
            return is_trained(module)
        return any(found.is_leaf and found.grad is not None for found in self._objects)

    def _twins(self) -> list[tuple[int, Tensor]]:
        """Return the other tensors that FSDP1 keeps over the memory of entries, with the index of one."""
        found = (((unit, member), twin) for unit in self._units for member, twin in unit.twins())
        return [(self._beside[key], twin) for key, twin in found if key in self._beside]

    def refuse_copies(self) -> None:
        """Refuse tensors that no training step reaches; for a source to ask before each sync but the first.

        Such are clones that torch made for a state dict, and tensors that nobody holds but this layout, if
        nobody has written to them. The tensors of a module are not asked about.

        Raises:
            LayoutMismatch: names the first.

        Example:
            >>> weights = {"w": torch.zeros(2)}
            >>> # whoever holds `weights` may write to it
            >>> dte_dist.Layout.from_tensors(weights).refuse_copies()
        """
        if self._copies is not None and not self._copies.is_settled:
            self._copies.refuse(self._names, self._objects, self._counted())

    def note_changes(self, count: int) -> None:
        """Note how many changes a source found; warn once if there are none for long, and nobody writes.

        Example:
            >>> weights = {"w": torch.zeros(2)}
            >>> # one sync without changes is no reason to warn
            >>> dte_dist.Layout.from_tensors(weights).note_changes(0)
        """
        if self._copies is not None and self._copies.is_suspicious(count):
            self._copies.warn(self._names, self._counted())

    def _counted(self) -> Counted:
        """Return elements and version counters of the local tensors, which nothing holds when it is done."""
        read = LiveTensors.of(self._objects, locals_of)
        return read.numels, read.versions()

    def _follow_module(self, follow: ModuleWatcher) -> None:
        """Reshard the module and, if its structure changed, find its tensors again."""
        if not follow.changed():
            return
        fresh = Layout(follow.again(), partial=self.is_partial)
        if fresh.manifest != self.manifest:
            raise_changed(self.manifest, fresh.manifest)
        vars(self).update(vars(fresh))

    def _resolve(self) -> list[Any]:
        try:
            return [container[key] for container, key in self._homes]
        except KeyError:
            gone = next(ref for ref in self._spots if ref.key not in ref.container)
            raise LayoutMismatch(
                "the module no longer has this tensor", tensor=gone.name, hint=REOPEN
            ) from None

    def _check(self, index: int, found: Any) -> None:
        """Describe a tensor again and compare it with its entry."""
        ref, expected = self._spots[index], self.manifest.entries[index]
        if not isinstance(found, Tensor | FlatView):
            raise LayoutMismatch(
                "the module no longer has this tensor", tensor=ref.name, got=found, hint=REOPEN
            )
        entry = self._describer.entry(ref.name, found, ref.declared)
        refuse_difference(expected, entry)
        device = locals_of([found])[0].device.type
        if device != self._device_types[index]:
            what = "the tensor moved to another kind of device"
            raise LayoutMismatch(
                what, tensor=ref.name, expected=self._device_types[index], got=device, hint=REOPEN
            )

    def _check_ties(self, objects: Sequence[Any], local: Sequence[Tensor]) -> None:
        ties = Manifest.build((), (), aliases_of(self.manifest.entries, objects, local)).ties
        if ties != self.manifest.ties:
            raise LayoutMismatch(
                "other tensors share storage than before", expected=self.manifest.ties, got=ties, hint=REOPEN
            )
