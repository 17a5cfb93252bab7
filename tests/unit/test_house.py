"""Unit tier: a folder of the package imports what stands before it, documents name only what is there, and
unit tests lie where the module lies that they test.

docs/architecture.md tells the order of folders and the way of one changed element.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from dte_dist import delta_broadcast
from dte_dist.options import SyncOptions

ROOT = Path(__file__).parent.parent.parent / "dte_dist"
DOCS = ROOT.parent / "docs"

ORDER = [
    "errors",
    "_torch_compat",
    "_torch_fsdp",
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

LONGEST = 400
"""Lines of a file, at most."""


DENSEST = 10
"""Code tokens of a line, at most, on average of a folder."""


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


SPACE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def density(path: Path) -> tuple[int, int]:
    """Return the code tokens of a file, and the lines that have any; docstrings and comments are no code."""
    text = path.read_text()
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            said.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SPACE and token.start[0] not in said
    ]
    lines = {line for token in found for line in range(token.start[0], token.end[0] + 1)}
    return len(found), len(lines)


@pytest.mark.parametrize("folder", sorted({home(path) for path in files()} - {"kernels"}))
def test_lines_say_one_thing(folder: str) -> None:
    """On average of a folder; kernels apart, whose loops are arithmetic."""
    counts = {path: density(path) for path in files() if home(path) == folder}
    tokens, lines = np.array(list(counts.values())).sum(axis=0).tolist()
    densest = sorted(counts, key=lambda path: counts[path][0] / max(counts[path][1], 1))[-3:]
    assert tokens <= DENSEST * lines, f"{tokens / lines:.1f} tokens a line, the most in {densest}"


def stations() -> list[tuple[str, str]]:
    """Return file and function of each station in the pictures of docs/architecture.md."""
    pictures = re.findall(r"```text\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    return re.findall(r"(\S+\.py) +([A-Z]\w+\.\w+|\w+)", "\n".join(pictures))


def functions(path: Path) -> set[str]:
    """Return the functions of a file, methods as `Class.method`."""
    body = ast.parse(path.read_text()).body
    methods = [
        f"{node.name}.{each.name}"
        for node in body
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    ]
    return {*methods, *(node.name for node in body if isinstance(node, ast.FunctionDef))}


def test_the_way_of_one_changed_element_names_functions_that_exist() -> None:
    assert len(stations()) > 30
    assert [(file, name) for file, name in stations() if name not in functions(ROOT / file)] == []


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file, without their indentation."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_paragraphs_of_docstrings_are_not_indented_in_the_middle(path: Path) -> None:
    """A paragraph may be, a list may hang; a sentence may not jump to the right halfway."""
    plain = r"(?!\d+\.|[-*] |[ >]|[^\n]*:\n)"
    odd = [
        paragraph
        for text in docstrings(path)
        for paragraph in text.split("\n\n")
        if re.match(plain, paragraph) and re.search(r"[^:]\n +(?!\d+\.|[-*] )\w", paragraph)
    ]
    assert odd == []


def words() -> list[str]:
    """Return the words of docs/glossary.md, as they stand there."""
    lines = (DOCS / "glossary.md").read_text().splitlines()
    return [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]


def test_each_word_of_the_glossary_stands_once_and_in_order() -> None:
    plain = [re.sub(r" \(.*\)$", "", word).lower() for word in words()]
    assert len(plain) > 50
    assert plain == sorted(set(plain))


HINTS = get_type_hints(SyncOptions, include_extras=True)
OPTIONS_OF_README = (ROOT.parent / "README.md").read_text().split("\n## Options")[1].split("\n## ")[0]


@pytest.mark.parametrize("option", SyncOptions.__annotations__)
def test_each_option_is_described_where_users_look(option: str) -> None:
    described = re.search(rf"^        {option}: ", str(delta_broadcast.__doc__), re.MULTILINE)
    assert described, f"the docstring of delta_broadcast does not describe {option}"
    in_table = re.search(rf"^\|.*`{option}`.* \|", OPTIONS_OF_README, re.MULTILINE)
    assert in_table, f'the table of README\'s "Options" has no row with {option}'


def test_the_readme_says_which_options_each_call_may_give_anew() -> None:
    said = re.search(r"all but (.*?) stay the same", OPTIONS_OF_README, re.DOTALL)
    assert said, 'README\'s "Options" does not begin with "all but ... stay the same"'
    anew = {name for name, hint in HINTS.items() if hint.__metadata__[0].each_call}
    assert set(re.findall(r"`(\w+)`", said[1])) == anew | {"async_op"}


DOCUMENTS = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(document: Path) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|md|toml))(?:::\w+)?`", document.read_text())
    homes = [ROOT.parent, ROOT, ROOT.parent / "tests"]
    assert [name for name in named if not any((home / name).exists() for home in homes)] == []


def test_unit_tests_are_named_after_modules() -> None:
    """A file in a folder here is `test_<module>.py`, or `test_<module>_<aspect>.py`, of its namesake."""
    for test in sorted(Path(__file__).parent.glob("*/test_*.py")):
        folder = ROOT.parent / "launch" if test.parent.name == "launch" else ROOT / test.parent.name
        name = f"{test.stem.removeprefix('test_')}_"
        assert any(name.startswith(f"{module.stem}_") for module in folder.rglob("*.py")), test


def test_no_unit_test_file_is_too_long() -> None:
    """At most 540 lines."""
    for test in sorted(Path(__file__).parent.rglob("*.py")):
        assert len(test.read_text().splitlines()) <= 540, test
