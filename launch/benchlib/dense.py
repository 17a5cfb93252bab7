"""Method (a): everything, packed into buckets and broadcast; see commonlib/dense.py."""

from __future__ import annotations

from torch import Tensor

from benchlib.methods import Method, Moved
from benchlib.world import World
from commonlib.dense import DenseBroadcast
from dte_dist.report import Phases

__all__ = ["Dense"]


class Dense(Method):
    """Dense packed broadcast.

    Args:
        world: the ranks and their modules.
        bucket_bytes: whole parameters are packed until there are as many bytes.
    """

    name = "dense_broadcast"

    def __init__(self, world: World, bucket_bytes: int) -> None:
        self._world = world
        self._broadcast = DenseBroadcast(
            list(world.shapes.values()),
            world.root_group,
            is_root=world.rank == 0,
            is_receiver=world.is_receiver,
            bucket_bytes=bucket_bytes,
        )

    def run(self) -> Moved:
        phases = Phases()
        if self._world.is_source:
            self._broadcast.send(self._world.parameters(), phases)
        else:
            locals_ = self._world.locals()

            def take(index: int, whole: Tensor) -> None:
                locals_[index].copy_(whole[self._world.held(index)])

            self._broadcast.receive(take, phases)
        return Moved(self._broadcast.bytes, phases.seconds)
