"""Which version of dte_dist this is; `pyproject.toml` alone says so.

Code that lies beside its `pyproject.toml` is that version, installed or not: what an editable installation
has noted may be older, and another copy may be installed. Elsewhere the file has gone into the metadata of
the installation.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["find_version"]

_NAME = "dte_dist"
_UNKNOWN = "0+unknown"


def find_version(package: Path) -> str:
    """Return the version of the code in a folder; "0+unknown" if it was copied without anything that says so.

    Args:
        package: the folder `dte_dist`.

    Example:
        >>> find_version(Path(dte_dist.__file__).parent) == dte_dist.__version__
        True
    """
    return _in_tree(package.parent / "pyproject.toml") or _installed()


def _in_tree(file: Path) -> str | None:
    """Return what a project file says, if it is there and of this project."""
    try:
        project = tomllib.loads(file.read_text("utf-8")).get("project")
    except (OSError, ValueError):  # none, or not one of TOML in UTF-8
        return None
    if not isinstance(project, dict) or project.get("name") != _NAME or "version" not in project:
        return None
    return str(project["version"])


def _installed() -> str:
    try:
        return version(_NAME)
    except PackageNotFoundError:
        return _UNKNOWN
