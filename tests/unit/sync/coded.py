"""Pairs over every choice of codecs, and weights of many dtypes that are trained at random."""

from __future__ import annotations

import torch
from torch import Tensor

from dte_dist.codec import CodecSelector
from dte_dist.report import Phases
from dte_dist.tensors.flat import BITS
from tests.unit.sync.pair import Pair


def chooser_of(codec: str) -> CodecSelector:
    return CodecSelector(codec, bytes_per_second=1e7 if codec == "auto" else None)


class Coded(Pair):
    """A pair whose source chooses its codecs."""

    def __init__(self, codec: str, *args, **options) -> None:
        self.selector = chooser_of(codec)
        super().__init__(*args, **options)

    def prepare(self) -> list[Tensor]:
        self.source.prepare(
            self.source.state.version + 1, False, Phases(), self.detector, selector=self.selector
        )
        return self.source.frames()


def random(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Any bits, NaNs and all; of 0 and 1 for bool."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).to(torch.bool)
    return (
        torch.randint(0, 256, (*shape, dtype.itemsize), generator=rng, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def strided(tensor: Tensor, kind: int) -> Tensor:
    """Return a zero tensor of the same shape that is transposed, a part of a larger one, or contiguous."""
    if kind == 0 or tensor.dim() == 0:
        return torch.zeros_like(tensor)
    if kind == 1:
        return torch.zeros(tuple(reversed(tensor.shape)), dtype=tensor.dtype).permute(
            *reversed(range(tensor.dim()))
        )
    return torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)[..., 2:-1]


def step(trained: dict[str, Tensor], rng: torch.Generator, density: float, near: bool) -> None:
    """Change bits: by a step of the last bits, or to any others."""
    for tensor in trained.values():
        other = (
            tensor.view(BITS[tensor.element_size()]) ^ 1
            if near
            else random(tuple(tensor.shape), tensor.dtype, rng)
        )
        where = torch.rand(tensor.shape, generator=rng) < density
        tensor.copy_(torch.where(where, other.view(tensor.dtype), tensor).view(tensor.dtype))


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
