"""`DeltaEngine` with tensors on the GPU, on either side or both: in one process, and between ranks over gloo;
whole, and along a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dte_dist import DeltaEngine, Layout, LoopbackTransport, Plan, ProcessGroupTransport, Transport
from tests.distributed.launcher import Ranks
from tests.gpu.device import DEVICE, FLOATS, begin, random_bits, same_bits, settle, tier

pytestmark = tier
WORLD, VERSIONS, CPU = 4, 4, torch.device("cpu")
SHAPES = {"w": (2, (48, 20)), "v": (4, (12, 4, 8)), "b": (1, (24,)), "s": (8, ()), "big": (2, (40, 30000))}
places = pytest.mark.parametrize(
    ("sources", "receivers"),
    [(DEVICE, DEVICE), (DEVICE, CPU), (CPU, DEVICE)],
    ids=["device to device", "device to cpu", "cpu to device"],
)
ratios = pytest.mark.parametrize("sparse_bytes_ratio", [0.0, 1.0], ids=["whole tensors", "positions"])


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        yield ranks


class Side:
    """What the ranks of one side hold: each its chunk along the first or the last dimension, of the truth
    that all know.
    """

    def __init__(self, ranks: Sequence[int], dim: int, device: torch.device) -> None:
        self.regions: dict[int, dict[str, tuple[slice, ...]]] = {}
        self.tensors: dict[int, dict[str, Tensor]] = {}
        for place, rank in enumerate(ranks):
            self.regions[rank] = {}
            for name, (_, shape) in SHAPES.items():
                region = [slice(0, size) for size in shape]
                if shape:
                    step = shape[dim] // len(ranks)
                    region[dim] = slice(place * step, (place + 1) * step)
                self.regions[rank][name] = tuple(region)
            self.tensors[rank] = {name: part.to(device) for name, part in self.parts(rank, truth(0)).items()}
            for tensor in self.tensors[rank].values() if dim else ():
                tensor.zero_()

    def parts(self, rank: int, full: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: full[name][region].clone() for name, region in self.regions[rank].items()}

    def layout(self, rank: int) -> Layout:
        regions = self.regions[rank]
        return Layout.from_views(
            (name, t, SHAPES[name][1], [along.start for along in regions[name]])
            for name, t in self.tensors[rank].items()
        )

    def take(self, rank: int, full: dict[str, Tensor]) -> None:
        for name, part in self.parts(rank, full).items():
            self.tensors[rank][name].copy_(part)


def truth(version: int) -> dict[str, Tensor]:
    """Return all tensors as they are at a version: of each, a few more elements have other bits; at version 3
    none.
    """
    full = {}
    for number, (name, (width, shape)) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        bits, other = (random_bits(count, width, 10 * number + seed) for seed in (0, 1))
        for step in range(1, min(version, 2) + 1):
            bits[step::17] = other[step::17]
        full[name] = bits.view(FLOATS[width]).view(shape)
    return full


def run(
    transport: Transport,
    plan: Plan | None,
    sides: tuple[Side, Side],
    played: Sequence[int],
    sparse_bytes_ratio: float,
) -> list[str]:
    """Push and pull all versions on the ranks that this process plays; return what is wrong."""
    sources, copies = sides
    given = [
        {rank: side.layout(rank) if plan is not None else side.tensors[rank] for rank in side.tensors}
        for side in sides
    ]
    options: list[dict[str, Any]] = [
        {"plan": plan, "rank": rank} if plan is not None else {} for rank in range(WORLD)
    ]
    engines = {
        rank: DeltaEngine(transport, sparse_bytes_ratio=sparse_bytes_ratio, timeout=60, **options[rank])
        for rank in played
    }
    faults = []
    for version in range(VERSIONS):
        for rank in (rank for rank in played if rank in sources.tensors):
            sources.take(rank, truth(version))
            engines[rank].push(given[0][rank], version)
        for rank in (rank for rank in played if rank in copies.tensors):
            engines[rank].pull(given[1][rank], version)
            expected = copies.parts(rank, truth(version))
            faults += [
                f"v{version} rank {rank}: {name}"
                for name in expected
                if not same_bits(copies.tensors[rank][name], expected[name])
            ]
    settle()
    return faults


def stage(shared: bool, devices: tuple[torch.device, torch.device]) -> tuple[tuple[Side, Side], Plan | None]:
    sources, copies = (
        (Side([0, 1], 0, devices[0]), Side([2, 3], -1, devices[1])) if shared else _whole(*devices)
    )
    if not shared:
        return (sources, copies), None
    return (sources, copies), Plan.between(
        *({rank: side.layout(rank) for rank in side.tensors} for side in (sources, copies))
    )


def _whole(source: torch.device, copy: torch.device) -> tuple[Side, Side]:
    copies = Side([1], 0, copy)
    copies.regions |= {rank: copies.regions[1] for rank in (2, 3)}
    copies.tensors = {
        rank: {name: torch.zeros_like(tensor) for name, tensor in copies.tensors[1].items()}
        for rank in (1, 2, 3)
    }
    return Side([0], 0, source), copies


def in_one_process(
    rank: int, world: int, shared: bool, devices: tuple[torch.device, torch.device], sparse_bytes_ratio: float
) -> list[str]:
    begin()
    if rank:
        return []
    sides, plan = stage(shared, devices)
    return run(LoopbackTransport(), plan, sides, range(WORLD), sparse_bytes_ratio)


def between_ranks(
    rank: int, world: int, shared: bool, devices: tuple[torch.device, torch.device], sparse_bytes_ratio: float
) -> list[str]:
    begin()
    sides, plan = stage(shared, devices)
    transport = ProcessGroupTransport(dist.group.WORLD, plan=plan, timeout=60)
    faults = run(transport, plan, sides, [rank], sparse_bytes_ratio)
    dist.barrier()
    transport.close()
    return faults


@places
@ratios
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "along a plan"])
@pytest.mark.parametrize("program", [in_one_process, between_ranks])
def test_every_version_arrives_bit_for_bit(  # noqa: PLR0917
    ranks, program: Any, shared: bool, sources: Any, receivers: Any, sparse_bytes_ratio: float
) -> None:
    found = ranks.run(program, shared, (sources, receivers), sparse_bytes_ratio, seconds=110)
    assert [fault for faults in found for fault in faults] == []
