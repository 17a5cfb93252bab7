"""What tests on ranks share: small models, their bits, errors as values, and a way to the channel for faults
to be put in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dte_dist
from dte_dist import Layout
from dte_dist.sync import registry
from dte_dist.sync.channel import Channel
from dte_dist.sync.channel_state import ChannelState

TIMEOUT = 15.0
"""Seconds that a call may wait for another rank: long for a busy machine, short of the launcher's own limit.
"""


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
    return registry._channels[module][torch.distributed.group.WORLD if group is None else group]


def parts_of(module: Any, group: Any = None) -> ChannelState:
    """Return the parts of the open channel of a module, for faults to be put into."""
    return channel_of(module, group).parts


def same(values: list[Any]) -> Any:
    """Return the value that all ranks gave."""
    assert all(value == values[0] for value in values), values
    return values[0]


def facts(report: dte_dist.SyncReport) -> tuple[Any, ...]:
    """The part of a report that is the same on every rank."""
    return (
        report.version,
        report.base_version,
        report.kind,
        report.reason,
        report.changed,
        report.total,
        report.wire_bytes,
        report.gather_bytes,
        report.dense_bytes,
        report.frames,
        report.seeded,
    )


def why(report: dte_dist.SyncReport) -> tuple[Any, ...]:
    """What a report says of seeds."""
    return report.version, report.base_version, report.kind, report.reason, report.seeded


class Rows:
    """A (rows, columns) weight cut by rows over the sources, whole on receivers; no mesh needed."""

    def __init__(self, rank: int, sources: int, shape: tuple[int, int] = (12, 5), tensors: int = 1) -> None:
        torch.manual_seed(rank)
        low, high = (
            (rank * shape[0] // sources, (rank + 1) * shape[0] // sources)
            if rank < sources
            else (0, shape[0])
        )
        self.parts = [torch.randn(high - low, shape[1]) for _ in range(tensors)]
        self.layout = Layout.from_views(
            [(f"w{i:04}", part, shape, (low, 0)) for i, part in enumerate(self.parts)]
        )

    def whole(self, sources: int) -> list[str]:
        """Hash every tensor as all ranks know it: the sources' parts put together on rank 0, the copy on the
        others.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.parts)
        mine = (
            [torch.cat(cut) for cut in zip(*gathered[:sources], strict=True)]
            if dist.get_rank() < sources
            else self.parts
        )
        return [digest(tensor) for tensor in mine]
