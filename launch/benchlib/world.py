"""Who is who in a scenario, and the two modules: bf16 shards on the sources (FSDP2), whole weights or parts
on the receivers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from benchlib.settings import Scenario

__all__ = ["Shapes", "World", "even_shapes", "part_of"]

Shapes = Mapping[str, tuple[int, ...]]
"""Full shapes by name, in the order of the model."""


class World:
    """The ranks of one scenario, on one rank; every rank that was started must make one, those beyond `size`
    just wait.

    Args:
        scenario: says how many sources and receivers.
        shapes: the model.

    Attributes:
        rank: of this process; sources come first, then receivers.
        group: sources and receivers.
        root_group: rank 0 and the receivers.
        elements: of the model.
        mesh: of the sources on a source, of the receivers on a receiver that holds parts.
        module: this rank's own; nothing is in its weights yet.
    """

    def __init__(self, scenario: Scenario, shapes: Shapes) -> None:
        self.rank, self.sources, self.receivers = dist.get_rank(), scenario.sources, scenario.receivers
        self.size, self.split = scenario.sources + scenario.receivers, scenario.receivers_hold == "tp"
        self.shapes, self._shapes = shapes, list(shapes.values())
        self.elements = sum(map(math.prod, self._shapes))
        self.group = dist.new_group(list(range(self.size)))
        self.root_group = dist.new_group([0, *range(self.sources, self.size)])
        meshes = [DeviceMesh("cpu", list(range(self.sources)))]  # made by all ranks: it makes groups
        if self.split:
            meshes.append(DeviceMesh("cpu", list(range(self.sources, self.size))))
        self.mesh = meshes[0] if self.is_source else meshes[-1]
        self.is_member = self.rank < self.size
        self.module = self._module() if self.is_member else nn.Module()

    @property
    def is_source(self) -> bool:
        return self.rank < self.sources

    @property
    def is_receiver(self) -> bool:
        return self.sources <= self.rank < self.size

    def parameters(self) -> list[Tensor]:
        """Return the parameters in the order of the model: DTensors on sources and on receivers that hold
        parts.
        """
        found = dict(self.module.named_parameters())
        return [found[_flat_name(name)] for name in self.shapes]

    def locals(self) -> list[Tensor]:
        """Return what this rank holds of every parameter, as plain tensors that share its memory."""
        with torch.no_grad():
            return [
                each.to_local() if isinstance(each, DTensor) else each.detach() for each in self.parameters()
            ]

    def block(self, index: int, source: int, receiver: int) -> tuple[slice, ...]:
        """Return what a source and a receiver (both counted from 0) have in common of a parameter, as slices
        of the full tensor.
        """
        shape = self._shapes[index]
        slices = [slice(0, length) for length in shape]
        slices[0] = part_of(shape[0], source, self.sources)
        if self.split:
            dim = _split_dim(index, shape)
            cut = part_of(shape[dim], receiver, self.receivers)
            low, high = max(slices[dim].start, cut.start), min(slices[dim].stop, cut.stop)
            slices[dim] = slice(low, max(low, high))
        return tuple(slices)

    def held(self, index: int) -> tuple[slice, ...]:
        """Return what this rank holds of a parameter, as slices of the full tensor."""
        shape = self._shapes[index]
        slices = [slice(0, length) for length in shape]
        if self.is_source:
            slices[0] = part_of(shape[0], self.rank, self.sources)
        elif self.split:
            dim = _split_dim(index, shape)
            slices[dim] = part_of(shape[dim], self.rank - self.sources, self.receivers)
        return tuple(slices)

    def _module(self) -> nn.Module:
        module = nn.Module()
        if self.is_source:
            for name, shape in self.shapes.items():
                module.register_parameter(
                    _flat_name(name), nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
                )
            fully_shard(module, mesh=self.mesh)
            return module.to_empty(device="cpu")
        for index, (name, shape) in enumerate(self.shapes.items()):
            whole = torch.zeros([cut.stop - cut.start for cut in self.held(index)], dtype=torch.bfloat16)
            if self.split:
                strides = torch.empty(shape, device="meta").stride()
                placements = [Shard(_split_dim(index, shape))]
                whole = DTensor.from_local(
                    whole, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
                )
            module.register_parameter(_flat_name(name), nn.Parameter(whole, requires_grad=False))
        return module


def even_shapes(scenario: Scenario) -> dict[str, tuple[int, ...]]:
    """Return `tensors` matrices of one shape that together have about `model_mib` MiB in bf16; the first is
    the embedding.
    """
    numel = max(1, int(scenario.model_mib * (1 << 20)) // 2 // scenario.tensors)
    columns = 1 << max(0, round(math.log2(numel) / 2 - 0.5))
    return {
        f"layers.{number:05}.weight": (max(1, numel // columns), columns)
        for number in range(scenario.tensors)
    }


def part_of(length: int, place: int, parts: int) -> slice:
    """Return which part of a dimension `torch.chunk` gives to a place.

    Example:
        >>> [part_of(5, place, 4) for place in range(4)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    step = -(-length // parts)
    return slice(min(length, place * step), min(length, (place + 1) * step))


def _split_dim(index: int, shape: tuple[int, ...]) -> int:
    """Tensor-parallel receivers cut rows and columns by turns."""
    return index % 2 if len(shape) > 1 else 0


def _flat_name(name: str) -> str:
    return name.replace(".", "_")
