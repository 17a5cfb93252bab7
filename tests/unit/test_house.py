"""Unit tier: a folder of the package imports what stands before it; docs/design.md tells the order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "dte_dist"

ORDER = [
    "errors",
    "version",
    "report",
    "kernels",
    "tensors",
    "layout",
    "plan",
    "detect",
    "codec",
    "liveness",
    "transport",
    "options",
    "sync",
    "api",
]
"""Folders and files of the package, each after all that it imports."""

LONGEST = 540
"""Lines of a file, at most: a bound that may only come down."""


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the folders or files of the package that a file imports when it runs, by their first name."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        match node:
            case ast.ImportFrom(module="dte_dist", names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module)) if module.startswith("dte_dist."):
                yield module.split(".")[1]


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_everything_has_its_place_in_the_order() -> None:
    assert {home(path) for path in files()} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_backwards(path: Path) -> None:
    if home(path) != "__init__":
        later = [name for name in imports(path) if ORDER.index(name) > ORDER.index(home(path))]
        assert not later, f"{home(path)} must not import {later}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST
