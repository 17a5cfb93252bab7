"""Trainers hold fp32 shards of the model (FSDP2) and train it with AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from commonlib.model import ModelSettings, Transformer
from commonlib.text import crops

__all__ = ["Trainer", "TrainingSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The training.

    Attributes:
        seed: of the first weights, and of the text that each trainer draws.
        batch: sequences per trainer rank and step.
        length: tokens per sequence.
        warmup_steps: before the first sync, at `warmup_lr`: then the model has something to say.
        warmup_lr: learning rate of the warm-up.
        steps: at `lr`; each is followed by one sync.
        lr: learning rate, as small as RL fine-tuning uses.
    """

    seed: int = 0
    batch: int = 2
    length: int = 32
    warmup_steps: int = 16
    warmup_lr: float = 1e-3
    steps: int = 8
    lr: float = 3e-6


class Trainer:
    """One of the ranks that train together; every parameter is cut into rows over `mesh`."""

    def __init__(
        self, model: ModelSettings, settings: TrainingSettings, mesh: DeviceMesh, tokens: Tensor
    ) -> None:
        torch.manual_seed(settings.seed)  # the same first weights on every trainer
        self.model = Transformer(model)
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
