"""When FSDP1 modules may be read, who else may write to them, and what is refused by name."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

import dte_dist
from dte_dist import Layout
from dte_dist.errors import LayoutMismatch
from tests.distributed.flat_models import CPU, Model, Trainer, evaluated, half, prints, synced, whole, wrapped
from tests.distributed.launcher import Ranks
from tests.distributed.tools import caught

pytestmark = pytest.mark.slow

STRATEGIES = list(product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (True, False)))


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as ranks:
        yield ranks


def between_passes(rank, world, strategy, orig):
    """Train twice alike, once with a sync between every forward and backward."""
    group, results = half(rank, 2, world), []
    for between in (False, True):
        model = wrapped(Model(), strategy=strategy, orig=orig, group=group) if rank < 2 else Model(7)
        trainer = Trainer(model) if rank < 2 else None
        for _ in range(3):
            loss = trainer.loss() if trainer is not None else None
            if between:
                synced(model, p2p=False)
                results.append(prints(model))
            if loss is not None:
                loss.backward()
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
        synced(model, p2p=True)
        results.append(prints(model))
        dte_dist.close(model)
    return results


@pytest.mark.parametrize(("strategy", "orig"), STRATEGIES)
def test_a_sync_between_forward_and_backward_disturbs_neither(ranks, strategy, orig):
    results = ranks.run(between_passes, strategy, orig)
    assert results[0] == results[1] == results[2]
    undisturbed, *_, disturbed = results[0]
    assert undisturbed == disturbed


def accumulated(rank, world, strategy, orig):
    """Gradients of two passes under `no_sync`, with a sync in between, and two without."""
    group, results = half(rank, 2, world), []
    for between in (False, True):
        model = wrapped(Model(), strategy=strategy, orig=orig, group=group) if rank < 2 else Model(7)
        trainer = Trainer(model) if rank < 2 else None
        synced(model, p2p=False)
        if trainer is not None:
            with model.no_sync():
                trainer.loss().backward()
        if between:
            synced(model, p2p=False)
        if trainer is not None:
            trainer.step()
        synced(model, p2p=False)
        results.append(prints(model))
        dte_dist.close(model)
    return results


@pytest.mark.parametrize(("strategy", "orig"), STRATEGIES)
def test_gradients_that_are_accumulated_stay(ranks, strategy, orig):
    results = ranks.run(accumulated, strategy, orig)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == results[0][1]


def inside(rank, world, orig):
    """Read a module inside a forward, a backward and `summon_full_params`."""
    model, texts = wrapped(Model(), orig=orig), {}
    layout = Layout.from_module(model)

    def read(where):
        texts[where] = caught(layout.tensors), caught(lambda: Layout.from_module(model))

    model.blocks[0].wide.register_forward_hook(lambda *_: read("forward"))
    model.blocks[1].register_full_backward_hook(lambda *_: read("backward"))
    trainer = Trainer(model)
    trainer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        read("summon")
    layout.tensors()
    return texts


@pytest.mark.parametrize("orig", [True, False])
def test_inside_a_pass_is_refused_by_name(ranks, orig):
    for texts in ranks.run(inside, orig):
        assert texts.keys() == {"forward", "backward", "summon"}
        for kind, text in (each for pair in texts.values() for each in pair):
            assert kind == "LayoutMismatch"
            assert "is in a pass or summoned" in text
            assert "tensor 'embed.weight'" in text or "tensor 'blocks." in text
            assert "after forward, backward and summon_full_params" in text


def without_parameters(rank, world):
    """A wrapper that flattens nothing itself, read between the forwards of its two units, and after them."""
    units = [FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU) for _ in range(2)]
    model, texts = FullyShardedDataParallel(nn.Sequential(*units), device_id=CPU), []
    layout = Layout.from_module(model)
    units[0].register_forward_hook(lambda *_: texts.append(caught(layout.tensors)))
    model(torch.ones(1, 4))
    texts.append(caught(layout.tensors))
    return texts


def test_a_pass_of_a_wrapper_without_parameters_is_noticed(ranks):
    for inside_of, after in ranks.run(without_parameters):
        assert inside_of[0] == "LayoutMismatch"
        assert "is in a pass or summoned" in inside_of[1]
        assert "tensor '0.bias'" in inside_of[1] or "tensor '0.weight'" in inside_of[1]
        assert after == ("", "")


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 5)
        self.other = self.one


def named(rank, world, orig):
    """Names, ties and shapes under all that wraps a module."""
    blocks = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.Sequential(torch.compile(Twice())))
    blocks[1] = FullyShardedDataParallel(blocks[1], device_id=CPU, use_orig_params=orig)
    model = torch.compile(FullyShardedDataParallel(blocks, device_id=CPU, use_orig_params=orig))
    manifest = Layout.from_module(model).manifest
    return {entry.name: entry.shape for entry in manifest.entries}, manifest.ties


@pytest.mark.parametrize("orig", [True, False])
def test_names_are_those_of_the_model_under_every_wrapper(ranks, orig):
    linear = {"weight": (5, 3), "bias": (5,)}
    twice = {f"1.0.{name}.{kind}": shape for name in ("one", "other") for kind, shape in linear.items()}
    for shapes, ties in ranks.run(named, orig):
        assert shapes == {"0.weight": (3, 2), "0.bias": (3,), **twice}
        assert ties == (("1.0.one.bias", "1.0.other.bias"), ("1.0.one.weight", "1.0.other.weight"))


def inside_a_call(rank, world):
    """A sync that one rank calls inside of a forward is refused on all, and disturbs nothing."""
    group = half(rank, 2, world)
    model = wrapped(Model(), group=group) if rank < 2 else Model(7)
    texts = []
    synced(model, p2p=False)
    if rank < 2:
        call = lambda *_: texts.append(caught(lambda: synced(model, p2p=False)))  # noqa: E731
        handle = model.blocks[0].register_forward_hook(call)
        Trainer(model).step()
        handle.remove()
    else:
        texts.append(caught(lambda: synced(model, p2p=False)))
    report = synced(model, p2p=False)
    dte_dist.close(model)
    return texts, report.kind


def test_a_call_inside_a_pass_is_refused_on_every_rank(ranks):
    results = ranks.run(inside_a_call)
    assert all(result == results[0] for result in results)
    ((kind, text),), after = results[0]
    assert kind == "LayoutMismatch"
    assert "is in a pass" in text
    assert after == "delta"


def writers(rank, world, orig, strategy):
    """Ranks 1 and 2 receive into FSDP1, and somebody else writes there in every way that torch has."""
    group = half(rank, 1, world)
    model, reports = Model(7 if rank else 0, turned=False), {}
    if rank > 0:
        model = wrapped(model, strategy=strategy, orig=orig, group=group)

    def sync(what):
        report = synced(model, p2p=False, src=[0])
        reports[what] = report.kind, report.seeded, prints(model)

    # None of these writes to what is not flattened, which counts writes as any tensor does.
    def step():
        flat = [parameter for parameter in model.blocks.parameters() if parameter.numel()]
        for parameter in flat:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(flat, lr=1.0).step()
        model.zero_grad()

    def load(kind, config=None):
        with FullyShardedDataParallel.state_dict_type(model, kind, config):
            state = {
                name: tensor
                for name, tensor in model.state_dict().items()
                if name.startswith("blocks.0.wide")
            }
            for tensor in state.values():
                shards = tensor.local_shards() if hasattr(tensor, "local_shards") else ()
                for local in [shard.tensor for shard in shards] or [tensor]:
                    local.zero_()
            model.load_state_dict(state, strict=False)

    def summon(how):
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for parameter in model.blocks.parameters():
                how(parameter).add_(1)

    ways = {
        "nothing": lambda: None,
        "evaluation": lambda: evaluated(model),
        "a step": step,
        "full state dict": lambda: load(StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
        "sharded state dict": lambda: load(StateDictType.SHARDED_STATE_DICT),
        "summoned": lambda: summon(lambda parameter: parameter),
        "summoned, by .data": lambda: summon(lambda parameter: parameter.data),
    }
    if strategy == "NO_SHARD":  # of which torch has no sharded state dict, and writes nothing back
        ways = {
            way: write
            for way, write in ways.items()
            if way not in ("sharded state dict", "summoned, by .data")
        }
    sync("first")
    for way, write in ways.items():
        if rank > 0:
            write()
        else:
            with torch.no_grad():
                model.norm.weight.add_(1e-3)
        sync(way)
    dte_dist.close(model)
    return reports


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_writes_by_others_are_noticed_and_forwards_are_none(ranks, orig, strategy):
    results = ranks.run(writers, orig, strategy)
    assert all(result == results[0] for result in results)
    for way, (kind, seeded, _) in results[0].items():
        quiet = way in ("nothing", "evaluation")
        assert (kind, seeded) == (("delta", ()) if quiet else ("full", (1, 2))), way


def replaced(rank, world, strategy):
    """Parameters that a trainer sets to other memory, or replaces: taken over as the next forward would."""
    group = half(rank, 2, world)
    turned = strategy != "NO_SHARD"  # there torch cannot take over a parameter that is not row-major
    model = wrapped(Model(turned=turned), strategy=strategy, group=group) if rank < 2 else Model(7)
    results = []

    def sync():
        report = synced(model, p2p=False)
        results.append((report.kind, prints(model)))

    sync()
    if rank < 2:
        for parameter in model.parameters():
            parameter.data = parameter.data + 1
    sync()
    if rank < 2:
        owner = model.blocks[0].wide
        owner.weight = nn.Parameter(owner.weight.detach() * 2)
    sync()
    if rank < 2:
        Trainer(model).step()
    sync()
    dte_dist.close(model)
    return results


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_parameters_in_other_memory_are_taken_over(ranks, strategy):
    results = ranks.run(replaced, strategy)
    assert results[0] == results[1] == results[2]
    assert [kind for kind, _ in results[0]] == ["full", "delta", "delta", "delta"]
    assert len({tuple(held.items()) for _, held in results[0]}) == 4


def refused(rank, world):
    """What is refused, each by a text."""
    texts = {}
    for orig in (True, False):
        model = wrapped(Model(), orig=orig)
        texts["unwrapped", orig] = caught(lambda: Layout.from_module(model.module))  # noqa: B023
        parameters = dict(model.named_parameters())
        texts["parameters", orig] = caught(lambda: Layout.from_tensors(parameters))  # noqa: B023
        layout = Layout.from_module(model)
        evaluated(model)
        model.to(torch.float64)
        texts["cast later", orig] = caught(layout.tensors)
        fresh = wrapped(Model(), orig=orig)
        layout = Layout.from_module(fresh)
        fresh.to(torch.float64)
        texts["cast before", orig] = caught(layout.tensors)
        assert len(Layout.from_module(fresh).manifest.entries) == len(layout.manifest.entries)
    return texts


def test_what_cannot_be_told_is_refused_by_name(ranks):
    expected = {
        "unwrapped": "pass the FullyShardedDataParallel module, not what it wraps",
        "parameters": "pass the module itself",
        "cast later": "moved or cast after a forward",
        "cast before": "another dtype than before",
    }
    for texts in ranks.run(refused):
        assert {what for what, _ in texts} == expected.keys()
        for (what, _), (kind, text) in texts.items():
            assert kind == LayoutMismatch.__name__
            assert expected[what] in text
            assert "tensor '" in text


def partial(rank, world, orig):
    """Renamed and selected tensors, and a unit in a module that is no unit itself."""
    model = nn.ModuleDict({"inner": wrapped(Model(), orig=orig), "outer": nn.Linear(3, 2)})
    select = ["inner.blocks.1.*", "outer.*"]
    named = Layout.from_module(model, select=select, rename=lambda name: name.removeprefix("inner."))
    tensors = named.tensors()
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(rank)
    written = {n: t.unique().tolist() for n, t in whole(model["inner"]).items() if n.startswith("blocks.1")}
    return sorted({entry.name for entry in named.manifest.entries}), written


@pytest.mark.parametrize("orig", [True, False])
def test_selected_and_renamed_parts_are_written_to_in_place(ranks, orig):
    results = ranks.run(partial, orig)
    names = [f"blocks.1.{name}" for name in ("cube", "nothing", "turned", "wide.bias", "wide.weight")]
    for found, values in results:
        assert found == [*names, "outer.bias", "outer.weight"]
        assert set(values) == set(names)
        assert set().union(*values.values()) == {0.0, 1.0, 2.0}, "each rank writes its own"
