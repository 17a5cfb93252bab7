"""Several ranks on one GPU, over gloo: the package stages through the CPU. Real layouts, one side on the GPU
or both, all dtypes.

NCCL refuses several ranks on one GPU, and so does nothing here run on it; `test_alone` has what one rank can
do.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import dte_dist
from dte_dist import Layout
from tests.distributed.cases import Case, Held, make_case
from tests.distributed.launcher import Ranks
from tests.gpu.device import DEVICE, begin, random_bits, same_bits, settle, tier
from tests.unit.codec.pairs import PAIRS

pytestmark = tier
WORLD, TIMEOUT = 4, 60.0
CPU = torch.device("cpu")
collectives = pytest.mark.parametrize("collective", ["delta_broadcast", "delta_p2p"])
places = pytest.mark.parametrize(
    ("sources", "receivers"),
    [(DEVICE, DEVICE), (DEVICE, CPU), (CPU, DEVICE)],
    ids=["device to device", "device to cpu", "cpu to device"],
)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        yield ranks


# Random layouts
# ----------------------------------------------------------------------------------------------------------


def held_tensor(full: Tensor, held: Held, members: list[int], rank: int, device: torch.device) -> Tensor:
    """Return what a rank holds: plain, or a DTensor made of its part, on a mesh that has no groups."""
    part = held.part(full, members.index(rank)).contiguous().clone().to(device)
    if held.mesh is None:
        return part
    mesh = DeviceMesh(device.type, torch.tensor(members).view(held.mesh), _init_backend=False, _rank=rank)
    return DTensor.from_local(
        part, mesh, held.placements(), run_check=False, shape=full.shape, stride=full.stride()
    )


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expected_of(case: Case, name: str, device: torch.device) -> Tensor:
    """Return what receivers must hold; cast where the sources cast: NaNs become other bits on a GPU."""
    full = case.tensors[name].to(device)
    return full.reshape(-1).to(case.wire.get(name, full.dtype)).reshape(full.shape).cpu()


def run_case(
    case: Case,
    rank: int,
    group: dist.ProcessGroup,
    collective: str,
    devices: tuple[torch.device, torch.device],
) -> list[str]:
    """Seed and sync twice; return what is wrong."""
    source = copy = None
    if rank in case.sources:
        source = {
            n: held_tensor(t, case.at_source[n], case.sources, rank, devices[0])
            for n, t in case.tensors.items()
            if n not in case.ties
        }
        source |= {second: source[first] for second, first in case.ties.items()}
    if rank in case.receivers:
        blanks = {n: torch.zeros_like(case.expected(n)) for n in case.tensors}
        copy = {
            n: held_tensor(t, case.at_receiver[n], case.receivers, rank, devices[1])
            for n, t in blanks.items()
        }
    rng, faults = torch.Generator().manual_seed(7), []
    mine, into = (None if each is None else Layout.from_tensors(each) for each in (source, copy))
    for step in range(3):
        report = getattr(dte_dist, collective)(
            into if mine is None else mine,
            group,
            group_src=case.group_src,
            into=None if mine is None else into,
            wire_dtype=case.wire or None,
            bucket_bytes=case.bucket_bytes,
            timeout=TIMEOUT,
            codec=case.codec,
        )
        faults += (
            []
            if report.version == step + 1 and (report.kind == "full") == (step == 0)
            else [f"{case.seed} step {step}: {report}"]
        )
        for name, tensor in (copy or {}).items():
            part = case.at_receiver[name].part(
                expected_of(case, name, devices[0]), case.receivers.index(rank)
            )
            if not same_bits(local(tensor), part.reshape(local(tensor).shape)):
                faults.append(
                    f"{case.seed} step {step}: {name} on rank {rank}, {tensor.dtype}{list(tensor.shape)}"
                )
        case.change(rng)
        for name, tensor in (source or {}).items():
            local(tensor).copy_(
                case.at_source[name]
                .part(case.tensors[name], case.sources.index(rank))
                .reshape(local(tensor).shape)
            )
    return faults


def sweep(
    rank: int, world: int, seeds: list[str], collective: str, devices: tuple[torch.device, torch.device]
) -> list[str]:
    begin()
    faults = []
    for seed in seeds:
        case = make_case(seed, world, most=world // 2)
        case.codec = random.Random(seed).choice(["fast", "small", "auto", *PAIRS])
        group = dist.new_group(case.group)
        case.group_src = [sorted(case.group).index(source) for source in case.sources]
        if rank in case.group:
            faults += run_case(case, rank, group, collective, devices)
            dist.destroy_process_group(group)
    settle()
    return faults


@collectives
@places
def test_every_layout_reaches_every_other(
    ranks, collective: str, sources: torch.device, receivers: torch.device
) -> None:
    found = ranks.run(
        sweep, [f"gpu:{number}" for number in range(25)], collective, (sources, receivers), seconds=110
    )
    assert [fault for faults in found for fault in faults] == []


# FSDP -------------------------------------------------------------------------------------------------------
# -------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 301), nn.LayerNorm(301), nn.Linear(301, 37, bias=False)).to(DEVICE)


def obstacle(group: dist.ProcessGroup) -> str:
    """Say why FSDP cannot run its collectives over gloo on this device; empty if it can."""
    part, whole = torch.ones(2, device=DEVICE), torch.empty(4, device=DEVICE)
    try:
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
    """Train one step; `alone` changes the shards without a word to other ranks."""
    if alone:
        for weight in module.parameters():
            weight.detach().to_local().view(-1)[::5] *= 1.25
        return
    module(torch.randn(8, 48, device=DEVICE)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(module: nn.Module, sources: int) -> dict[str, Tensor]:
    """Return the full parameters that the first ranks hold shards of, on every rank, from the bits on the
    CPU.
    """
    mine = (
        {name: weight.detach().to_local().cpu() for name, weight in module.named_parameters()}
        if dist.get_rank() < sources
        else {}
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: torch.cat([shards[name] for shards in gathered[:sources]]) for name in gathered[0]}


def columns(name: str, whole: Tensor, at: int, mesh: DeviceMesh) -> nn.Parameter:
    """Return a part of a parameter: matrices are cut by columns, the rest is whole."""
    if whole.dim() < 2:
        return nn.Parameter(torch.zeros_like(whole, device=DEVICE), requires_grad=False)
    part = torch.zeros_like(whole.chunk(2, 1)[at], device=DEVICE)
    return nn.Parameter(
        DTensor.from_local(part, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()),
        requires_grad=False,
    )


def fsdp(rank: int, world: int, collective: str, background: bool) -> tuple[list[str], str]:
    """Two ranks train with FSDP2 on the device, two hold columns."""
    begin()
    trained, sources = network(), [0, 1]
    shapes = {name: torch.empty(weight.shape) for name, weight in trained.named_parameters()}
    mesh, other = (
        DeviceMesh(DEVICE.type, sources),
        DeviceMesh(DEVICE.type, [2, 3], _init_backend=False, _rank=rank),
    )
    said, faults = "", []
    if rank < 2:
        for layer in trained:
            fully_shard(layer, mesh=mesh)
        fully_shard(trained, mesh=mesh)
        for layer in trained.modules():
            layer.set_force_sum_reduction_for_comms(True)  # gloo has no average on a GPU
        said = obstacle(mesh.get_group())
        module, optimizer = trained, torch.optim.AdamW(trained.parameters(), lr=1e-2)
    else:
        module = network()
        for name, whole in shapes.items():
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, columns(name, whole, rank - 2, other))
    for step in range(4):
        expected = full(trained, 2)
        work = getattr(dte_dist, collective)(module, src=sources, async_op=background, timeout=TIMEOUT)
        if rank < 2:
            train(module, optimizer, alone=bool(said))
        report = work.wait() if background else work
        faults += [] if report.kind == ("delta" if step else "full") else [str(report)]
        for name, weight in module.named_parameters() if rank > 1 else ():
            part = expected[name] if weight.dim() < 2 else expected[name].chunk(2, 1)[rank - 2]
            if not same_bits(local(weight), part.contiguous()):
                faults.append(f"step {step}: {name} on rank {rank}")
    dte_dist.close(module)
    return faults, said


@collectives
@pytest.mark.parametrize("background", [False, True])
def test_fsdp_to_columns(ranks, capsys, collective: str, background: bool) -> None:
    results = ranks.run(fsdp, collective, background)
    with capsys.disabled():
        print(f"\nFSDP2 over gloo: {results[0][1] or 'trained'}", end="")
    assert [faults for faults, _ in results] == [[]] * WORLD


def hybrid(rank: int, world: int, collective: str) -> list[str]:
    """All four ranks train with HSDP and infer: each into whole weights of its own."""
    begin()
    trained, rollout = network(), network()
    fully_shard(
        trained,
        mesh=DeviceMesh(DEVICE.type, torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard")),
    )
    faults = []
    for step in range(3):
        getattr(dte_dist, collective)(trained, into=rollout, timeout=TIMEOUT)
        expected = full(trained, 2)
        faults += [
            f"step {step}: {name} on rank {rank}"
            for name, weight in rollout.named_parameters()
            if not same_bits(weight, expected[name])
        ]
        for weight in trained.parameters():
            weight.detach().to_local().view(-1)[step::6] *= 0.75
    dte_dist.close(trained)
    return faults


@collectives
def test_hsdp_into_whole_copies(ranks, collective: str) -> None:
    assert ranks.run(hybrid, collective) == [[]] * WORLD


# Kinds of memory and dtypes
# ----------------------------------------------------------------------------------------------

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
SHAPES = ((), (0,), (1,), (700,), (33, 65), (5, 7, 11))


def shaped(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that lie in memory in a certain way."""
    if kind == "transposed" and len(shape) > 1:
        return torch.zeros(shape, dtype=dtype, device=device).mT.contiguous().mT
    if kind == "sliced" and shape:
        return torch.zeros((*shape, 2), dtype=dtype, device=device)[..., 0]
    return torch.zeros(shape, dtype=dtype, device=device)


def kinds_of_memory(
    rank: int, world: int, collective: str, kind: str, devices: tuple[torch.device, torch.device]
) -> list[str]:
    """One source, three receivers; every dtype and shape, the receivers' memory of one kind."""
    begin()
    shapes = {
        f"{dtype}.{number}".replace("torch.", ""): (dtype, shape)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }

    def fill(step: int) -> dict[str, Tensor]:
        made = {}
        for number, (name, (dtype, shape)) in enumerate(shapes.items()):
            count, width = torch.Size(shape).numel(), dtype.itemsize
            bits, other = (random_bits(count, width, seed) for seed in (number, number + 1000 * step))
            moved = torch.arange(count) % 50 == step
            bits = torch.where(moved, other, bits) & (1 if dtype is torch.bool else -1)
            made[name] = bits.view(dtype).view(shape)
        return made

    with torch.inference_mode(kind == "inference"):
        receiving = {name: shaped(kind, shape, dtype, devices[1]) for name, (dtype, shape) in shapes.items()}
    source = {name: tensor.to(devices[0]) for name, tensor in fill(0).items()}
    layout, faults = Layout.from_tensors(receiving if rank else source), []
    before = {name: tensor.data_ptr() for name, tensor in receiving.items()}
    for step in range(4):
        expected = fill(step)
        for name, tensor in source.items():
            tensor.copy_(expected[name])
        report = getattr(dte_dist, collective)(
            layout, timeout=TIMEOUT, mode="full" if step == 3 else "delta", codec="small"
        )
        faults += [] if report.kind == ("full" if step in (0, 3) else "delta") else [str(report)]
        for name, tensor in receiving.items() if rank else ():
            if not same_bits(tensor, expected[name]) or tensor.data_ptr() != before[name]:
                faults.append(f"step {step}: {name} on rank {rank}")
    dte_dist.close(layout)
    return faults


@collectives
@places
@pytest.mark.parametrize("kind", ["plain", "transposed", "sliced", "inference"])
def test_kinds_of_memory(
    ranks, collective: str, kind: str, sources: torch.device, receivers: torch.device
) -> None:
    assert ranks.run(kinds_of_memory, collective, kind, (sources, receivers)) == [[]] * WORLD


def cast_on_the_wire(rank: int, world: int, wire: torch.dtype, collective: str) -> list[str]:
    """Masters in fp32 on the source, `wire` at the receivers; changes below half a step of it send
    nothing.
    """
    begin()
    masters = {
        f"w{number}": random_bits(3000 + number, 4, number, DEVICE).view(torch.float32) for number in range(3)
    }
    copies = {name: torch.zeros(tensor.shape, dtype=wire, device=DEVICE) for name, tensor in masters.items()}
    layout, faults = Layout.from_tensors(copies if rank else masters), []
    for step in range(3):
        report = getattr(dte_dist, collective)(layout, wire_dtype=wire, timeout=TIMEOUT)
        faults += [] if step != 2 or report.changed == 0 else [str(report)]
        for name, tensor in copies.items() if rank else ():
            faults += (
                [] if same_bits(tensor, masters[name].to(wire)) else [f"step {step}: {name} on rank {rank}"]
            )
        for tensor in masters.values():
            tensor[step :: 9 + step].copy_(
                tensor[step :: 9 + step] * 3
                if step == 0
                else tensor[step :: 9 + step].to(wire).to(torch.float32)
            )
    dte_dist.close(layout)
    return faults


@collectives
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_masters_are_cast_on_the_device(ranks, wire: torch.dtype, collective: str) -> None:
    assert ranks.run(cast_on_the_wire, wire, collective) == [[]] * WORLD


# The engine over a process group
# -----------------------------------------------------------------------------------------


def engine(rank: int, world: int, devices: tuple[torch.device, torch.device]) -> list[str]:
    begin()
    transport = dte_dist.ProcessGroupTransport(timeout=TIMEOUT)
    pushing, faults = dte_dist.DeltaEngine(transport), []
    truth = [random_bits(50_000, 2, 1), random_bits(700, 4, 2), random_bits(3, 8, 3)]
    tensors = {
        f"w{number}": (bits if rank == 0 else torch.zeros_like(bits)).to(devices[min(rank, 1)])
        for number, bits in enumerate(truth)
    }
    for version in range(1, 5):
        if rank == 0:
            pushing.push(tensors, version=version)
        else:
            pushing.pull(tensors, version=version)
            faults += [
                f"v{version}: w{number} on rank {rank}"
                for number, bits in enumerate(truth)
                if not same_bits(tensors[f"w{number}"], bits)
            ]
        for number, bits in enumerate(truth):
            bits[version :: 40 * version].bitwise_not_()
            if rank == 0:
                tensors[f"w{number}"].copy_(bits)
    transport.close()
    return faults


@places
def test_the_engine_over_a_process_group(ranks, sources: torch.device, receivers: torch.device) -> None:
    assert ranks.run(engine, (sources, receivers)) == [[]] * WORLD
