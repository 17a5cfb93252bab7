"""A model for the older FullyShardedDataParallel (FSDP1): wrapped in all ways, trained, read in full."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import dte_dist
from dte_dist.layout import canonical_name
from tests.distributed.tools import TIMEOUT, digest

CPU = torch.device("cpu")
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A unit of its own. One parameter may lie in memory transposed (`turned`), one has no elements."""

    def __init__(self, width: int, turned: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 11)
        self.turned = nn.Parameter(torch.randn(width, 11).t() if turned else torch.randn(11, width))
        self.cube = nn.Parameter(torch.randn(3, 1, width, 2))
        self.nothing = nn.Parameter(torch.zeros(4, 0))

    def forward(self, hidden: Tensor) -> Tensor:
        square = self.cube.sum(0)[0]
        return hidden + torch.relu(self.wide(hidden)) @ self.turned + (square @ square.t()).sum() * 1e-3


class Model(nn.Module):
    """Tied weights, a module to be ignored, a buffer, and rows that no number of ranks divides."""

    def __init__(self, seed: int = 0, *, turned: bool = True) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.blocks = nn.ModuleList([Block(5, turned), Block(5, turned)])
        self.aside = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden + self.aside(hidden.to(self.aside.weight.dtype)).to(hidden.dtype)))


def wrapped(
    model: Model,
    *,
    strategy: str = "FULL_SHARD",
    orig: bool = True,
    mixed: bool = False,
    group: Any = None,
    mesh: DeviceMesh | None = None,
) -> FullyShardedDataParallel:
    """Wrap a model: each block is a unit, what is left of it another, `aside` none."""
    return FullyShardedDataParallel(
        model,
        process_group=group,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        mixed_precision=MIXED if mixed else None,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_states=[model.aside],
        device_id=CPU,
    )


class Trainer:
    """Steps of AdamW on data that all ranks have alike: what is not sharded stays alike, too."""

    def __init__(self, model: nn.Module, seed: int = 1) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        self._data = torch.Generator().manual_seed(seed)

    def loss(self) -> Tensor:
        tokens = torch.randint(13, (4, 3), generator=self._data)
        return nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten())

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copy every tensor of a model as a whole, of FSDP1 as `summon_full_params` shows it; its ranks call."""
    full = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        parameters, buffers = model.named_parameters, model.named_buffers
        for name, tensor in chain(parameters(remove_duplicate=False), buffers(remove_duplicate=False)):
            local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            full[canonical_name(name)] = local.detach().clone()
    return full


def prints(model: nn.Module) -> dict[str, str]:
    """Hash every tensor of a model as a whole."""
    return {name: digest(tensor) for name, tensor in whole(model).items()}


@torch.no_grad()
def evaluated(model: nn.Module) -> Tensor:
    """Use a model as a rollout does."""
    return model.eval()(torch.arange(13).view(1, 13))


def synced(model: Any, p2p: bool, **options: Any) -> dte_dist.SyncReport:
    """Call one of the collectives with the timeout of the tests."""
    call = dte_dist.delta_p2p if p2p else dte_dist.delta_broadcast
    return call(model, **{"timeout": TIMEOUT, **options})


def half(rank: int, first: int, world: int) -> Any:
    """Return the group that a rank is in: ranks below `first`, or the others; all ranks must call."""
    groups = [dist.new_group(list(range(first))), dist.new_group(list(range(first, world)))]
    return groups[rank >= first]
