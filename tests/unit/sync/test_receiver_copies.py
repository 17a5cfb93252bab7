"""Unit tier, no ranks: where the copy of a receiver lies in memory, and what else may happen to that
memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dte_dist.errors import (
    LayoutMismatch,
)
from dte_dist.layout import Layout
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.source import Source
from dte_dist.sync.version import NONE
from tests.unit.sync.pair import SCHEMA, Pair, bits, same_bits, weights


def strided() -> dict[str, Tensor]:
    return {
        "transposed": torch.zeros(7, 5).t(),
        "sliced": torch.zeros(8, 9)[1:6, 2:9],
        "stepped": torch.zeros(60)[5:50:3],
        "whole": torch.zeros(4),
    }


@pytest.mark.parametrize("side", ["receiver", "source", "both"])
def test_transposed_and_sliced_tensors_are_read_and_written_in_place(side: str) -> None:
    views, plain = strided(), {name: torch.zeros(tensor.shape) for name, tensor in strided().items()}
    pair = Pair(views if side != "receiver" else plain, plain if side == "source" else strided(), seed=False)
    for number, tensor in enumerate(pair.trained.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + number)
    addresses = [(tensor.data_ptr(), tensor.stride()) for tensor in pair.copy.values()]
    pair.seed()
    assert same_bits(pair.trained, pair.copy)
    for tensor in pair.trained.values():
        tensor[1] += 100.5
    assert pair.sync() == 7 + 7 + 1 + 1 and same_bits(pair.trained, pair.copy)
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in pair.copy.values()] == addresses


def test_memory_around_a_sliced_copy_is_left_alone() -> None:
    whole = torch.full((8, 9), 3.0)
    pair = Pair({"w": torch.randn(5, 7)}, {"w": whole[1:6, 2:9]})
    pair.trained["w"].neg_()
    pair.sync()
    outside = torch.ones(8, 9, dtype=torch.bool)
    outside[1:6, 2:9] = False
    assert bits(whole[outside]) == bits(torch.full((72 - 35,), 3.0))


def test_a_tied_tensor_is_sent_once_and_both_names_change() -> None:
    one, other = torch.randn(50), torch.zeros(50)
    pair = Pair({"a": one, "b": one, "c": torch.randn(3)}, {"a": other, "b": other, "c": torch.zeros(3)})
    assert pair.model.numel == 53
    one[4] = 8.0
    assert pair.sync() == 1
    assert same_bits(pair.trained, pair.copy) and pair.copy["b"].data_ptr() == pair.copy["a"].data_ptr()


def test_names_tied_on_the_sources_only_are_both_written() -> None:
    one = torch.randn(50)
    pair = Pair({"a": one, "b": one}, {"a": torch.zeros(50), "b": torch.zeros(50)})
    one[4] = 8.0
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


def test_inference_tensors_are_written_too() -> None:
    with torch.inference_mode():
        copy = {"w": torch.zeros(40), "t": torch.zeros(4, 3).t()}
    pair = Pair({"w": torch.randn(40), "t": torch.randn(3, 4)}, copy)
    pair.trained["w"][::3] = 1.0
    pair.trained["t"][1] = 1.0
    assert pair.sync() == 14 + 4 and same_bits(pair.trained, pair.copy)


def test_addresses_stay_and_version_counters_of_written_tensors_move() -> None:
    pair = Pair(weights(40, 40, 40), bucket_bytes=160)
    for tensor in pair.copy.values():
        tensor.requires_grad_(True)
    addresses = [tensor.data_ptr() for tensor in pair.copy.values()]
    before = [tensor._version for tensor in pair.copy.values()]
    product = pair.copy["w1"] * pair.copy["w1"]
    pair.trained["w1"][3] = 9.0
    pair.sync()
    after = [tensor._version for tensor in pair.copy.values()]
    assert after[1] > before[1] and (after[0], after[2]) == (before[0], before[2])
    assert [tensor.data_ptr() for tensor in pair.copy.values()] == addresses
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_seed_moves_version_counters() -> None:
    pair = Pair(weights(40))
    before = pair.copy["w0"]._version
    pair.seed(2)
    assert pair.copy["w0"]._version > before


def test_a_sync_of_parameters_leaves_no_trace_in_autograd() -> None:
    trained = {"w": torch.nn.Parameter(torch.randn(30))}
    copy = {"w": torch.nn.Parameter(torch.zeros(30))}
    pair = Pair(trained, copy)
    with torch.no_grad():
        trained["w"][2] = 4.0
    pair.sync()
    assert (
        same_bits(trained, copy)
        and copy["w"].grad_fn is None
        and copy["w"].requires_grad
        and copy["w"].grad is None
    )


def test_a_tensor_replaced_between_syncs_is_found_by_its_layout_or_refused_by_name() -> None:
    module, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    pair = Pair(dict(module.named_parameters()), dict(copy.named_parameters()), seed=False)
    pair.layouts = Layout.from_module(module), Layout.from_module(copy)
    pair.source = Source(pair.layouts[0], pair.model, 0, pair.schedule, SCHEMA)
    pair.receiver = Receiver(pair.layouts[1], pair.model, 1)
    pair.seed()
    module.weight = torch.nn.Parameter(torch.ones(2, 3))
    pair.sync()
    assert same_bits(dict(module.named_parameters()), dict(copy.named_parameters()))
    copy.weight = torch.nn.Parameter(copy.weight.detach().clone())
    pair.seed(3)
    assert same_bits(dict(module.named_parameters()), dict(copy.named_parameters()))
    copy.weight = torch.nn.Parameter(torch.zeros(2, 4))
    pair.prepare()
    with pytest.raises(LayoutMismatch, match="'weight'"):
        pair.receiver.begin()


@pytest.mark.parametrize("how", ["written", "written in part", "replaced", "written back"])
def test_a_copy_that_others_wrote_to_has_no_version_until_it_is_seeded(how: str) -> None:
    pair = Pair(weights(40, 40))
    old = pair.copy["w1"].clone()
    copy = pair.copy["w1"]
    if how == "replaced":
        copy.data = old
    elif how == "written back":
        copy.add_(1)
        copy.copy_(old)
    else:
        copy[3 if how == "written in part" else slice(None)] = 1.0
    pair.trained["w0"][5] = 2.0
    pair.receiver.begin()
    assert (
        pair.receiver.state.seed_reason
        and pair.receiver.state.version == NONE
        and pair.receiver.state.newest == 1
    )
    pair.receiver.rollback()
    pair.seed(2)
    assert same_bits(pair.trained, pair.copy)
    pair.trained["w1"][5] = 2.0
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy) and not pair.receiver.state.seed_reason


def test_reading_a_copy_and_what_the_package_writes_disturb_nothing() -> None:
    pair = Pair(weights(40, 40))
    for step in range(3):
        pair.trained["w1"][step] = 2.0
        assert pair.copy["w0"].sum() is not None and pair.copy["w1"].clone() is not None
        pair.receiver.begin()
        assert not pair.receiver.state.seed_reason
        pair.sync()


def test_empty_and_scalar_tensors_take_part() -> None:
    pair = Pair({"empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5), "w": torch.zeros(2)})
    pair.trained["scalar"].fill_(2.5)
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


def test_a_tensor_larger_than_the_bucket_and_buckets_of_one_element() -> None:
    pair = Pair(weights(1000), bucket_bytes=64)
    pair.trained["w0"].neg_()
    assert len(pair.chunks) == 63 and pair.sync() == 1000 and same_bits(pair.trained, pair.copy)


def test_a_second_prepare_forgets_the_first() -> None:
    pair = Pair(weights(100))
    pair.trained["w0"][:10] += 1
    pair.prepare()
    pair.trained["w0"][:9] -= 1
    pair.trained["w0"].copy_(torch.where(torch.arange(100) < 9, pair.copy["w0"], pair.trained["w0"]))
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)


def test_a_delta_that_nobody_follows_is_taken_over_and_can_seed() -> None:
    pair = Pair(weights(100))
    pair.trained["w0"][:10] += 1
    pair.prepare()
    pair.trained["w0"][20] += 1  # after the call: belongs to the next version
    pair.source.detach()
    assert pair.source.state.version == NONE
    pair.place(2)
    assert bits(pair.copy["w0"][:20]) == bits(pair.trained["w0"][:20]) and bits(pair.copy["w0"][20]) != bits(
        pair.trained["w0"][20]
    )
    assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)
