"""Distributed tier, four ranks over gloo: what could be meant in two ways is refused when the channel opens.

Every rank raises the same text.

Programs return what each rank found; bits are compared through hashes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dte_dist
from dte_dist import Layout
from dte_dist.layout.modules import is_trained
from dte_dist.sync import replica_check as copies
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught, facts, model, nudge, prints, same, sync

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect the warnings of the package; modules of earlier programs, which may lie in cycles, go first."""
    gc.collect()
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dte_dist")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


# Names of channels ------------------------------------------------------------------------------------------


def twins(rank: int, world: int, named: bool) -> Any:
    """Two modules of one shape, which rank 2 syncs in the other order."""
    modules = {"actor": model(10 if rank == 0 else rank), "reference": model(20 if rank == 0 else rank)}
    order = ["reference", "actor"] if rank == 2 else ["actor", "reference"]
    errors = []
    with warnings() as told:
        for name in order:
            errors.append(caught(lambda name=name: sync(modules[name], name=name if named else None)))
        for name in ["actor", "reference"] if named else []:
            sync(modules[name], name=name)
    return errors, {name: prints(module) for name, module in modules.items()}, told


def test_twins_that_are_opened_in_another_order_on_one_rank_are_refused_by_their_names(ranks: Ranks) -> None:
    errors, bits, told = same(ranks.run(twins, True))
    for (kind, text), (most, one) in zip(
        errors, [("actor", "reference"), ("reference", "actor")], strict=True
    ):
        assert (
            kind == "LayoutMismatch"
            and f"'{most}' on rank 0, 1, 3; '{one}' on rank 2" in text
            and "name=" in text
        )
    assert bits == {"actor": prints(model(10)), "reference": prints(model(20))} and told == []


def test_twins_without_names_are_warned_of_once_on_every_rank(ranks: Ranks) -> None:
    found = ranks.run(twins, False)
    assert [told for _, _, told in found] == [[found[0][2][0]]] * 4 and "pass name=" in found[0][2][0]
    assert found[2][1]["actor"] == prints(model(20)), "they are swapped: that is why the warning is there"


def neighbours(rank: int, world: int, how: str) -> list[str]:
    """Open two channels over one group; return what is warned of."""
    group = dist.new_group(list(range(world)))
    one, other = model(rank), model(rank) if how != "other layouts" else nn.Linear(3, 3)
    names = {"one is named": ("actor", None), "both are named": ("actor", "reference")}.get(how, (None, None))
    with warnings() as told:
        sync(one, group, name=names[0])
        sync(one, group, name=names[0])
        if how == "closed":
            dte_dist.close(one, group)
        sync(other, None if how == "other groups" else group, name=names[1])
    dte_dist.close(one, group)
    dte_dist.close(other, group)
    dte_dist.close(other)
    return told


@pytest.mark.parametrize("how", ["one is named", "both are named", "other layouts", "other groups", "closed"])
def test_channels_that_cannot_be_swapped_are_not_warned_of(ranks: Ranks, how: str) -> None:
    assert same(ranks.run(neighbours, how)) == []


def names_that_differ(rank: int, world: int, is_open: bool) -> Any:
    module = model(rank)
    if is_open:
        sync(module, name="actor")
    error = caught(
        lambda: sync(module, name=(None if rank == 1 else "x" * 201 if rank == 3 and is_open else "actor"))
    )
    return error, sync(module, name="actor").version


def test_a_name_on_some_ranks_only_is_refused(ranks: Ranks) -> None:
    (kind, text), version = same(ranks.run(names_that_differ, False))
    assert kind == "LayoutMismatch" and "'actor' on rank 0, 2, 3; None on rank 1" in text and version == 1
    (kind, text), version = same(ranks.run(names_that_differ, True))
    assert (
        kind == "ValueError"
        and "name: not what the call that opened the channel passed" in text
        and version == 2
    )


def p2p_by_name(rank: int, world: int) -> Any:
    module = model(rank)
    sync(module, name="actor")
    nudge(module, "0.weight", 3)
    report = dte_dist.delta_p2p(module, timeout=15, name="actor", src=None)
    return report.version, prints(module)


def test_delta_p2p_takes_the_name_and_finds_the_same_channel(ranks: Ranks) -> None:
    assert same(ranks.run(p2p_by_name))[0] == 2


# One name, several contents ---------------------------------------------------------------------------------

OTHERS = "sources hold different bits under one name"


class Layers(nn.ModuleDict):
    """A dict of layers that can be sharded as one module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.values()])


def linear(value: float, *names: str) -> Layers:
    """Linear layers without bias, filled with a value."""
    layers = Layers({name: nn.Linear(6, 8, bias=False) for name in names or ("w",)})
    for each in layers.parameters():
        nn.init.constant_(each, value)
    return layers


def full(module: nn.Module) -> dict[str, list[float]]:
    return {name: sorted(set(tensor.flatten().tolist())) for name, tensor in module.state_dict().items()}


def stages(rank: int, world: int) -> Any:
    """Each of two stages counts its layers from 0; ranks 2 and 3 receive what one stage holds, then both."""
    stage, group = rank % 2, dist.new_group(list(range(world)))
    module = nn.ModuleDict({"layers": linear(1.0 + stage if rank < 2 else 0.0, "0", "1")})
    error = caught(lambda: sync(module, group, src=[0, 1]))
    before = full(module)
    copy = nn.ModuleDict({"layers": linear(0.0, "0", "1", "2", "3")})
    rename = (lambda name: name.replace("0", "2").replace("1", "3")) if rank == 1 else None
    found = [
        (sync(module if rank < 2 else copy, group, src=[0, 1], rename=rename).version, full(copy))
        for _ in range(2)
    ]
    return error, before == full(module), found if rank > 1 else None


def test_stages_that_count_their_layers_from_0_are_refused_and_renaming_them_helps_over_the_same_group(
    ranks: Ranks,
) -> None:
    found = ranks.run(stages)
    (kind, text), untouched = same([one[:2] for one in found])
    assert kind == "LayoutMismatch" and OTHERS in text and untouched
    assert "(2 tensors in all) [tensor 'layers.0.weight'; ranks 0, 1]" in text
    assert all(way in text for way in ("rename=", "one mesh", "src=", "select="))
    sent = {
        "layers.0.weight": [1.0],
        "layers.1.weight": [1.0],
        "layers.2.weight": [2.0],
        "layers.3.weight": [2.0],
    }
    assert found[2][2] == found[3][2] == [(1, sent), (2, sent)]


def on_meshes(rank: int, world: int, values: list[float], cut: bool, how: str) -> Any:
    """Two meshes of two ranks each, with DTensors of one name; every rank receives into a whole copy."""
    if how == "a mesh of both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    else:
        mesh = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][rank // 2]
    module, copy = linear(0.0, "a", "b"), linear(-1.0, "a", "b")
    for name, value in (("a", 3.0), ("b", values[rank])):
        weight = distribute_tensor(
            torch.full((8, 6), value), mesh, [Shard(0) if cut else Replicate()], src_data_rank=None
        )
        module[name].weight = nn.Parameter(weight)
    error = caught(lambda: sync(module, into=copy, src=[0, 1, 2, 3]))
    return error, full(copy)


@pytest.mark.parametrize("how", ["a mesh of both", "two meshes"])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "replicated"])
def test_tensors_on_different_meshes_may_be_copies_and_nothing_else(
    ranks: Ranks, cut: bool, how: str
) -> None:
    error, copy = same(ranks.run(on_meshes, [5.0, 5.0, 5.0, 5.0], cut, how))
    assert error == ("", "") and copy == {"a.weight": [3.0], "b.weight": [5.0]}
    (kind, text), copy = same(ranks.run(on_meshes, [5.0, 5.0, 6.0, 6.0], cut, how))
    assert kind == "LayoutMismatch" and OTHERS in text and copy == {"a.weight": [-1.0], "b.weight": [-1.0]}
    assert f"[tensor 'b.weight'; ranks {'0, 1, 2, 3' if cut else '0, 2'}]" in text and "in all" not in text
    (kind, text), _ = same(ranks.run(on_meshes, [5.0, 5.0, 5.0, 7.0], cut, how))
    assert kind == ("LayoutMismatch" if cut else ""), "of replicas on a mesh one speaks for all"
    assert ("[tensor 'b.weight'; ranks 1, 3]" in text) == cut


def hybrid(rank: int, world: int) -> Any:
    """HSDP whose replicas have drifted apart; nothing may be read to find out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module, copy = linear(1.0, "a", "b"), linear(-1.0, "a", "b")
    fully_shard(module, mesh=mesh)
    with torch.no_grad():
        module["a"].weight.to_local().fill_(1.0 + rank // 2)
    with pytest.MonkeyPatch.context() as patch, warnings() as told:
        patch.setattr(copies, "own_digests", lambda tensors: pytest.fail("replicas on one mesh are not read"))
        sync(module, into=copy)
    return full(copy), told


def test_replicas_of_hsdp_are_never_read(ranks: Ranks) -> None:
    assert same(ranks.run(hybrid)) == ({"a.weight": [1.0], "b.weight": [1.0]}, [])


def experts(rank: int, world: int, is_same: bool, select: list[str] | None = None) -> Any:
    """FSDP2 on two ranks, beside it an expert that each keeps as a plain tensor of one name."""
    module, mesh = linear(1.0, "dense", "expert"), DeviceMesh("cpu", [0, 1])
    if rank < 2:
        nn.init.constant_(module["expert"].weight, 7.0 if is_same else 7.0 + rank)
        fully_shard(module, mesh=mesh, ignored_params={module["expert"].weight})
    error = caught(lambda: sync(module, select=select if rank == 1 else None))
    return error, full(module) if rank > 1 else None


def test_experts_of_one_name_beside_a_sharded_module_are_refused_unless_they_are_equal(ranks: Ranks) -> None:
    found = ranks.run(experts, False)
    kind, text = same([error for error, _ in found])
    assert kind == "LayoutMismatch" and "[tensor 'expert.weight'; ranks 0, 1]" in text
    found = ranks.run(experts, False, ["dense.*"])  # the hint if they are copies that drifted apart
    assert same([error for error, _ in found]) == ("", "") and found[3][1]["expert.weight"] == [7.0]
    found = ranks.run(experts, True)
    assert same([error for error, _ in found]) == ("", "") and found[2][1] == {
        "dense.weight": [1.0],
        "expert.weight": [7.0],
    }


def data_parallel(rank: int, world: int) -> Any:
    """Three DDP trainers and a receiver, over two steps and a channel that opens again."""
    trainers = dist.new_group([0, 1, 2])
    module = inner = model(1 if rank < 3 else 9)
    if rank < 3:
        module = nn.parallel.DistributedDataParallel(inner, process_group=trainers)
    found = []
    with warnings() as told:
        for step in range(4):
            found.append((facts(sync(module, src=[0, 1, 2]))[:4], prints(inner)))
            if rank < 3:
                module(torch.full((2, 12), float(rank))).sum().backward()
                torch.optim.SGD(module.parameters(), lr=0.5).step()
                module.zero_grad()
            if step == 1:
                dte_dist.close(module)
    return found, told


def test_equal_copies_on_several_sources_are_accepted(ranks: Ranks) -> None:
    found, told = same(ranks.run(data_parallel))
    assert [report[2] for report, _ in found] == ["full", "delta", "full", "delta"] and told == []
    assert len({str(bits) for _, bits in found}) == 4


def bit_twins(rank: int, world: int, kind: str) -> Any:
    module = linear(0.0, "a", "b")
    weight = module["b"].weight
    with torch.no_grad():
        weight.fill_(float("nan") if "nan" in kind else 0.0)
        if rank == 1 and kind == "minus zero":
            weight[3, 4] = -0.0
        if rank == 1 and kind == "payload of a nan":
            weight.view(torch.int32)[3, 4] += 1
    return caught(lambda: sync(module, src=[0, 1]))


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [("minus zero", True), ("payload of a nan", True), ("nan", False), ("zero", False)],
)
def test_it_is_bits_that_differ_not_numbers(ranks: Ranks, kind: str, is_refused: bool) -> None:
    error, text = same(ranks.run(bit_twins, kind))
    assert (
        error == ("LayoutMismatch" if is_refused else "")
        and ("[tensor 'b.weight'; ranks 0, 1]" in text) == is_refused
    )


class Normed(nn.Module):
    """A layer and a norm whose statistics each rank has of its own batches."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norm.running_mean.fill_(float(rank))
        self.norm.num_batches_tracked.fill_(10 + rank)


def statistics(rank: int, world: int, how: str) -> Any:
    """BatchNorm on two sources; the call is made twice, over one channel."""
    module: Any = Normed(rank)
    target = module
    both, *alone = (
        DeviceMesh("cpu", members) for members in ([0, 1], [0], [1])
    )  # on all ranks: torch counts the groups
    # Stages have a mesh of their own each: nothing says that they train one module.
    if "fsdp2" in how and rank < 2:
        fully_shard(module, mesh=alone[rank] if how == "stages of fsdp2" else both)
    src = None if how in ("fsdp2", "fsdp2, layout") else [0, 1]
    if how == "tensors":
        target = Layout.from_tensors(module.state_dict())
    elif how == "fsdp2, layout":
        target = Layout.from_module(module)
    with warnings() as told:
        error = caught(lambda: [sync(target, src=src) for _ in range(2)])
    return error, told, (module.norm.running_mean[0].item(), module.norm.num_batches_tracked.item())


@pytest.mark.parametrize("how", ["fsdp2", "fsdp2, layout", "ddp"])
def test_buffers_of_ranks_that_train_one_module_may_differ_and_the_lowest_is_sent_with_a_warning(
    ranks: Ranks, how: str
) -> None:
    found = ranks.run(statistics, how)
    assert same([error for error, _, _ in found]) == ("", "")
    assert [len(told) for _, told, _ in found] == [1, 0, 0, 0]
    assert found[0][1][0].endswith("the lowest rank sends its own: norm.num_batches_tracked and 1 more")
    assert [held for _, _, held in found] == [(0.0, 10), (1.0, 11), (0.0, 10), (0.0, 10)]


@pytest.mark.parametrize("how", ["stages of fsdp2", "tensors"])
def test_what_differs_is_refused_where_it_is_no_buffer_or_the_ranks_share_nothing(
    ranks: Ranks, how: str
) -> None:
    found = ranks.run(statistics, how)
    kind, text = same([error for error, _, _ in found])
    assert (
        kind == "LayoutMismatch"
        and "(2 tensors in all) [tensor 'norm.num_batches_tracked'; ranks 0, 1]" in text
    )
    assert [held for _, _, held in found] == [(0.0, 10), (1.0, 11), (2.0, 12), (3.0, 13)]


def parameter_or_buffer(rank: int, world: int) -> Any:
    """What is a buffer on one rank and a parameter on another is trained somewhere."""
    module = nn.Module()
    value = torch.full((5,), float(rank))
    if rank == 1:
        module.w = nn.Parameter(value)
    else:
        module.register_buffer("w", value)
    return caught(lambda: sync(module, src=[0, 1]))


def test_a_buffer_on_some_sources_only_is_refused(ranks: Ranks) -> None:
    kind, text = same(ranks.run(parameter_or_buffer))
    assert kind == "LayoutMismatch" and "[tensor 'w'; ranks 0, 1]" in text


def unreadable(rank: int, world: int) -> Any:
    module = linear(1.0)

    def failing(tensors: Any) -> Any:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(copies, "own_digests", failing)
        error = caught(lambda: sync(module, src=[0, 1]))
    return error, sync(module, src=[0, 1]).version


def test_a_source_that_cannot_read_its_tensors_tells_all(ranks: Ranks) -> None:
    (kind, text), version = same(ranks.run(unreadable))
    assert (
        kind == "SyncFailed"
        and "MemoryError: no room (raised on rank 1 of the group)" in text
        and version == 1
    )


# src= forgotten ---------------------------------------------------------------------------------------------

ASKS = "src= was not passed"


def forgotten(rank: int, world: int, how: str) -> Any:
    """An engine on rank 0, which nobody names; trainers or something like them on ranks 1 and 2."""
    module, into, options, mesh = linear(float(rank > 0)), None, {}, DeviceMesh("cpu", [1, 2])
    if rank == 0:
        module.requires_grad_("root trains" in how)
        if how == "root trains":
            module["w"](torch.ones(1, 6)).sum().backward()
    elif rank < 3 and how.startswith("gradients"):
        module["w"](torch.ones(1, 6)).sum().backward()
        into = linear(9.0) if "into" in how else None
    elif rank < 3 and how != "plain":
        if how == "frozen":
            module.requires_grad_(False)
        fully_shard(module, mesh=mesh)
        into = linear(9.0) if how == "fsdp2, into a copy" else None
    if how == "fsdp2, into it" and 0 < rank < 3:
        into, module = module, linear(9.0)
    if how in ("src", "group_src"):
        options = {how: [0]}
    sent = Layout.from_module(module) if how == "fsdp2, layout" else module
    error = caught(lambda: sync(sent, into=into, **options))
    target = module if into is None else into
    return error, {
        float(v)
        for tensor in target.parameters()
        for v in getattr(tensor, "_local_tensor", tensor).flatten().tolist()
    }


@pytest.mark.parametrize(
    "how", ["fsdp2", "fsdp2, into it", "fsdp2, layout", "gradients", "root trains not, but may"]
)
def test_an_engine_that_nobody_named_is_not_written_over_what_is_trained(ranks: Ranks, how: str) -> None:
    found = ranks.run(forgotten, how)
    kind, text = same([error for error, _ in found])
    assert kind == "LayoutMismatch" and ASKS in text and "[ranks 1, 2]" in text and "group_src=" in text
    assert [held for _, held in found] == [{0.0}, {1.0}, {1.0}, {1.0}]


@pytest.mark.parametrize(
    "how",
    ["frozen", "plain", "src", "group_src", "root trains", "gradients, into a copy", "fsdp2, into a copy"],
)
def test_receivers_that_are_not_trained_and_sources_that_are_named_are_let_through(
    ranks: Ranks, how: str
) -> None:
    found = ranks.run(forgotten, how)
    assert same([error for error, _ in found]) == ("", "")
    assert all(held == {0.0} for _, held in found)


def swapped(rank: int, world: int) -> Any:
    """Every rank trains and generates, and passes its two modules the wrong way round."""
    actor, copy = linear(1.0), linear(0.0)
    fully_shard(actor, mesh=DeviceMesh("cpu", list(range(world))))
    wrong = caught(lambda: sync(copy, into=actor))
    return wrong, sync(actor, into=copy).version, full(copy)


def test_a_copy_and_a_trained_module_passed_the_wrong_way_round(ranks: Ranks) -> None:
    (kind, text), version, copy = same(ranks.run(swapped))
    assert kind == "LayoutMismatch" and ASKS in text and "[ranks 0, 1, 2, 3]" in text
    assert version == 1 and copy == {"w.weight": [1.0]}


def kinds_of_training(rank: int, world: int) -> list[bool]:
    mesh = DeviceMesh("cpu", list(range(world)))
    flat = FullyShardedDataParallel(linear(1.0), device_id=torch.device("cpu"), device_mesh=mesh)
    frozen, sharded, partly = linear(1.0).requires_grad_(False), linear(1.0), linear(1.0, "a", "b")
    partly["a"].requires_grad_(False)
    for each in (frozen, sharded, partly["a"]):
        fully_shard(each, mesh=mesh)
    return [is_trained(each) for each in (flat, sharded, frozen, partly)]


def test_what_is_sharded_to_be_trained_is_known_before_its_first_gradient(ranks: Ranks) -> None:
    assert same(ranks.run(kinds_of_training)) == [True, True, False, False]
