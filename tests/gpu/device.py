"""Where the GPU tier runs, and what its tests share.

`DTE_TEST_DEVICE=cpu` runs the same tests on tensors of the CPU, which then take the way of tensors on an
accelerator: kernels of plain torch ops, frames that stay where they were made. That proves the tests
themselves where there is no GPU; without the variable they are skipped there.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.kernels import torch as torch_kernels
from dte_dist.tensors.flat import BITS, FlatTensors

DEVICE = torch.device(os.environ.get("DTE_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"

tier = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
only_gpu = pytest.mark.skipif(not ON_GPU, reason="means nothing without a CUDA device")

FLOATS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def begin() -> None:
    """Make a rank ready: it uses the GPU, or takes the CPU for one."""
    if ON_GPU:
        torch.cuda.set_device(0)
    else:
        kernels.on = lambda _: torch_kernels
        kernels.precompile = lambda *_: None


def settle() -> None:
    """Wait for the device; what it has met so far is raised here."""
    if ON_GPU:
        torch.cuda.synchronize()


@contextmanager
def waits() -> Iterator[list[str]]:
    """List every time that the host waits for the device in between."""
    found: list[str] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]


# Bits and geometry
# -------------------------------------------------------------------------------------------------------


def random_bits(count: int, width: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return bit patterns of all kinds, NaNs among them; the same on any device."""
    data = np.random.default_rng(seed).integers(0, 256, (count + 1) * width, np.uint8)
    return torch.from_numpy(data).view(BITS[width])[:count].to(device)


Recipe = tuple[str, tuple[int, ...]]
"""How a tensor lies in memory, and the shape of the memory."""


def recipes(seed: int, most: int = 9) -> list[Recipe]:
    """Draw how some tensors lie in memory: whole, misaligned, transposed, sliced, permuted, empty, of no
    dimension; one is large.
    """
    pick = random.Random(seed)
    drawn: list[Recipe] = []
    for number in range(pick.randint(1, most)):
        how = pick.choice(("plain", "plain", "offset", "transposed", "sliced", "permuted", "scalar", "empty"))
        a, b, c = (pick.choice((1, 2, 3, 5, 8, 33, pick.randint(1, 200))) for _ in range(3))
        if number == 0:  # kernels treat tensors of more than 2^16 elements by themselves
            how, a, b, c = (
                ("plain", "transposed", "sliced", "permuted", "offset")[seed % 5],
                pick.randint(1200, 1300),
                pick.randint(62, 70),
                6,
            )
        shapes = {
            "plain": (a, b),
            "offset": (a * b + 3,),
            "transposed": (a, b),
            "sliced": (a, b + 2),
            "permuted": (a, b % 9 + 9, c % 7 + 1),
        }
        drawn.append((how, shapes.get(how, (0, a) if how == "empty" else ())))
    return drawn


def build(drawn: Sequence[Recipe], width: int, seed: int, device: torch.device | str) -> list[Tensor]:
    """Make the tensors that recipes describe, with the same bits and strides on any device."""
    tensors = []
    for number, (how, shape) in enumerate(drawn):
        memory = (
            random_bits(int(np.prod(shape)), width, seed + number, device).view(FLOATS[width]).view(shape)
        )
        views = {
            "offset": lambda m: m[3:],
            "transposed": lambda m: m.t(),
            "sliced": lambda m: m[:, 1:-1],
            "permuted": lambda m: m.permute(2, 0, 1),
        }
        tensors.append(views[how](memory) if how in views else memory)
    return tensors


def flats(seed: int, width: int) -> tuple[FlatTensors, FlatTensors]:
    """Return the same flat array on the CPU and on the device."""
    drawn = recipes(seed)
    return FlatTensors(build(drawn, width, seed, "cpu"), width), FlatTensors(
        build(drawn, width, seed, DEVICE), width
    )


def content(tensors: Sequence[Tensor], width: int) -> Tensor:
    """Return the bits of all tensors, on the CPU."""
    bits = [tensor.detach().view(BITS[width]).contiguous().view(-1) for tensor in tensors]
    return torch.cat(bits).cpu() if bits else torch.empty(0, dtype=BITS[width])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare dtype, shape and bits, wherever the tensors are."""
    one, other = one.detach(), other.detach()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bits = BITS[one.element_size()]
    return torch.equal(one.view(as_bits).contiguous().cpu(), other.view(as_bits).contiguous().cpu())
