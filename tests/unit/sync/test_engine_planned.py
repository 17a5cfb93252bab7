"""Unit tier, no ranks: `DeltaEngine` along a plan; other layouts, and what a sender has no right to write,
are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist import (
    DeltaEngine,
    FrameError,
    Layout,
    LayoutMismatch,
    LoopbackTransport,
    Payload,
    Plan,
    VersionGap,
    VersionRestart,
)
from dte_dist.codec.named_tensors import HEADER, INDEX, MAGIC, VALUE
from dte_dist.errors import DeltaError
from dte_dist.plan.model_map import RankLayout
from tests.distributed.cases import random_bits, same_bits

View = tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]


class Job:
    """Senders and receivers in one process, numbered from 0 on; each is a list of views, or a layout."""

    def __init__(
        self, senders: list[Any], receivers: list[Any], wire: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.layouts = [
            each if isinstance(each, Layout) else Layout.from_views(each) for each in (*senders, *receivers)
        ]
        self.senders, self.receivers = range(len(senders)), range(len(senders), len(self.layouts))
        sources = {
            rank: RankLayout(self.layouts[rank].manifest, self.layouts[rank].coordinates, wire)
            for rank in self.senders
        }
        self.plan = Plan.between(sources, {rank: self.layouts[rank] for rank in self.receivers})
        self.transport = LoopbackTransport()
        self.engines = [self.engine(rank, **options) for rank in range(len(self.layouts))]

    def engine(self, rank: int, **options: Any) -> DeltaEngine:
        return DeltaEngine(self.transport, plan=self.plan, rank=rank, timeout=0.05, **options)

    def push(self, version: int, **options: Any) -> list[Payload]:
        for rank in self.senders:
            self.engines[rank].push(self.layouts[rank], version, **options)
        return [self.transport.receive(version, sender=rank, timeout=1.0) for rank in self.senders]

    def pull(self, version: int) -> None:
        for rank in self.receivers:
            self.engines[rank].pull(self.layouts[rank], version)

    def both(self, version: int, **options: Any) -> list[Payload]:
        payloads = self.push(version, **options)
        self.pull(version)
        return payloads


def rows(full: Tensor, ranks: int, name: str = "w") -> list[list[View]]:
    """Cut a tensor by rows; every part has memory of its own."""
    step = full.shape[0] // ranks
    parts = [full[rank * step : (rank + 1) * step].clone() for rank in range(ranks)]
    return [
        [(name, part, tuple(full.shape), (rank * step, *[0] * (full.dim() - 1)))]
        for rank, part in enumerate(parts)
    ]


def columns(full: Tensor, ranks: int, name: str = "w") -> list[list[View]]:
    """Zeros, cut by columns."""
    step = full.shape[1] // ranks
    return [
        [(name, torch.zeros(full.shape[0], step, dtype=full.dtype), tuple(full.shape), (0, rank * step))]
        for rank in range(ranks)
    ]


def whole(views: list[list[View]], shape: tuple[int, ...]) -> Tensor:
    """Put the parts of all ranks together."""
    full = torch.zeros(shape, dtype=views[0][0][1].dtype)
    for _, part, _, offsets in (view for rank in views for view in rank):
        full[tuple(slice(low, low + size) for low, size in zip(offsets, part.shape, strict=True))] = part
    return full


@pytest.mark.parametrize("sparse_bytes_ratio", [0.0, 1.0])
def test_what_travels(sparse_bytes_ratio: float) -> None:
    """Positions count in the whole tensor; a whole part has the shape in which its sender holds it."""
    full = torch.arange(48, dtype=torch.float32).view(8, 6)
    sources, copies = rows(full, 2), columns(full, 3)
    job = Job(sources, copies, sparse_bytes_ratio=sparse_bytes_ratio)
    first = job.both(1)
    assert [tuple(payload.tensors["w"].shape) for payload in first] == [(4, 6)] * 2
    assert [payload.sender for payload in first] == [0, 1]
    assert all(payload.plan == job.plan.digest() and payload.full for payload in first)
    assert same_bits(whole(copies, (8, 6)), full)
    sources[1][0][1][2, 3] = -7.0
    quiet, second = job.both(2)
    assert list(quiet.tensors) == [HEADER]
    if sparse_bytes_ratio:
        assert second.tensors["w@delta_idx"].tolist() == [6 * 6 + 3]
        assert second.tensors["w@delta_idx"].dtype is torch.int32
    else:
        assert tuple(second.tensors["w"].shape) == (4, 6)
    full[6, 3] = -7.0
    assert same_bits(whole(copies, (8, 6)), full)
    assert [engine.version for engine in job.engines] == [-1, -1, 2, 2, 2]


@pytest.mark.parametrize("sparse_bytes_ratio", [0.0, 1.0])
def test_fused_tensors_and_several_regions_of_one_tensor(sparse_bytes_ratio: float) -> None:
    """Sender: query and key fused, the key in two parts in the other order. Receiver: fused otherwise, with
    padding.
    """
    fused, other = (
        random_bits((10, 4), torch.bfloat16, torch.Generator().manual_seed(1)),
        torch.zeros(13, 4, dtype=torch.bfloat16),
    )
    sender = [
        ("k", fused[6:8], (4, 4), (2, 0)),
        ("q", fused[:6], (6, 4), (0, 0)),
        ("k", fused[8:], (4, 4), (0, 0)),
    ]
    receiver = [
        ("q", other[1:4], (6, 4), (0, 0)),
        ("k", other[5:8], (4, 4), (1, 0)),
        ("q", other[9:12], (6, 4), (3, 0)),
        ("k", other[12:], (4, 4), (0, 0)),
    ]
    job = Job([sender], [receiver], sparse_bytes_ratio=sparse_bytes_ratio)
    for version in range(4):
        payloads = job.both(version)
        expected = torch.cat([fused[:3], fused[9:], fused[6:8], fused[3:6], fused[8:9]])
        assert same_bits(torch.cat([other[1:4], other[5:8], other[9:]]), expected)
        assert not other[[0, 4, 8]].view(torch.int16).any()
        fused.view(torch.int16)[[1, 5, 6, 9], [0, 1, 2, 3]] ^= 1
    names = set(payloads[0].tensors) - {HEADER}
    assert names == (
        {"k[0]", "k[1]", "q"}
        if not sparse_bytes_ratio
        else {f"{name}@delta_{end}" for name in ("k[0]", "k[1]", "q") for end in ("idx", "val")}
    )


@pytest.mark.parametrize("sparse_bytes_ratio", [0.0, 1.0])
def test_tensors_named_as_regions_of_others_would_be(sparse_bytes_ratio: float) -> None:
    """A region of "w" must not take the name of a tensor "w[1]", nor of one that was named to avoid that."""
    names = ("w", "w[0]", "w[1]", "w[1]'", "w[1][0]")
    shapes = dict.fromkeys(names, (4, 3))
    make = torch.Generator().manual_seed(3)
    full = {name: random_bits(shape, torch.float32, make) for name, shape in shapes.items()}
    halves = [(name, full[name][row : row + 2], (4, 3), (row, 0)) for name in ("w", "w[1]") for row in (2, 0)]
    others = [(name, full[name], (4, 3), (0, 0)) for name in names if name not in ("w", "w[1]")]
    copy = {name: torch.zeros(4, 3) for name in names}
    targets = [
        (name, copy[name][:, column : column + 1], (4, 3), (0, column))
        for name in names
        for column in (2, 0, 1)
    ]
    job = Job([halves + others], [targets], sparse_bytes_ratio=sparse_bytes_ratio)
    for version in range(1, 4):
        job.both(version)
        for name in names:
            assert same_bits(copy[name], full[name]), (version, name)
            full[name].view(torch.int32)[version, version % 3] ^= version


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tensors_are_sent_once(tied: bool) -> None:
    weight, homes = torch.randn(6, 4), [torch.zeros(6, 4) for _ in range(2)]
    targets = {"embed": homes[0], "head": homes[0] if tied else homes[1], "norm": torch.zeros(4)}
    job = Job(
        [Layout.from_tensors({"embed": weight, "head": weight, "norm": torch.ones(4)})],
        [Layout.from_tensors(targets)],
    )
    for version in range(3):
        (payload,) = job.both(version)
        assert not any(name.startswith("head") for name in payload.tensors)
        assert all(same_bits(home, weight) for home in homes[: 1 if tied else 2])
        weight[version, 1:3] += 1


def test_masters_travel_in_the_dtype_of_the_copy() -> None:
    """Changes are found after the cast; a NaN is cast alike with and without dimensions."""
    master, scalar = torch.linspace(-1, 1, 24).view(6, 4), torch.tensor(float("nan"))
    copies = {"w": torch.zeros(6, 4, dtype=torch.bfloat16), "s": torch.zeros((), dtype=torch.bfloat16)}
    wire = {"w": "bfloat16", "s": "bfloat16"}
    halves = [
        [("w", master[:3], (6, 4), (0, 0)), ("s", scalar, (), ())],
        [("w", master[3:], (6, 4), (3, 0)), ("s", scalar.clone(), (), ())],
    ]
    job = Job(halves, [Layout.from_tensors(copies)], wire)
    for change in (0.0, 1e-6, 0.5):
        master[0, 0] += change
        payloads = job.both(int(change * 100) + int(change > 0))
        assert same_bits(copies["w"], master.to(torch.bfloat16))
        assert same_bits(copies["s"].view(1), scalar.view(1).to(torch.bfloat16))
        assert ("w@delta_idx" in payloads[0].tensors) == (change == 0.5)


def test_replicas_and_receivers_of_a_part() -> None:
    """A replica sends nothing, and nobody waits for it; a receiver takes of a payload what it holds."""
    full = torch.randn(4, 4)
    upper, lower = torch.zeros(1, 4), torch.zeros(2, 4)
    receivers = [[("w", upper, (4, 4), (1, 0))], [("w", lower, (4, 4), (2, 0))]]
    job = Job([Layout.from_tensors({"w": full}), Layout.from_tensors({"w": full.clone()})], receivers)
    assert [len(payload.tensors) for payload in job.push(1)] == [2, 1]
    job.engines[1] = job.engine(1)
    job.pull(1)
    for version in (2, 3):
        full[version, version] = 9.0
        job.engines[0].push(job.layouts[0], version)
        job.pull(version)
        assert same_bits(torch.cat([upper, lower]), full[1:])


def test_what_stands_for_a_layout() -> None:
    """Tensors of which `Layout.from_tensors` makes the layout of the plan."""
    full, copy = {"b": torch.randn(3), "a": torch.randn(5, 2)}, {"a": torch.zeros(5, 2), "b": torch.zeros(3)}
    job = Job([Layout.from_tensors(full)], [Layout.from_tensors(copy)])
    for version in range(3):
        full["a"][version] += 1
        job.engines[0].push(full.items(), version)
        job.engines[1].pull(copy, version)
        assert all(same_bits(full[name], copy[name]) for name in full)


def test_options_are_checked() -> None:
    layout = Layout.from_tensors({"w": torch.zeros(4)})
    plan, transport = Plan.between({0: layout}, {1: layout}), LoopbackTransport()
    for wrong in (
        {"plan": plan},
        {"rank": 1},
        {"plan": plan, "rank": -1},
        {"plan": plan, "rank": True},
        {"plan": 3, "rank": 0},
    ):
        with pytest.raises(ValueError, match="plan"):
            DeltaEngine(transport, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no sender of the plan"):
        DeltaEngine(transport, plan=plan, rank=1).push(layout, 1)
    for call in (DeltaEngine(transport).push, _pulled):
        with pytest.raises(ValueError, match="a Layout says"):
            call(layout, 1)
    with pytest.raises(LayoutMismatch, match="leave out"):
        DeltaEngine(transport, plan=replace(plan, ops=[]), rank=0)


def _pulled(given: Any, version: int) -> None:
    transport = LoopbackTransport()
    DeltaEngine(transport).push({"w": torch.zeros(4)}, version)
    DeltaEngine(transport).pull(given, version)


def test_layouts_that_are_not_those_of_the_plan() -> None:
    full = torch.randn(8, 6)
    sources, copies = rows(full, 2), columns(full, 2)
    job = Job(sources, copies)
    job.push(1)
    view = Layout.from_views
    for rank, wrong, said in (
        (0, job.layouts[1], "does not hold what the plan says"),
        (1, view([("w", torch.zeros(4, 6), (8, 6), (0, 0))]), "does not hold what the plan says"),
        (0, view([("w", torch.zeros(3, 6), (8, 6), (0, 0))]), "does not hold what the plan says"),
        (0, view([("w", torch.zeros(4, 6), (9, 6), (0, 0))]), "something else"),
        (0, view([("w", torch.zeros(4, 6, dtype=torch.int32), (8, 6), (0, 0))]), "another dtype"),
        (0, view([]), "not those of the plan"),
    ):
        with pytest.raises(LayoutMismatch, match=said):
            job.engines[rank].push(wrong, 2)
    for wrong, said in (
        (job.layouts[3], "something else"),
        (job.layouts[0], "something else"),
        (view([]), "not those of the plan"),
        (view([("w", torch.zeros(8, 3, dtype=torch.bfloat16), (8, 6), (0, 0))]), "another dtype"),
    ):
        with pytest.raises(LayoutMismatch, match=said):
            job.engines[2].pull(wrong, 1)
    job.pull(1)
    assert same_bits(whole(copies, (8, 6)), full)
    two = Layout.from_tensors({"a": torch.zeros(3), "b": torch.zeros(3)})
    other = Job([two], [two])
    with pytest.raises(LayoutMismatch, match="not those of the plan"):
        other.engines[0].push({"b": torch.zeros(3), "bb": torch.zeros(3)}, 1)


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor], int], dict[str, Tensor]], type[DeltaError], str]] = {
    "rows of the other": (
        lambda said, own: said | {"w@delta_idx": i32(25 - own, 28 - own)},
        FrameError,
        "does not send by the plan",
    ),
    "outside the tensor": (
        lambda said, _: said | {"w@delta_idx": i32(3, 48)},
        FrameError,
        "outside its tensor",
    ),
    "int64": (
        lambda said, own: said | {"w@delta_idx": torch.tensor([own, own + 3])},
        FrameError,
        "another dtype",
    ),
    "falling": (lambda said, own: said | {"w@delta_idx": i32(own + 3, own)}, FrameError, "ascending"),
    "values of another dtype": (
        lambda said, _: said | {"w@delta_val": torch.zeros(2, dtype=torch.float16)},
        LayoutMismatch,
        "dtype",
    ),
    "unknown name": (
        lambda said, _: said | {f"v{end}": said[f"w{end}"] for end in (INDEX, VALUE)},
        LayoutMismatch,
        "'v'",
    ),
    "smaller part": (lambda *_: {"w": torch.zeros(3, 6)}, LayoutMismatch, "another shape"),
    "flat part": (lambda *_: {"w": torch.zeros(24)}, LayoutMismatch, "another shape"),
    "whole of another dtype": (
        lambda *_: {"w": torch.zeros(4, 6, dtype=torch.int32)},
        LayoutMismatch,
        "another dtype",
    ),
}


def i32(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_sender_may_not_send_moves_nothing(case: str, sender: int) -> None:
    """Senders hold rows 0 to 3 and 4 to 7, positions 0 to 23 and 24 to 47."""
    full = torch.randn(8, 6)
    sources, copies = rows(full, 2), columns(full, 2)
    job = Job(sources, copies)
    job.both(1)
    for _, part, *_ in (view for rank in sources for view in rank):
        part[0, 3:5] += 1
    payloads = job.push(2)
    spoil, kind, said = HOSTILE[case]
    tensors = {name: tensor for name, tensor in payloads[sender].tensors.items() if name != HEADER}
    wrong = spoil(tensors, 24 * sender)
    pairs = sum(name.endswith("@delta_idx") for name in wrong)
    header = torch.tensor([MAGIC, 1, 2, 1, pairs, len(wrong) - 2 * pairs])
    job.transport.send(replace(payloads[sender], tensors={HEADER: header, **wrong}), timeout=1.0)
    for rank in job.receivers:
        with pytest.raises(kind, match=said):
            job.engines[rank].pull(job.layouts[rank], 2)
    assert same_bits(whole(copies, (8, 6)), full)
    job.transport.send(payloads[sender], timeout=1.0)
    job.pull(2)
    assert same_bits(whole(copies, (8, 6)), torch.cat([view[0][1] for view in sources]))


def test_payloads_of_another_plan_sender_or_version_chain() -> None:
    full = torch.randn(8, 6)
    sources, copies = rows(full, 2), columns(full, 2)
    job = Job(sources, copies)
    first = job.both(1)
    payloads = job.push(2)
    receiver = job.engines[2]

    def refused(kind: type[Exception], said: str, wrong: Payload) -> None:
        job.transport.send(wrong, timeout=1.0)
        with pytest.raises(kind, match=said):
            receiver.pull(job.layouts[2], 2)
        job.transport.send(payloads[1], timeout=1.0)

    refused(LayoutMismatch, "another plan", replace(payloads[1], plan=b"other"))
    refused(LayoutMismatch, "another plan", replace(payloads[1], plan=b""))
    refused(VersionRestart, "ranks 1", replace(payloads[1], base_lineage=payloads[1].base_lineage + 2))
    job.transport.receive = lambda version, *, sender, timeout: payloads[0]  # type: ignore[method-assign]
    with pytest.raises(FrameError, match=r"something else.*of rank 1"):
        receiver.pull(job.layouts[2], 2)
    del job.transport.receive  # type: ignore[method-assign]
    missing = replace(first[1], version=2, tensors={HEADER: torch.tensor([MAGIC, 1, 2, -1, 0, 0])})
    refused(LayoutMismatch, "missing", missing)
    with pytest.raises(LayoutMismatch, match="share of one of several"):
        DeltaEngine(job.transport).pull({"w": torch.zeros(8, 6)}, 1)
    job.pull(2)


def test_each_sender_has_its_own_lineage() -> None:
    """One sender of two starts anew: its delta is refused, and its full payload goes with the delta of the
    other.
    """
    full = torch.randn(8, 6)
    sources, copies = rows(full, 2), columns(full, 2)
    job = Job(sources, copies)
    job.both(1)
    job.engines[1] = job.engine(1)
    sources[0][0][1][0] += 1
    sources[1][0][1][1] += 1
    before, (same, fresh) = whole(copies, (8, 6)), job.push(2)
    assert (same.full, fresh.full) == (False, True)
    job.pull(2)
    assert same_bits(whole(copies, (8, 6)), torch.cat([view[0][1] for view in sources]))
    assert not same_bits(before, whole(copies, (8, 6)))
    late = DeltaEngine(job.transport, plan=job.plan, rank=2)
    with pytest.raises(VersionGap, match=r"before anything.*ranks 0"):
        late.pull(job.layouts[2], 2)
    sources[1][0][1][1] += 1
    job.both(3)
    assert same_bits(whole(copies, (8, 6)), torch.cat([view[0][1] for view in sources]))


@pytest.mark.parametrize("name", [HEADER, f"w{INDEX}", f"w{VALUE}"])
def test_names_that_mean_something_else_in_a_payload_are_refused(name: str) -> None:
    with pytest.raises(LayoutMismatch, match="reserved"):
        Job([[(name, torch.ones(4), (4,), (0,))]], [[(name, torch.zeros(4), (4,), (0,))]])


def test_an_empty_region_may_come_twice() -> None:
    """As two ranks' worth of padding does, on either side."""
    full, copy = torch.rand(4, 3), torch.zeros(4, 3)
    nothing = ("w", torch.zeros(0, 3), (4, 3), (4, 0))
    job = Job(
        [[nothing, ("w", full, (4, 3), (0, 0)), nothing]], [[("w", copy, (4, 3), (0, 0)), nothing, nothing]]
    )
    for version in (1, 2):
        job.both(version)
        assert same_bits(full, copy)
        full[version] += 1
