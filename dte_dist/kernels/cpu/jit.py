"""How the numba loops are compiled, cached on disk, and made ready before they are needed.

Processes of one user on one machine that share a cache share the work: each takes a job that nobody else is
at, and what others have compiled it loads from numba's cache on disk. So the ranks of one machine do on
several cores what one alone would do on one.

numba looks only at the file of a function that it has cached, but the compiled code holds that of all
functions it calls, which are in other files too. After an update that left its own file alone it would go on
with the old code of the others, and with what that takes for the layout of memory. So what is compared here
instead is a hash of all files of loops.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final

from numba import config, njit
from numba.core import event

__all__ = ["inline", "loop", "precompile"]

_log = logging.getLogger(__name__)

_OPTIONS: Final = {"nogil": True, "cache": True, "error_model": "numpy"}

_JOBS: Final = (
    "value_codecs.precompile",
    "index_map.precompile_patch",
    "scan.precompile",
    "index_map.precompile",
    "index_codecs.precompile",
)
"""Functions of this folder that take widths, the dearest first."""

_PATIENCE: Final = 60.0
"""Seconds after which a process takes jobs that others are at: to compile twice is better than to wait for
ever.
"""

_LOADING: Final = 2.0
"""Seconds after which another process that is at a job compiles, and does not just load."""

_ready: set[int] = set()


def loop(function: Callable[..., Any]) -> Any:
    """Make a loop that Python calls; it is compiled when it is first called with arguments of some types.

    Example:
        >>> import inspect
        >>> from dte_dist.kernels.cpu import scan_loops
        >>> inspect.getsource(scan_loops.advance).splitlines()[0]
        '@loop'
    """
    return _stamped(njit(**_OPTIONS, no_cfunc_wrapper=True)(function))


def inline(function: Callable[..., Any]) -> Any:
    """Make a part of loops, which Python does not call: there is a little less to compile."""
    return _stamped(njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def _stamped(compiled: Any) -> Any:
    """Let the cache of a function depend on all loops; on its own file alone, should a numba to come keep its
    stamp elsewhere.
    """
    index: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(index, "_source_stamp"):
        index._source_stamp = _stamp()
    return compiled


@cache
def _stamp() -> str:
    """Return a hash of all files whose code may be in a loop."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*loops.py")), here / "intrinsics.py", here / "jit.py"]
    files += [here.parent / name for name in ("sizes.py", "table.py")]
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def precompile(widths: Iterable[int], say: Callable[[], None] | None = None) -> None:
    """Compile the CPU kernels for elements of these widths (bytes: 1, 2, 4, 8), or load them from numba's
    cache on disk.

    Without it the first sync pays: seconds where nothing is cached, a fraction of one where it is.

    Args:
        widths: of elements.
        say: called when it turns out that something has to be compiled, here or by another process that this
            one waits for.

    Example:
        >>> precompile([2, 4])
    """
    new = set(widths) - _ready
    left, begin = list(_JOBS) if new else [], time.monotonic()
    notice = _Notice(new, say)
    with event.install_listener("numba:compile", notice):
        while left:
            waited = time.monotonic() - begin
            for job in tuple(left):
                with _turn(job) as is_mine:
                    if is_mine or waited > _PATIENCE:
                        module, name = job.split(".")
                        getattr(import_module(f"{__package__}.{module}"), name)(new)
                        left.remove(job)
            if left:
                time.sleep(0.02)
                if waited > _LOADING:
                    notice.give()
    _ready.update(new)


class _Notice(event.Listener):
    """Tells once that something is being compiled."""

    def __init__(self, widths: Iterable[int], say: Callable[[], None] | None) -> None:
        self._widths, self._say, self._is_given = sorted(widths), say, False

    def on_start(self, _: Any) -> None:
        self.give()

    def on_end(self, _: Any) -> None:
        pass

    def give(self) -> None:
        if not self._is_given:
            self._is_given = True
            widths = ", ".join(map(str, self._widths))
            what = (
                "compiling kernels for elements of %s bytes, once per machine and "
                "version: this takes 10 to 45 s"
            )
            _log.info(what, widths)
            if self._say is not None:
                self._say()


@contextmanager
def _turn(job: str) -> Iterator[bool]:
    """Tell whether no other process is at a job, and keep others off it.

    Where there can be no lock there are no turns. The package filelock has versions that follow a link here,
    and versions that wait where a file system has no locks.
    """
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
