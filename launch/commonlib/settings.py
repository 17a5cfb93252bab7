"""Settings of a program: a frozen dataclass holds the defaults, a TOML file may change them, flags have the
last word.

1. `read_toml` reads a file; `build` makes a dataclass of its tables. A key that no field has is refused, and
   the nearest name is suggested; so is a value of another type.
2. `parse` makes a flag of every field, with tyro. An unknown flag is refused in the same way.
3. A program that torchrun starts runs on every rank: help and errors are printed by rank 0 only, and the exit
   code (0 for help, 2 for an error) is the same on all.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from commonlib.console import complain, only_rank_0_prints, wait_for_rank_0

__all__ = ["SettingsError", "build", "did_you_mean", "parse", "read_toml", "refuse"]

T = TypeVar("T")


class SettingsError(ValueError):
    """A file or a table that is not what the program takes; the text says where and what it takes."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        SettingsError: it cannot be read, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are such
        raise SettingsError(f"{path}: {error}") from error


def build(cls: type[T], table: object, where: str) -> T:
    """Return an instance of a dataclass with the values of a TOML table; fields that are dataclasses are
    tables within it.

    Args:
        cls: the dataclass.
        table: keys are names of its fields; those that are not there keep their defaults.
        where: the file and the table, for the error.

    Raises:
        SettingsError: an unknown key, a missing one, or a value of another type.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Training:
        ...     steps: int = 8
        >>> build(Training, {"steps": 3}, "x.toml")
        Training(steps=3)
    """
    if not isinstance(table, dict):
        raise SettingsError(f"{where} must be a table, got {table!r}")
    known: dict[str, Field[Any]] = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise SettingsError(f"{where} has an unknown key {key!r}{did_you_mean(key, known)}")
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise SettingsError(f"{where} lacks the key {name!r}")
    hints = get_type_hints(cls)
    try:
        return cls(**{key: _value(hints[key], value, f"{where}, {key}") for key, value in table.items()})
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from error


def parse(default: T, argv: Sequence[str] | None, description: str, *, rest: bool = False) -> T:
    """Return `default` with what the flags in `argv` change.

    Flags are the names of the fields, those of nested dataclasses included; `-` and `_` are the same. Help
    and errors are printed on rank 0 only and end every rank.

    Args:
        default: an instance of a dataclass; its docstring explains the flags.
        argv: without the name of the program; None takes those of the process.
        description: above the flags in the help.
        rest: leave alone what is no flag of `default`, help included; for a flag that says where the defaults
            of the others are.

    Raises:
        SystemExit: 0 after the help, 2 for flags that are wrong.
    """
    try:
        import tyro
    except ImportError:
        refuse('flags need tyro: python -m pip install -e ".[demo]" -c constraints.txt')
    options: dict[str, Any] = {"return_unknown_args": rest}
    try:
        with only_rank_0_prints():
            result = tyro.cli(
                type(default),
                default=default,
                args=sys.argv[1:] if argv is None else list(argv),
                prog=Path(sys.argv[0]).name,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
                add_help=not rest,
                **options,
            )
    except SystemExit as end:
        if end.code:
            wait_for_rank_0()
        raise
    return result[0] if rest else result


def refuse(text: str) -> NoReturn:
    """Say on rank 0 what is wrong with the arguments, and end this rank with exit code 2."""
    sys.exit(complain(f"{Path(sys.argv[0]).name}: error: {text}", code=2))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the nearest known name, or lists them all.

    Example:
        >>> did_you_mean("stesp", ["steps", "lr"])
        ": did you mean 'steps'?"
        >>> did_you_mean("x", ["steps", "lr"])
        '; known: lr, steps'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return the value as the type that the field has: TOML has no paths and no tuples."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        [hint] = [kind for kind in kinds if kind is not type(None)]  # TOML has no None: it is left out
        return _value(hint, value, where)
    if is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list):
            raise SettingsError(f"{where} must be a list, got {value!r}")
        return tuple(_value(kinds[0], each, where) for each in value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    wanted = (int, float) if hint is float else (hint,)
    if type(value) not in wanted:
        raise SettingsError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value
