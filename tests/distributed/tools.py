"""What tests on ranks share: small models, their bits, errors as values, and a way to the channel for faults to be put in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dte_dist
from dte_dist.collectives import channels
from dte_dist.collectives.channel import Channel
from dte_dist.collectives.sync import Parts

TIMEOUT = 15.0
"""Seconds that a call may wait for another rank: long for a busy machine, short of the launcher's own limit."""


def sync(module: Any, group: Any = None, **options: Any) -> Any:
    """Call `delta_broadcast` with the timeout of the tests."""
    return dte_dist.delta_broadcast(module, group, **{"timeout": TIMEOUT, **options})


def model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A few layers with a persistent buffer, filled from a seed."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False))
    module.register_buffer("steps", torch.tensor(seed))
    return module.to(dtype)


def nudge(module: nn.Module, name: str, count: int = 1, by: float = 1.0) -> None:
    """Change the first elements of one parameter, as an optimizer would."""
    with torch.no_grad():
        dict(module.named_parameters())[name].view(-1)[:count] += by


def digest(tensor: Tensor) -> str:
    """Hash the bits of a tensor; equal for equal bits only."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def prints(module: nn.Module) -> dict[str, str]:
    """Hash every tensor of a module by name."""
    return {name: digest(tensor) for name, tensor in module.state_dict().items()}


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    """Return class and text of what a call raises; two empty strings if it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def channel_of(module: Any, group: Any = None) -> Channel:
    """Return the open channel of a module."""
    return channels._channels[module][torch.distributed.group.WORLD if group is None else group]


def parts_of(module: Any, group: Any = None) -> Parts:
    """Return the parts of the open channel of a module, for faults to be put into."""
    return channel_of(module, group).parts


def same(values: list[Any]) -> Any:
    """Return the value that all ranks gave."""
    assert all(value == values[0] for value in values), values
    return values[0]
