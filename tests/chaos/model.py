"""What a rank holds of the small model that chaos tests keep in step, and its bits as JSON can hold them.

Each source has some rows of every tensor, receivers have them whole or, "columns", some columns each. So that
groups can be formed anew with other ranks, most tests describe this by views; "module" means a module of
DTensors on meshes.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dte_dist import Layout

__all__ = ["SHAPES", "Bits", "Model"]

SHAPES: Final = {"a.weight": (24, 20), "b.weight": (17, 8), "c.steps": (9, 6)}
_DTYPES: Final = {"a.weight": torch.bfloat16, "b.weight": torch.float32, "c.steps": torch.int64}
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Bits = dict[str, dict[str, Any]]
"""By name: the width of elements, the shape, and all bytes in base64."""


class Model:
    """The tensors of one rank.

    Args:
        rank: in the group.
        sources: the ranks below this one are sources.
        size: ranks of the group.
        cut: what receivers hold: "whole" or "columns".
        kind: what the package is given: "views" or "module".
        fill: seed of the bits that it begins with; None for zeros.
        scale: how many times as many rows each tensor has.

    Attributes:
        handle: to be passed to a collective.
        tensors: by name, the local tensors.
    """

    def __init__(
        self, rank: int, sources: int, size: int, *, cut: str, kind: str, fill: int | None, scale: int = 1
    ) -> None:
        self.rank, self.sources, self.size, self.cut = rank, sources, size, cut
        self.tensors: dict[str, Tensor] = {}
        views, places = [], {}
        for name, (rows, columns) in SHAPES.items():
            shape = (rows * scale, columns)
            low, high, dim = self._part(shape)
            extent = [high - low if axis == dim else length for axis, length in enumerate(shape)]
            self.tensors[name] = torch.zeros(extent, dtype=_DTYPES[name])
            offsets = [low if axis == dim else 0 for axis in range(2)]
            views.append((name, self.tensors[name], shape, offsets))
            places[name] = shape, dim
        if fill is not None:
            self.change(random.Random(f"{fill} {rank}"), 1.0)
        self.handle: Any = Layout.from_views(views) if kind == "views" else self._module(places)

    def _part(self, shape: tuple[int, int]) -> tuple[int, int, int]:
        """Return begin, end and dimension of this rank's part; chunks as torch cuts them."""
        if self.rank < self.sources:
            number, count, dim = self.rank, self.sources, 0
        elif self.cut == "columns":
            number, count, dim = self.rank - self.sources, self.size - self.sources, 1
        else:
            return 0, shape[0], 0
        each = -(-shape[dim] // count)
        return min(number * each, shape[dim]), min((number + 1) * each, shape[dim]), dim

    def _module(self, places: Mapping[str, tuple[tuple[int, int], int]]) -> nn.Module:
        root = nn.Module()
        is_source = self.rank < self.sources
        ranks = list(range(self.sources)) if is_source else list(range(self.sources, self.size))
        mesh = (
            DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=self.rank)
            if is_source or self.cut == "columns"
            else None
        )
        for name, local in self.tensors.items():
            shape, dim = places[name]
            part, field = name.split(".")
            tensor = (
                local
                if mesh is None
                else DTensor.from_local(
                    local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
                )
            )
            root.add_module(part, nn.Module())
            getattr(root, part).register_parameter(field, nn.Parameter(tensor, requires_grad=False))
        return root

    def change(self, choose: random.Random, share: float) -> None:
        """Give this share of the elements of this rank's tensors any bits; version counters move."""
        rng = torch.Generator().manual_seed(choose.getrandbits(62))
        with torch.no_grad():
            for tensor in self.tensors.values():
                words = tensor.view(_WORDS[tensor.element_size()])
                noise = torch.randint(
                    0, 256, (*tensor.shape, tensor.element_size()), generator=rng, dtype=torch.uint8
                )
                where = torch.rand(tensor.shape, generator=rng) < share
                words.copy_(torch.where(where, noise.view(words.dtype).view(tensor.shape), words))

    def bits(self) -> Bits:
        """Return all bits, read by address: nothing of the package is asked."""
        return {name: _bits(tensor) for name, tensor in self.tensors.items()}

    def fill(self, full: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over this rank's part of full tensors, as `oracle.whole` gives them."""
        for name, tensor in self.tensors.items():
            data = (
                np.frombuffer(base64.b64decode(full[name]["data"]), f"i{full[name]['width']}")
                .reshape(full[name]["shape"])
                .copy()
            )
            low, high, dim = self._part(tuple(full[name]["shape"]))
            part = torch.from_numpy(data).narrow(dim, low, high - low)
            with torch.no_grad():
                tensor.view(_WORDS[tensor.element_size()]).copy_(part)


def _bits(tensor: Tensor) -> dict[str, Any]:
    array = tensor.view(_WORDS[tensor.element_size()]).numpy()
    return {
        "width": tensor.element_size(),
        "shape": list(tensor.shape),
        "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    }
