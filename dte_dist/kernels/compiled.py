"""How the numba loops are compiled, and when what is cached of them on disk is out of date.

numba looks only at the file of a function that it has cached, but the compiled code holds that of all
functions it calls, which are in other files too. After an update that left its own file alone it would go on
with the old code of the others, and with what that takes for the layout of memory. So what is compared here
instead is a hash of all files of loops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from numba import njit

__all__ = ["loop", "part"]

_OPTIONS: Final = {"nogil": True, "cache": True, "error_model": "numpy"}


def loop(function: Callable[..., Any]) -> Any:
    """Make a loop that Python calls; it is compiled when it is first called with arguments of some types.

    Example:
        >>> import inspect
        >>> from dte_dist.kernels import loops
        >>> inspect.getsource(loops.advance).splitlines()[0]
        '@loop'
    """
    return _stamped(njit(**_OPTIONS, no_cfunc_wrapper=True)(function))


def part(function: Callable[..., Any]) -> Any:
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
    files = sorted(here.glob("*loops.py")) + [
        here / name for name in ("compiled.py", "memory.py", "planes.py", "table.py", "vector.py")
    ]
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()
