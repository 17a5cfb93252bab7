"""The public plan: its ops carried out on numbered tensors, and what it says of coverage and cost."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist import Layout, LayoutMismatch, Plan, TransferOp
from dte_dist.layout import WHOLE, Block, Cut, Entry, Manifest, MeshSpec, Placement
from dte_dist.plan.model_map import RankLayout

some = settings(max_examples=150, deadline=None)
DTYPES = ["bfloat16", "float32"]


@st.composite
def placements(draw, shape, mesh):
    """Any cuts of a slot by a mesh: plain or strided, in any order, the other axes replicated; or no mesh at
    all.
    """
    if not shape or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from([WHOLE, Placement(0)]))
    axes = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))]
    return Placement(
        0, tuple(Cut(draw(st.integers(0, len(shape) - 1)), axis, draw(st.integers(1, 2))) for axis in axes)
    )


@st.composite
def sides(draw, shapes, first):
    """The holdings of all ranks of a mesh; of some slots, receivers or sources without a mesh hold two
    regions instead.
    """
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    entries = []
    for number, shape in enumerate(shapes):
        name, dtype = f"s{number}", DTYPES[number % 2]
        if shape and shape[0] > 1 and draw(st.integers(0, 3)) == 0:
            row = draw(st.integers(1, shape[0] - 1))
            parts = [
                Block.rectangle((start, *[0] * (len(shape) - 1)), (size, *shape[1:]))
                for start, size in ((0, row), (row, shape[0] - row))
            ]
            entries += [Entry(name, shape, dtype, Placement(block=part)) for part in parts]
        else:
            entries.append(Entry(name, shape, dtype, draw(placements(shape, mesh))))
    manifest = Manifest.build(entries, [MeshSpec(mesh, tuple(range(prod(mesh))))])
    return {first + rank: RankLayout(manifest, (at,)) for rank, at in enumerate(product(*map(range, mesh)))}


@st.composite
def plans(draw):
    shapes = draw(
        st.lists(
            st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 8]), max_size=3).map(tuple), min_size=1, max_size=4
        )
    )
    shapes += draw(st.sampled_from([[], [(0, 3)]]))
    return draw(sides(shapes, 0)), draw(sides(shapes, draw(st.sampled_from([0, 100]))))


def locals_of(side):
    """By rank and entry: the local tensor, every element numbered by its place in the full tensor."""
    tensors = {}
    for rank, holding in side.items():
        for number, entry in enumerate(holding.manifest.entries):
            block = holding.manifest.block(entry, holding.coordinates)
            tensors[rank, number] = block.global_indices(entry.shape).reshape(block.shape)
    return tensors


def carry_out(ops, sources, receivers):
    read, wanted = locals_of(sources), locals_of(receivers)
    written = {key: np.full_like(tensor, -1) for key, tensor in wanted.items()}
    for op in ops:
        names = [
            side[rank].manifest.entries[entry].name
            for side, rank, entry in (
                (sources, op.send_rank, op.send_entry),
                (receivers, op.recv_rank, op.recv_entry),
            )
        ]
        assert names == [op.slot, op.slot]
        part = written[op.recv_rank, op.recv_entry][op.inf_slices]
        assert part.shape == op.shape
        assert (part == -1).all()
        written[op.recv_rank, op.recv_entry][op.inf_slices] = read[op.send_rank, op.send_entry][
            op.train_slices
        ]
    assert all((written[key] == tensor).all() for key, tensor in wanted.items())


@some
@given(plans())
def test_the_ops_reproduce_every_receiver(drawn) -> None:
    sources, receivers = drawn
    plan = Plan.between(sources, receivers)
    ops = list(plan.ops)
    carry_out(ops, sources, receivers)
    plan.validate()
    assert len(plan.ops) == len(ops)
    assert [plan.ops[at] for at in range(len(ops))] == ops
    assert ops == sorted(
        ops, key=lambda op: (op.slot, op.send_rank, op.send_entry, op.recv_rank, op.recv_entry)
    )
    listed = replace(plan, ops=ops[::-1])
    assert list(listed.ops_for()) == ops
    assert listed.digest() == plan.digest()
    listed.validate()


@some
@given(plans(), st.data())
def test_a_removed_and_a_doubled_op_are_noticed(drawn, data) -> None:
    plan = Plan.between(*drawn)
    ops = list(plan.ops)
    at = data.draw(st.integers(0, len(ops) - 1))
    for wrong in (ops[:at] + ops[at + 1 :], [*ops, ops[at]]):
        broken = replace(plan, ops=wrong)
        with pytest.raises(LayoutMismatch, match="Hint"):
            broken.validate()
        assert broken.digest() != plan.digest()


@some
@given(plans())
def test_bytes_are_those_of_the_ops(drawn) -> None:
    plan = Plan.between(*drawn)
    width = {slot.name: slot.width for slot in plan.slots}
    sent = {}
    for op in plan.ops:
        sent[op.send_rank, op.recv_rank] = (
            sent.get((op.send_rank, op.recv_rank), 0) + op.numel * width[op.slot]
        )
    ranks = sorted({*drawn[0], *drawn[1]})
    assert all(plan.bytes_between(a, b) == sent.get((a, b), 0) for a in ranks for b in ranks)
    loads = [
        sum(size for pair, size in sent.items() if pair[end] == rank and pair[0] != pair[1])
        for rank in ranks
        for end in (0, 1)
    ]
    assert plan.busiest_bytes("p2p") == max(loads)
    for rank in ranks:
        assert list(plan.ops_for(send_rank=rank)) == [op for op in plan.ops if op.send_rank == rank]
        assert list(plan.ops_for(0, rank)) == [
            op for op in plan.ops if (op.send_rank, op.recv_rank) == (0, rank)
        ]


def mesh_side(first, mesh, cuts, shape=(8, 6), names=("w",)):
    manifest = Manifest.build(
        [Entry(name, shape, "float32", Placement(0, cuts)) for name in names],
        [MeshSpec(mesh, tuple(range(prod(mesh))))],
    )
    return {first + rank: RankLayout(manifest, (at,)) for rank, at in enumerate(product(*map(range, mesh)))}


def test_every_rank_has_the_same_digest_whatever_it_was_given() -> None:
    def again(side):
        return {
            rank: RankLayout(Manifest.from_bytes(each.manifest.to_bytes()), each.coordinates)
            for rank, each in reversed(side.items())
        }

    sources, receivers = mesh_side(0, (4,), (Cut(0, 0),)), mesh_side(4, (2,), (Cut(1, 0),))
    digest = Plan.between(sources, receivers).digest()
    assert len(digest) == 16
    assert Plan.between(again(sources), again(receivers)).digest() == digest
    others = [
        (mesh_side(0, (4,), (Cut(1, 0),)), receivers),
        (sources, mesh_side(5, (2,), (Cut(1, 0),))),
        (sources, mesh_side(4, (2,), (Cut(0, 0),))),
        (sources, mesh_side(4, (2,), ())),
        tuple(mesh_side(at, (2,), (Cut(0, 0),), names=("v",)) for at in (0, 4)),
    ]
    assert len({digest, *(Plan.between(*pair).digest() for pair in others)}) == 6


def test_of_replicas_the_chosen_one_sends_to_all() -> None:
    """HSDP over 2 x 2: the first replica of each shard, for both receivers."""
    plan = Plan.between(mesh_side(0, (2, 2), (Cut(0, 1),)), mesh_side(4, (2,), ()))
    rows = [(slice(0, 4), slice(0, 6)), (slice(4, 8), slice(0, 6))]
    assert list(plan.ops) == [
        TransferOp(send, recv, "w", rows[0], rows[send]) for send in (0, 1) for recv in (4, 5)
    ]


def test_a_block_of_several_runs_gives_several_ops() -> None:
    plan = Plan.between(mesh_side(0, (2,), (Cut(0, 0, 2),)), mesh_side(2, (1,), ()))
    assert [(op.send_rank, op.train_slices[0], op.inf_slices[0]) for op in plan.ops] == [
        (0, slice(0, 2), slice(0, 2)),
        (0, slice(2, 4), slice(4, 6)),
        (1, slice(0, 2), slice(2, 4)),
        (1, slice(2, 4), slice(6, 8)),
    ]


def test_layouts_and_their_tensors() -> None:
    """A fused projection of the receiver, whose tensors the entries of the ops find."""
    fused = torch.zeros(10, 4)
    source = Layout.from_tensors(
        {"k": torch.arange(16.0).view(4, 4), "q": torch.rand(6, 4), "scale": torch.tensor(3.0)}
    )
    views = [
        ("k", fused[6:8], (4, 4), (2, 0)),
        ("q", fused[:6], (6, 4), (0, 0)),
        ("k", fused[8:], (4, 4), (0, 0)),
    ]
    receiver = Layout.from_views([*views, ("scale", torch.zeros(()), (), ())])
    read, written = source.tensors(), receiver.tensors()
    for op in Plan.between({0: source}, {1: receiver}).ops:
        written[op.recv_entry][op.inf_slices] = read[op.send_entry][op.train_slices]
    assert torch.equal(fused, torch.cat([read[1], read[0][2:], read[0][:2]]))
    assert written[-1] == 3


def test_tied_names() -> None:
    shared = torch.rand(4, 3)
    tied = Layout.from_tensors({"embed": shared, "head": shared})
    assert [(op.slot, op.recv_entry) for op in Plan.between({0: tied}, {1: tied}).ops] == [("embed", 0)]
    plan = Plan.between(
        {0: tied}, {1: Layout.from_tensors({"embed": torch.zeros(4, 3), "head": torch.zeros(4, 3)})}
    )
    assert [(op.slot, op.send_entry, op.recv_entry) for op in plan.ops] == [("embed", 0, 0), ("embed", 0, 1)]
    plan.validate()


def test_the_busiest_rank_of_each_route() -> None:
    full = 8 * 6 * 4
    plan = Plan.between(mesh_side(0, (4,), (Cut(0, 0),)), mesh_side(4, (2,), (Cut(1, 0),)))
    assert (plan.busiest_bytes("p2p"), plan.busiest_bytes("broadcast")) == (full // 2, full)
    alone = Plan.between(mesh_side(0, (4,), (Cut(0, 0),)), mesh_side(0, (1,), ()))
    assert (alone.busiest_bytes("p2p"), alone.busiest_bytes("broadcast")) == (full * 3 // 4, full * 3 // 4)
    with pytest.raises(ValueError, match="route"):
        plan.busiest_bytes("mail")


def test_what_cannot_be_planned_is_refused() -> None:
    sources, receivers = mesh_side(0, (4,), (Cut(0, 0),)), mesh_side(4, (2,), (Cut(1, 0),))
    with pytest.raises(LayoutMismatch, match="whole tensor"):
        Plan.between({0: sources[0]}, receivers)
    with pytest.raises(ValueError, match="at least one source"):
        Plan.between({}, receivers)
    plan = Plan.between(sources, receivers)
    first, *rest = plan.ops
    for wrong in (
        replace(first, recv_rank=9),
        replace(first, recv_entry=1),
        replace(first, inf_slices=(slice(0, 9), slice(0, 3))),
        replace(first, inf_slices=first.inf_slices[:1]),
        replace(first, train_slices=(slice(0, 1), slice(0, 3))),
    ):
        with pytest.raises(LayoutMismatch):
            replace(plan, ops=[wrong, *rest]).validate()
    with pytest.raises(LayoutMismatch, match="leave out a tensor"):
        replace(plan, ops=[]).validate()
    with pytest.raises(ValueError, match="slot"):
        replace(plan, ops=[replace(first, slot="v")]).validate()
    with pytest.raises(IndexError):
        plan.ops[len(plan.ops)]


@pytest.mark.slow
def test_a_large_model_is_planned_fast() -> None:
    """20,000 slots from 64 sharded sources to 64 receivers cut the other way; the bound is loose, the time is
    printed.
    """
    shapes = [(4096, 1024), (1024, 4096), (1024,), (50257, 64), (1000, 130), ()]

    def side(first, dim):
        cuts = [Placement(0, (Cut(dim % len(shape), 0),)) if shape else Placement(0) for shape in shapes]
        entries = [Entry(f"layers.{i}", shapes[i % 6], "bfloat16", cuts[i % 6]) for i in range(20000)]
        manifest = Manifest.build(entries, [MeshSpec((64,), tuple(range(64)))])
        return {first + rank: RankLayout(manifest, ((rank,),)) for rank in range(64)}

    sources, receivers = side(0, 0), side(64, -1)
    begin = time.perf_counter()
    plan = Plan.between(sources, receivers)
    end = time.perf_counter()
    print(f"20,000 slots x 64 sources x 64 receivers: {len(plan.ops)} ops in {end - begin:.2f} s")
    assert end - begin < 30
