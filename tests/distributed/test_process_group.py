"""Distributed tier, four ranks over gloo: what can go wrong between ranks in a `ProcessGroupTransport`, and
what moves on its wires.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dte_dist
from dte_dist import DeltaEngine, Layout, Payload, PeerLost, Plan, ProcessGroupTransport
from dte_dist.engine.payload import Change, write_payload
from dte_dist.transport import packing, process_group
from dte_dist.transport.communicator import Communicator
from dte_dist.transport.packing import Arrival, Packed
from tests.distributed.cases import same_bits
from tests.distributed.launcher import Outcome, Ranks
from tests.distributed.shares import warm
from tests.distributed.tools import caught, digest, same

WORLD, PATIENCE, SHORT = 4, 30.0, 4.0
STATE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


def payload(version: int, numel: int = 10) -> Payload:
    """A full payload; every rank can make it."""
    weights = torch.arange(numel, dtype=torch.float32) * version
    return write_payload(version, -1, [Change("w", None, weights)], lineage=version + 1)


def meet(
    transport: ProcessGroupTransport,
    rank: int,
    version: int,
    *,
    sent: Any = None,
    src: int = 0,
    timeout: float = PATIENCE,
) -> Any:
    """Send on one rank, receive on the others; return what came."""
    if rank == src:
        transport.send(payload(version) if sent is None else sent, timeout=timeout)
        return version
    return transport.receive(version, timeout=timeout).version


def told(
    rank: int, world: int, calls: Callable[[ProcessGroupTransport, int], list[Callable[[], Any]]]
) -> list[tuple[str, str]]:
    """Make calls that raise on all ranks; then the transport still works."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    errors = [caught(call) for call in calls(transport, rank)]
    assert meet(transport, rank, 77) == 77
    transport.close()
    return errors


def different_versions(transport: ProcessGroupTransport, rank: int) -> list[Callable[[], Any]]:
    return [
        lambda: meet(transport, rank, 4 if rank == 2 else 3),
        lambda: meet(transport, rank, 3 if rank == 0 else 2),
    ]


def wrong_ends(transport: ProcessGroupTransport, rank: int) -> list[Callable[[], Any]]:
    return [
        lambda: transport.send(payload(1), timeout=PATIENCE) if rank == 3 else meet(transport, rank, 1),
        lambda: transport.receive(2, timeout=PATIENCE) if rank == 0 else meet(transport, rank, 2),
        lambda: meet(transport, rank, 3, timeout=-1.0 if rank == 1 else PATIENCE),
        lambda: transport.receive("4", timeout=PATIENCE) if rank == 1 else meet(transport, rank, 4),  # type: ignore[arg-type]
        lambda: meet(transport, rank, 5, sent="five"),
        lambda: meet(transport, rank, -1),
    ]


def what_cannot_be_sent(transport: ProcessGroupTransport, rank: int) -> list[Callable[[], Any]]:
    quantised = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)
    tensors: list[Any] = [quantised, torch.zeros(2, dtype=torch.complex128), torch.zeros(3).to_sparse(), 3]
    return [
        lambda tensor=tensor: meet(transport, rank, 6, sent=Payload(6, -1, True, {"w": tensor}))
        for tensor in tensors
    ]


def what_the_caller_fails_with(transport: ProcessGroupTransport, rank: int) -> list[Callable[[], Any]]:
    errors = [OSError("no data"), PeerLost("another transport lost a rank")]
    return [
        lambda error=error: transport.fail(error, timeout=PATIENCE) if rank == 0 else meet(transport, rank, 1)
        for error in errors
    ]


@pytest.mark.parametrize(
    ("calls", "kinds"),
    [
        (different_versions, ["VersionError"] * 2),
        (wrong_ends, ["ValueError", "VersionGap", "ValueError", "ValueError", "ValueError", "ValueError"]),
        (what_cannot_be_sent, ["LayoutMismatch", "LayoutMismatch", "SyncFailed", "ValueError"]),
        (what_the_caller_fails_with, ["SyncFailed", "PeerLost"]),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_and_the_transport_goes_on(
    ranks: Ranks, calls: Any, kinds: list[str]
) -> None:
    errors = same(ranks.run(told, calls, seconds=60))
    assert [kind for kind, _ in errors] == kinds, errors


def before_the_transport(rank: int, world: int) -> list[tuple[str, str]]:
    """Push what cannot be pushed; the others are waiting for it."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    engine = DeltaEngine(transport, timeout=PATIENCE)
    weights = {"w": torch.arange(50.0) if rank == 0 else torch.zeros(50)}

    def both(version: Any, tensors: Any = None, asked: Any = None) -> None:
        if rank == 0:
            engine.push(weights if tensors is None else tensors, version)
        else:
            engine.pull(weights, version if asked is None else asked)

    both(1)
    wrong = {"w": torch.zeros(50, dtype=torch.complex128)}
    errors = [
        caught(lambda: both(1)),
        caught(lambda: both(2, wrong)),
        caught(lambda: both(2, asked="2" if rank == 2 else 2)),
    ]
    if rank == 0:
        weights["w"][3] += 1
    both(3)
    both(4)
    transport.close()
    assert weights["w"].tolist() == [0.0, 1.0, 2.0, 4.0, *map(float, range(4, 50))]
    return errors


def test_an_error_before_the_transport_is_asked_reaches_those_who_wait(ranks: Ranks) -> None:
    errors = same(ranks.run(before_the_transport, seconds=60))
    assert [kind for kind, _ in errors] == ["VersionReplay", "LayoutMismatch", "ValueError"], errors


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no description": lambda said: [],
    "other format": lambda said: said | {"format": 2},
    "another version": lambda said: said | {"version": 9},
    "negative version": lambda said: said | {"version": -3},
    "version of text": lambda said: said | {"version": "8"},
    "true for a number": lambda said: said | {"lineage": True},
    "a number for true": lambda said: said | {"full": 1},
    "huge number": lambda said: said | {"lineage": 1 << 70},
    "missing part": lambda said: {key: value for key, value in said.items() if key != "shapes"},
    "fewer names": lambda said: said | {"names": said["names"][:1]},
    "name twice": lambda said: said | {"names": [said["names"][0]] * 2},
    "name of a number": lambda said: said | {"names": [said["names"][0], 3]},
    "unknown dtype": lambda said: said | {"dtypes": ["int64", "quint8"]},
    "attribute of torch": lambda said: said | {"dtypes": ["int64", "load"]},
    "wider dtype": lambda said: said | {"dtypes": ["int64", "float64"]},
    "larger shape": lambda said: said | {"shapes": [[6], [11]]},
    "negative size": lambda said: said | {"shapes": [[6], [-10]]},
    "overflowing shape": lambda said: said | {"shapes": [[6], [1 << 40, 1 << 40]]},
    "shape of floats": lambda said: said | {"shapes": [[6], [10.0]]},
    "too many dimensions": lambda said: said | {"shapes": [[6], [10, *[1] * 70]]},
    "plan of no digits": lambda said: said | {"plan": "xy"},
}


def damaged_description(rank: int, world: int, name: str) -> tuple[tuple[str, str], int]:
    transport = ProcessGroupTransport(timeout=PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            init = Packed.__init__

            def damaged(self: Packed, sent: Payload) -> None:
                init(self, sent)
                if name == "no JSON":
                    self.text = b"\xff" + self.text[1:]
                elif name == "deep":
                    self.text = b"[" * 100000
                else:
                    self.text = json.dumps(DAMAGE[name](json.loads(self.text))).encode()

            patch.setattr(Packed, "__init__", damaged)
        error = caught(lambda: meet(transport, rank, 8))
    after = meet(transport, rank, 9)
    transport.close()
    return error, after


@pytest.mark.parametrize("name", [*DAMAGE, "no JSON", "deep"])
def test_a_damaged_description_is_a_frame_error_on_all_ranks_and_nothing_hangs(
    ranks: Ranks, name: str
) -> None:
    (kind, _), after = same(ranks.run(damaged_description, name, seconds=60))
    assert (kind, after) == ("FrameError", 9)


def damaged_data(rank: int, world: int, what: str) -> tuple[tuple[str, str], int]:
    """Flip a bit of a piece of the description or the data on rank 0, or say sizes that cannot be."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 and what.startswith("a bit"):
            write = packing._write

            def flip(flat: Any, number: int, key: int, place: torch.Tensor) -> None:
                write(flat, number, key, place)
                if (key == 0) == (what == "a bit of the description"):
                    place[5] ^= 16

            patch.setattr(packing, "_write", flip)
        elif rank == 0:
            sizes = {"negative": -8, "odd": 15, "huge": 1 << 60, "text": 88}
            patch.setattr(packing.Description, "nbytes", property(lambda self: sizes[what]))
            if what == "text":
                patch.setattr(packing.Description, "to_bytes", lambda self: b"")
            patch.setattr(process_group, "MOST_DATA", 1 << 62)
            patch.setattr(packing, "MOST_DATA", 1 << 62)
        error = caught(lambda: meet(transport, rank, 8))
    after = meet(transport, rank, 9) if what != "huge" else 9
    transport.close()
    return error, after


@pytest.mark.parametrize("what", ["a bit of the description", "a bit of the data", "negative", "odd", "text"])
def test_damaged_data_and_impossible_sizes_are_frame_errors_on_all_ranks(ranks: Ranks, what: str) -> None:
    (kind, _), after = same(ranks.run(damaged_data, what, seconds=60))
    assert (kind, after) == ("FrameError", 9)


def opening(rank: int, world: int, options: list[dict[str, Any]]) -> tuple[str, str]:
    error = caught(lambda: ProcessGroupTransport(**options[rank]))
    transport = ProcessGroupTransport(src=1, timeout=PATIENCE)
    assert meet(transport, rank, 1, src=1) == 1
    transport.close()
    return error


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ({"src": 1}, "LayoutMismatch"),
        ({"src": 4}, "ValueError"),
        ({"src": True}, "ValueError"),
        ({"plan": 3}, "ValueError"),
    ],
)
def test_ranks_that_open_it_differently_all_raise(ranks: Ranks, option: dict[str, Any], kind: str) -> None:
    options = [{"timeout": PATIENCE}] * 3 + [{"timeout": PATIENCE, **option}]
    assert same(ranks.run(opening, options, seconds=60))[0] == kind


def test_a_wrong_timeout_of_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    assert (
        same(ranks.run(opening, [{"timeout": PATIENCE}] * 3 + [{"timeout": 0}], seconds=60))[0]
        == "ValueError"
    )


def over_a_subgroup(rank: int, world: int) -> int:
    """A group in another order, whose ranks are not those of the world; it and a second transport over it, in
    turns.
    """
    group = dist.new_group([3, 1, 2], sort_ranks=False)
    if rank == 0:
        return 5
    first, second = (ProcessGroupTransport(group, src=src, timeout=PATIENCE) for src in (0, 2))
    mine = dist.get_rank(group)
    for version in range(1, 6):
        assert meet(first, mine, version) == meet(second, mine, version, src=2) == version
    for transport in (first, second):
        transport.close()
    dist.destroy_process_group(group)
    return version


def test_groups_of_any_members_and_several_transports(ranks: Ranks) -> None:
    assert same(ranks.run(over_a_subgroup)) == 5


def beside_the_user(rank: int, world: int) -> None:
    """The user's collectives on the same group and a `delta_broadcast`, while payloads travel."""
    transport, stop = ProcessGroupTransport(timeout=PATIENCE), threading.Event()
    module = torch.nn.Linear(20, 20)
    wrong: list[Any] = []

    def talk() -> None:
        for number in range(60):
            values = torch.full((50,), rank + number)
            dist.all_reduce(values)
            if values.tolist() != [6 + 4 * number] * 50:
                wrong.append(values)
        stop.set()

    thread = threading.Thread(target=talk)
    thread.start()
    for version in range(1, 20):
        got = payload(version, 1000)
        if rank == 0:
            transport.send(got, timeout=PATIENCE)
        else:
            assert same_bits(transport.receive(version, timeout=PATIENCE).tensors["w"], got.tensors["w"])
    thread.join()
    assert stop.is_set() and not wrong
    for version in range(20, 23):
        dte_dist.delta_broadcast(module, timeout=PATIENCE)
        meet(transport, rank, version)
    dte_dist.close(module)
    transport.close()


def test_its_traffic_never_meets_the_users(ranks: Ranks) -> None:
    ranks.run(beside_the_user)


def large(rank: int, world: int, numel: int) -> None:
    transport = ProcessGroupTransport(timeout=60.0)
    expected = payload(3, numel)
    if rank == 0:
        transport.send(expected, timeout=60.0)
    else:
        came = transport.receive(3, timeout=60.0)
        assert (came.lineage, came.base_lineage, came.base_version, came.full) == (4, 0, -1, True)
        assert all(same_bits(came.tensors[name], tensor) for name, tensor in expected.tensors.items())
    transport.close()


@pytest.mark.parametrize("numel", [0, 1, (1 << 22) - 2, (1 << 22) + 1, 9 << 20], ids=str)
def test_payloads_of_any_size_arrive_bit_for_bit(ranks: Ranks, numel: int) -> None:
    ranks.run(large, numel)


class Counted:
    """Bytes of descriptions and data that a rank sends to each other rank, point to point; rows of numbers
    are left out.
    """

    def __enter__(self) -> Counted:
        self.sent: dict[int, int] = {}
        self._patch = pytest.MonkeyPatch()
        send = Communicator.send

        def counted(wire: Communicator, tensor: torch.Tensor, to: int) -> Any:
            if tensor.dtype == torch.uint8:
                self.sent[to] = self.sent.get(to, 0) + tensor.numel()
            return send(wire, tensor, to)

        self._patch.setattr(Communicator, "send", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def shards(rank: int, world: int, colocated: bool) -> dict[int, int]:
    """Rows of 4 senders, or of 2, to receivers that hold the same rows on other ranks; return the bytes that
    this one sent.
    """
    full, rows = torch.arange(4 * 1000, dtype=torch.float32).view(4, 1000), 1 if colocated else 2

    def view(tensor: torch.Tensor, low: int) -> Layout:
        return Layout.from_views([("w", tensor, (4, 1000), (low, 0))])

    homes = [1, 0, 2, 3] if colocated else [0, 1]  # ranks 0 and 1 hold each other's rows
    parts = [full[rows * sender : rows * (sender + 1)].clone() for sender in range(len(homes))]
    senders = {sender: view(part, rows * sender) for sender, part in enumerate(parts)}
    first = 0 if colocated else 2
    copies = {first + place: torch.zeros(rows, 1000) for place in range(len(homes))}
    targets = {receiver: view(tensor, rows * homes[receiver - first]) for receiver, tensor in copies.items()}
    plan = Plan.between(senders, targets)
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    with Counted() as counted:
        for version in (1, 2):
            if rank in senders:
                engine.push(senders[rank], version)
            if rank in targets:
                engine.pull(targets[rank], version)
    if rank in copies:
        low = rows * homes[rank - first]
        assert torch.equal(copies[rank], full[low : low + rows])
    transport.close()
    return counted.sent


def test_payloads_go_only_to_the_ranks_that_need_them(ranks: Ranks) -> None:
    sent = ranks.run(shards, False)
    assert [set(each) for each in sent] == [{2}, {3}, set(), set()]
    assert all(8000 < sent[rank][rank + 2] < 8000 + 1500 for rank in (0, 1))


def test_what_a_rank_sends_itself_does_not_travel(ranks: Ranks) -> None:
    """Ranks 0 and 1 swap their rows; 2 and 3 are their own receivers, and meet nobody."""
    sent = ranks.run(shards, True)
    assert [set(each) for each in sent] == [{1}, {0}, set(), set()]


def one_sided(rank: int, world: int) -> list[float]:
    """Rank 0 holds all rows and sends only to itself; its first payload to come is that of rank 1, the root
    of the plan.
    """
    full = torch.arange(32.0).view(8, 4)
    sources = {1: [("w", full[4:].clone(), (8, 4), (4, 0))], 0: [("w", full[:4].clone(), (8, 4), (0, 0))]}
    copies = {0: torch.zeros(8, 4), 2: torch.zeros(2, 4)}
    senders = {each: Layout.from_views(views) for each, views in sources.items()}
    targets = {
        each: Layout.from_views([("w", copies[each], (8, 4), (low, 0))]) for each, low in ((0, 0), (2, 5))
    }
    plan = Plan.between(senders, targets)
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    for version in range(3):
        if rank in senders:
            engine.push(senders[rank], version)
            sources[rank][0][1][version] += 1
        if rank in targets:
            engine.pull(targets[rank], version)
    transport.close()
    return copies[rank].view(-1).tolist() if rank in copies else []


def test_a_receiver_that_sends_only_to_itself(ranks: Ranks) -> None:
    expected = torch.arange(32.0).view(8, 4)
    for version in range(2):
        expected[[version, 4 + version]] += 1
    assert ranks.run(one_sided) == [expected.view(-1).tolist(), [], expected[5:7].reshape(-1).tolist(), []]


def as_a_user_would(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Two trainers with DTensors on a mesh, two rollout ranks cut the other way; every rank knows only what
    it holds itself.
    """
    trainers, rollouts = [0, 1], [2, 3]
    mine, dim = (trainers, 0) if rank in trainers else (rollouts, 1)
    mesh = DeviceMesh("cpu", mine, _init_backend=False, _rank=rank)
    full = {"w": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)), "b": torch.arange(3.0)}
    parts = {
        name: tensor.chunk(2, min(dim, tensor.dim() - 1))[mine.index(rank)].clone()
        for name, tensor in full.items()
    }
    cut = {name: [Shard(min(dim, full[name].dim() - 1))] for name in full}
    if rank in rollouts:
        parts = {name: torch.zeros_like(part) for name, part in parts.items()}
    module = torch.nn.Module()
    for name, part in parts.items():
        tensor = DTensor.from_local(
            part, mesh, cut[name], run_check=False, shape=full[name].shape, stride=full[name].stride()
        )
        module.register_parameter(name, torch.nn.Parameter(tensor))
    layout = Layout.from_module(module)
    held: list[Any] = [None] * world
    dist.all_gather_object(held, dte_dist.RankLayout(layout.manifest, layout.coordinates))
    plan = Plan.between({each: held[each] for each in trainers}, {each: held[each] for each in rollouts})
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    for version in range(3):
        if rank in trainers:
            engine.push(layout, version)
            parts["w"][version, version] += 1
        else:
            engine.pull(layout, version)
        if version < 2:
            full["w"][version, version] += 1
            full["w"][4 + version, version] += 1
    transport.close()
    expected = [
        digest(tensor.chunk(2, min(dim, tensor.dim() - 1))[mine.index(rank)].contiguous())
        for tensor in full.values()
    ]
    return [digest(part) for part in parts.values()], expected


def test_as_a_user_would(ranks: Ranks) -> None:
    for got, expected in ranks.run(as_a_user_would)[2:]:
        assert got == expected


def lonely(rank: int, world: int) -> None:
    """A group of one rank, whose sender receives from itself; and a rank that pulls before it pushes."""
    groups = [dist.new_group([each]) for each in range(world)]
    transport = ProcessGroupTransport(groups[rank], timeout=PATIENCE)
    model, copy = {"w": torch.randn(30)}, {"w": torch.zeros(30)}
    engine = DeltaEngine(transport)
    for version in range(3):
        model["w"][version] += 1
        engine.push(model, version)
        engine.pull(copy, version)
        assert same_bits(model["w"], copy["w"])
    assert caught(lambda: engine.pull(copy, 3))[0] == "VersionGap"
    transport.close()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_group_of_one(ranks: Ranks) -> None:
    ranks.run(lonely)


def not_there(rank: int, world: int, when: str) -> tuple[tuple[str, str], str, float]:
    """Rank 2 does not come, at opening or later; the others tell in time, and once more at once."""
    if when == "opening":
        begin = time.monotonic()
        error = caught(lambda: ProcessGroupTransport(timeout=SHORT)) if rank != 2 else ("PeerLost", "")
        took = time.monotonic() - begin
        dist.barrier()
        return error, "ChannelClosed", took
    transport = ProcessGroupTransport(timeout=PATIENCE)
    assert meet(transport, rank, 1) == 1
    dist.barrier()
    if rank == 2:
        dist.barrier()
    begin = time.monotonic()
    error = caught(lambda: meet(transport, rank, 2, timeout=SHORT))
    again = caught(lambda: meet(transport, rank, 3))[0]
    took = time.monotonic() - begin
    if rank != 2:
        dist.barrier()
    return error, again, took


@pytest.mark.parametrize("when", ["opening", "later"])
def test_a_rank_that_does_not_come_is_peer_lost_on_all_others_in_time(ranks: Ranks, when: str) -> None:
    outcomes = ranks.run(not_there, when, seconds=60)
    assert [(error[0], again) for error, again, _ in outcomes] == [("PeerLost", "ChannelClosed")] * WORLD
    assert all(took < SHORT + 12 for *_, took in outcomes)
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != 2]
    same([error for error, *_ in others])


def closing(rank: int, world: int) -> list[tuple[str, str]]:
    """Rank 3 closes while the others wait for it; an error that they keep holds no connection."""
    transport = ProcessGroupTransport(timeout=PATIENCE)
    assert meet(transport, rank, 1) == 1
    dist.barrier()
    errors: list[tuple[str, str]] = []
    held: list[Exception] = []
    begin = time.monotonic()
    if rank == 3:
        time.sleep(0.5)
        transport.close()
    for version in (2, 3):
        try:
            meet(transport, rank, version)
        except Exception as error:
            errors.append((type(error).__name__, str(error) if version == 2 and rank != 3 else ""))
            held.append(error)
    assert time.monotonic() - begin < PATIENCE / 2
    dist.barrier()
    return errors


def test_closing_wakes_the_others(ranks: Ranks) -> None:
    outcomes = ranks.run(closing, seconds=60)
    assert all([kind for kind, _ in errors] == ["ChannelClosed"] * 2 for errors in outcomes)
    assert "rank closed the transport [ranks 3]" in same([errors[0][1] for errors in outcomes[:3]])


def close_at_once(rank: int, world: int, rounds: int) -> None:
    """Every rank closes as soon as it has what it came for: the others must not lose the last version by
    that.
    """
    for version in range(1, rounds):
        transport = ProcessGroupTransport(timeout=PATIENCE)
        assert meet(transport, rank, version) == version
        transport.close()


def test_closing_at_once_takes_nothing_from_the_others(ranks: Ranks) -> None:
    ranks.run(close_at_once, 40)


def outside_the_plan(rank: int, world: int, how: str) -> Any:
    """Ranks 2 and 3 are not in the plan. They close, exit or stay; ranks 0 and 1 wait for long, and meet."""
    weights = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    layout = Layout.from_views([("w", weights, (4,), (0,))])
    plan = Plan.between({0: layout}, {1: layout})
    transport = ProcessGroupTransport(plan=plan, timeout=PATIENCE)
    if rank > 1:
        if how == "exits" and rank == 3:
            os._exit(0)
        if how != "stays":
            transport.close()
        return None
    engine = DeltaEngine(transport, plan=plan, rank=rank, timeout=PATIENCE)
    for version in (1, 2):
        if rank == 0:
            time.sleep(3)  # long enough for rank 1 to look around
            engine.push(layout, version)
        else:
            engine.pull(layout, version)
    transport.close()
    return weights.tolist()


@pytest.mark.parametrize("how", ["stays", "closes", "exits"])
def test_a_rank_outside_the_plan_may_go(how: str) -> None:
    with Ranks(WORLD) as ranks:
        outcomes = ranks.outcomes(outside_the_plan, how, seconds=60)
    assert [outcome.value for outcome in outcomes[:2]] == [[0.0, 1.0, 2.0, 3.0]] * 2, outcomes
    assert [outcome.died for outcome in outcomes[2:]] == [False, how == "exits"]


def begin(rank: int, world: int) -> int:
    STATE["transport"] = ProcessGroupTransport(timeout=PATIENCE)
    return meet(STATE["transport"], rank, 1)


def broken_meeting(rank: int, world: int, victim: int, flag: str) -> tuple[str, str, str, float]:
    """Meet again; the victim stops in the middle: a receiver at its second piece, the sender before its
    second one.

    Who waits for a dead rank to receive may learn of it only at the timeout: gloo does not wake it.
    """
    if rank == victim and flag:
        where = (packing, "_write", 3) if rank == 0 else (Arrival, "take", 2)  # the description is one piece
        _block(*where, flag)
    start = time.monotonic()
    sent = payload(2, 10 << 20) if rank == 0 else None
    error = caught(lambda: meet(STATE["transport"], rank, 2, sent=sent, timeout=SHORT))
    took = time.monotonic() - start
    return *error, caught(lambda: meet(STATE["transport"], rank, 3))[0], took


def _block(place: Any, name: str, call: int, flag: str) -> None:
    original, calls = getattr(place, name), []

    def stopping(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            Path(flag).touch()
            threading.Event().wait()
        return original(*args)

    setattr(place, name, stopping)  # for good: this rank will be killed


def _wait_for(flag: Path) -> None:
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline, "the victim never came to its place"
        time.sleep(0.01)


@pytest.mark.parametrize("idle", [False, True], ids=["in a meeting", "between meetings"])
@pytest.mark.parametrize("victim", [0, 2], ids=["sender", "receiver"])
def test_a_rank_that_dies_is_peer_lost_on_all_others(tmp_path: Path, victim: int, idle: bool) -> None:
    flag = tmp_path / "blocked"
    with Ranks(WORLD) as ranks:
        assert ranks.run(begin) == [1] * WORLD
        if not idle:
            ranks.start(broken_meeting, victim, str(flag))
            _wait_for(flag)
        ranks.kill(victim)
        if idle:
            ranks.start(broken_meeting, victim, "")
        outcomes: list[Outcome] = ranks.finish(60)
    told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [(kind, after) for kind, _, after, _ in told] == [(PeerLost.__name__, "ChannelClosed")] * (
        WORLD - 1
    ), outcomes
    assert len({text for _, text, *_ in told}) == 1
    assert all(took < SHORT + 12 for *_, took in told)
