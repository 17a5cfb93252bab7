"""Starts the ranks of the bench where torchrun did not: one process each, on this host or each on an emulated
host of its own.

If one fails, or the launcher is told to stop, all are ended. If the launcher itself is killed, the kernel
ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

from benchlib.links import ADDRESS, INTERFACE, Network, Rate

__all__ = ["STARTED", "launch"]

STARTED = "DTE_BENCH_STARTED"
"""Set in the environment of ranks that the bench itself has started."""

_PORT = 29577
_PATIENCE = 5.0
_PR_SET_PDEATHSIG = 1


def launch(script: str, arguments: Sequence[str], ranks: int, links: Rate | None) -> int:
    """Run a script on `ranks` ranks and return the exit code: 0, or that of the first that failed.

    Args:
        script, arguments: what every rank runs; it finds RANK, WORLD_SIZE and the like in its environment.
        ranks: how many.
        links: rate of their links; None starts them side by side.

    Raises:
        NetworkError: the links cannot be made.
    """
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, _interrupt))
        if links is not None:
            stack.enter_context(Network(ranks, links))
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        stack.callback(
            _ignore_interrupts
        )  # from here on up, in reverse: what has begun to be cleaned up is cleaned up
        address, port = ("127.0.0.1", _free_port()) if links is None else (ADDRESS.format(1), _PORT)
        for rank in range(ranks):
            here = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            environment = {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                **{name: str(value) for name, value in here.items()},
            }
            environment |= {"GLOO_SOCKET_IFNAME": "lo" if links is None else INTERFACE, STARTED: "1"}
            prefix = [] if links is None else Network.prefix(rank)
            command = [*prefix, sys.executable, script, *arguments]
            started.append(  # the launcher has a single thread, so a function between fork and exec is safe
                subprocess.Popen(
                    command,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,  # noqa: PLW1509
                )
            )
        return _wait(started)


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                print(f"rank {rank} failed with exit code {code}; all are ended", file=sys.stderr, flush=True)
                return abs(code)
        if None not in codes:
            return 0
        time.sleep(0.1)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: they are asked first."""
    for process in started:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _PATIENCE
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
