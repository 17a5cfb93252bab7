"""What a sync of 1 GiB costs on a GPU: its memory is asserted, its time is printed.

Expected beyond the model, for buckets of 16 MiB, 1 % changed and gloo, which stages through the CPU
(invariant 7 of the design: a source holds snapshot, encoded delta and two buckets; a receiver the staged
delta and two buckets):

* source, seed: the snapshot, the frame of one bucket, and for its checksum a few arrays of the size of that
  frame: 6 buckets in all.
* source, delta: the snapshot; room for the changes of a batch and of a range, which stays (10 * 2^20 times 8
  bytes); what was there before, 6 bytes a change; the encoded delta; and what finding in a range of 2^23
  elements and encoding takes: 64 MiB are far more than the bool for each element and the arrays of 8 bytes
  for each change that exist at once.
* receiver, seed: buckets and frames are in memory of the CPU; on the GPU about 16 arrays of 8 bytes for each
  of 2^20 elements.
* receiver, delta: the positions and bits of one segment at a time.
* nothing is kept from one sync to the next but the snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dte_dist
from dte_dist import kernels
from dte_dist.kernels import torch as torch_kernels
from dte_dist.plan.index_map import build_index_maps
from dte_dist.tensors.flat import FlatTensors
from tests.distributed.launcher import Ranks
from tests.gpu.device import DEVICE, ON_GPU, begin, settle, tier
from tests.unit.geometry import whole_space

pytestmark = tier
MIB = 1 << 20
MODEL = (1024 if ON_GPU else 4) * MIB
BUCKET = 16 * MIB
TENSORS, DENSITY = 64, 0.01


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call returns, and the most memory that the device had given out meanwhile."""
    settle()
    if not ON_GPU:
        return call(), 0
    torch.cuda.reset_peak_memory_stats()
    result = call()
    settle()
    return result, torch.cuda.max_memory_allocated()


def change(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        bits = tensor.view(torch.int16).view(-1)
        where = torch.randint(len(bits), (int(len(bits) * DENSITY),), device=DEVICE)
        bits[where] ^= 1


def grow(rank: int, world: int, collective: str) -> dict[str, Any]:
    """Seed, and sync six deltas of 1 %; return what it took beyond the model, in bytes and seconds."""
    begin()
    torch.manual_seed(1)
    make = torch.randn if rank == 0 else torch.zeros
    tensors = [make(MODEL // TENSORS // 2, device=DEVICE).to(torch.bfloat16) for _ in range(TENSORS)]
    layout = dte_dist.Layout.from_tensors({f"w{number:02}": tensor for number, tensor in enumerate(tensors)})
    base, figures = allocated(), {}

    def sync() -> dte_dist.SyncReport:
        return getattr(dte_dist, collective)(layout, bucket_bytes=BUCKET, timeout=100)

    for step in range(7):
        report, peak = peak_of(sync)
        figures["seed" if step == 0 else "delta"] = max(peak - base, figures.get("delta", 0) if step else 0)
        figures[f"after {step}"] = allocated() - base
        if rank == 0:
            change(tensors)
    return {
        **figures,
        "report": str(report),
        "phases": report.phases,
        "wire": report.wire_bytes,
        "changed": report.changed,
    }


@pytest.mark.timeout(110)
@pytest.mark.parametrize("collective", ["delta_broadcast", "delta_p2p"])
def test_memory(ranks, capsys, collective: str) -> None:
    source, receiver = ranks.run(grow, collective, seconds=100)
    with capsys.disabled():
        print(f"\n{collective}, {MODEL // MIB} MiB on one GPU: {source['report']}")
        for name, figures in (("source", source), ("receiver", receiver)):
            spent = ", ".join(f"{phase} {1e3 * took:.1f}" for phase, took in figures["phases"].items())
            held = ", ".join(
                f"{key} +{figures[key] / MIB:.1f}" for key in ("seed", "delta", "after 1", "after 6")
            )
            print(f"  {name}: MiB {held}; ms {spent}")
    assert 0.009 < source["changed"] / (MODEL // 2) < 0.011
    if not ON_GPU:
        return
    assert source["seed"] <= MODEL + 6 * BUCKET
    assert (
        source["delta"]
        <= MODEL + 80 * MIB + 6 * source["changed"] + 1.25 * source["wire"] + 2 * BUCKET + 64 * MIB
    )
    assert receiver["seed"] <= 2 * BUCKET + 16 * 8 * MIB
    assert receiver["delta"] <= 2 * BUCKET + 64 * MIB
    for figures in (source, receiver):
        assert figures["after 6"] <= figures["after 1"] + MIB


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Return how long a call takes, until the device is done with it: the best of some."""
    best = float("inf")
    for _ in range(repeats + 1):
        settle()
        start = time.perf_counter()
        call()
        settle()
        best = min(best, time.perf_counter() - start)
    return best


def test_time_of_the_kernels(capsys) -> None:
    """Print what each kernel takes; nothing is asserted but that they run on 1 GiB."""
    count = MODEL // 2
    live = torch.zeros(count, dtype=torch.int16, device=DEVICE)
    known, at = live.clone(), kernels.on(DEVICE) if ON_GPU else torch_kernels
    known[torch.randint(count, (count // 100,), device=DEVICE)] = 1
    taken = known.clone()
    copied = seconds(lambda: taken.copy_(known))
    lines = [
        f"copy of {MODEL // MIB} MiB: {1e3 * copied:.2f} ms, "
        f"{2 * MODEL / copied / 1e9:.0f} GB/s read and written"
    ]
    flat = FlatTensors([live], 2)
    for bits in (20, 24, 28):
        size = min(1 << bits, count)
        positions = torch.empty(size, dtype=torch.int32, device=DEVICE)
        old, new = torch.empty(2, size, dtype=torch.int16, device=DEVICE).unbind()

        def detect(
            size: int = size, positions: Tensor = positions, old: Tensor = old, new: Tensor = new
        ) -> None:
            taken.copy_(known)
            for first in range(0, count - size + 1, size):
                at.advance(flat, first, first + size, taken[first : first + size], positions, old, new)

        took = seconds(detect, 3) - copied
        lines.append(f"advance in segments of 2^{bits}: {1e3 * took:.2f} ms, {copied / took:.2f} of the copy")
    segment = min(1 << 20, count)
    positions = (live[:segment] != known[:segment]).nonzero().view(-1).to(torch.int32)
    changed, bits = max(len(positions), 1), torch.zeros(len(positions), dtype=torch.int16, device=DEVICE)
    (index_map,) = build_index_maps(*[whole_space(2, (count,))] * 2)
    lineage, decoded = at.encode_u16(positions, segment), torch.empty_like(positions)
    calls = {
        "encode_u16": lambda: at.encode_u16(positions, segment),
        "decode_u16": lambda: at.decode_u16(lineage, len(positions), segment, decoded),
        "translate": lambda: at.translate(index_map, 0, positions, bits),
        "scatter": lambda: at.scatter(flat, positions, bits),
        "scatter_1d": lambda: at.scatter_1d(known, positions, bits),
        "checksum of 16 MiB": lambda: at.checksum(live[: min(8 * MIB, count)].view(torch.uint8), 1),
        "scatter_dense of a segment": lambda: at.scatter_dense(index_map, 0, known[:segment], flat),
    }
    lines += [
        f"{name}: {1e6 * took:.0f} us, {1e9 * took / changed:.1f} ns a change"
        for name, took in ((n, seconds(c)) for n, c in calls.items())
    ]
    with capsys.disabled():
        print(f"\n{len(positions)} changes in a segment; " + "; ".join(lines), end="")
