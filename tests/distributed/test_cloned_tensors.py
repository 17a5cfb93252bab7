"""Sources that give copies of what they train: refused at the second sync if it can be known."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import dte_dist
from dte_dist import Layout
from tests.distributed.flat_models import CPU, half, whole
from tests.distributed.launcher import Ranks
from tests.distributed.tools import TIMEOUT, caught, digest, sync

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as ranks:
        yield ranks


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 5))


def flat(mesh, group, kind):
    options = {"device_mesh": mesh, "process_group": group, "use_orig_params": True, "device_id": CPU}
    model = FullyShardedDataParallel(plain(), **options)
    FullyShardedDataParallel.set_state_dict_type(model, kind)
    return model


def trained(kind, mesh, group):
    """A module that ranks 0 and 1 train, and what they take for its weights."""
    if kind in ("DTensor", "ShardedTensor", "full"):
        of = StateDictType.FULL_STATE_DICT if kind == "full" else StateDictType.SHARDED_STATE_DICT
        model = flat(mesh if kind == "DTensor" else None, None if kind == "DTensor" else group, of)
        return model, model.state_dict
    model = plain()
    if kind in ("sharded state dict", "gathered"):
        model = fully_shard(model, mesh=mesh)
    return model, {
        "gathered": lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        "cast": lambda: {name: parameter.double().float() for name, parameter in model.named_parameters()},
        "state dict": model.state_dict,
        "sharded state dict": model.state_dict,
    }[kind]


def stale(rank, world, kind, held):
    """What three syncs say of weights that are trained between them, and given as `kind` once, before."""
    mesh, group = DeviceMesh("cpu", [0, 1]), half(rank, 2, world)
    model, weights = trained(kind, mesh, group) if rank < 2 else trained("state dict", None, None)
    given = weights()
    target = Layout.from_tensors(given) if rank < 2 else model
    given = given if held else None
    said, agree = [], []
    for _ in range(3):
        said.append(caught(lambda: sync(target, src=[0, 1])))
        if rank < 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        agree.append({name: digest(tensor) for name, tensor in whole(model).items()} if rank == 2 else None)
    dte_dist.close(target)
    return said, agree


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", ["DTensor", "ShardedTensor", "full", "gathered", "cast"])
def test_copies_are_refused_at_the_second_sync_on_every_rank(ranks, kind, held):
    results = ranks.run(stale, kind, held)
    said = results[0][0]
    assert all(each == said for each, _ in results)
    assert said[0] == ("", ""), "sending them once is fine"
    if held and kind in ("DTensor", "gathered", "cast"):
        assert said[1:] == [("", "")] * 2, "who holds them may write to them: nothing tells"
        return
    for error, text in said[1:]:
        assert error == "LayoutMismatch"
        assert "no training step reaches it [tensor '" in text
        assert ("torch cloned the tensor for a state dict" in text) == (kind in ("ShardedTensor", "full"))
        assert "ranks" not in text or "raised on rank 0, 1" in text


@pytest.mark.parametrize("kind", ["state dict", "sharded state dict"])
def test_what_shares_memory_with_a_module_is_followed(ranks, kind):
    results = ranks.run(stale, kind, held=False)
    assert [said for said, _ in results] == [[("", "")] * 3] * 3
    after = results[2][1]
    assert after[0] != after[1] != after[2]


def never_written_to(rank, world):
    """Clones that their holder never writes to: a warning, once, after eight syncs without a change."""
    held = {"w": torch.arange(4.0), "still": torch.zeros(2)}
    target = Layout.from_tensors(held)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        counts = []
        for _ in range(20):
            sync(target, src=[0])
            counts.append(len(seen))
    dte_dist.close(target)
    return counts, [str(each.message) for each in seen]


def test_a_source_that_never_changes_is_warned_of_once(ranks):
    results = ranks.run(never_written_to)
    counts, (text,) = results[0]
    assert counts == [0] * 8 + [1] * 12
    assert "in 8 syncs nothing changed" in text
    assert "'still'" in text
    assert [texts for _, texts in results[1:]] == [[], []]


def quiet(rank, world):
    """What must not be warned of or refused, though nothing changes for long."""
    module = nn.Linear(3, 2)
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2)}
    pair = [torch.zeros(3), torch.zeros(2)]
    layouts = {
        "module": module,
        "state dict": Layout.from_tensors(module.state_dict()),
        "dict": Layout.from_tensors(tensors),
        "list": Layout.from_views((f"{i}", each, tuple(each.shape), (0,)) for i, each in enumerate(pair)),
    }
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for target in layouts.values():
            for _ in range(5):
                sync(target, src=[0])
    for target in layouts.values():
        dte_dist.close(target)
    return [str(each.message) for each in seen]


def test_tensors_that_are_held_are_not_spoken_of(ranks):
    assert ranks.run(quiet) == [[], [], []]


def partly(rank, world):
    """One copy among live tensors: a warning with its name, unless it is written to by way of the layout."""
    live, texts = {"a": torch.zeros(3), "b": torch.zeros(2)}, []
    for written in (False, True):
        target = Layout.from_tensors({**live, "copy": torch.zeros(4)})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                sync(target, src=[0])
                with torch.no_grad():
                    live["a"].add_(1)
                    if written:
                        target.tensors()[2].add_(1)
        dte_dist.close(target)
        texts.append([str(each.message) for each in seen])
    return texts


def test_one_copy_among_others_is_warned_of_by_name(ranks):
    results = ranks.run(partly)
    (text,), nothing = results[0]
    assert "nobody holds 1 of 3 tensors of a Layout but itself" in text
    assert "'copy'" in text
    assert nothing == []
    assert results[1] == results[2] == [[], []], "receivers may well be the only ones"


def followed(rank, world):
    """The same trainers, whose module itself is given."""
    group = half(rank, 2, world)
    model = flat(None, group, StateDictType.SHARDED_STATE_DICT) if rank < 2 else plain()
    held = []
    for _ in range(3):
        report = dte_dist.delta_broadcast(model, timeout=TIMEOUT)
        held.append((report.kind, {name: digest(tensor) for name, tensor in whole(model).items()}))
        if rank < 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
    dte_dist.close(model)
    return held


def test_the_module_itself_is_followed(ranks):
    results = ranks.run(followed)
    assert results[0] == results[1] == results[2]
    assert [kind for kind, _ in results[0]] == ["full", "delta", "delta"]
    assert len({tuple(held.items()) for _, held in results[0]}) == 3
