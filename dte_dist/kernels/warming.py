"""Compiling the CPU kernels before they are needed, or loading what was compiled.

Processes of one user on one machine that share a cache share the work: each takes a job that nobody else is at, and what others have
compiled it loads from numba's cache on disk. So the ranks of one machine do on several cores what one alone would do on one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Final

from numba import config

__all__ = ["warm"]

_JOBS: Final = ("cpu_codecs.warm", "cpu_codecs.warm_patch", "cpu.warm", "cpu_remap.warm")
"""Functions that take widths, the dearest first."""

_PATIENCE: Final = 60.0
"""Seconds after which a process takes jobs that others are at: to compile twice is better than to wait for ever."""

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
            with _turn(job) as is_mine:
                if is_mine or time.monotonic() > deadline:
                    module, name = job.split(".")
                    getattr(import_module(f"dte_dist.kernels.{module}"), name)(new)
                    left.remove(job)
        if left:
            time.sleep(0.02)
    _warm.update(new)


@contextmanager
def _turn(job: str) -> Iterator[bool]:
    """Tell whether no other process is at a job, and keep others off it. Where there can be no lock there are no turns."""
    cache = blake2b(f"{config.CACHE_DIR}:{Path(__file__).parent}".encode(), digest_size=4).hexdigest()
    path = Path(gettempdir()) / f"dte_dist-{os.getuid()}-{cache}-{job}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _is_locked(lock)
    finally:
        os.close(lock)


def _is_locked(lock: int) -> bool:
    """Lock an open file, unless another process has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as without a file, there are no turns
        return True
    return True
