"""What the tests of `dte_dist.verify` share: layouts with something to flip, and what a report says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dte_dist
from tests.distributed.cases import BITS
from tests.distributed.tools import model, sync

DIFFERENT = "a verification found other bits"


def found(report: dte_dist.VerifyReport) -> tuple[Any, ...]:
    """The part of a report that is the same on every rank."""
    return report.version, report.different, report.first, report.ranks, report.compared, report.moved


def why(report: dte_dist.SyncReport) -> tuple[Any, ...]:
    return report.version, report.kind, report.reason, report.seeded


@dataclass
class Side:
    """What one rank has of a case.

    Attributes:
        target: what it passes.
        trained: what a source trains, by name, as local tensors.
        held: what a receiver holds, likewise.
        options: of each call.
        receivers: ranks.
    """

    target: Any
    trained: dict[str, Tensor]
    held: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    receivers: tuple[int, ...] = (1, 2, 3)

    def train(self, step: int) -> int:
        """Change a bit of some tensors; return how many of this rank's shards changed."""
        some = [tensor for tensor in self.trained.values() if tensor.numel()][step % 2 :: 2]
        for tensor in some:
            flip(tensor, step)
        return len(some)


def flip(tensor: Tensor, place: int, bit: int = -1) -> None:
    """Flip one bit behind everybody's back: no counter moves. By default one that a cast to half the width
    keeps.
    """
    width = 8 * tensor.element_size()
    bits = tensor.data.view(BITS[tensor.element_size()])  # as it lies: of any strides
    at = (
        tuple(int(index) for index in torch.unravel_index(torch.tensor(place % bits.numel()), bits.shape))
        if bits.dim()
        else ()
    )
    mask = 1 << ((0 if tensor.dtype == torch.bool else width - 8) if bit < 0 else bit)
    bits[at] ^= torch.tensor(mask, dtype=torch.uint64).view(torch.int64).to(bits.dtype)


def locals_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: t._local_tensor if isinstance(t, DTensor) else t
        for name, t in module.state_dict(keep_vars=True).items()
    }


def sharded_model(rank: int, mesh: DeviceMesh) -> nn.Module:
    module = model(rank)
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module


def fsdp2(rank: int, world: int) -> Side:
    mesh = DeviceMesh("cpu", [0, 1])
    module = sharded_model(1, mesh) if rank < 2 else model(rank)
    return Side(module, locals_of(module), locals_of(module), receivers=(2, 3))


def call(side: Side, **how: Any) -> dte_dist.SyncReport:
    report = sync(side.target, **{**side.options, **how})
    return report.wait() if how.get("async_op") else report
