"""Coming together, without ranks: the roll call, and who does not come to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from dte_dist.errors import PeerLost
from dte_dist.liveness.presence import Process
from dte_dist.liveness.rendezvous import PatientStore, call_roll
from dte_dist.liveness.watch import Watch
from tests.unit.liveness.test_watch import SOON, membership


def test_the_roll_tells_origins_and_processes() -> None:
    store = dist.HashStore()
    watches = [Watch(membership(rank, store)) for rank in range(3)]
    watches[1].origin = 7
    with ThreadPoolExecutor(3) as pool:
        rolls = list(pool.map(call_roll, watches))
    assert rolls == [{0: None, 1: 7, 2: None}] * 3
    assert all(watch.processes == dict.fromkeys(range(3), Process.this()) for watch in watches)


def test_a_roll_names_who_does_not_come_and_a_verdict_ends_it() -> None:
    store = dist.HashStore()
    watches = [Watch(membership(rank, store, seconds=1.0)) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda watch: caught(lambda: call_roll(watch)), watches))
    assert [(error.lost, error.late) for error in errors] == [((1,), True)] * 2
    assert all(str(error).startswith("rank 1 did not come within 1 s") for error in errors)
    verdict = watches[0].settle(errors[0])
    begin, third = time.monotonic(), Watch(membership(1, store))
    caught(lambda: call_roll(third))
    assert third.board.found == verdict and not third.ends_here(verdict) and time.monotonic() - begin < SOON


HOST = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_no_rank_is_named_where_the_store_dies_or_hangs_in_a_roll_call(how: signal.Signals) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
        watch = Watch(membership(0, store, seconds=4.0))
        threading.Timer(1.5, lambda: host.send_signal(how)).start()
        error = caught(lambda: call_roll(watch))
    finally:
        host.kill()
        host.wait()
    assert str(error).startswith("the store of the group cannot be reached") and not error.lost, error


def caught(call: Callable[[], Any]) -> PeerLost:
    with pytest.raises(PeerLost) as found:
        call()
    return found.value


def test_a_store_that_is_asked_patiently_can_be_stopped() -> None:
    watch = Watch(membership(0, dist.HashStore()))
    store = PatientStore(dist.HashStore(), watch)
    store.set("there", "x")
    assert store.get("there") == b"x" and store.add("count", 2) == 2 and store.check(["there"])
    threading.Timer(0.3, store.stop).start()
    with pytest.raises(RuntimeError):
        store.wait(["not there"])
