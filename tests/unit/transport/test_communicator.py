"""Rows over real gloo groups, each rank a thread: they come as they were sent, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dte_dist.errors import FrameError
from dte_dist.transport.communicator import Communicator, Membership
from dte_dist.transport.guard import DamagedRow

MEMBERS = (1, 2, 4)
PATIENCE = timedelta(seconds=20)
VICTIM, SENDER = 2, 4

Damage = Callable[[dict[int, Tensor], list[dict[int, Tensor]]], Any]
"""What happens to the parts that came to a rank, given those of the exchanges before."""


def on_wires(call: Callable[[Communicator], Any]) -> list[Any]:
    """Call something on every member of one group at a time; return what each returns."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        ranks = tuple(range(MEMBERS[-1] + 1))
        wire = Communicator(
            "control", MEMBERS, Membership(rank, len(ranks), ranks, store, "cpu:gloo", PATIENCE), "gloo"
        )
        try:
            return call(wire)
        finally:
            wire.close()

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return list(pool.map(run, MEMBERS))


def damaging(wire: Communicator, damage: Damage) -> None:
    """Let what comes to this rank be damaged."""
    swap_all, before = wire.all_gather, []

    def swap(parts: Mapping[int, Tensor]) -> None:
        swap_all(parts)
        before.append({rank: part.clone() for rank, part in parts.items()})
        damage(dict(parts), before)

    wire.all_gather = swap  # type: ignore[method-assign]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DamagedRow as error:
        return str(error)


@pytest.mark.parametrize("words", [0, 1, 7, 513])
def test_rows_and_letters_come_as_they_were_sent_turn_by_turn(words: int) -> None:
    rooms = {1: 24, 2: 0, 4: 8}

    def turns(wire: Communicator) -> list[Any]:
        seen: list[Any] = []
        for turn in range(3):
            row = np.arange(words) * (-1) ** turn + (wire.rank << 40)
            table, letters = wire.all_gather_rows_inline(
                row, rooms, lambda place, turn=turn: place.fill_(wire.rank + turn)
            )
            seen += [table, wire.all_gather_rows(row[::-1]), letters]
        return seen

    for seen in on_wires(turns):
        for turn in range(3):
            table, mirrored, letters = seen[3 * turn : 3 * turn + 3]
            expected = np.stack([np.arange(words) * (-1) ** turn + (rank << 40) for rank in MEMBERS])
            assert (
                table.dtype == np.int64
                and np.array_equal(table, expected)
                and np.array_equal(mirrored, expected[:, ::-1])
            )
            assert {rank: letter.tolist() for rank, letter in letters.items()} == {
                r: [r + turn] * rooms[r] for r in MEMBERS
            }


def flip(bit: int) -> Damage:
    def damage(parts: dict[int, Tensor], before: list[dict[int, Tensor]]) -> None:
        parts[SENDER].view(torch.uint8)[bit // 8] ^= 1 << bit % 8

    return damage


def swap_words(parts: dict[int, Tensor], before: list[dict[int, Tensor]]) -> None:
    parts[SENDER][[0, 1]] = parts[SENDER][[1, 0]].clone()


DAMAGE: dict[str, Damage] = {
    "two words change places": swap_words,
    "nothing came": lambda parts, before: parts[SENDER].zero_(),
    "half of it came": lambda parts, before: parts[SENDER][2:].zero_(),
    "the row of another rank": lambda parts, before: parts[SENDER].copy_(parts[1]),
    "the row of the exchange before": lambda parts, before: parts[SENDER].copy_(before[-2][SENDER]),
    "noise": lambda parts, before: parts[SENDER].copy_(torch.arange(4) * 0x1234567890ABCDE),
    "all ones": lambda parts, before: parts[SENDER].fill_(-1),
}


def damaged_once(damage: Damage) -> list[Any]:
    """One sound exchange, then one in which what comes to one rank is damaged."""

    def turns(wire: Communicator) -> Any:
        row = np.array([wire.rank, 1 << 50, -3])
        first: list[Any] = []
        damaging(
            wire,
            lambda parts, before: damage(parts, before) if wire.rank == VICTIM and len(before) > 1 else None,
        )
        first = wire.all_gather_rows(row).tolist()
        return first, outcome(lambda: wire.all_gather_rows(row).tolist())

    return on_wires(turns)


def check_refused(found: Sequence[Any], what: str) -> None:
    expected = [[rank, 1 << 50, -3] for rank in MEMBERS]
    assert [first for first, _ in found] == [expected] * 3
    assert [second for (_, second), rank in zip(found, MEMBERS, strict=True) if rank != VICTIM] == [
        expected
    ] * 2
    text = found[MEMBERS.index(VICTIM)][1]
    assert (
        text.startswith(f"{what} came damaged, short or out of turn to rank {VICTIM} [ranks {SENDER}; ")
        and "call again" in text
    )


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_row_that_came_otherwise_is_refused_by_who_got_it_and_by_nobody_else(damage: Damage) -> None:
    check_refused(damaged_once(damage), "a row")


def test_every_flipped_bit_of_a_row_and_of_its_guard_is_noticed() -> None:
    """All 256 of a row of three words, one after the other on one group: the exchange does not suffer."""
    size = 8 * 32

    def turns(wire: Communicator) -> list[bool]:
        damaging(
            wire, lambda parts, before: flip(len(before) - 1)(parts, before) if wire.rank == VICTIM else None
        )
        return [
            isinstance(outcome(lambda: wire.all_gather_rows(np.array([wire.rank, 5, 0]))), str)
            for _ in range(size)
        ]

    assert on_wires(turns) == [[rank == VICTIM] * size for rank in MEMBERS]


def test_letters_are_not_looked_at() -> None:
    """They hold frames, which have checksums of their own: an error in one is told in the vote."""

    def turn(wire: Communicator) -> Any:
        damaging(
            wire, lambda parts, before: parts[SENDER][-1:].fill_(9 << 56) if wire.rank == VICTIM else None
        )
        return wire.all_gather_rows_inline(np.array([3]), dict.fromkeys(MEMBERS, 8))[1][SENDER].tolist()

    assert on_wires(turn) == [[0] * 8, [0] * 7 + [9], [0] * 8]


@pytest.mark.parametrize("what", ["text", "description"])
def test_texts_and_descriptions_are_guarded_too(what: str) -> None:
    data = bytes(range(251))

    def turn(wire: Communicator) -> Any:
        if what == "text":
            damaging(wire, lambda parts, before: flip(90)(parts, before) if wire.rank == VICTIM else None)
            return outcome(lambda: wire.all_gather_bytes(data))
        broadcast = wire.broadcast

        def damaged(tensor: Tensor, root: int) -> Any:
            pending = broadcast(tensor, root)
            pending.wait()
            tensor.view(torch.uint8)[11] ^= 4
            return pending

        if wire.rank == VICTIM:
            wire.broadcast = damaged  # type: ignore[method-assign]
        return outcome(lambda: wire.broadcast_bytes(SENDER, data if wire.rank == SENDER else b"", len(data)))

    found = on_wires(turn)
    good = [data] * 3 if what == "text" else data
    assert found[0] == found[2] == good and isinstance(found[1], str)
    assert (
        found[1].startswith(f"a {'row' if what == 'text' else 'description'} came damaged")
        and f"[ranks {SENDER};" in found[1]
    )


def test_descriptions_of_any_size_are_shared() -> None:
    sizes = [0, 1, 7, 8, 9, 1000]
    data = {size: bytes(number % 256 for number in range(size)) for size in sizes}

    def turn(wire: Communicator) -> list[bytes]:
        return [wire.broadcast_bytes(1, data[size] if wire.rank == 1 else b"", size) for size in sizes]

    assert on_wires(turn) == [list(data.values())] * 3


def test_a_damaged_row_is_of_the_family() -> None:
    assert issubclass(DamagedRow, FrameError)
