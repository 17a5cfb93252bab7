"""Distributed tier, four ranks over gloo in several default worlds, as trainers and the workers of an engine
are: every kind of group that engines and frameworks make across worlds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dte_dist
from dte_dist import StoreGroup
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT, caught, digest, model, nudge, same, sync

pytestmark = pytest.mark.slow

PATIENCE = timedelta(seconds=TIMEOUT)
KEPT: list[StoreGroup] = []
"""The store goes with the group of rank 0."""


@pytest.fixture(scope="module")
def two_worlds() -> Iterator[Ranks]:
    with Ranks(4, worlds=[2, 2]) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def homeless() -> Iterator[Ranks]:
    """Trainers have a world, rollout ranks none."""
    with Ranks(4, worlds=[2, 0, 0]) as ranks:
        yield ranks


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "shared")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# Groups across worlds ---------------------------------------------------------------------------------------


def store_group(rank: int, size: int, path: str) -> Any:
    return StoreGroup(dist.FileStore(path, size), rank, size)


def with_prefix(rank: int, size: int, path: str) -> Any:
    return StoreGroup(dist.PrefixStore("mine", dist.FileStore(path, size)), rank, size)


def unregistered(rank: int, size: int, path: str) -> Any:
    """As vLLM's `stateless_init_torch_distributed_process_group` makes it."""
    store = dist.PrefixStore("stateless", dist.FileStore(path, size))
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, PATIENCE)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def registered_by_hand(rank: int, size: int, path: str) -> Any:
    """As verl, OpenRLHF and slime make it: torch's registry takes the ranks for those of the world."""
    c10d = dist.distributed_c10d
    store = dist.PrefixStore("by hand", dist.FileStore(path, size))
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), store, group_name=f"sync {path}", timeout=PATIENCE
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


KINDS: dict[str, Callable[[int, int, str], Any]] = {
    "a store": store_group,
    "a store with a prefix": with_prefix,
    "a group of no registry": unregistered,
    "a group registered by hand": registered_by_hand,
}


def trainer() -> nn.Module:
    """FSDP2 over the two trainers, whose mesh counts in their own world."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def full(module: nn.Module) -> dict[str, str]:
    held = {
        name: getattr(value, "full_tensor", lambda value=value: value)()
        for name, value in module.state_dict().items()
    }
    return {name: digest(value) for name, value in held.items()}


def syncs(rank: int, world: int, kind: str, path: str, p2p: bool) -> Any:
    group = KINDS[kind](rank, world, path)
    trains = rank < 2
    module = trainer() if trains else nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    call = dte_dist.delta_p2p if p2p else dte_dist.delta_broadcast
    seen = []
    for step in range(3):
        report = call(module, group, timeout=TIMEOUT)
        seen.append((report.version, report.kind, full(module)))
        if trains:
            with torch.no_grad():
                next(module.parameters()).to_local().view(-1)[step] += 1
    found = dte_dist.verify(module, group)
    dte_dist.close(module, group)
    return seen, found.equal


@pytest.mark.parametrize("p2p", [False, True], ids=["broadcast", "p2p"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_worlds_sync_over_any_group(two_worlds: Ranks, kind: str, p2p: bool, path: str) -> None:
    seen, is_equal = same(two_worlds.run(syncs, kind, path, p2p))
    assert [each[:2] for each in seen] == [(1, "full"), (2, "delta"), (3, "delta")] and is_equal
    assert len({str(each[2]) for each in seen}) == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a group registered by hand"])
def test_ranks_without_a_world_sync_over_any_group(homeless: Ranks, kind: str, path: str) -> None:
    seen, is_equal = same(homeless.run(syncs, kind, path, False))
    assert [each[:2] for each in seen] == [(1, "full"), (2, "delta"), (3, "delta")] and is_equal


def meshes_on_both_sides(rank: int, world: int, path: str) -> Any:
    """Both meshes are (0, 1), each of its own world."""
    group = store_group(rank, world, path)
    module = trainer()
    if rank >= 2:
        with torch.no_grad():
            for value in module.parameters():
                value.to_local().zero_()
    report = sync(module, group)
    if rank < 2:
        with torch.no_grad():
            next(module.parameters()).to_local().view(-1)[0] += 1
    return report.version, sync(module, group).kind, full(module)


def test_equal_meshes_of_two_worlds_are_not_one(two_worlds: Ranks, path: str) -> None:
    version, kind, _ = same(two_worlds.run(meshes_on_both_sides, path))
    assert (version, kind) == (1, "delta")


def meets(rank: int, world: int, port: int) -> Any:
    if rank:
        time.sleep(0.05 * rank)
    group = dte_dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, world, timeout=TIMEOUT)
    module = model(rank)
    sync(module, group)
    if rank == 0:
        nudge(module, "0.weight")
    report = sync(module, group)
    transport = dte_dist.ProcessGroupTransport(group, timeout=TIMEOUT)
    engine = dte_dist.DeltaEngine(transport, timeout=TIMEOUT)
    tensors = {"w": torch.full((5,), float(rank))}
    (engine.push if rank == 0 else engine.pull)(tensors, 1)
    transport.close()
    return report.version, full(module), tensors["w"].tolist()


def test_ranks_meet_at_an_address(homeless: Ranks) -> None:
    version, _, values = same(homeless.run(meets, free_port()))
    assert version == 2 and values == [0.0] * 5


def other_sizes(rank: int, world: int, port: int) -> tuple[str, str]:
    address = f"tcp://127.0.0.1:{port}"
    size = 5 if rank == 3 else world
    if rank == 3:
        time.sleep(0.5)
    return caught(lambda: KEPT.append(dte_dist.rendezvous(address, rank, size, timeout=TIMEOUT)))


def test_ranks_that_meet_with_other_sizes_are_told(two_worlds: Ranks) -> None:
    found = two_worlds.run(other_sizes, free_port())
    assert found[:3] == [("", "")] * 3
    kind, text = found[3]
    assert kind == "ValueError" and "5 here, 4" in text


def test_nobody_at_the_address_is_a_lost_peer() -> None:
    begin = time.monotonic()
    kind, text = caught(lambda: dte_dist.rendezvous(f"tcp://127.0.0.1:{free_port()}", 1, 2, timeout=1.0))
    assert kind == "PeerLost" and "rank 0 did not come" in text and time.monotonic() - begin < TIMEOUT


@pytest.mark.parametrize(
    "arguments",
    [
        ("127.0.0.1:80", 0, 1),
        ("tcp://127.0.0.1", 0, 1),
        ("udp://127.0.0.1:80", 0, 1),
        (None, 0, 1),
        ("tcp://127.0.0.1:80", 1, 1),
        ("tcp://127.0.0.1:80", -1, 1),
        ("tcp://127.0.0.1:80", True, 2),
        ("tcp://127.0.0.1:80", 0, "2"),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        dte_dist.rendezvous(*arguments)
    with pytest.raises(ValueError, match="must be"):
        StoreGroup(dist.HashStore(), 0, 1, backends="mpi")
    with pytest.raises(ValueError, match="must be"):
        StoreGroup("store", 0, 1)  # type: ignore[arg-type]


# A store that is gone ---------------------------------------------------------------------------------------


def host_dies(rank: int, world: int, port: int) -> Any:
    group = dte_dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, world, timeout=TIMEOUT)
    module = model(rank)
    sync(module, group)
    if rank == 0:
        os._exit(1)
    first = caught(lambda: sync(module, group))
    again = caught(lambda: dte_dist.delta_broadcast(module, group, timeout=3.0))
    return first, again


def test_a_store_that_goes_with_its_host_says_so() -> None:
    port = free_port()
    with Ranks(3, worlds=[0, 0, 0]) as ranks:
        found = ranks.outcomes(host_dies, port)
    assert found[0].died
    for outcome in found[1:]:
        (kind, text), (later, why) = outcome.value
        assert kind == later == "PeerLost" and "rank 0" in text
        assert "store of the group cannot be reached" in why and f"nobody at tcp://127.0.0.1:{port}" in why


def in_a_child(rank: int, world: int, path: str) -> int:
    group = store_group(rank, world, path)
    child = os.fork()
    if child == 0:
        kind, text = caught(lambda: sync(model(rank), group))
        os._exit(0 if kind == "ChannelClosed" and "forked" in text else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_takes_no_part(homeless: Ranks, path: str) -> None:
    assert homeless.run(in_a_child, path) == [0] * 4


# Names before layouts ---------------------------------------------------------------------------------------


def described(rank: int, world: int, path: str) -> Any:
    group = store_group(rank, world, path)
    held = dte_dist.describe(group, trainer() if rank < 2 else None, timeout=TIMEOUT)
    layout = {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in held.items()}
    module: Any = trainer() if rank < 2 else dte_dist.Layout.from_tensors(layout)
    report = sync(module, group)
    values = full(module) if rank < 2 else {name: digest(value) for name, value in layout.items()}
    return list(held.items()), report.version, values


def test_a_receiver_builds_its_layout_from_what_the_sources_hold(two_worlds: Ranks, path: str) -> None:
    held, version, _ = same(two_worlds.run(described, path))
    assert version == 1 and [name for name, _ in held] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert held[1][1] == dte_dist.TensorInfo((8, 6), torch.float32)


def tied(rank: int, world: int, path: str) -> Any:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    module.to(torch.bfloat16)["head"].weight = module["embed"].weight
    group = store_group(rank, world, path)
    return dict(dte_dist.describe(group, module if rank == 1 else None, timeout=TIMEOUT))


def test_aliases_are_told(two_worlds: Ranks, path: str) -> None:
    info = dte_dist.TensorInfo((4, 3), torch.bfloat16, ("embed.weight", "head.weight"))
    assert same(two_worlds.run(tied, path)) == {"embed.weight": info, "head.weight": info}


def misdescribed(rank: int, world: int, path: str, what: str) -> tuple[str, str]:
    module: Any = None
    if what == "shape" and rank < 2:
        module = nn.Linear(3, 2 + rank, bias=False)
    if what == "dtype" and rank < 2:
        module = nn.Linear(3, 2, bias=False).to([torch.float32, torch.bfloat16][rank])
    if what == "module" and rank == 2:
        module = "a module"
    timeout: Any = "long" if what == "timeout" and rank == 1 else TIMEOUT
    return caught(lambda: dte_dist.describe(store_group(rank, world, path), module, timeout=timeout))


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("shape", "LayoutMismatch", "another shape"),
        ("dtype", "LayoutMismatch", "another dtype"),
        ("nothing", "LayoutMismatch", "no rank of the group has a module"),
        ("module", "ValueError", "expected a torch.nn.Module"),
        ("timeout", "ValueError", "timeout"),
    ],
)
def test_what_is_wrong_with_a_description_is_raised_on_all(
    two_worlds: Ranks, path: str, what: str, kind: str, says: str
) -> None:
    found, text = same(two_worlds.run(misdescribed, path, what))
    assert found == kind and says in text
