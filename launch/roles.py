"""The two roles of the demo: trainers hold fp32 shards of the model (FSDP2), rollout ranks bf16 slices of it
(tensor parallel).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from model import Transformer
from settings import Settings
from text import crops

__all__ = ["Rollout", "Trainer"]


class Trainer:
    """One of the ranks that train together; every parameter is cut into rows over `mesh`."""

    def __init__(self, settings: Settings, mesh: DeviceMesh, tokens: Tensor) -> None:
        torch.manual_seed(settings.seed)  # the same first weights on every trainer
        self.model = Transformer(settings)
        for block in self.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.warmup_lr, betas=(0.9, 0.95), fused=True
        )
        self._settings, self._tokens, self.loss = settings, tokens, float("nan")
        self._chance = torch.Generator().manual_seed(
            settings.seed + mesh.get_rank()
        )  # other text on every trainer

    def train(self) -> None:
        """Train on one batch."""
        inputs, targets = crops(self._tokens, self._settings.batch, self._settings.length, self._chance)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()

    def settle(self) -> None:
        """From here on train as carefully as RL does."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr


class Rollout:
    """One of the ranks that generate together; each holds its heads, its channels and its part of the
    vocabulary.
    """

    def __init__(self, settings: Settings, mesh: DeviceMesh) -> None:
        torch.manual_seed(settings.seed + 1)  # weights of no use: the first sync replaces every one
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


def _tensor_parallel(settings: Settings, ranks: int) -> dict[str, ParallelStyle]:
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
