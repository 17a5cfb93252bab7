"""A wire within this process, for either route.

Whatever is sent or received is moved when it is waited for, never before, as late as a network may do it.
So a buffer that is used again too early is noticed too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dte_dist.transport.buffers import Frame

Posts = dict[tuple[int, int], deque[Tensor]]
Taken = list[tuple[int, int, Tensor, Tensor]]


class Later:
    """Something on its way, which happens when it is waited for."""

    def __init__(self, happen: Callable[[], Any]) -> None:
        self._happen, self.done = happen, False

    def wait(self) -> None:
        assert not self.done
        self.done = True
        self._happen()


class Wire:
    """A group of ranks that run one after the other: senders first."""

    device = torch.device("cpu")

    def __init__(self, rank: int, members: Sequence[int], posts: Posts) -> None:
        self.rank, self.members, self._posts = rank, tuple(members), posts

    def send(self, tensor: Tensor, to: int) -> Later:
        return Later(lambda: self._posts[self.rank, to].append(tensor.clone()))

    def receive(self, tensor: Tensor, source: int) -> Later:
        return Later(lambda: tensor.copy_(self._posts[source, self.rank].popleft()))

    def broadcast(self, tensor: Tensor, root: int) -> Later:
        if self.rank != root:
            return self.receive(tensor, root)
        others = [self.send(tensor, member) for member in self.members if member != root]

        def happen() -> None:
            for other in others:
                other.wait()

        return Later(happen)

    def send_recv(
        self, outgoing: tuple[Tensor, int] | None, incoming: tuple[Tensor, int] | None
    ) -> tuple[Later | None, Later | None]:
        return self.send(*outgoing) if outgoing else None, self.receive(*incoming) if incoming else None


def frame_of(source: int, number: int, size: int, to: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([source, number, to]).integers(0, 256, size, np.uint8))


def as_sent(frame: Tensor, late: bool) -> Frame:
    def write(place: Tensor) -> None:
        place.copy_(frame)

    return write if late else frame


def check(taken: Taken, expected: dict[tuple[int, int], Tensor], keep: bool) -> None:
    """Every frame came once and right; kept ones are still what they were, and the others have had two
    buffers at most.
    """
    assert {(source, number) for source, number, *_ in taken} == expected.keys() and len(taken) == len(
        expected
    )
    for source, number, frame, when_taken in taken:
        assert torch.equal(when_taken, expected[source, number])
        assert not keep or torch.equal(frame, when_taken)
        assert frame.data_ptr() % 8 == 0


def memories(taken: Taken) -> int:
    return len({frame.untyped_storage().data_ptr() for *_, frame, _ in taken})


SIZES = {0: [2000, 1504, 0, 128, 1000, 96, 8], 1: [0, 2000, 1504, 96, 800, 104, 96]}
"""By source, of every chunk; the first ones are the largest, so that no buffer has to grow."""
