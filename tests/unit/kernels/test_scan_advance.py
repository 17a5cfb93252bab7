"""`advance` of both modules against plain numpy: what changed, what was there before, and that it is taken
over and nothing else is.
"""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist.kernels import cpu
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.kernels.test_scan import FLOATS, both, random_bits, widths

GUARD = 70  # elements around an array, more than a block of 64 bytes, that nobody may touch
SIZES = [0, 1, 2, 3, 7, 8, 15, 31, 33, 63, 64, 65, 130, 513, 2047, 2048, 2049, 4200]
"""Elements of a tensor: shorter than a block of 64 bytes or not, around the 2048 that the loops go through at
once, and beyond.
"""


class Space(NamedTuple):
    """Tensors as they are read, and their bits in order."""

    flat: FlatTensors
    live: np.ndarray


def space_of(width: int, tensors: list[Tensor], wire: list[torch.dtype] | None = None) -> Space:
    flat = FlatTensors(tensors, width)
    dtypes = wire or [tensor.dtype for tensor in tensors]
    cast = [
        tensor.contiguous().view(-1).to(dtype).view(BITS[width])
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    return Space(flat.read_as(dtypes), torch.cat(cast).numpy())


def make(size: int, dtype: torch.dtype, seed: int, strided: bool = False) -> Tensor:
    """Return a tensor of any bits that is not aligned to a block; transposed, or every other element, if
    `strided`.
    """
    tensor = random_bits(2 * size + 1, dtype.itemsize, seed)[1 : size + 1].view(dtype)
    if strided and size % 3 == 0:
        return tensor.view(3, size // 3).t().contiguous().t()
    return torch.stack([tensor, tensor], 1)[:, 0] if strided else tensor


def changed_from(live: np.ndarray, changed: np.ndarray, seed: int) -> np.ndarray:
    """Return bits that differ from the live ones at some places, in their lowest bit and any others."""
    noise = random_bits(len(live), live.itemsize, seed).numpy() | 1
    return np.where(changed, live ^ noise, live)


def check(kernel: ModuleType, space: Space, before: np.ndarray, begin: int, end: int) -> None:
    """Advance over a range and compare everything with the reference; `before` are the known bits of the
    whole space.
    """
    length, dtype = end - begin, BITS[space.flat.width]
    arrays = [torch.full((length + 2 * GUARD,), 77, dtype=kind) for kind in (torch.int32, dtype, dtype)]
    positions, old, new = (array[GUARD : GUARD + length] for array in arrays)
    known = torch.from_numpy(before.copy())
    untouched = [tensor.clone() for tensor in space.flat.tensors]
    count = int(kernel.advance(space.flat, begin, end, known[begin:end], positions, old, new))
    expected = np.flatnonzero(before[begin:end] != space.live[begin:end])
    assert count == len(expected)
    if count < length:  # else they are undefined
        assert np.array_equal(positions[:count].numpy(), expected)
    assert np.array_equal(old[:count].numpy(), before[begin:end][expected])
    assert np.array_equal(new[:count].numpy(), space.live[begin:end][expected])
    assert np.array_equal(
        known.numpy(), np.concatenate([before[:begin], space.live[begin:end], before[end:]])
    )
    assert all((array[:GUARD] == 77).all() and (array[GUARD + length :] == 77).all() for array in arrays)
    for tensor, copy in zip(space.flat.tensors, untouched, strict=True):
        bits = BITS[tensor.element_size()]
        assert torch.equal(tensor.view(bits), copy.view(bits)) and tensor._version == 0


# Where changes are
# -------------------------------------------------------------------------------------------------------


def runs(total: int, rng: np.random.Generator) -> np.ndarray:
    """Return runs of all changed and of none, of lengths around those that the loops go through at once."""
    lengths = rng.choice([1, 5, 16, 32, 64, 100, 2048, 2050, 4096], 20 + total // 500)
    return np.resize(np.repeat(np.arange(len(lengths)) % 2 == rng.integers(2), lengths), total)


PATTERNS = {
    "nothing": lambda n, rng: np.zeros(n, bool),
    "everything": lambda n, rng: np.ones(n, bool),
    "tiny": lambda n, rng: rng.random(n) < 2 / (n + 1),
    "some": lambda n, rng: rng.random(n) < 0.1,
    "0.3": lambda n, rng: rng.random(n) < 0.3,
    "most": lambda n, rng: rng.random(n) < 0.97,
    "runs": runs,
    "runs and some": lambda n, rng: runs(n, rng) | (rng.random(n) < 0.02),
    "all but the first": lambda n, rng: np.arange(n) > 0,
    "all but the last": lambda n, rng: np.arange(n) < n - 1,
    "all but one": lambda n, rng: np.arange(n) != rng.integers(n + 1),
    "one": lambda n, rng: np.arange(n) == rng.integers(n + 1),
    "up to one": lambda n, rng: np.arange(n) < rng.integers(n + 1),
    "from one on": lambda n, rng: np.arange(n) >= rng.integers(n + 1),
}


@st.composite
def spaces(draw: st.DrawFn, width: int) -> Space:
    """Draw tensors of one width, some strided; of width 2 some are fp32 that is read as bf16."""
    tensors, wire = [], []
    for number, size in enumerate(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8))):
        own = torch.float32 if width == 2 and draw(st.booleans()) else FLOATS[width]
        tensors.append(make(size, own, number, draw(st.integers(0, 3)) == 0))
        wire.append(FLOATS[width])
    return space_of(width, tensors, wire)


@pytest.mark.slow
@both
@widths
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_changes_of_any_tensors(kernel: ModuleType, width: int, data: st.DataObject) -> None:
    space = data.draw(spaces(width))
    total = len(space.live)
    pattern, seed = data.draw(st.sampled_from(sorted(PATTERNS))), data.draw(st.integers(0, 1 << 30))
    begin = data.draw(st.sampled_from([0, 0, 1, 5]) | st.integers(0, total))
    end = data.draw(st.sampled_from([total, total, total - 1]) | st.integers(0, total))
    begin, end = sorted((min(begin, total), max(end, 0)))
    changed = np.zeros(total, bool)
    changed[begin:end] = PATTERNS[pattern](end - begin, np.random.default_rng(seed))
    changed[:begin] = changed[end:] = True  # which is not to be noticed
    check(kernel, space, changed_from(space.live, changed, seed), begin, end)


@both
@widths
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_every_pattern_in_one_tensor_and_in_many(kernel: ModuleType, width: int, pattern: str) -> None:
    """The same in one long tensor, in tensors shorter than a block, and in runs that end where a tensor
    does.
    """
    rng = np.random.default_rng(1)
    for sizes in ([10_007], [3] * 100, [2048, 1, 2048, 63, 4096, 64 // width, 5]):
        space = space_of(width, [make(size, FLOATS[width], number) for number, size in enumerate(sizes)])
        changed = PATTERNS[pattern](len(space.live), rng)
        check(kernel, space, changed_from(space.live, changed, 2), 0, len(space.live))


@widths
@pytest.mark.parametrize("others", ["changed", "as they were"])
def test_one_element_that_is_not_like_all_others(width: int, others: str) -> None:
    """At every place: in the first block and the last, at the borders of tensors and blocks, and in what
    follows the last whole block.
    """
    space = space_of(
        width, [make(size, FLOATS[width], number) for number, size in enumerate([70, 1, 129, 5, 40])]
    )
    total = len(space.live)
    for place in range(total):
        changed = np.full(total, others == "changed")
        changed[place] ^= True
        for begin, end in ((0, total), (3, total - 1)):
            check(cpu, space, changed_from(space.live, changed, place), begin, end)


@both
@widths
def test_whole_tensors_change_and_others_do_not(kernel: ModuleType, width: int) -> None:
    """Every choice of five tensors that change throughout: runs of all changed begin and end at the borders
    of tensors.
    """
    space = space_of(
        width, [make(size, FLOATS[width], number) for number, size in enumerate([64, 3, 2049, 1, 160])]
    )
    border = space.flat.starts
    for choice in product([False, True], repeat=5):
        changed = np.repeat(choice, np.diff(border))
        check(kernel, space, changed_from(space.live, changed, 3), 0, len(space.live))


@both
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_masters_of_four_bytes_are_compared_as_bf16(kernel: ModuleType, pattern: str) -> None:
    """Rounded window by window, beside bf16 and strided tensors; NaNs, infinities and subnormals among
    them.
    """
    rng = np.random.default_rng(4)
    tensors = [
        make(5000, torch.float32, 1),
        make(2048, torch.float32, 2),
        make(300, torch.bfloat16, 3),
        make(2049, torch.float32, 4, True),
        make(1, torch.float32, 5),
        make(77, torch.bfloat16, 6, True),
        make(4097, torch.float32, 7),
    ]
    space = space_of(2, tensors, [torch.bfloat16] * len(tensors))
    total = len(space.live)
    for begin, end in ((0, total), (1, total), (4999, total - 5), (6000, 6001)):
        changed = np.zeros(total, bool)
        changed[begin:end] = PATTERNS[pattern](end - begin, rng)
        check(kernel, space, changed_from(space.live, changed, 5), begin, end)


@both
def test_a_second_time_nothing_has_changed(kernel: ModuleType) -> None:
    space = space_of(
        2, [make(3000, torch.float32, 1), make(500, torch.bfloat16, 2, True)], [torch.bfloat16] * 2
    )
    known, positions = torch.from_numpy(~space.live), torch.empty(3500, dtype=torch.int32)
    old, new = torch.empty(2, 3500, dtype=torch.int16).unbind()
    assert kernel.advance(space.flat, 0, 3500, known, positions, old, new) == 3500
    assert kernel.advance(space.flat, 0, 3500, known, positions, old, new) == 0
    space.flat.tensors[1][1] = space.flat.tensors[1][0]
    known[3001] = ~known[3000]
    assert kernel.advance(space.flat, 2900, 3400, known[2900:3400], positions, old, new) == 1
    assert positions[0] == 101 and new[0] == ~old[0] == known[3000] == known[3001]


@both
def test_ranges_of_no_elements(kernel: ModuleType) -> None:
    space = space_of(4, [make(10, torch.float32, 1), make(0, torch.float32, 2)])
    for place in (0, 5, 10):
        check(kernel, space, changed_from(space.live, np.ones(10, bool), 1), place, place)
    check(kernel, space_of(4, [make(0, torch.float32, 2)]), np.zeros(0, np.int32), 0, 0)
