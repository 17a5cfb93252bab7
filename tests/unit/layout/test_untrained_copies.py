"""Who holds a tensor, and what follows from it: references, clones, version counters of several tensors over
one memory.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dte_dist.detect.fingerprint import Fingerprint, external_writes
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout, LiveTensors
from dte_dist.layout.untrained_copies import is_clone, only_here

HELD = torch.zeros(4)
ARRAY = np.zeros(4, np.float32)
MODULE = nn.Linear(4, 3)

ALONE = {
    "a tensor": lambda: torch.zeros(3),
    "a view of one": lambda: torch.zeros(4, 2)[1:],
    "a parameter": lambda: nn.Parameter(torch.zeros(3)),
    "a cast": HELD.bfloat16,
    "a clone": lambda: MODULE.weight.detach().clone(),
}
HELD_ELSEWHERE = {
    "by a name": lambda: HELD,
    "its memory": HELD.detach,
    "a part of its memory": lambda: HELD[1:3],
    "its memory, transposed": lambda: HELD.view(2, 2).t(),
    "by a module": lambda: MODULE.weight,
    "a state dict": lambda: MODULE.state_dict()["weight"],
    "by numpy": lambda: torch.from_numpy(ARRAY),
    "by another process, perhaps": lambda: torch.zeros(3).share_memory_(),
}


def ask(make):
    items = [make()]
    also = {0: items[0]}
    found = only_here(items, 0)
    return found and also[0] is items[0]


@pytest.mark.parametrize("make", ALONE.values(), ids=ALONE.keys())
def test_what_nobody_else_holds(make):
    assert ask(make)


@pytest.mark.parametrize("make", HELD_ELSEWHERE.values(), ids=HELD_ELSEWHERE.keys())
def test_what_somebody_else_holds(make):
    assert not ask(make)


def test_a_graph_holds_what_it_needs():
    weight = nn.Parameter(torch.ones(3))
    items = [torch.ones(3)]
    also = {0: items[0]}
    loss = (weight * items[0]).sum()
    assert not only_here(items, 0)
    del loss
    assert only_here(items, 0)
    assert len(also) == 1


def test_a_view_whose_base_is_held_is_held():
    base = torch.zeros(4)
    items = [base[1:]]
    also = {0: items[0]}
    assert not only_here(items, 0)
    del base
    assert only_here(items, 0)
    assert len(also) == 1


def test_clones_are_known_by_what_torch_says_of_them():
    clone = torch.zeros(3)
    clone._has_been_cloned = True
    assert is_clone(clone)
    assert not is_clone(torch.zeros(3))
    assert is_clone(torch.zeros(3), is_shard=True)
    assert not is_clone(HELD.detach(), is_shard=True)
    assert not is_clone(torch.zeros(0), is_shard=True)


def test_a_layout_of_copies_is_refused_every_time_until_somebody_writes():
    layout = Layout.from_tensors({"b": torch.zeros(3), "a": torch.zeros(0), "c": torch.zeros(2)})
    for _ in range(2):
        with pytest.raises(
            LayoutMismatch, match=r"nobody holds the tensor but the Layout.*tensor 'b'.*got 2 such tensors"
        ):
            layout.refuse_copies()
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layout.tensors()[1].add_(1)
        layout.refuse_copies()
        layout.refuse_copies()
    assert [str(each.message)[:45] for each in seen] == ["nobody holds 1 of 3 tensors of a Layout but i"], (
        "once"
    )


def test_marked_clones_are_refused_though_somebody_holds_them():
    state = {"live": torch.zeros(2), "clone": torch.zeros(3), "other": torch.zeros(3)}
    for name in ("clone", "other"):
        state[name]._has_been_cloned = True
    layout = Layout.from_tensors(state)
    with pytest.raises(
        LayoutMismatch, match=r"torch cloned the tensor.*tensor 'clone'.*pass the module itself"
    ):
        layout.refuse_copies()
    state["other"].add_(1)  # its holder keeps it up to date
    layout.refuse_copies()


@pytest.mark.parametrize(
    "held", [MODULE.state_dict(), {"w": torch.zeros(3)}, dict(MODULE.named_parameters())]
)
def test_layouts_of_held_tensors_are_not_spoken_of(held):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Layout.from_tensors(held).refuse_copies()
        Layout.from_tensors(iter(held.items())).refuse_copies()
        views = ((name, tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in held.items())
        Layout.from_views(views).refuse_copies()
        Layout.from_module(MODULE).refuse_copies()


def test_a_flattened_parameter_is_refused_by_name():
    parameter = nn.Parameter(torch.zeros(3))
    parameter._fsdp_flattened = True
    module = nn.ParameterDict({"w": parameter})
    for build in (lambda: Layout.from_tensors({"w": parameter}), lambda: Layout.from_module(module)):
        with pytest.raises(
            LayoutMismatch, match=r"FullyShardedDataParallel flattened the parameter.*tensor 'w'"
        ):
            build()


def test_writes_to_other_tensors_over_the_same_memory_are_foreign():
    tensors = [torch.zeros(6), torch.zeros(6)]
    twins = [tensors[1].data, tensors[1].data]  # the same memory, counters of their own
    local = replace(LiveTensors.of(tensors), twins=[(1, twin) for twin in twins])
    own = np.array([0, 1])
    for other in (None, *twins):
        before = Fingerprint.of(local)
        assert before.same(Fingerprint.of(local))
        for written in (tensors[1], other):
            if written is not None:
                written.add_(1)
        now = Fingerprint.of(local, moved=True)
        assert not before.same(now)
        assert external_writes(before, now, own, tensors) == ([] if other is None else [1])


def test_a_tensor_that_joins_others_is_no_write():
    tensor = torch.zeros(3)
    alone, joined = LiveTensors.of([tensor]), replace(LiveTensors.of([tensor]), twins=[(0, tensor.data)])
    before, now = Fingerprint.of(alone), Fingerprint.of(joined)
    assert before.same(now)
    assert external_writes(before, now, np.array([0]), [tensor]) == []


def test_names_that_share_some_regions_only_are_refused():
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    rows = [(one, (4, 3), (0, 0)), (other, (4, 3), (2, 0))]
    shared = [(name, *row) for name in "ab" for row in rows]
    assert Layout.from_views(shared).manifest.ties == (("a", "b"),)
    for apart in ([*shared[:3], ("b", other.clone(), (4, 3), (2, 0))], shared[:3]):
        with pytest.raises(
            LayoutMismatch, match="a and b share the memory of some regions and not of others"
        ):
            Layout.from_views(apart)
