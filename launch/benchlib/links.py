"""Emulated hosts: network namespaces joined by links of a given rate. Linux only; needs root and iproute2.

1. Node i lives in the namespace `dtebench<i>`; its interface `e0` has the address 10.77.0.<i + 1>.
2. The other end of its link is a port of a bridge in the namespace `dtebenchhub`.
3. A token bucket at either end holds what the node sends, and what it gets, to the rate.

Nothing of it is visible outside of these namespaces. They go when the `Network` is left, whatever the reason;
what a killed bench left behind goes when the next one starts. A lock on a file keeps two benches from taking
each other's namespaces down.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import IO

__all__ = ["ADDRESS", "INTERFACE", "Network", "NetworkError", "Rate"]

ADDRESS, INTERFACE = "10.77.0.{}", "e0"
_PREFIX, _HUB = "dtebench", "dtebenchhub"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BUCKET = ("burst", "256kb", "latency", "100ms")


class NetworkError(Exception):
    """The namespaces cannot be made; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate as `tc` writes it.

    Example:
        >>> Rate.parse("200mbit").bytes_per_second
        25000000.0
    """

    text: str
    bytes_per_second: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read a rate such as 1gbit or 200mbit.

        Raises:
            ValueError: it is not one.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
        if not match or not float(match[1]):
            raise ValueError(f"a rate is a number with kbit, mbit or gbit, such as 1gbit, got {text!r}")
        return cls(text.lower(), float(match[1]) * _UNITS[match[2]] / 8)

    def __str__(self) -> str:
        return self.text


class Network(AbstractContextManager):
    """`nodes` namespaces behind links of one rate, for the time of a `with` block.

    Raises:
        NetworkError: not root, no iproute2, another bench is running, or the kernel refuses.
    """

    def __init__(self, nodes: int, rate: Rate) -> None:
        self._nodes, self._rate = nodes, rate
        self._lock: IO[str] | None = None

    def __enter__(self) -> Network:
        _require_tools()
        self._lock = _lock()
        try:
            _remove_all()
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove_all()
        if self._lock is not None:
            self._lock.close()

    @staticmethod
    def prefix(node: int) -> list[str]:
        """Return what to put before a command to run it on a node."""
        return ["ip", "netns", "exec", f"{_PREFIX}{node}"]

    def _build(self) -> None:
        _ip("netns", "add", _HUB)
        _ip("-n", _HUB, "link", "add", "br0", "type", "bridge")
        _ip("-n", _HUB, "link", "set", "br0", "up")
        for node in range(self._nodes):
            self._add(f"{_PREFIX}{node}", f"h{node}", ADDRESS.format(node + 1))

    def _add(self, name: str, port: str, address: str) -> None:
        _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", _HUB)
        _ip("-n", _HUB, "link", "set", port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        for namespace, device in ((name, INTERFACE), (_HUB, port)):
            _run(
                "tc",
                "-n",
                namespace,
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                str(self._rate),
                *_BUCKET,
            )


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(
            f"--links needs {' and '.join(missing)}: install iproute2 (apt-get install iproute2)"
        )
    if os.geteuid() != 0:
        raise NetworkError("--links makes network namespaces: run it as root")


def _lock() -> IO[str]:
    file = open(Path(gettempdir()) / f"{_PREFIX}.lock", "w")  # noqa: SIM115  (held for as long as the network stands)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise NetworkError(
            "another bench is using its namespaces on this machine: wait until it has ended"
        ) from None
    return file


def _remove_all() -> None:
    """Remove every namespace of a bench, and the processes in it; only the holder of the lock may call."""
    names = [
        line.split()[0]
        for line in _ip("netns", "list").splitlines()
        if re.match(rf"{_PREFIX}(\d+|hub)\b", line)
    ]
    for name in names:
        _end_processes(name)
        _ip("netns", "del", name)


def _end_processes(namespace: str) -> None:
    deadline = time.monotonic() + 10
    while pids := [int(pid) for pid in _ip("netns", "pids", namespace).split()]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise NetworkError(f"processes {pids} in namespace {namespace} do not end")
        time.sleep(0.05)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
