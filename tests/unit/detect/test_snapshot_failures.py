"""A snapshot whose advance, undo or refresh breaks off says whether it still has a version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect import snapshot as module
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from tests.unit.detect.snapshots import SIZES, Failing, Model, heals

KERNELS = [cpu, torch_kernels]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments at once and a batch of 40 changes: a few hundred elements make many of both."""
    monkeypatch.setattr(module, "_RANGE_SEGMENTS", 2)
    monkeypatch.setattr(module, "_BATCH_CHANGES", 40)


@pytest.fixture(params=KERNELS, ids=["cpu", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run a test with the kernels of both kinds of device, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield request.param


@pytest.mark.parametrize("done", [False, True], ids=["at once", "when it was done"])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("pattern", ["tiny", "0.3", "everything"])
def test_a_kernel_that_fails_while_bits_are_taken_over(
    kernel: Any, small: None, pattern: str, at: int, done: bool
) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, pattern, 2)
    model.snapshot._kernels = Failing(kernel, "advance", at, done)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        model.take_over()
    model.snapshot._kernels = kernel
    heals(model)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("pattern", ["some", "everything"])
def test_notes_that_cannot_be_made(
    kernel: Any, small: None, monkeypatch: pytest.MonkeyPatch, pattern: str, at: int
) -> None:
    model, empty, made = Model(SIZES), kernels.empty, []
    for width in SIZES:
        model.change(width, pattern, 2)
        model.snapshot._scratch[width] = module._ScratchBuffers.of(
            model.totals[width], width, torch.device("cpu")
        )

    def failing(*args: Any) -> Tensor:
        made.append(args)
        if len(made) > at:
            raise MemoryError("no room")
        return empty(*args)

    monkeypatch.setattr(kernels, "empty", failing)
    with pytest.raises(MemoryError):
        model.take_over()
    monkeypatch.setattr(kernels, "empty", empty)
    heals(model)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_bits_that_cannot_be_put_back(kernel: Any, small: None, at: int) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "some", 2)
    model.take_over()
    assert not model.snapshot.inconsistent
    model.snapshot._kernels = Failing(kernel, "scatter_1d", at, False)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        model.snapshot.roll_back()
    model.snapshot._kernels = kernel
    heals(model)


@pytest.mark.parametrize("at", [0, 3])
def test_a_refresh_that_breaks_off_leaves_no_version(kernel: Any, at: int) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "some", 2)
    model.take_over()
    model.snapshot._kernels = Failing(kernel, "read", at, False)  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        model.refresh()
    model.snapshot._kernels = kernel
    heals(model)


def test_a_refresh_cannot_be_undone(kernel: Any, small: None) -> None:
    model = Model(SIZES)
    for width in SIZES:
        model.change(width, "some", 2)
    model.take_over()
    for width in SIZES:
        model.change(width, "some", 3)
    model.refresh()
    model.snapshot.roll_back()
    assert model.everything() == model.lives() and not model.snapshot.inconsistent
