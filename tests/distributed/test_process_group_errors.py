"""Distributed tier, four ranks over gloo: an error of one rank in a `ProcessGroupTransport` is raised on all,
and so is damage on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dte_dist import DeltaEngine, Layout, Payload, PeerLost, ProcessGroupTransport
from dte_dist.codec import payload_bytes as packing
from dte_dist.codec.payload_bytes import Packed
from dte_dist.transport import meeting
from tests.distributed.launcher import Ranks
from tests.distributed.meetings import PATIENCE, WORLD, meet, payload
from tests.distributed.shares import warm
from tests.distributed.tools import caught, same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        ranks.run(warm, seconds=300)
        yield ranks


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

    def both(version: Any, tensors: Any = None, asked: Any = None, targets: Any = None) -> None:
        if rank == 0:
            engine.push(weights if tensors is None else tensors, version)
        else:
            engine.pull(
                weights if targets is None or rank != 2 else targets, version if asked is None else asked
            )

    both(1)
    wrong = {"w": torch.zeros(50, dtype=torch.complex128)}
    memory = torch.zeros(60)
    targets: list[Any] = [
        wrong,
        [("w", weights["w"]), ("w", weights["w"])],
        {"w": 3},
        Layout.from_tensors(weights),
        {"w": memory[:50], "b": memory[10:]},
    ]
    errors = [
        caught(lambda: both(1)),
        caught(lambda: both(2, wrong)),
        caught(lambda: both(2, asked="2" if rank == 2 else 2)),
        *[caught(lambda given=given: both(2, targets=given)) for given in targets],
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
    pushed = ["VersionReplay", "LayoutMismatch"]
    pulled = ["ValueError", "LayoutMismatch", "LayoutMismatch", "ValueError", "ValueError", "LayoutMismatch"]
    assert [kind for kind, _ in errors] == pushed + pulled, errors


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
            patch.setattr(meeting, "MOST_DATA", 1 << 62)
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
