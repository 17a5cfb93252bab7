"""Private names of torch: the fallbacks do what torch does, and what has none is an error that says what is
missing.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dte_dist import _torch_compat as compat
from dte_dist import _torch_fsdp as fsdp
from dte_dist.errors import DeltaError, LayoutMismatch


class Bare:
    """An object of a torch that keeps everything under other names."""

    def is_inference(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (compat.version, "_version"),
        (lambda bare: compat.versions([bare]), "_version"),
        (compat.base_of, "_base"),
        (compat.spec_of, "_spec"),
        (compat.local_tensor, "_local_tensor"),
        (compat.preferred_device, "_get_preferred_device"),
        (compat.registered_by, "_non_persistent_buffers_set"),
        (compat.structure_of, "_modules"),
        (fsdp.fsdp2_groups, "_get_fsdp_state"),
        (fsdp.fsdp2_module_info, "fsdp_params"),
        (fsdp.flat_columns, "_param_infos"),
        (fsdp.fsdp1_shows_gathered, "_skipped_use_sharded_views"),
        (fsdp.fsdp1_write_back, "_use_orig_params"),
        (lambda bare: compat.read(bare, "flat_param"), "flat_param"),
    ],
)
def test_a_name_that_torch_lacks_is_an_error_that_says_which(read, missing):
    with pytest.raises(LayoutMismatch) as caught:
        read(Bare())
    text = str(caught.value)
    assert f"has no {missing}" in text and torch.__version__ in text and "Hint: " in text


def test_names_without_which_nothing_is_wrong_may_be_missing():
    bare: Any = Bare()
    found = [fsdp.flat_local_shard(bare), fsdp.fsdp1_handle(bare), fsdp.fsdp1_mesh(bare)]
    assert found == [None] * 3 and fsdp.fsdp1_replica_group(bare) is None
    assert fsdp.flat_gathered(bare) == [] and compat.use_count(bare) is None
    assert compat.use_counts(bare, bare) is None
    assert not fsdp.is_flattened_by_fsdp1(bare) and not fsdp.is_cloned_by_fsdp1(bare)


def test_operations_are_not_begun_where_they_cannot_be_joined():
    begun = []
    with pytest.raises(DeltaError, match="joins no sends"):
        compat.coalesced(Bare(), lambda: begun.append(1))
    assert not begun


@pytest.mark.parametrize("fails", [False, True])
def test_operations_end_as_one_even_if_one_of_them_fails(fails):
    said = []
    backend = SimpleNamespace(
        _start_coalescing=lambda: said.append("start"), _end_coalescing=lambda: said.append("end") or "work"
    )

    def begin() -> None:
        said.append("begin")
        if fails:
            raise RuntimeError("no")

    if fails:
        with pytest.raises(RuntimeError, match="no"):
            compat.coalesced(backend, begin)
    else:
        assert compat.coalesced(backend, begin) == "work"
    assert said == ["start", "begin", "end"]


def test_nccl_options_have_the_timeout_or_are_refused(monkeypatch):
    monkeypatch.setattr(
        dist,
        "ProcessGroupNCCL",
        SimpleNamespace(Options=lambda: SimpleNamespace(_timeout=None)),
        raising=False,
    )
    assert compat.nccl_options(timedelta(seconds=3))._timeout == timedelta(seconds=3)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Bare), raising=False)
    with pytest.raises(DeltaError, match="timeout"):
        compat.nccl_options(timedelta(seconds=3))


def test_the_fallbacks_do_what_torch_does():
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(4, 2).t()]
    flat = compat.flatten(tensors)
    assert torch.equal(compat._flatten(tensors), flat)
    parts = list(zip(compat.unflatten(flat, tensors), compat._unflatten(flat, tensors), strict=True))
    assert len(parts) == 3 and all(torch.equal(a, b) and a.shape == b.shape for a, b in parts)
    for copy in (compat.foreach_copy_, compat._copy_each):
        into = [torch.zeros_like(tensor) for tensor in tensors]
        copy(into, compat._unflatten(flat, tensors))
        assert all(map(torch.equal, into, tensors))
    assert compat._class("torch.nonesuch", "X") is compat._class("torch.nn", "Nonesuch") is compat._Nothing


def test_versions_count_writes_and_are_minus_one_for_inference_tensors():
    with torch.inference_mode():
        inference = torch.zeros(2)
    written = torch.zeros(2)
    written.add_(1)
    assert compat.versions([torch.zeros(2), written]) == [0, 1]
    assert compat.versions([inference, written]) == [-1, 1]
    assert compat.version(written) == 1


def test_what_a_module_registers_are_its_own_dicts():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    found = compat.registered_by(module)
    assert list(found.modules) == ["0", "1"] and found.non_persistent == {"passing"}
    keys, owners = compat.structure_of(module)
    assert keys == ("0", "1") and owners[1] is compat.registered_by(module[1]).parameters
    module.register_parameter("late", nn.Parameter(torch.zeros(1)))
    assert list(found.parameters) == ["late"] and list(found.buffers) == ["passing"]


def test_the_names_that_this_torch_has_are_found():
    assert compat.AsyncCollectiveTensor is not compat._Nothing
    assert compat.ShardedTensor is not compat._Nothing
    assert compat.foreach_copy_ is torch._foreach_copy_
    tensor = torch.zeros(4)
    assert compat.use_counts(tensor, tensor.untyped_storage()) is not None
    assert compat.base_of(tensor) is None and compat.base_of(tensor[:2]) is tensor
