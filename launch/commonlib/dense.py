"""A dense broadcast of bf16 weights: what a delta is measured against, and what it is proved with.

1. The sources put a bucket of parameters together, each with `full_tensor()`.
2. The first rank of the group broadcasts the bucket to the receivers, while the next one is put together.
3. Receivers take the parameters out of a bucket, while the next one arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dte_dist.report import Phases

__all__ = ["DenseBroadcast", "pack"]


class DenseBroadcast:
    """Buffers and buckets for one list of parameters. All sources call `send` while all receivers call
    `receive`.

    Args:
        shapes: full shapes of the parameters, the same on every rank.
        group: the root and the receivers; the root is its rank 0. Another source is not in it.
        is_root: whether this rank sends.
        is_receiver: whether this rank receives.
        bucket_bytes: whole parameters are packed until there are as many bytes.

    Attributes:
        bytes: that one call brings to each receiver.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        *,
        is_root: bool,
        is_receiver: bool,
        bucket_bytes: int,
    ) -> None:
        self._shapes, self._group, self._is_root = list(map(tuple, shapes)), group, is_root
        self._sizes = list(map(math.prod, self._shapes))
        self._buckets = pack(self._sizes, bucket_bytes // 2)
        most = max((self._size(number) for number in range(len(self._buckets))), default=0)
        length = most if is_root or is_receiver else 0
        self._buffers = [torch.zeros(length, dtype=torch.bfloat16) for _ in range(2)]
        self.bytes = 2 * sum(self._sizes)

    @torch.no_grad()
    def send(self, parameters: Sequence[Tensor], phases: Phases | None = None) -> None:
        """Send the parameters; those that are DTensors are assembled by all sources first."""
        phases, pending = phases or Phases(), _Pair()
        for number, bucket in enumerate(self._buckets):
            with phases("wire"):
                pending.wait(number)
            with phases("gather"):
                for index, place in zip(bucket, self._places(number), strict=True):
                    parameter = parameters[index]
                    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    if self._is_root:
                        place.copy_(whole)
            if self._is_root:
                pending.put(number, self._broadcast(number))
        with phases("wire"):
            pending.wait_all()

    @torch.no_grad()
    def receive(self, take: Callable[[int, Tensor], object], phases: Phases | None = None) -> None:
        """Receive the parameters and hand each to `take(index, whole)`; `whole` is valid during the call."""
        phases, pending = phases or Phases(), _Pair()
        if self._buckets:
            pending.put(0, self._broadcast(0))
        for number, bucket in enumerate(self._buckets):
            if number + 1 < len(self._buckets):
                pending.put(number + 1, self._broadcast(number + 1))
            with phases("wire"):
                pending.wait(number)
            with phases("apply"):
                for index, whole in zip(bucket, self._places(number), strict=True):
                    take(index, whole)

    def _size(self, number: int) -> int:
        return sum(self._sizes[index] for index in self._buckets[number])

    def _broadcast(self, number: int) -> Any:
        return dist.broadcast(
            self._buffers[number % 2][: self._size(number)].view(torch.uint8),
            group=self._group,
            group_src=0,
            async_op=True,
        )

    def _places(self, number: int) -> list[Tensor]:
        """Return where each parameter of a bucket lies in its buffer; empty where there is none."""
        buffer, bucket = self._buffers[number % 2], self._buckets[number]
        if not len(buffer):
            return [buffer] * len(bucket)
        pieces = buffer[: self._size(number)].split([self._sizes[index] for index in bucket])
        return [piece.view(self._shapes[index]) for piece, index in zip(pieces, bucket, strict=True)]


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


def pack(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Put indices into buckets of at most so many elements, or of one.

    Example:
        >>> pack([3, 4, 9, 1, 1], 7)
        [[0, 1], [2], [3, 4]]
    """
    buckets: list[list[int]] = []
    filled = most
    for index, size in enumerate(sizes):
        if not buckets or filled + size > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets
