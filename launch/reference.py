"""The plain way to move weights, to measure against and to prove with: assemble every tensor, broadcast all
of it.

1. The trainers put each parameter together (`full_tensor`) and cast it to bf16.
2. Rank 0 sends the packed weights to the rollout ranks in buckets of 16 MiB.
3. Each rollout rank cuts out its own slices.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["DenseBroadcast"]

BUCKET_BYTES = 16 << 20


class DenseBroadcast:
    """A dense broadcast that writes to a spare copy, so that it cannot repair what a delta got wrong.

    Making one is a collective of all ranks, and so is each of its methods.
    """

    def __init__(self, model: nn.Module, trains: bool) -> None:
        self._model, self._trains = model, trains
        self._names = sorted(model.state_dict())
        self._packed = torch.zeros(sum(tensor.numel() for tensor in self._slots()), dtype=torch.bfloat16)
        self._spare = [] if trains else [torch.zeros_like(_local(tensor)) for tensor in self._slots()]
        rank, world = dist.get_rank(), dist.get_world_size()
        self._takes_part = rank == 0 or not trains
        self._group = dist.new_group([0, *range(world // 2, world)])
        self.bytes = self._packed.nbytes

    def run(self) -> None:
        """Bring the trainers' weights to the spare copy of every rollout rank."""
        wholes = self._fetch()
        if not self._trains:
            for slot, spare, whole in zip(self._slots(), self._spare, wholes, strict=True):
                spare.copy_(_part_of(whole, slot))

    def first_difference(self) -> str | None:
        """Name of the first parameter whose bits differ on any rollout rank; None if every rank holds the
        trainers' bits.
        """
        wholes = self._fetch()
        wrong = len(self._names)
        if not self._trains:
            pairs = enumerate(zip(self._slots(), wholes, strict=True))
            wrong = next(
                (
                    number
                    for number, (slot, whole) in pairs
                    if not _same_bits(_local(slot), _part_of(whole, slot))
                ),
                wrong,
            )
        first = torch.tensor(wrong)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        return (*self._names, None)[int(first)]

    def _slots(self) -> list[Tensor]:
        """The parameters as they lie now, in an order that all ranks share."""
        state = self._model.state_dict()
        return [state[name] for name in self._names]

    def _fetch(self) -> list[Tensor]:
        """Every parameter in full, in bf16; of use on the ranks that take part."""
        slots = self._slots()
        wholes = [
            piece.view(slot.shape)
            for piece, slot in zip(self._packed.split([slot.numel() for slot in slots]), slots, strict=True)
        ]
        if self._trains:
            for whole, slot in zip(wholes, slots, strict=True):
                whole.copy_(slot.full_tensor() if isinstance(slot, DTensor) else slot)
        if self._takes_part:
            for bucket in self._packed.view(torch.uint8).split(BUCKET_BYTES):
                dist.broadcast(bucket, group=self._group, group_src=0)
        return wholes


def _local(slot: Tensor) -> Tensor:
    return slot.to_local() if isinstance(slot, DTensor) else slot


def _part_of(whole: Tensor, slot: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `slot`; no communication."""
    if not isinstance(slot, DTensor):
        return whole
    return distribute_tensor(whole, slot.device_mesh, slot.placements, src_data_rank=None).to_local()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
