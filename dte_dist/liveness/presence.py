"""Processes as other processes of the same machine see them.

A rank tells the others which process it is. Those that share its machine can then say for sure that it is
gone. Nothing is ever
concluded from silence: a process that is starved, stopped, or in a long call of C code lives.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from dte_dist.liveness.notes import checked, number

__all__ = ["Process"]

_STATE, _STARTED = 0, 19
"""Fields of /proc/<pid>/stat, counted from behind the name of the program."""

_GONE: Final = ("Z", "X", "x")
"""States of processes that have ended: nobody has asked yet how."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from all others.

    Attributes:
        machine: where, and among which process ids; empty where that cannot be known.
        pid: its number there.
        started: when, in clock ticks since the machine came up; 0 where that cannot be known.
    """

    machine: str
    pid: int
    started: int

    @classmethod
    def this(cls) -> Process:
        """Return the process that calls."""
        stat = _stat(os.getpid())
        return cls(_machine(), os.getpid(), int(stat[_STARTED]) if stat else 0)

    @classmethod
    def read(cls, said: Any) -> Process:
        """Return the process that another rank said it is, as a JSON object.

        Raises:
            ValueError, TypeError, KeyError: it cannot be one.
        """
        process = cls(checked(said["machine"], str), number(said["pid"], 1), number(said["started"]))
        if process.pid >= 1 << 31:
            raise ValueError(f"there is no process {process.pid}")
        return process

    def is_dead(self) -> bool:
        """Return whether it has surely ended; False for a process of another machine, or if in doubt.

        Example:
            >>> Process.this().is_dead()
            False
        """
        if not self.machine or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is there, and somebody else's
            return False
        stat = _stat(self.pid)
        if not stat or not self.started:
            return False
        return int(stat[_STARTED]) != self.started or (stat[_STATE] in _GONE and _threads(self.pid) <= 1)


@cache
def _machine() -> str:
    """Name this machine since it came up, and the space of process ids that this process counts in."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat behind the name; none if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _threads(pid: int) -> int:
    """Return how many threads a process has: where the first one has ended, others may go on."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
