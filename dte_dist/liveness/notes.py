"""Notes that ranks leave for each other in the store of the group: JSON, checked before anything of it is
used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dte_dist.errors import FrameError

__all__ = ["checked", "number", "read_note"]

_MOST: Final = 1 << 62
_T = TypeVar("_T")


def read_note(what: str, data: bytes, read: Callable[[Any], _T]) -> _T:
    """Return what `read` makes of a note.

    Args:
        what: the note is of, for the error.
        data: the note.
        read: takes the JSON apart, and raises at what cannot be.

    Raises:
        FrameError: the note is damaged.

    Example:
        >>> read_note("a number", b"3", number)
        3
    """
    try:
        return read(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = f"{what}, as another rank left it in the store, is damaged: {str(error)[:200]}"
        raise FrameError(text, hint="run the same version of dte_dist on every rank") from error


def number(value: Any, low: int = 0) -> int:
    """Return a value that is an int from `low` to 2^62.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or not low <= value < _MOST:
        raise ValueError(f"{str(value)[:40]} is no number from {low} to 2^62")
    return value


def checked(value: Any, kind: type[_T]) -> _T:
    """Return a value that is of a type, by itself and not by a subclass.

    Raises:
        ValueError: it is not.

    Example:
        >>> checked("w", str)
        'w'
    """
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]} is no {kind.__name__}")
    return value
