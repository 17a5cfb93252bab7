"""Rollout ranks hold bf16 slices of the model (tensor parallel) and generate text with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from commonlib.model import ModelSettings, Transformer

__all__ = ["Rollout"]


class Rollout:
    """One of the ranks that generate together; each holds its heads, its channels and its part of the
    vocabulary.
    """

    def __init__(self, settings: ModelSettings, seed: int, mesh: DeviceMesh) -> None:
        torch.manual_seed(seed)  # weights of no use: the first sync replaces every one
        self.model = Transformer(settings).bfloat16().eval().requires_grad_(False)
        parallelize_module(self.model, mesh, _tensor_parallel(settings, mesh.size()))
        self.loss = float("nan")

    def train(self) -> None:
        """Nothing: while the trainers train, a rollout rank has no say."""

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> Tensor:
        """The prompt and its `count` likeliest next tokens; the same on every rank of the mesh."""
        tokens = torch.tensor(prompt)
        for _ in range(count):
            logits = self.model(tokens[None])[0, -1]
            tokens = torch.cat((tokens, logits.argmax()[None]))
        return tokens


def _tensor_parallel(settings: ModelSettings, ranks: int) -> dict[str, ParallelStyle]:
    """Which way each weight is cut: by its outputs on the way in, by its inputs on the way out; norms stay
    whole.
    """
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        **{f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "layers.*.mlp.down": RowwiseParallel(),
    }
    if settings.kv_heads % ranks == 0:  # else every rank keeps all heads
        plan |= {f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan["layers.*.attention.o"] = RowwiseParallel()
    return plan
