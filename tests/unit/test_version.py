"""Unit tier, no ranks: where the version comes from."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import dte_dist
from dte_dist import version
from dte_dist.version import find_version

PROJECT = '[project]\nname = "dte_dist"\nversion = "7.8.9"\n'


def installed(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    def ask(name: str) -> str:
        assert name == "dte_dist"
        if number is None:
            raise PackageNotFoundError(name)
        return number

    monkeypatch.setattr(version, "version", ask)


def test_it_is_what_the_project_file_says() -> None:
    file = Path(__file__).parents[2] / "pyproject.toml"
    assert dte_dist.__version__ == tomllib.loads(file.read_text())["project"]["version"]


def test_code_beside_its_project_file_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for number in (None, "1.2.3"):
        installed(monkeypatch, number)
        assert find_version(tmp_path / "dte_dist") == "7.8.9"


@pytest.mark.parametrize(
    "beside",
    [
        None,
        PROJECT.replace("dte_dist", "another"),
        "[tool.x]\n",
        "project = 3\n",
        '[project]\nname = "dte_dist"\ndynamic = ["version"]\n',
        "no TOML",
        "\0",
    ],
    ids=["nothing", "another project", "no project", "a number", "no version", "no TOML", "no text"],
)
def test_elsewhere_the_installation_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str | None
) -> None:
    if beside is not None:
        (tmp_path / "pyproject.toml").write_text(beside)
    for number, expected in (("1.2.3", "1.2.3"), (None, "0+unknown")):
        installed(monkeypatch, number)
        assert find_version(tmp_path / "dte_dist") == expected
