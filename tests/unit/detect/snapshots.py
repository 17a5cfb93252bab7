"""Tensors of several widths with a snapshot of them, and a kernel that fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect.detector import Changed, Detector
from dte_dist.detect.snapshot import Snapshot
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.kernels.test_scan import FLOATS
from tests.unit.kernels.test_scan_advance import PATTERNS, changed_from, make

SEGMENT = 16
KERNELS = [cpu, torch_kernels]
Spans = list[tuple[int, int]]


class Model:
    """Tensors of several widths, some strided, some fp32 that is read as bf16; and a snapshot of them."""

    def __init__(self, sizes: dict[int, list[int]], segment: int = SEGMENT) -> None:
        self.tensors: dict[int, list[Tensor]] = {}
        for width, numels in sizes.items():
            own = [
                torch.float32 if width == 2 and number % 2 else FLOATS[width] for number in range(len(numels))
            ]
            self.tensors[width] = [
                make(numel, own[i], 10 * width + i, i % 3 == 2) for i, numel in enumerate(numels)
            ]
        self.totals = {width: sum(numels) for width, numels in sizes.items()}
        for width in sizes:
            self.set(width, self.bits(width))
        self.snapshot = Snapshot(self.totals, torch.device("cpu"), segment)
        self.refresh()

    def live(self, width: int) -> FlatTensors:
        return FlatTensors(self.tensors[width], width).read_as([FLOATS[width]] * len(self.tensors[width]))

    def refresh(self) -> None:
        ranges = [
            (width, first, min(50, total - first))
            for width, total in self.totals.items()
            for first in range(0, total, 50)
        ]
        self.snapshot.refresh({width: self.live(width) for width in self.totals}, ranges)

    def bits(self, width: int) -> np.ndarray:
        """Return what would be sent now."""
        out = torch.zeros(self.totals[width], dtype=BITS[width])
        cpu.read(self.live(width), 0, out)
        return out.numpy()

    def set(self, width: int, bits: np.ndarray) -> None:
        """Let the tensors hold these bits; where they are fp32, finite numbers near them, of which none is
        halfway to the next.
        """
        parts = torch.from_numpy(bits.copy()).split([tensor.numel() for tensor in self.tensors[width]])
        for tensor, part in zip(self.tensors[width], parts, strict=True):
            own = (
                part
                if tensor.element_size() == width
                else ((part & ~0x80).int() << 16) | torch.randint(0x7FFF, part.shape).int()
            )
            tensor.view(own.dtype).copy_(own.view(tensor.shape))

    def change(self, width: int, pattern: str, seed: int) -> None:
        """Let live elements differ from what they were."""
        live = self.bits(width)
        self.set(width, changed_from(live, PATTERNS[pattern](len(live), np.random.default_rng(seed)), seed))

    def known(self, width: int) -> np.ndarray:
        return self.snapshot.bits[width].numpy().copy()

    def everything(self) -> dict[int, list[int]]:
        return {width: self.known(width).tolist() for width in self.totals}

    def lives(self) -> dict[int, list[int]]:
        return {width: self.bits(width).tolist() for width in self.totals}

    def advance(
        self, width: int, spans: Spans | None = None, detector: Detector | None = None
    ) -> Iterator[list[Changed]]:
        return self.snapshot.changes(self.live(width), width, spans or [(0, self.totals[width])], detector)

    def take_over(self, detector: Detector | None = None) -> None:
        for width in self.totals:
            for _ in self.advance(width, detector=detector):
                pass


class Found(NamedTuple):
    """What was found in a range, copied: the tensors are used again."""

    first: int
    length: int
    positions: list[int] | None
    old: list[int]
    new: list[int]

    @classmethod
    def of(cls, changed: Changed) -> Found:
        positions = None if changed.positions is None else changed.positions.tolist()
        return cls(changed.first, changed.length, positions, changed.old.tolist(), changed.new.tolist())

    @property
    def places(self) -> list[int]:
        return [self.first + at for at in (range(self.length) if self.positions is None else self.positions)]


@pytest.fixture(params=KERNELS, ids=["cpu", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run a test with the kernels of both kinds of device, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield request.param


SIZES = {1: [70, 200], 2: [33, 150, 48, 91, 5], 4: [300], 8: [100, 57, 3]}


def exact(live: Tensor, known: Tensor) -> Tensor:
    return (live != known).nonzero().view(-1)


def too_many(live: Tensor, known: Tensor) -> Tensor:
    return torch.unique(torch.cat([exact(live, known), torch.arange(0, len(live), 5)])).int()


class Failing:
    """The kernels of a device, one of which fails when it is called for the k-th time: before it did
    anything, or after.
    """

    def __init__(self, kernel: Any, name: str, at: int, done: bool) -> None:
        self._kernel, self._name, self.left, self._done = kernel, name, at, done

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._fail if name == self._name else getattr(self._kernel, name)

    def _fail(self, *args: Any) -> Any:
        self.left -= 1
        if self.left >= 0 or self._done:
            result = getattr(self._kernel, self._name)(*args)
        if self.left < 0:
            raise OSError("the device is gone")
        return result


def heals(model: Model) -> None:
    """The snapshot is of no version, whatever is undone, until all live bits are taken over."""
    assert model.snapshot.inconsistent
    model.snapshot.roll_back()
    assert model.snapshot.inconsistent
    model.snapshot.commit()
    assert model.snapshot.inconsistent
    model.refresh()
    before = model.everything()
    assert before == model.lives() and not model.snapshot.inconsistent
    for width in model.totals:
        model.change(width, "0.3", 8)
    model.take_over()
    assert model.everything() == model.lives()
    model.snapshot.roll_back()
    assert model.everything() == before and not model.snapshot.inconsistent
