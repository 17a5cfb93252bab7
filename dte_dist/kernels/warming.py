"""Compiling the CPU kernels before they are needed, or loading what was compiled.

Processes of one user on one machine share the work: each takes a job that nobody else is at, and what others have compiled it loads from
numba's cache on disk. So the ranks of one machine do on several cores what one alone would do on one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import IO, Final

__all__ = ["warm"]

_JOBS: Final = ("cpu_codecs.warm", "cpu_codecs.warm_patch", "cpu.warm", "cpu_remap.warm")
"""The dearest first."""

_PATIENCE: Final = 60.0

_warm: set[int] = set()


def warm(widths: Iterable[int]) -> None:
    """Compile the CPU kernels for elements of these widths (bytes: 1, 2, 4, 8), or load them from numba's cache on disk.

    Without it the first sync pays: seconds where nothing is cached, a fraction of one where it is.

    Example:
        >>> warm([2, 4])
    """
    new = set(widths) - _warm
    left, deadline = list(_JOBS) if new else [], time.monotonic() + _PATIENCE
    while left:
        for job in tuple(left):
            with open(Path(gettempdir()) / f"dte_dist-{os.getuid()}-{job}.lock", "w") as lock:
                # To compile twice is better than to wait for ever.
                if _is_mine(lock) or time.monotonic() > deadline:
                    _run(job, new)
                    left.remove(job)
        if left:
            time.sleep(0.02)
    _warm.update(new)


def _is_mine(lock: IO[str]) -> bool:
    """Lock a file until it is closed; return False if another process has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run(job: str, widths: set[int]) -> None:
    module, name = job.split(".")
    getattr(import_module(f"dte_dist.kernels.{module}"), name)(widths)
