"""Every example of every docstring of the package runs, and says what it prints.

Examples of collectives run on real ranks, all of them in step; each rank compares what it prints. The
examples of public names see only public names, as a reader does; the others see their module, too.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import dte_dist
from tests.examples.collect import Docstring, docstrings
from tests.examples.conftest import Stage
from tests.examples.world import WORLD, local, make_mesh, on_ranks

ON_RANKS = (
    "dte_dist.detect.detector.Detector",
    "dte_dist.api",
    "dte_dist.sync.registry",
    "dte_dist.sync.background",
    "dte_dist.errors",
    "dte_dist.transport.process_group",
    "dte_dist.liveness.rendezvous",
    "dte_dist.liveness.groups.group_of",
    "dte_dist.sync.described_model.describe",
    "dte_dist.transport.all_or_none",
)
"""Names whose examples need ranks: a name stands for all that begin with it."""

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FOUND = {found.name: found for found in docstrings()}


def test_examples_are_found():
    assert len(FOUND) > 100
    assert "dte_dist.detect.detector.Detector" in FOUND, "a string below an assignment"
    assert "dte_dist.plan.transfer_plan.Plan.between" in FOUND, "a class method"


def test_a_wrong_example_fails():
    wrong = Docstring("dte_dist.report.size", "dte_dist.report", "dte_dist/report.py", 0, ">>> 1 + 1\n3\n")
    assert "Expected:\n    3\nGot:\n    2" in failures(wrong, local())


@pytest.mark.parametrize("name", sorted(name for name in FOUND if not name.startswith(ON_RANKS)))
def test_example(name: str):
    assert not failures(FOUND[name], local())


@pytest.mark.parametrize("name", sorted(name for name in FOUND if name.startswith(ON_RANKS)))
def test_example_on_ranks(name: str, stage: Stage):
    said = stage.run(run_on_rank, name)
    wrong = {text: [rank for rank in range(WORLD) if said[rank] == text] for text in said if text}
    assert not wrong, "\n".join(f"--- ranks {ranks}:\n{text}" for text, ranks in wrong.items())


def run_on_rank(rank: int, world: int, name: str) -> str:
    return failures(FOUND[name], on_ranks(_mesh()))


@cache
def _mesh() -> DeviceMesh:
    return make_mesh()


def failures(found: Docstring, names: dict[str, Any]) -> str:
    """Run an example; return what went wrong, nothing if all is well."""
    own = {} if _is_public(found.name) else vars(importlib.import_module(found.module))
    globs = names | own | {"__name__": found.module}
    test = doctest.DocTestParser().get_doctest(
        inspect.cleandoc(found.text), globs, found.name, found.file, found.line
    )
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    return "".join(said)


def _is_public(name: str) -> bool:
    return any(name == public or name.startswith(f"{public}.") for public in _public())


@cache
def _public() -> tuple[str, ...]:
    return tuple(origin for origin, _ in public_names())


def public_names() -> Iterator[tuple[str, str]]:
    """Yield full name and last part of every public name, and of every public method and property of a
    class.
    """
    for name in sorted(set(dte_dist.__all__) - {"__version__"}):
        found = getattr(dte_dist, name)
        if name == "Detector":  # a type has no docstring of its own: the string below it is one
            yield "dte_dist.detect.detector.Detector", name
            continue
        origin = f"{found.__module__}.{found.__qualname__}"
        yield origin, name
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            is_code = isinstance(value, classmethod | staticmethod | property) or inspect.isfunction(value)
            if is_code and not member.startswith("_"):
                yield f"{origin}.{member}", member


@pytest.mark.parametrize(("origin", "name"), list(public_names()))
def test_public_name_has_an_example(origin: str, name: str):
    assert origin in FOUND, f"{origin} is public and has no example"
    shown = "\n".join(example.source for example in doctest.DocTestParser().get_examples(FOUND[origin].text))
    assert name in shown, f"the example of {origin} does not show {name}"
