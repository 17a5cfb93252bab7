"""Distributed tier, four ranks over gloo: who else writes to a receiver's copy, and when; which of it is
noticed, and what becomes of it.

Rank 0 is the source unless the test says otherwise. A copy that was written to is seeded, alone, and the
report says why; a copy that nobody wrote to is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dte_dist import Layout
from dte_dist.sync.protocol import Sync
from dte_dist.sync.staging import StagedPatch
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, digest, model, nudge, prints, same, sync, why

pytestmark = pytest.mark.slow

WRITTEN = "its weights were written to by others"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


# Another thread ---------------------------------------------------------------------------------------------


@contextmanager
def another_thread(write: Callable[[], object], place: Any, name: str, *, after: bool) -> Iterator[None]:
    """Let another thread write before, or after, the first call of a method that this rank makes."""
    original, go, done = getattr(place, name), threading.Event(), threading.Event()

    def writer() -> None:
        go.wait(60)
        write()
        done.set()

    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if after else None
        go.set()
        assert done.wait(60)
        return result if after else original(*args, **kwargs)

    thread = threading.Thread(target=writer)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, method)
        yield
    thread.join()


MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "while it waits for a source": (Sync, "_exchange", False),
    "after the vote": (StagedPatch, "apply", False),
    "when all is written": (StagedPatch, "apply", True),
}


def disturbed(rank: int, world: int, moment: str, background: bool, how: str) -> Any:
    module, seen = model(rank), []

    @torch.no_grad()
    def write() -> None:
        weight = module[2].weight
        if how == "memory":
            weight.data = torch.full_like(weight, 7.0)
        else:
            weight.view(-1)[-2:] = 123.0 if how == "bits" else weight.view(-1)[-2:].clone()

    for step in range(5):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
            nudge(module, "2.weight", 1)
        place, name, after = MOMENTS[moment]
        reports: list[Any] = []

        def call(found: list[Any] = reports) -> None:
            found.append(sync(module, async_op=True).wait() if background else sync(module))

        if rank == 2 and step == 2:
            with another_thread(write, place, name, after=after):
                error = caught(call)
        else:
            error = caught(call)
        seen.append(
            (why(reports[0]) if reports else error, prints(module) if rank != 2 or not error[0] else None)
        )
    return seen


@pytest.mark.parametrize("how", ["bits", "the same bits", "memory"])
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_another_thread_writes_while_a_receiver_waits_and_the_same_sync_seeds_it(
    ranks: Ranks, background: bool, how: str
) -> None:
    found = same(ranks.run(disturbed, "while it waits for a source", background, how))
    assert [report for report, _ in found[1:]] == [
        (2, 1, "delta", "", ()),
        (3, 2, "delta", f"rank 2 seeded: {WRITTEN}", (2,)),
        (4, 3, "delta", "", ()),
        (5, 4, "delta", "", ()),
    ]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("after the vote", "bits"),
        ("after the vote", "the same bits"),
        ("when all is written", "bits"),
        ("when all is written", "the same bits"),
        ("when all is written", "memory"),
    ],
)
def test_another_thread_writes_while_a_receiver_writes_and_the_next_sync_seeds_it(
    ranks: Ranks, moment: str, background: bool, how: str
) -> None:
    seen = ranks.run(disturbed, moment, background, how)
    _, second, (name, text), fourth, fifth = same([[report for report, _ in found] for found in seen])
    assert second == (2, 1, "delta", "", ())
    assert (
        name == "ApplyFailed"
        and "rank 2 of the group" in text
        and "somebody else wrote" in text
        and "2.weight" in text
    )
    assert fourth == (4, 3, "delta", f"rank 2 seeded: {WRITTEN}", (2,)) and fifth == (5, 4, "delta", "", ())
    same([found[2][1] for rank, found in enumerate(seen) if rank != 2])
    same([[bits for _, bits in found[3:]] for found in seen])


def all_disturbed(rank: int, world: int) -> Any:
    """Every receiver is written to while it waits: nobody follows."""
    module, seen = model(rank), []
    for step in range(4):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank and step == 2:
            with another_thread(lambda: nudge(module, "2.weight", 1), Sync, "_exchange", after=False):
                seen.append(why(sync(module)))
        else:
            seen.append(why(sync(module)))
    return seen, prints(module)


def test_where_all_receivers_are_written_to_while_they_wait_all_are_seeded(ranks: Ranks) -> None:
    reports, _ = same(ranks.run(all_disturbed))
    reason = "; ".join(f"rank {rank} seeded: {WRITTEN}" for rank in (1, 2, 3))
    assert reports[1:] == [
        (2, 1, "delta", "", ()),
        (3, 2, "full", reason, (1, 2, 3)),
        (4, 3, "delta", "", ()),
    ]


def before_a_first_sync(rank: int, world: int) -> Any:
    """What is written to a copy before its first seed comes is overwritten, and no error."""
    module = model(rank)
    if rank == 2:
        module[2].weight.data = torch.zeros(3, 8)
        with another_thread(
            lambda: setattr(module[2].weight, "data", torch.ones(3, 8)), Sync, "_exchange", after=False
        ):
            first = why(sync(module))
    else:
        first = why(sync(module))
    bits = prints(module)
    return first, why(sync(module)), bits, prints(module)


def test_a_copy_that_changes_before_its_first_seed_comes_is_seeded_where_it_is_then(ranks: Ranks) -> None:
    first, second, before, after = same(ranks.run(before_a_first_sync))
    assert (
        first[:4] == (1, None, "full", "first sync") and second == (2, 1, "delta", "", ()) and before == after
    )


# Between two syncs ------------------------------------------------------------------------------------------


def reloaded(rank: int, world: int, grown: bool) -> Any:
    """A rollout model that was made in inference mode is loaded again between two syncs."""
    checkpoint = {name: tensor.clone() for name, tensor in model(77).state_dict().items()}
    with torch.inference_mode(rank == 2):
        module, seen = model(rank), []
    frozen = module[0].weight.is_inference()
    for step in range(5):
        if rank == 0:
            nudge(module, "0.weight", step + 1)
        if rank == 2 and step == 2:
            with torch.inference_mode():
                module.load_state_dict(checkpoint)
        with torch.inference_mode(grown and rank == 2):
            seen.append((why(sync(module)), prints(module)))
    return frozen, seen


@pytest.mark.parametrize("within", [False, True], ids=["outside", "within"])
def test_a_copy_of_inference_mode_that_is_loaded_again_is_seeded_and_says_so(
    ranks: Ranks, within: bool
) -> None:
    """Called within inference mode or outside of it."""
    frozen, seen = zip(*ranks.run(reloaded, within), strict=True)
    assert frozen == (False, False, True, False)
    assert [report for report, _ in same(list(seen))[1:]] == [
        (2, 1, "delta", "", ()),
        (3, 2, "delta", f"rank 2 seeded: {WRITTEN}", (2,)),
        (4, 3, "delta", "", ()),
        (5, 4, "delta", "", ()),
    ]


def fused() -> tuple[Any, Any]:
    """A trainer's projections, and an engine's views of one tensor, with padding."""
    whole, trained = (
        torch.zeros(16, 6),
        {"q": torch.randn(6, 6), "k": torch.randn(4, 6), "v": torch.randn(4, 6)},
    )
    rows = {"q": whole[:6], "k": whole[6:10], "v": whole[10:14]}
    return Layout.from_tensors(trained), Layout.from_views(
        [(name, view, tuple(view.shape), (0, 0)) for name, view in rows.items()]
    )


def tied() -> nn.Module:
    module = nn.ModuleDict(
        {"embed": nn.Embedding(9, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 9, bias=False)}
    )
    module["head"].weight = module["embed"].weight
    return module


def of_complex_numbers() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_parameter("wide", nn.Parameter(torch.randn(5, dtype=torch.complex128)))
    module.register_parameter("narrow", nn.Parameter(torch.randn(5, dtype=torch.complex64)))
    return module


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def without_elements() -> nn.Module:
    module = nn.Linear(5, 3)
    module.register_parameter("none", nn.Parameter(torch.zeros(0, 4)))
    module.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    module.register_parameter("turned", nn.Parameter(torch.randn(6, 4).t()))
    return module


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "complex": of_complex_numbers,
    "buffers": with_buffers,
    "no elements, no dimension, strided": without_elements,
}


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(module: Any) -> dict[str, str]:
    """Hash every tensor of a module, put together where it is sharded; on all ranks of the mesh."""
    return {
        name: digest(t.full_tensor() if isinstance(t, DTensor) else t)
        for name, t in module.state_dict().items()
    }


def placed(kind: str, rank: int) -> Any:
    """Return what a rank has of a model of some kind; ranks 2 and 3 share a mesh where it is sharded."""
    torch.manual_seed(rank)
    if kind == "fused":
        return fused()[rank > 0]
    if kind in PLAIN:
        return PLAIN[kind]()
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    mesh = DeviceMesh("cpu", [2, 3])
    if rank < 2:
        return module
    if kind == "fsdp2":
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh)
    else:
        placements = {"rows": [Shard(0)], "columns": [Shard(1)], "replicas": [Replicate()]}[kind]
        for layer in (module[0], module[2]):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, placements))
    return module


def undisturbed(rank: int, world: int, kind: str, route: str) -> Any:
    """Five syncs; receivers use their copies in between, but write nothing."""
    module, seen = placed(kind, rank), []
    for step in range(5):
        if rank == 0:
            tensors = module.tensors() if kind == "fused" else [*module.parameters(), *module.buffers()]
            with torch.no_grad():
                for tensor in tensors[step % 2 :: 2] if step % 3 else tensors:
                    tensor[tuple(size - 1 for size in tensor.shape) if tensor.numel() else ...] += 1
        report = sync(module, src=0, route=route)
        seen.append((why(report), report.changed))
        if rank and kind in ("fsdp2", "rows", "columns", "replicas"):
            with torch.no_grad():
                module(torch.ones(2, 6)) if kind == "fsdp2" else [local(p).sum() for p in module.parameters()]
    if kind == "fused":
        return seen, {str(index): digest(tensor) for index, tensor in enumerate(module.tensors())}
    return seen, whole(module)


@pytest.mark.parametrize("route", ["broadcast", "p2p"])
@pytest.mark.parametrize("kind", ["fused", *PLAIN, "fsdp2", "rows", "columns", "replicas"])
def test_a_receivers_own_writes_cost_no_seed(ranks: Ranks, kind: str, route: str) -> None:
    """Whether its tensors share a counter, are shards, or are looked at as other numbers."""
    seen, _ = same(ranks.run(undisturbed, kind, route))
    assert [report for report, _ in seen[1:]] == [(step, step - 1, "delta", "", ()) for step in (2, 3, 4, 5)]
    assert all(changed for _, changed in seen)
