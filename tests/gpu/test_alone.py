"""One rank that is source and receiver, in an NCCL group: into=, syncs in the background, streams, modes of
torch, the wire itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dte_dist
from dte_dist.detect.detector import Changed
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.report import ChangedNames
from dte_dist.sync.changed_pieces import ChangedPieces
from dte_dist.transport.communicator import Communicator, Membership
from tests.distributed.launcher import Ranks
from tests.gpu.device import DEVICE, ON_GPU, begin, random_bits, same_bits, settle, tier

pytestmark = tier
BACKEND = "nccl" if ON_GPU else "gloo"
collectives = pytest.mark.parametrize("collective", ["delta_broadcast", "delta_p2p"])


@pytest.fixture(scope="module")
def ranks():
    with Ranks(1) as ranks:
        yield ranks


def network(width: int = 512) -> nn.Module:
    """Return a small network on the device; its largest weight spans several segments at the width of the
    tests.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)
    ).to(DEVICE, torch.bfloat16)


def blank(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(tensor, requires_grad=False) for name, tensor in module.state_dict().items()
    }


def wrong(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    return [name for name in expected if not same_bits(expected[name], found[name])]


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one step."""
    inputs = torch.randn(64, module[0].in_features, device=DEVICE, dtype=torch.bfloat16)
    module(inputs).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def churn() -> None:
    """Take memory of many sizes and write to it: whoever still reads what was freed gets this instead."""
    for power in range(9, 24):
        for _ in range(4):
            torch.empty(1 << power, dtype=torch.uint8, device=DEVICE).fill_(0xA5)


def train_and_sync(  # noqa: PLR0917
    rank: int, world: int, collective: str, codec: str, background: bool, side: bool
) -> list[Any]:
    """Train and sync; with `background` the optimizer steps at once after the call, on a stream of the
    caller's own with `side`.
    """
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained = network(1100 if ON_GPU else 128)
    rollout = blank(trained)
    into, optimizer = dte_dist.Layout.from_tensors(rollout), torch.optim.AdamW(trained.parameters(), lr=1e-3)
    lineage = torch.cuda.Stream() if side and ON_GPU else None
    if lineage is not None:
        lineage.wait_stream(torch.cuda.current_stream())
    faults: list[Any] = []
    with torch.cuda.stream(lineage) if lineage is not None else nullcontext():
        for step in range(8):
            expected = {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}
            if ON_GPU and side:
                with torch.cuda.stream(torch.cuda.default_stream()):
                    torch.cuda._sleep(20_000_000)  # whatever is queued on the default stream comes late
            found = getattr(dte_dist, collective)(trained, group, into=into, async_op=background, codec=codec)
            if background:
                step_of(trained, optimizer)
                churn()
                found = found.wait()
            faults += [(step, name) for name in wrong(expected, rollout)]
            if (found.version, found.kind) != (step + 1, "delta" if step else "full"):
                faults.append(str(found))
            if not background:
                step_of(trained, optimizer)
        settle()
    dte_dist.close(trained, group)
    return faults


@collectives
@pytest.mark.parametrize(("background", "side"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("codec", ["fast", "small"])
def test_a_rank_trains_and_infers(ranks, collective: str, codec: str, background: bool, side: bool) -> None:
    assert ranks.run(train_and_sync, collective, codec, background, side) == [[]]


def not_held_up(rank: int, world: int) -> tuple[bool, bool]:
    """Queue a long kernel after the call: the sync must end before it does."""
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained = network(256)
    rollout = blank(trained)
    into = dte_dist.Layout.from_tensors(rollout)
    for step in range(3):  # a kernel that is used for the first time may wait for all that are running
        dte_dist.delta_p2p(trained, group, into=into, async_op=True).wait()
        with torch.no_grad():
            trained[0].weight[step] += 1
    settle()
    work = dte_dist.delta_p2p(trained, group, into=into, async_op=True)
    late = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    late.record()
    work.wait(60)
    return late.query(), not wrong(dict(trained.state_dict()), rollout)


@pytest.mark.skipif(not ON_GPU, reason="means nothing without a CUDA device")
def test_a_sync_in_the_background_does_not_wait_for_what_is_queued_after_it(ranks) -> None:
    assert ranks.run(not_held_up) == [(False, True)]


# Modes of torch
# ----------------------------------------------------------------------------------------------------------


def with_mode(rank: int, world: int, mode: str, collective: str) -> list[str]:
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained = network(256)
    rollout = blank(trained)
    into, faults = dte_dist.Layout.from_tensors(rollout), []
    modes: dict[str, Callable[[], Any]] = {
        "inference": torch.inference_mode,
        "default device": lambda: torch.device(DEVICE.type),
        "deterministic": lambda: torch.use_deterministic_algorithms(True),
        "autocast": lambda: torch.autocast(DEVICE.type, torch.float16),
        "grad": torch.enable_grad,
    }
    try:
        with modes[mode]() or nullcontext():
            for step in range(3):
                report = getattr(dte_dist, collective)(
                    trained, group, into=into, mode="full" if step == 2 else "delta"
                )
                faults += wrong(dict(trained.state_dict()), rollout)
                faults += [] if report.version == step + 1 else [str(report)]
                for weight in trained.parameters():
                    weight.data.view(-1)[step :: 7 + step] *= 1.5
    finally:
        torch.use_deterministic_algorithms(False)
    dte_dist.close(trained, group)
    return faults


@collectives
@pytest.mark.parametrize("mode", ["inference", "default device", "deterministic", "autocast", "grad"])
def test_modes_of_torch(ranks, mode: str, collective: str) -> None:
    assert ranks.run(with_mode, mode, collective) == [[]]


def with_detector(rank: int, world: int) -> tuple[list[str], set[str], int]:
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained, devices = network(256), set()
    rollout = blank(trained)

    def everywhere(live: Tensor, known: Tensor) -> Tensor:
        devices.update((live.device.type, known.device.type))
        return (live != known).nonzero().view(-1)

    into, faults = dte_dist.Layout.from_tensors(rollout), []
    for step in range(3):
        report = dte_dist.delta_broadcast(trained, group, into=into, detector=everywhere)
        faults += wrong(dict(trained.state_dict()), rollout)
        with torch.no_grad():
            trained[2].weight[step] *= -1
    dte_dist.close(trained, group)
    return faults, devices, report.changed


def test_a_detector_gets_tensors_of_the_device(ranks) -> None:
    assert ranks.run(with_detector) == [([], {DEVICE.type}, 512)]


def moves_away(rank: int, world: int) -> tuple[str, list[str]]:
    """The module is moved to the CPU and back between syncs; what is synced from the wrong place is
    refused.
    """
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained = network(256)
    rollout = blank(trained)
    into = dte_dist.Layout.from_tensors(rollout)
    dte_dist.delta_p2p(trained, group, into=into)
    trained.cpu()
    try:
        dte_dist.delta_p2p(trained, group, into=into)
        said = "nothing"
    except dte_dist.LayoutMismatch as error:
        said = str(error)
    trained.to(DEVICE)
    with torch.no_grad():
        trained[0].bias += 1
    report = dte_dist.delta_p2p(trained, group, into=into)
    return said, [report.kind, *wrong(dict(trained.state_dict()), rollout)]


@pytest.mark.skipif(not ON_GPU, reason="means nothing without a CUDA device")
def test_a_module_that_moves_away_and_back(ranks) -> None:
    ((said, found),) = ranks.run(moves_away)
    assert "another kind of device" in said
    assert found == ["delta"]


def two_devices(rank: int, world: int, sizes: tuple[int, int]) -> Any:
    """Sync tensors on two devices, at both ends, tied and strided ones on the GPU; once in the background."""
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained = {
        "a": torch.randn(sizes[0]),
        "b": torch.randn(sizes[1], 4, device=DEVICE).t(),
        "n": torch.tensor(3, device=DEVICE),
    }
    trained["tied"] = trained["b"]
    rollout = {
        "a": torch.zeros(sizes[0]),
        "b": torch.zeros(sizes[1], 4, device=DEVICE).t(),
        "n": torch.tensor(0, device=DEVICE),
    }
    rollout["tied"] = rollout["b"]
    mine, into = (dte_dist.Layout.from_tensors(side) for side in (trained, rollout))
    before, kinds, faults = {name: tensor.data_ptr() for name, tensor in rollout.items()}, [], list[str]()
    for step in range(4):
        trained["a"][step] += 1
        trained["b"][1, step] += 1
        trained["n"] += step
        moved = {name: tensor._version for name, tensor in rollout.items()}
        report = dte_dist.delta_p2p(mine, group, into=into, async_op=step == 3)
        report = report.wait() if step == 3 else report
        kinds.append(report.kind)
        faults += wrong(trained, rollout)
        faults += [name for name, tensor in rollout.items() if tensor._version == moved[name]]
    equal = dte_dist.verify(mine, group).equal
    rollout["n"] += 1
    reason = dte_dist.delta_p2p(mine, group, into=into).reason
    faults += wrong(trained, rollout) + [
        name for name, tensor in rollout.items() if tensor.data_ptr() != before[name]
    ]
    return kinds, faults, equal, reason


@pytest.mark.skipif(not ON_GPU, reason="means nothing without a CUDA device")
@pytest.mark.parametrize("sizes", [(5000, 8), (8, 500)], ids=["most on the CPU", "most on the GPU"])
def test_tensors_on_the_cpu_and_the_gpu_are_one_copy(ranks, sizes: tuple[int, int]) -> None:
    ((kinds, faults, equal, reason),) = ranks.run(two_devices, sizes)
    assert kinds == ["full", "delta", "delta", "delta"] and faults == [] and equal
    assert "written to by others" in reason


# The wire ---------------------------------------------------------------------------------------------------
# -------------


def over_the_wire(rank: int, world: int) -> dict[str, bool]:
    """Send to ourselves: the only way to run the operations of NCCL on one GPU."""
    begin()
    membership = Membership.join(dist.new_group([0], backend=BACKEND), timedelta(seconds=30))
    wire = Communicator("alone", [0], membership, BACKEND, DEVICE)
    sent = [random_bits(size, 1, size, wire.device) for size in (8, 1 << 20, 24 << 20)]
    received = [torch.zeros_like(each) for each in sent]
    if ON_GPU:
        for outgoing, incoming in zip(sent, received, strict=True):
            for pending in wire.send_recv((outgoing, 0), (incoming, 0)):
                pending.wait()
    wire.broadcast(sent[1], 0).wait()
    right = {
        "device": wire.device.type == DEVICE.type,
        "swap": not ON_GPU or all(torch.equal(a, b) for a, b in zip(sent, received, strict=True)),
        "broadcast": torch.equal(sent[1], random_bits(1 << 20, 1, 1 << 20, wire.device)),
        "rows": wire.device.type != "cpu"
        or wire.all_gather_rows(torch.arange(3).numpy()).tolist() == [[0, 1, 2]],
    }
    wire.close()
    try:
        wire.broadcast(sent[0], 0)
    except dte_dist.PeerLost:
        right["closed"] = True
    return right


def test_the_wire_itself(ranks) -> None:
    (right,) = ranks.run(over_the_wire)
    assert right == dict.fromkeys(("device", "swap", "broadcast", "rows", "closed"), True)


def names_of_changes(rank: int, world: int, collective: str) -> list[tuple[str, ...]]:
    """Change one tensor, none, and two on both sides of an untouched one."""
    begin()
    group = dist.new_group([0], backend=BACKEND)
    trained = {name: torch.zeros(40, 30, device=DEVICE) for name in "abcd"}
    rollout = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    layout, into = dte_dist.Layout.from_tensors(trained), dte_dist.Layout.from_tensors(rollout)
    found = []
    for changed in ("", "c", "", "ad"):
        for name in changed:
            trained[name][3, 2] += 1
        found.append(getattr(dte_dist, collective)(layout, group, into=into).changed_names)
        settle()
    return found


@collectives
def test_names_of_changed_tensors(ranks, collective: str) -> None:
    assert ranks.run(names_of_changes, collective) == [[tuple("abcd"), ("c",), (), ("a", "d")]]


def test_pieces_of_a_source_are_noted_where_the_changes_are() -> None:
    space = FlatSpace.of(2, Pieces.of([Piece(slot, slot, Block.whole((4,))) for slot in range(3)]))
    found = ChangedPieces({2: space}, DEVICE)
    bits = torch.zeros(2, dtype=torch.int16, device=DEVICE)
    found.note(2, Changed(0, 12, torch.tensor([1, 8], dtype=torch.int32, device=DEVICE), bits, bits))
    names = ChangedNames("abc", [], found.marks())
    assert names.listed() == ("a", "c")
