"""Method (a): everything, packed into buckets.

1. The sources put a bucket of parameters together, each with `full_tensor()`.
2. Rank 0 broadcasts the bucket to the receivers, while the next one is being put together.
3. Receivers copy their parts out of a bucket, while the next one arrives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchlib.methods import Method, Moved
from benchlib.world import World
from dte_dist.report import Phases

__all__ = ["DenseBroadcast"]


class DenseBroadcast(Method):
    """Dense packed broadcast.

    Args:
        world: the ranks and their modules.
        bucket_bytes: whole parameters are packed until there are as many bytes.
    """

    name = "dense_broadcast"

    def __init__(self, world: World, bucket_bytes: int) -> None:
        self._world = world
        sizes = [torch.Size(shape).numel() for shape in world.shapes.values()]
        self._buckets = _pack(sizes, bucket_bytes // 2)
        self._shapes = list(world.shapes.values())
        most = max(sum(sizes[index] for index in bucket) for bucket in self._buckets)
        takes_part = world.rank == 0 or world.is_receiver
        self._buffers = [torch.zeros(most if takes_part else 0, dtype=torch.bfloat16) for _ in range(2)]
        self._bytes = 2 * sum(sizes)

    @torch.no_grad()
    def run(self) -> Moved:
        phases = Phases()
        if self._world.is_source:
            self._send(phases)
        else:
            self._receive(phases)
        return Moved(self._bytes, phases.seconds)

    def _send(self, phases: Phases) -> None:
        parameters, pending = self._world.parameters(), _Pair()
        for number, bucket in enumerate(self._buckets):
            with phases("wire"):
                pending.wait(number)
            with phases("gather"):
                wholes = self._places(number)
                for index in bucket:
                    parameter = parameters[index]
                    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    if self._world.rank == 0:
                        wholes[index].copy_(whole)
            if self._world.rank == 0:
                pending.put(number, self._broadcast(number))
        with phases("wire"):
            pending.wait_all()

    def _receive(self, phases: Phases) -> None:
        locals_, pending = self._world.locals(), _Pair()
        pending.put(0, self._broadcast(0))
        for number, bucket in enumerate(self._buckets):
            if number + 1 < len(self._buckets):
                pending.put(number + 1, self._broadcast(number + 1))
            with phases("wire"):
                pending.wait(number)
            with phases("apply"):
                wholes = self._places(number)
                for index in bucket:
                    locals_[index].copy_(wholes[index][self._world.held(index)])

    def _broadcast(self, number: int) -> Any:
        size = sum(torch.Size(self._shapes[index]).numel() for index in self._buckets[number])
        return dist.broadcast(
            self._buffers[number % 2][:size].view(torch.uint8),
            group=self._world.root_group,
            group_src=0,
            async_op=True,
        )

    def _places(self, number: int) -> dict[int, Tensor]:
        """Return where each parameter of a bucket lies in its buffer; nothing on a rank that has none."""
        buffer = self._buffers[number % 2]
        if not len(buffer):
            return {}
        places, begin = {}, 0
        for index in self._buckets[number]:
            shape = torch.Size(self._shapes[index])
            places[index] = buffer[begin : begin + shape.numel()].view(shape)
            begin += shape.numel()
        return places


class _Pair:
    """The broadcasts on their way out of, or into, the two buffers."""

    def __init__(self) -> None:
        self._works: list[Any] = [None, None]

    def put(self, number: int, work: Any) -> None:
        self._works[number % 2] = work

    def wait(self, number: int) -> None:
        work, self._works[number % 2] = self._works[number % 2], None
        if work is not None:
            work.wait()

    def wait_all(self) -> None:
        self.wait(0)
        self.wait(1)


def _pack(sizes: list[int], most: int) -> list[list[int]]:
    """Put indices into buckets of at most so many elements, or of one."""
    buckets: list[list[int]] = []
    filled = most
    for index, size in enumerate(sizes):
        if filled + size > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets
