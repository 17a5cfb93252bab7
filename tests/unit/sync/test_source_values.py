"""Unit tier, no ranks: any bits of any dtype travel as they are; a cast hides what it hides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dte_dist.errors import (
    FrameError,
)
from tests.unit.sync.pair import Pair, bits, flip, same_bits


def from_bits(*patterns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.tensor(
        [p - (1 << 16) if dtype.itemsize == 2 and p >> 15 else p for p in patterns], dtype=integer
    ).view(dtype)


def test_nan_payloads_travel_and_a_nan_that_stays_sends_nothing() -> None:
    pair = Pair({"w": from_bits(0x7FC0, 0x7F81, 0xFFFF, 0x7FC0)})
    assert pair.sync() == 0
    pair.trained["w"].copy_(from_bits(0x7FC1, 0x7F81, 0xFFFE, 0x7FC0))
    assert pair.sync() == 2 and same_bits(pair.trained, pair.copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_sign_of_zero_and_changes_of_the_high_byte_alone_are_sent(dtype: torch.dtype) -> None:
    pair = Pair({"w": torch.tensor([0.0, 1.0, 1.0, 1.0, -0.0], dtype=dtype)})
    pair.trained["w"].copy_(torch.tensor([-0.0, -1.0, 4.0, 0.25, -0.0], dtype=dtype))
    assert pair.sync() == 4 and same_bits(pair.trained, pair.copy)


def test_subnormals_and_infinities_are_bits_like_others() -> None:
    pair = Pair({"w": torch.tensor([1e-45, 0.0, 1.0])})
    pair.trained["w"].copy_(torch.tensor([0.0, 1e-45, float("inf")]))
    assert pair.sync() == 3 and same_bits(pair.trained, pair.copy)


ANY = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def test_tensors_of_all_dtypes_change_in_one_commit() -> None:
    pair = Pair(
        {str(dtype): torch.zeros(5).to(dtype) for dtype in ANY}
        | {"scalar": torch.zeros((), dtype=torch.int64)}
    )
    for dtype in ANY:
        pair.trained[str(dtype)].view(torch.uint8)[1] = 1
    pair.trained["scalar"] += 1
    assert pair.sync() == len(ANY) + 1 and same_bits(pair.trained, pair.copy)


def test_an_fp8_weight_and_its_scale_change_in_one_commit_or_not_at_all() -> None:
    pair = Pair({"w": torch.zeros(64).to(torch.float8_e4m3fn), "scale": torch.ones(1)})
    before = {name: tensor.clone() for name, tensor in pair.copy.items()}
    pair.trained["w"].view(torch.uint8)[:] = 7
    pair.trained["scale"][0] = 0.5
    frames = pair.prepare()
    assert len(frames) == 2 and all(len(frame) for frame in frames)
    for damaged in ([flip(frames[0], -8), frames[1]], [frames[0], flip(frames[1], -8)]):
        assert isinstance(pair.deliver(damaged), FrameError)
        assert same_bits(before, pair.copy)
    pair.rollback()
    pair.sync()
    assert same_bits(pair.trained, pair.copy)


def test_fp32_masters_send_only_what_the_cast_to_bf16_changes() -> None:
    trained = {"w": torch.linspace(1, 2, 129)[:128]}
    copy = {"w": torch.zeros(128, dtype=torch.bfloat16)}
    pair = Pair(trained, copy, wire={"w": "bfloat16"})
    assert bits(copy["w"]) == bits(trained["w"].bfloat16())
    trained["w"] += 2.0**-12 * (torch.arange(128) % 2)  # an ulp of bf16 is 2^-7 here
    assert pair.sync() == 0
    trained["w"][3] += 2.0**-7
    assert pair.sync() == 1 and bits(copy["w"]) == bits(trained["w"].bfloat16())


def test_many_changes_below_half_an_ulp_are_sent_once_they_add_up() -> None:
    trained, copy = {"w": torch.ones(1)}, {"w": torch.zeros(1, dtype=torch.bfloat16)}
    pair = Pair(trained, copy, wire={"w": "bfloat16"})
    sent = []
    for _ in range(8):
        trained["w"] += 2.0**-10
        sent.append(pair.sync())
        assert bits(copy["w"]) == bits(trained["w"].bfloat16())
    assert sent == [0, 0, 0, 0, 1, 0, 0, 0]  # half an ulp is 2^-8, and a tie goes to even
