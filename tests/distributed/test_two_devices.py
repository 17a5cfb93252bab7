"""Real ranks whose tensors lie on two devices: FSDP2 keeps parameters on the CPU, and buffers where it
computes.

There is one device here: some memory counts as lying on a GPU (`tensors.devices` asks for devices in one
place, and is told so there). What it takes with a real GPU is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dte_dist
from dte_dist.tensors import devices
from tests.distributed.launcher import Ranks
from tests.distributed.shares import warm
from tests.distributed.tools import TIMEOUT, caught, channel_of, digest, same

pytestmark = pytest.mark.slow

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


@contextmanager
def on_a_gpu(*tensors: Tensor) -> Iterator[None]:
    """Let some memory count as lying on a GPU."""
    far, real = {tensor.data_ptr(): tensor for tensor in tensors}, devices._device_of
    devices._device_of = lambda tensor: GPU if tensor.data_ptr() in far else tensor.device
    try:
        yield
    finally:
        devices._device_of = real


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 6), nn.BatchNorm1d(6, dtype=torch.float64)
    )


def prints(module: nn.Module) -> dict[str, str]:
    """Hash every tensor, whole."""
    found = {}
    for name, tensor in module.state_dict().items():
        found[name] = digest(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return found


def marks(module: nn.Module) -> list[tuple[int, int]]:
    """Return address and version counter of each buffer."""
    return [(tensor.data_ptr(), tensor._version) for tensor in module.buffers()]


def step(module: nn.Module, number: int) -> None:
    """Change parameters and buffers in place, the same on all trainers."""
    with torch.no_grad():
        for tensor in module.parameters():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)[number : number + 2] += 1
        for index, tensor in enumerate(module.buffers()):
            if (index + number) % 2:
                tensor.view(-1)[:1] += 1


def offloaded(rank: int, world: int, collective: str) -> Any:
    module, sources = network(rank), world // 2
    mesh = init_device_mesh("cpu", (2, sources), mesh_dim_names=("role", "shard"))["shard"]
    if rank < sources:
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    buffers, found = list(module.buffers()) if rank != world - 1 else [], []
    with on_a_gpu(*buffers):
        for number in range(4):
            if rank < sources:
                step(module, number)
            places = marks(module)
            call = getattr(dte_dist, collective)
            report = call(module, timeout=TIMEOUT, async_op=number == 3, codec=["fast", "small"][number % 2])
            report = report.wait() if number == 3 else report
            pairs = list(zip(places, marks(module), strict=True))
            stays, moved = (
                all(old[0] == new[0] for old, new in pairs),
                [new[1] - old[1] for old, new in pairs],
            )
            found.append((report.kind, report.reason, stays, moved))
        equal = dte_dist.verify(module).equal
        state = (
            prints(module)
            if rank in (0, 1)
            else {name: digest(tensor) for name, tensor in module.state_dict().items()}
        )
        if rank == 2:
            module[1].num_batches_tracked += 1
        seeded = getattr(dte_dist, collective)(module, timeout=TIMEOUT)
        stands_in = (
            channel_of(module).parts.receiver is None
            or channel_of(module).parts.receiver._layout.read().stand_ins is not None
        )
    dte_dist.close(module)
    return (
        found,
        equal,
        state,
        (seeded.seeded, seeded.reason),
        stands_in,
        digest(module[1].num_batches_tracked),
    )


@pytest.mark.parametrize("collective", ["delta_broadcast", "delta_p2p"])
def test_parameters_on_the_cpu_and_buffers_on_a_gpu(ranks: Ranks, collective: str) -> None:
    results = ranks.run(offloaded, collective)
    for found, equal, _, _, stands_in, _ in results[:3]:
        assert [kind for kind, *_ in found] == ["full", "delta", "delta", "delta"] and equal and stands_in
        assert all(stays for _, _, stays, _ in found)
    assert same([state for _, _, state, *_ in results])
    assert same([seeded for _, _, _, seeded, *_ in results]) == (
        (2,),
        "rank 2 seeded: its weights were written to by others",
    )
    assert same([last for *_, last in results])
    for found, *_ in results[2:]:  # what did not change is not written to, wherever it lies
        assert [[bool(count) for count in moved] for *_, moved in found[1:]] == [
            [(index + number) % 2 == 1 for index in range(6)] for number in (1, 2, 3)
        ]
    assert not results[3][4]


def several(rank: int, world: int) -> Any:
    module = network(rank)
    buffers = list(module.buffers()) if rank == 1 else []
    real, others = devices._device_of, {tensor.data_ptr(): index for index, tensor in enumerate(buffers[:3])}
    devices._device_of = lambda tensor: (
        torch.device("cuda", others[at] % 2) if (at := tensor.data_ptr()) in others else tensor.device
    )
    try:
        return caught(lambda: dte_dist.delta_broadcast(module, timeout=TIMEOUT))
    finally:
        devices._device_of = real


def test_several_accelerators_of_one_rank_are_refused_on_all(ranks: Ranks) -> None:
    kind, text = same(ranks.run(several))
    assert kind == "LayoutMismatch" and "several accelerators" in text
    assert (
        "'1.running_mean' on cuda:0, '1.running_var' on cuda:1" in text
        and "leave them out with select=" in text
    )
