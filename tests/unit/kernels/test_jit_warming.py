"""It is said once when kernels are compiled, and `warm` takes dtypes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from numba import njit
from numba.core import event

import dte_dist
from dte_dist import kernels
from dte_dist.kernels.cpu import jit


def test_it_is_said_once_when_something_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    said: list[int] = []
    notice = jit._Notice({4, 2}, lambda: said.append(1))
    with caplog.at_level(logging.INFO, "dte_dist"), event.install_listener("numba:compile", notice):
        for number in (1, 2):
            njit(lambda x, number=number: x + number)(1.0)
    assert said == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "compiling kernels for elements of 2, 4 bytes, once per machine and version: this takes 10 to 45 s"
    ]


def test_what_is_compiled_already_says_nothing() -> None:
    kernels.precompile([4])
    said: list[int] = []
    kernels.precompile([4], lambda: said.append(1))
    assert said == []


@pytest.mark.parametrize(
    ("dtypes", "widths"),
    [((), {1, 2, 4, 8}), ((torch.bfloat16,), {2}), ((torch.float8_e4m3fn, torch.complex128), {1, 8})],
    ids=str,
)
def test_warm_takes_dtypes(monkeypatch: pytest.MonkeyPatch, dtypes: Any, widths: set[int]) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(kernels, "precompile", asked.append)
    dte_dist.warm(*dtypes)
    assert asked == [widths]
    with pytest.raises(ValueError, match="takes dtypes"):
        dte_dist.warm("bfloat16")  # type: ignore[arg-type]
