"""What the demo measures against and proves with: a dense broadcast of the trainers' weights.

1. `run` writes the weights to a spare copy on the rollout ranks, so that it cannot repair what a delta got
   wrong.
2. `first_difference` compares the rollout ranks' live weights with them, bit for bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from commonlib.dense import DenseBroadcast

__all__ = ["Proof"]

_BUCKET_BYTES = 16 << 20


class Proof:
    """The trainers' weights by another way, in bf16.

    Making one is a collective of all ranks, and so is each of its methods.

    Args:
        model: this rank's.
        trains: whether it is a trainer's.

    Attributes:
        bytes: that one broadcast brings to each rollout rank.
    """

    def __init__(self, model: nn.Module, trains: bool) -> None:
        self._model, self._trains = model, trains
        self._names = sorted(model.state_dict())
        self._spare = [] if trains else [torch.zeros_like(_local(tensor)) for tensor in self._slots()]
        rank, world = dist.get_rank(), dist.get_world_size()
        self._broadcast = DenseBroadcast(
            [slot.shape for slot in self._slots()],
            dist.new_group([0, *range(world // 2, world)]),
            is_root=rank == 0,
            is_receiver=not trains,
            bucket_bytes=_BUCKET_BYTES,
        )
        self.bytes = self._broadcast.bytes

    def run(self) -> None:
        """Bring the trainers' weights to the spare copy of every rollout rank."""
        slots = self._slots()
        if self._trains:
            self._broadcast.send(slots)
        else:
            self._broadcast.receive(
                lambda index, whole: self._spare[index].copy_(_part_of(whole, slots[index]))
            )

    def first_difference(self) -> str | None:
        """Return the name of the first parameter whose bits differ on any rollout rank; None if every rank
        holds the trainers' bits.
        """
        slots, wrong = self._slots(), [len(self._names)]

        def compare(index: int, whole: Tensor) -> None:
            if not _same_bits(_local(slots[index]), _part_of(whole, slots[index])):
                wrong.append(index)

        if self._trains:
            self._broadcast.send(slots)
        else:
            self._broadcast.receive(compare)
        first = torch.tensor(min(wrong))
        dist.all_reduce(first, dist.ReduceOp.MIN)
        return (*self._names, None)[int(first)]

    def _slots(self) -> list[Tensor]:
        """Return the parameters as they lie now, in an order that all ranks share."""
        state = self._model.state_dict()
        return [state[name] for name in self._names]


def _local(slot: Tensor) -> Tensor:
    return slot.to_local() if isinstance(slot, DTensor) else slot


def _part_of(whole: Tensor, slot: Tensor) -> Tensor:
    """Return the part of `whole` that this rank holds of `slot`; no communication."""
    if not isinstance(slot, DTensor):
        return whole
    return distribute_tensor(whole, slot.device_mesh, slot.placements, src_data_rank=None).to_local()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
