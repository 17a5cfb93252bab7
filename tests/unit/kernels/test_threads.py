"""The pool of threads that the kernels split their work over."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from dte_dist.kernels.cpu import threads
from dte_dist.kernels.cpu.threads import parallel_for


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("total", [0, 1, 9, 10, 100, 1001])
@pytest.mark.parametrize("align", [1, 8, 64])
def test_parts_cover_the_range_in_order(total: int, align: int) -> None:
    parts = parallel_for(lambda low, high: (low, high), total, least=5, align=align)
    assert [low for low, _ in parts] == [0, *(high for _, high in parts[:-1])]
    assert parts[-1][1] == total
    assert 1 <= len(parts) <= 4
    assert all(low % align == 0 for low, _ in parts)
    assert total < 10 or align > 1 or len(parts) > 1


def test_work_runs_side_by_side() -> None:
    """Each part waits for all others, so this would hang if fewer than four ran at once."""
    barrier = threading.Barrier(4)
    seen = parallel_for(lambda low, high: (barrier.wait(30), threading.current_thread())[1], 8, least=1)
    assert len(set(seen)) == 4
    assert threading.current_thread() in seen


def test_small_work_starts_no_thread() -> None:
    assert parallel_for(lambda low, high: threading.current_thread(), 9, least=5) == [
        threading.current_thread()
    ]
    torch.set_num_threads(1)
    assert parallel_for(lambda low, high: threading.current_thread(), 1000, least=1) == [
        threading.current_thread()
    ]


def test_the_first_error_is_raised_after_all_parts_have_ended() -> None:
    ended = []

    def work(low: int, high: int) -> None:
        ended.append(low)
        if low:
            raise ValueError(f"part {low}")

    for _ in range(50):
        ended.clear()
        with pytest.raises(ValueError, match="part 25"):
            parallel_for(work, 100, least=10)
        assert sorted(ended) == [0, 25, 50, 75]


def test_a_call_within_a_part_is_one_part() -> None:
    barrier = threading.Barrier(4)

    def outer(low: int, high: int) -> int:
        barrier.wait(30)
        return len(parallel_for(lambda low, high: None, 8, least=1))

    assert parallel_for(outer, 8, least=1) == [1, 1, 1, 1]
    assert len(parallel_for(lambda low, high: None, 8, least=1)) == 4


def test_the_caller_goes_on_alone_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_pool", threads._Pool())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert parallel_for(lambda low, high: (low, threading.current_thread()), 8, least=2) == [
        (n, threading.current_thread()) for n in (0, 2, 4, 6)
    ]


def test_several_callers_at_once() -> None:
    totals: list[int] = []

    def call(number: int) -> None:
        for _ in range(50):
            totals.append(
                sum(parallel_for(lambda low, high: sum(range(low, high)), 1000 + number, least=10))
                - sum(range(1000 + number))
            )

    callers = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert totals == [0] * 400


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    parallel_for(lambda low, high: None, 100, least=1)
    pid = os.fork()
    if not pid:
        barrier = threading.Barrier(4)
        try:
            parallel_for(lambda low, high: barrier.wait(10), 8, least=1)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
