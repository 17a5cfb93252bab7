"""Payloads of named tensors, damaged at random: a receiver applies what is sound, or refuses and writes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist import Payload, kernels
from dte_dist.codec.named_tensors import (
    HEADER,
    MAGIC,
    Change,
    write_payload,
)
from dte_dist.sync.payload_apply import apply_payload
from dte_dist.tensors.flat import BITS
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import EXTREMES, refuses_or_is_harmless


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


BASE = {
    "w": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.zeros(5, dtype=torch.bfloat16),
    "e": torch.zeros(0, 3),
}

OTHER_NAMES = ["w", "b", "w@delta_idx", "w@delta_val", "b@delta_idx", "@delta_val", HEADER, "x", "", 3, None]
STRANGE: list[Any] = [
    torch.zeros(3),
    torch.zeros(3, 4),
    torch.zeros(()),
    torch.tensor([3, 2]),
    torch.zeros(0),
    None,
    3,
    "w",
    torch.tensor([1, 1], dtype=torch.int32),
    torch.tensor([11], dtype=torch.int32),
    torch.tensor([12], dtype=torch.int32),
    torch.tensor([-1, 3], dtype=torch.int32),
    torch.tensor([1 << 62]),
    torch.tensor([(1 << 63) - 1]),
    torch.zeros(2, device="meta"),
    torch.zeros(2).to_sparse(),
    torch.zeros(1).expand(1 << 40),
    torch.zeros(6, dtype=torch.int64),
    torch.zeros(2, dtype=torch.complex128),
    torch.zeros(5, dtype=torch.bfloat16),
    torch.empty(0, 1 << 40),
    torch.arange(10, dtype=torch.int32)[::3],
    torch.zeros(2, 3).t(),
    torch.zeros(3, 4, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.bool),
    torch.ones(2, requires_grad=True),
]


def payload_of_tensors(rng: Random) -> str:
    full = rng.random() < 0.3
    positions = torch.tensor([1, 5, 11], dtype=torch.int32)
    changes = [Change("w", positions, torch.ones(3)), Change("b", None, torch.ones(5, dtype=torch.bfloat16))]
    if full:
        changes = [Change(name, None, tensor.clone()) for name, tensor in BASE.items()]
    tensors: dict[Any, Any] = dict(write_payload(7, -1 if full else 4, changes).tensors)
    for _ in range(rng.randint(1, 3)):
        name, how = rng.choice(list(tensors)), rng.randrange(6)
        if how == 0:
            del tensors[name]
        elif how == 1:
            tensors[rng.choice(OTHER_NAMES)] = tensors[name]
        elif (
            how == 2
            and HEADER in tensors
            and isinstance(tensors[HEADER], Tensor)
            and tensors[HEADER].shape == (6,)
        ):
            header = tensors[HEADER].clone()
            header[rng.randrange(6)] = rng.choice([*EXTREMES, MAGIC, 1, 4, 7])
            tensors[HEADER] = header
        elif how == 3:
            other = rng.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        else:
            tensors[name] = rng.choice(STRANGE)
        if not tensors:
            break
    wrong = rng.choice([*EXTREMES, None, 7.0, "7"]) if rng.random() < 0.1 else 7
    payload = Payload(wrong, -1 if full else 4, full, MappingProxyType(tensors))
    targets = {name: tensor.clone() for name, tensor in BASE.items()}
    apply_payload(payload, targets)
    assert all(targets[name].shape == tensor.shape for name, tensor in BASE.items())
    return "applied"


READERS: dict[Callable[[Random], str], int] = {
    payload_of_tensors: 4000,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])
