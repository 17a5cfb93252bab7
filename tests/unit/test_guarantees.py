"""Unit tier: docs/guarantees.md has every sentence of what the README guarantees, and only tests that
exist.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def rows() -> list[tuple[str, list[str]]]:
    """Return the sentences of the table, each with its tests."""
    lines = (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [(sentence, re.findall(r"`([^`]+::[^`]+)`", tests)) for _, sentence, tests in cells[1:]]


def promised() -> str:
    """Return what the README guarantees, as one line."""
    readme = (ROOT / "README.md").read_text()
    return " ".join(readme.split("## What is guaranteed")[1].split("\n## ")[0].split())


def sentences() -> list[str]:
    """Return the sentences of all bullets, without their titles."""
    bullets = promised().split("Things for the caller to know")[0].split(" - **")[1:]
    texts = [bullet.split("** ", 1)[1] for bullet in bullets]
    return [sentence for text in texts for sentence in re.split(r"(?<=[^.]\.) (?=[A-Z`])", text)]


def test_every_test_that_is_named_exists() -> None:
    for sentence, tests in rows():
        assert tests, sentence
        for test in tests:
            path, name = test.split("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


def test_every_sentence_that_is_named_is_in_the_readme() -> None:
    text = promised()
    assert [sentence for sentence, _ in rows() if sentence not in text] == []


def test_every_sentence_of_the_readme_has_a_row() -> None:
    named = [sentence for sentence, _ in rows()]
    assert len(sentences()) > 15
    assert [each for each in sentences() if not any(each.startswith(sentence) for sentence in named)] == []
