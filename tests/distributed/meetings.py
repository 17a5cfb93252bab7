"""What the tests of a `ProcessGroupTransport` share: a payload that all ranks can make, and one meeting."""

from __future__ import annotations

from typing import Any

import torch

from dte_dist import Payload, ProcessGroupTransport
from dte_dist.codec.named_tensors import Change, write_payload

WORLD, PATIENCE, SHORT = 4, 30.0, 4.0


def payload(version: int, numel: int = 10) -> Payload:
    """A full payload; every rank can make it."""
    weights = torch.arange(numel, dtype=torch.float32) * version
    return write_payload(version, -1, [Change("w", None, weights)], lineage=version + 1)


def meet(
    transport: ProcessGroupTransport,
    rank: int,
    version: int,
    *,
    sent: Any = None,
    src: int = 0,
    timeout: float = PATIENCE,
) -> Any:
    """Send on one rank, receive on the others; return what came."""
    if rank == src:
        transport.send(payload(version) if sent is None else sent, timeout=timeout)
        return version
    return transport.receive(version, timeout=timeout).version
