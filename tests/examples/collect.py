"""Where the examples are: docstrings of the package, and code blocks of README.md and docs/*.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_HIDDEN = re.compile(r"^<!-- (before|after):\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"\n\n    \S")


@dataclass(frozen=True, slots=True)
class Docstring:
    """One docstring that has an example.

    Attributes:
        name: dotted, such as "dte_dist.report.size"; that of the variable for a string below an assignment.
        module: that it is in.
        file, line: where it begins; lines count from 0, as doctest counts them.
        text: of the docstring.
    """

    name: str
    module: str
    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """One code block of a document.

    Attributes:
        file, line: where its first line of code is; lines count from 1.
        language: after the fence; empty if it says none.
        code: of the block.
        before, after: hidden code that prepares the block and that checks what it did.
    """

    file: str
    line: int
    language: str
    code: str
    before: str = ""
    after: str = ""


def docstrings() -> list[Docstring]:
    """Return all docstrings of the package that have an example, those below assignments included."""
    found = []
    for path in sorted((ROOT / "dte_dist").rglob("*.py")):
        file = path.relative_to(ROOT)
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        found += [
            Docstring(name, module, str(file), text.lineno - 1, str(text.value))
            for name, text in _texts(tree, module)
            if PROMPT.search(str(text.value))
        ]
    return found


def _texts(node: ast.AST, name: str) -> Iterator[tuple[str, ast.Constant]]:
    """Yield dotted name and string of everything documented in a node, itself included."""
    body: list[ast.stmt] = getattr(node, "body", [])
    owner = name
    for index, statement in enumerate(body):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as text) if index == 0 or owner != name:
                yield owner, text
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                owner = f"{name}.{target}"
            case _:
                owner = name
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            yield from _texts(statement, f"{name}.{statement.name}")


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document with their hidden code: `before:` stands above a block, `after:`
    below it.
    """
    text, file = path.read_text(), str(path.relative_to(ROOT))
    marks = sorted([*_FENCE.finditer(text), *_HIDDEN.finditer(text)], key=re.Match.start)
    found: list[Block] = []
    before = ""
    for mark in marks:
        if mark.re is _FENCE:
            line = text.count("\n", 0, mark.start()) + 2
            found.append(Block(file, line, mark[2], mark[3], before))
            before = ""
        elif mark[1] == "before":
            before = mark[2]
        else:
            last = found.pop()
            found.append(Block(last.file, last.line, last.language, last.code, last.before, mark[2]))
    return found


def unfenced(path: Path) -> list[int]:
    """Return the lines at which a document has a block of code without a fence; lines count from 1."""
    text = _FENCE.sub(lambda mark: "\n" * mark[0].count("\n"), path.read_text())
    return [text.count("\n", 0, mark.start()) + 3 for mark in _INDENTED.finditer(text)]
