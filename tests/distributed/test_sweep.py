"""Random sweep (gloo, 8 ranks): meshes, placements, shapes, dtypes, densities, source layout x receiver
layout; bit-exact.

400 cases over the root, 200 shard to shard; each opens a channel, seeds, and syncs twice more, with the next
of all pairs of codecs. `DTE_SWEEP=seed` repeats a sweep, `DTE_SWEEP=seed:case` one case,
`DTE_CODEC=ef+planes` makes all cases use one pair.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

import dte_dist
from tests.distributed.cases import Case, local_tensor, make_case, same_bits
from tests.distributed.launcher import Ranks
from tests.unit.codec.pairs import PAIRS

pytestmark = pytest.mark.slow

WORLD, CASES, BATCH = 8, 400, 50
CODECS = ["auto", "fast", "small", *PAIRS]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as ranks:
        yield ranks


class Held(torch.nn.Module):
    """Tensors under dotted names, as a module."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        parameters = {
            id(t): torch.nn.Parameter(t, requires_grad=False)
            for t in tensors.values()
            if t.is_floating_point()
        }
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            if tensor.is_floating_point():
                module.register_parameter(leaf, parameters[id(tensor)])
            else:
                module.register_buffer(leaf, tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters(remove_duplicate=False)) | dict(
            self.named_buffers(remove_duplicate=False)
        )


def run_case(case: Case, rank: int, group: dist.ProcessGroup, collective: str, codec: str) -> list[str]:
    """Seed and sync twice; return what is wrong."""
    is_source, is_receiver = rank in case.sources, rank in case.receivers
    rng = torch.Generator().manual_seed(7)
    source = copy = None
    if is_source:
        held = {n: local_tensor(t, case.at_source[n], case.sources, rank) for n, t in case.tensors.items()}
        source = Held(held | {second: held[first] for second, first in case.ties.items()})
    if is_receiver:
        blank = {n: torch.zeros_like(case.expected(n)) for n in case.tensors}
        held = {n: local_tensor(t, case.at_receiver[n], case.receivers, rank) for n, t in blank.items()}
        copy = Held(held | {second: held[first] for second, first in case.ties.items() if case.receivers_tie})
    changed = total = sum(case.tensors[name].numel() for name in case.slots())
    wrong = []
    for step in range(3):
        report = getattr(dte_dist, collective)(
            source if source is not None else copy,
            group,
            src=case.sources,
            into=copy if source is not None else None,
            wire_dtype=case.wire or None,
            bucket_bytes=case.bucket_bytes,
            timeout=60,
            codec=codec,
        )
        if (report.version, report.kind, report.changed, report.total) != (
            step + 1,
            "delta" if step else "full",
            changed,
            total,
        ):
            wrong.append(f"{case.seed} step {step}: {report}, {changed} of {total} expected")
        for name, tensor in copy.tensors().items() if copy is not None else ():
            part = case.at_receiver[name].part(case.expected(name), case.receivers.index(rank))
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if not same_bits(local.reshape(part.shape) if not part.numel() else local, part):
                wrong.append(
                    f"{case.seed} step {step} rank {rank}: {name} {case.at_source[name]} -> "
                    f"{case.at_receiver[name]}"
                )
        changed = case.change(rng)
        for name, tensor in source.tensors().items() if source is not None else ():
            part = case.at_source[name].part(case.tensors[name], case.sources.index(rank))
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.copy_(part.reshape(local.shape))
    return wrong


def sweep(rank: int, world: int, seeds: list[str], collective: str, codecs: list[str]) -> list[str]:
    wrong = []
    for seed, codec in zip(seeds, codecs, strict=True):
        case = make_case(seed, world)
        group = dist.new_group(case.group, sort_ranks=False)
        if rank in case.group:
            wrong += run_case(case, rank, group, collective, codec)
            dist.destroy_process_group(group)
    return wrong


_SEED, _, _ONE = os.environ.get("DTE_SWEEP", str(random.SystemRandom().getrandbits(32))).partition(":")
_NUMBERS = [[int(_ONE)]] if _ONE else [list(range(low, low + BATCH)) for low in range(0, CASES, BATCH)]
_RUNS = [("delta_broadcast", numbers) for numbers in _NUMBERS] + [
    ("delta_p2p", numbers) for numbers in _NUMBERS[: len(_NUMBERS) // 2 or 1]
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("collective", "numbers"), _RUNS, ids=[f"{name}-{_SEED}:{numbers[0]}" for name, numbers in _RUNS]
)
def test_every_layout_reaches_every_other_bit_for_bit(ranks, collective, numbers, capsys):
    with capsys.disabled():
        print(f"\nsweep: {collective}, DTE_SWEEP={_SEED}, cases {numbers[0]} to {numbers[-1]}")
    codecs = [os.environ.get("DTE_CODEC", CODECS[number % len(CODECS)]) for number in numbers]
    wrong = ranks.run(sweep, [f"{_SEED}:{number}" for number in numbers], collective, codecs, seconds=280)
    assert [line for lines in wrong for line in lines] == []
