"""Unit tier: private names of torch stand in two files of the package, each with a fall-back or an error."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from tests.unit.test_house import ROOT, files

COMPAT = {ROOT / "_torch_compat.py", ROOT / "_torch_fsdp.py"}
"""The only files that may use private names of torch."""

OTHERS = {"_cache", "_cache_file", "_source_stamp"}
"""Private names of numba, which kernels/cpu/jit.py uses."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def torch_names() -> frozenset[str]:
    """Return private names that objects of torch have."""
    owners = torch, Tensor, torch._C, DTensor, FSDPModule, FullyShardedDataParallel, nn.Module()
    return frozenset(name for owner in owners for name in dir(owner) if is_private(name))


@cache
def own_names() -> frozenset[str]:
    """Return private names that the package itself defines."""
    found = set()
    for node in (node for path in files() for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return frozenset(filter(is_private, found))


def private_torch(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of torch in imports, as attributes, and in getattr and the like."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                paths = [f"{module}.{alias.name}" for alias in names]
                yield from (path for path in paths if any(map(is_private, path.split("."))))
            case ast.Import(names=names):
                paths = [alias.name for alias in names if alias.name.split(".")[0] == "torch"]
                yield from (path for path in paths if any(map(is_private, path.split("."))))
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "sys")):
                pass
            case ast.Attribute(attr=name) if is_foreign(name):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "attrgetter"), args=[*values]):
                yield from texts(values, is_foreign)
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[*values]):
                yield from texts(values, is_foreign)
            case ast.Call(func=ast.Name(id="import_module"), args=[*values]):
                yield from texts(values, lambda path: any(map(is_private, path.split("."))))


def is_foreign(name: str) -> bool:
    """Return whether a private name is one of torch, or at least none of ours."""
    return is_private(name) and (name in torch_names() or name not in own_names()) and name not in OTHERS


def texts(values: list[ast.expr], wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the strings among arguments that are wanted."""
    strings = [value.value for value in values if isinstance(value, ast.Constant)]
    yield from (text for text in strings if isinstance(text, str) and wanted(text))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_are_in_two_files(path: Path) -> None:
    found = list(private_torch(ast.parse(path.read_text())))
    if path in COMPAT:
        assert len(found) > 10
    else:
        assert not found, f"use a function of _torch_compat or _torch_fsdp, or add one, for {found}"


@pytest.mark.parametrize(
    "code",
    [
        "from torch._utils import x",
        "from torch.utils import _x",
        "import torch._inductor.config",
        "from torch import distributed, _C",
        "torch._foreach_copy_(a, b)",
        "x = tensor._version",
        "x = module.child._parameters['w']",
        "x = tensor._local_tensor._base",
        "x = getattr(tensor, '_spec', None)",
        "x = vars(flat).get('_local_shard')",
        "x = handle._surely_none_of_ours",
        "x = import_module('torch._utils')",
        "backend._end_coalescing()",
    ],
)
def test_private_names_of_torch_are_found(code: str) -> None:
    assert list(private_torch(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["self._version = 1", "from torch import nn", "x.__class__.__name__", "layout._spots", "x.get('a')"],
)
def test_names_that_are_not_private_ones_of_torch_pass(code: str) -> None:
    assert not list(private_torch(ast.parse(code)))
