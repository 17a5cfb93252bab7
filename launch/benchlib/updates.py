"""Where the changes come from: a generator that needs no training, or real steps of AdamW. Both run on the
sources only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchlib.limit import Limit, limit_of, ordered
from benchlib.world import World
from commonlib.model import ModelSettings, Transformer
from commonlib.text import Tokenizer, manual, zen
from commonlib.training import Trainer, TrainingSettings

__all__ = ["Generated", "Trained", "Updates", "learning_rate_for", "model_settings", "model_shapes"]

_CHUNK = 1 << 18
_SAMPLE = 1 << 20
_SIGMA = 0.23
_WEIGHT = 0.02
_TOUCHED_ROWS = 0.1  # of the embedding
_WARMUP_STEPS = 8


class Updates(ABC):
    """Bits for the live weights of a source, one state after another."""

    @abstractmethod
    def advance(self) -> Limit:
        """Write the next state into the live weights; returns what changed on this rank, and the fewest bytes
        for it.
        """


class Generated(Updates):
    """Updates with the statistics of AdamW on fp32 masters, without training.

    A master lies anywhere within half a step (ulp) of its bf16 weight w. An update moves it by lr * 0.23 *
    N(0, 1), and the new weight is the master in bf16. Nine in ten rows of the embedding do not move. At 100 %
    all elements move, those that would not by one step.

    Two such updates A and B of the same weights take turns, forth and back: w, w + A, w + A + B, w + B, w.
    Where both change an element their distances (in steps between neighbouring floats) add up. So any number
    of updates costs four states. Each has masters of its own: at 1 % about a fifth of its positions were in
    the one before (weights so small that any step moves them), as in real steps.

    Args:
        world: its live weights are written.
        density: of changed elements over the whole model, in percent.
        seed: of the weights; each source draws its own.
    """

    def __init__(self, world: World, density: float, seed: int) -> None:
        self._locals = world.locals()
        self._turn = 0
        numel = sum(each.numel() for each in self._locals)
        still = _still_share(world) if density < 100 else 0.0
        lr = learning_rate_for(min(density / 100 / (1 - still), 0.99))
        rng = torch.Generator().manual_seed(seed * 1000 + world.rank)
        masks = [_touched(self._locals[0], rng) if still else None for _ in range(2)]
        states = [torch.empty(numel, dtype=torch.int16) for _ in range(4)]
        for first in range(0, numel, _CHUNK):
            length = min(_CHUNK, numel - first)
            weights = (torch.randn(length, generator=rng) * _WEIGHT).bfloat16()
            old = weights.view(torch.int16)
            moves = [
                _move(length, lr, rng, None if mask is None else mask[first : first + length])
                for mask in masks
            ]
            a, b = (
                _moved(_master(old.view(torch.bfloat16), rng), old, move, everywhere=density >= 100)
                for move in moves
            )
            both = ordered(ordered(a) + ordered(b) - ordered(old))
            for state, bits in zip(states, (old, a, both, b), strict=True):
                state[first : first + length] = bits
        self._states = states
        self._limits = [limit_of(states[0], states[1]), limit_of(states[1], states[2])]
        self._write(states[0])

    def advance(self) -> Limit:
        limit = self._limits[self._turn % 2]
        self._turn += 1
        self._write(self._states[self._turn % 4])
        return limit

    @torch.no_grad()
    def _write(self, state: Tensor) -> None:
        sizes = [each.numel() for each in self._locals]
        for live, bits in zip(self._locals, state.split(sizes), strict=True):
            live.view(torch.int16).copy_(bits.view(live.shape))


class Trained(Updates):
    """Real steps of AdamW: the demo's trainer with fp32 masters, and what it is in bf16 goes into the live
    weights.

    Args:
        world: of the shapes that `model_shapes` gives.
        model_mib: size of the model.
        lr: of AdamW; a few steps at a larger one come before it.
    """

    def __init__(self, world: World, model_mib: float, lr: float) -> None:
        model, text = model_settings(model_mib), zen()
        tokens = torch.tensor(Tokenizer([text, manual()], model.vocab).encode(text))
        self._trainer = Trainer(model, TrainingSettings(lr=lr), world.mesh, tokens)
        self._world = world
        for _ in range(_WARMUP_STEPS):
            self._trainer.train()
        self._trainer.settle()
        self._trainer.train()
        self._publish()

    def advance(self) -> Limit:
        before = self._flat()
        self._trainer.train()
        self._publish()
        return limit_of(before, self._flat())

    @torch.no_grad()
    def _publish(self) -> None:
        for module in self._trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        masters = dict(self._trainer.model.named_parameters())
        for name, live in zip(self._world.shapes, self._world.locals(), strict=True):
            master = masters[name]
            live.copy_(master.to_local() if isinstance(master, DTensor) else master)

    def _flat(self) -> Tensor:
        return torch.cat([live.reshape(-1).view(torch.int16) for live in self._world.locals()])


def model_settings(model_mib: float) -> ModelSettings:
    """Return settings of the demo's model with as many layers as come closest to a size."""
    one, two = (_numel(model_shapes_of(ModelSettings(layers=layers))) for layers in (1, 2))
    wanted = model_mib * (1 << 20) / 2
    layers = max(1, round((wanted - one) / (two - one)) + 1)
    return ModelSettings(layers=layers)


def model_shapes(model_mib: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model that `Trained` trains."""
    return model_shapes_of(model_settings(model_mib))


def model_shapes_of(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the demo's model, by name."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in Transformer(settings).named_parameters()}


@cache
def learning_rate_for(share: float) -> float:
    """Return the learning rate at which the generator changes a share of the elements (0 to 0.99); found on a
    sample, to about 1 %.
    """
    if share <= 0:
        return 0.0
    rng = torch.Generator().manual_seed(1)
    master = _master((torch.randn(_SAMPLE, generator=rng) * _WEIGHT).bfloat16(), rng)
    old, noise = _bits(master), torch.randn(_SAMPLE, generator=rng) * _SIGMA
    low, high = math.log(1e-12), math.log(1e3)
    for _ in range(24):
        middle = (low + high) / 2
        found = (_bits(master + math.exp(middle) * noise) != old).float().mean().item()
        low, high = (middle, high) if found < share else (low, middle)
    return math.exp(high)


def _master(weights: Tensor, rng: torch.Generator) -> Tensor:
    power = (weights.view(torch.int16) & 0x7F80).view(torch.bfloat16).float()  # the power of two at or below
    return (torch.rand(len(weights), generator=rng) - 0.5).mul_(power).mul_(2**-7).add_(weights.float())


def _bits(values: Tensor) -> Tensor:
    return values.bfloat16().view(torch.int16)


def _move(length: int, lr: float, rng: torch.Generator, mask: Tensor | None) -> Tensor:
    """Return how far each master moves; `mask` says for the first of them whether they may."""
    move = torch.randn(length, generator=rng) * (lr * _SIGMA)
    if mask is not None:
        move[: len(mask)] *= mask
    return move


def _moved(master: Tensor, old: Tensor, move: Tensor, *, everywhere: bool) -> Tensor:
    """Return the bits after one update; a master that rounds to other bits than the old ones (next to a power
    of two) stays.
    """
    new = torch.where(_bits(master) == old, _bits(master + move), old)
    return torch.where(new == old, old ^ 1, new) if everywhere else new


def _still_share(world: World) -> float:
    sizes = [math.prod(shape) for shape in world.shapes.values()]
    return (1 - _TOUCHED_ROWS) * sizes[0] / sum(sizes) if len(sizes) > 1 else 0.0


def _touched(embedding: Tensor, rng: torch.Generator) -> Tensor:
    rows = (torch.rand(len(embedding), generator=rng) < _TOUCHED_ROWS).float()
    return rows[:, None].expand_as(embedding).reshape(-1)


def _numel(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
