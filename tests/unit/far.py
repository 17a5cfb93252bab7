"""Memory that counts as lying on a GPU, where there is none.

`tensors.devices` asks for devices in one place only, and is told so there. What is really copied across,
and how a real GPU is waited for, is in tests/gpu.
"""

from __future__ import annotations

import torch
from torch import Tensor

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
FAR: dict[int, Tensor] = {}  # by address, and kept, so that no other tensor comes to lie there


def far(tensor: Tensor) -> Tensor:
    """Let a tensor count as one on the GPU."""
    FAR[tensor.data_ptr()] = tensor.detach()
    return tensor


def near_and_far(numel: int = 300) -> dict[str, Tensor]:
    """Parameters on the CPU; buffers on the GPU, of several widths, one strided and one under two names."""
    generator = torch.Generator().manual_seed(numel)
    made = {f"p{i}": torch.randn(numel, generator=generator) for i in range(2)}
    made |= {
        "b.mean": far(torch.randn(20, generator=generator)),
        "b.steps": far(torch.tensor(7)),
        "b.flags": far(torch.ones(5).bool()),
    }
    made["b.wide"] = far(torch.randn(4, 8, generator=generator).t())
    made["b.half"] = made["b.half.tied"] = far(torch.randn(9, generator=generator).bfloat16())
    return made
