"""Verdicts, without ranks: all read one, and a store that hangs does not hold them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from dte_dist.errors import OrderMismatch, PeerLost
from dte_dist.liveness.board import Board, Verdict, late, names
from dte_dist.liveness.deadline import Deadline
from dte_dist.liveness.watch import Watch
from tests.unit.liveness.test_watch import membership


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_all_ranks_read_one_verdict_whoever_comes_first(kind: str, tmp_path: Any) -> None:
    def store() -> dist.Store:
        if kind == "file":
            return dist.FileStore(str(tmp_path / "store"), 8)
        return shared

    shared: Any = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if kind == "tcp"
        else dist.HashStore()
    )
    boards = [Board(dist.PrefixStore("channel", store()), 8) for _ in range(8)]
    assert all(board.read() is None for board in boards)
    mine = [Verdict.of(late([rank], "answer", 3), 0) for rank in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda board, verdict: board.settle(verdict), boards, mine))
    assert len(set(found)) == 1 and found[0] in mine
    assert [board.read() for board in boards] == found


class Hanging(dist.Store):
    """The store of a host that is stopped."""

    def check(self, _: Any) -> bool:
        threading.Event().wait(60)
        return False


def test_a_store_that_hangs_costs_a_verdict_half_a_second_after_the_deadline() -> None:
    board = Board(dist.HashStore(), 2)
    board._store = Hanging()
    threading.Thread(target=board.read, daemon=True).start()
    time.sleep(1.5)
    board.until, begin = Deadline(0), time.monotonic()
    mine = Verdict.of(MemoryError(), 1)
    assert board.settle(mine) == mine
    assert 0.4 < time.monotonic() - begin < 2


def test_errors_of_verdicts() -> None:
    lost = Verdict.of(late([3, 1], "answer", 2.5), 0).error()
    assert isinstance(lost, PeerLost) and (lost.lost, lost.late) == ((1, 3), True)
    assert str(lost).startswith("ranks 1 and 3 did not answer within 2.5 s")
    failed = Verdict.of(KeyboardInterrupt(), 2).error()
    assert type(failed) is PeerLost and (str(failed), failed.lost) == ("rank 2 failed: KeyboardInterrupt", ())
    crossed = Verdict("order", (0, 1), "text", (1, 2))
    assert type(crossed.error()) is OrderMismatch and Verdict.parse(crossed.pack().encode()) == crossed
    assert names([2, 0, 1]) == "ranks 0, 1 and 2"


def test_whom_a_verdict_concerns_that_had_not_begun() -> None:
    watch = Watch(membership(1, dist.HashStore()))
    assert not watch.ends_here(Verdict.of(late([1, 2], "answer", 3), 0)), "the others gave it up"
    assert watch.ends_here(Verdict.of(late([2], "answer", 3), 0))
    assert not watch.ends_here(Verdict("left", (2,), "rank 2 closed the channel"))
    failed = Verdict.of(MemoryError(), 2)
    assert watch.ends_here(failed) and watch.ends_here(watch.raised(failed)) is False
