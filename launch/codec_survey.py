"""Find the best pair of codecs: bytes and time for each changed element, by density and kind of change.

    python launch/codec_survey.py [--elements 1048576] [--repeat 9] [--pairs]

A line names the pair with the fewest bytes and the one with the least seconds over each link (codecs and
wire), and in brackets what "small" and "auto" take there; `--pairs` adds what each pair costs. The last lines
say how far each codec is, at best, from the best pair without it. One thread, minimum of the repetitions;
compare ratios within one run only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import CodecSelector, FrameHead, FrameWriter, read_frame
from dte_dist.codec.index_codecs import INDEX_CODECS
from dte_dist.codec.value_codecs import VALUE_CODECS

DATA = Path(__file__).parents[1] / "tests" / "data" / "adamw_steps.npz"
DENSITIES = (0.00001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95, 1.0)
LINKS = {"1 Gb/s": 125e6, "10 Gb/s": 1.25e9, "100 Gb/s": 12.5e9}
INDEXES = [codec.name for codec in INDEX_CODECS.values()]
VALUES = [codec.name for codec in VALUE_CODECS.values()]

Cost = tuple[float, float, float]
"""Bytes, and seconds of encoding and of decoding, for each changed element."""
Change = Callable[[Tensor, torch.Generator], Tensor]


def move(sizes: Tensor, old: Tensor, rng: torch.Generator) -> Tensor:
    """Move bits up or down, each by one of these sizes."""
    size = sizes[torch.randint(0, len(sizes), old.shape, generator=rng)]
    return old + (size * (torch.randint(0, 2, old.shape, generator=rng) * 2 - 1)).to(old.dtype)


def adamw(rate: float, old: Tensor, rng: torch.Generator) -> Tensor:
    """Add a step of AdamW to fp32 weights."""
    return (old.view(torch.float32) + 0.23 * rate * torch.randn(old.shape, generator=rng)).view(old.dtype)


def anything(old: Tensor, rng: torch.Generator) -> Tensor:
    """Return bits that have nothing to do with those before."""
    bits = torch.iinfo(old.dtype)
    return torch.randint(bits.min, bits.max, old.shape, generator=rng, dtype=torch.int64).to(old.dtype)


def kinds() -> Iterator[tuple[str, int, Change]]:
    """Yield what an element does, its bytes, and how it does that."""
    with np.load(DATA) as data:
        before, after = (torch.from_numpy(data[f"bf16_{name}"]) for name in ("before", "after"))
    yield "recorded bf16 steps", 2, partial(move, kernels.on("cpu").ulp_deltas(before, after).abs())
    yield from (
        (f"AdamW on fp32 at {rate:.0e}", 4, partial(adamw, rate)) for rate in (1e-6, 3e-7, 1e-7, 1e-8)
    )
    for width in (1, 2, 4):
        yield f"1 to 3 ULPs, {width} B", width, partial(move, torch.tensor([1, 1, 1, 1, 1, 1, 2, 3]))
        yield f"any bits, {width} B", width, anything


def changes(length: int, density: float, width: int, change: Change, run: int) -> tuple[Tensor, ...]:
    """Return positions, old bits, new bits and all new bits of a range in which `run` neighbours change."""
    rng = torch.Generator().manual_seed(1)
    known = (torch.randn(length, generator=rng) * 0.04).to(torch.bfloat16 if width == 2 else torch.float32)
    bits = known.view(kernels.BITS[width])[:length]
    chosen = (torch.rand(length // run, generator=rng) < density).repeat_interleave(run)
    chosen[:4] = True
    now = torch.where(chosen, change(bits, rng), bits)
    positions = (now != bits).nonzero().view(-1)  # a small step leaves some as they are
    return positions.to(torch.int32), bits[positions], now[positions], now


def fastest(call: Callable[[], object], repeat: int) -> float:
    """Return the least seconds of a call."""
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds, default=0.0)


def cost(codec: str, found: tuple[Tensor, ...], repeat: int, speed: float | None = None) -> tuple[str, Cost]:
    """Return the pair that is taken, and what it costs."""
    positions, old, new, now = found
    head = FrameHead(7, 9, 1, 2, 0, 0, 1, new.element_size(), 0, len(now))
    selector, used = CodecSelector(codec, speed), set[str]()
    relative = selector.relative(new.element_size())

    def encode() -> Tensor:
        writer = FrameWriter(head, "cpu", selector)
        values = kernels.on("cpu").ulp_deltas(old, new) if relative else new
        writer.add(0, len(now), positions, values, relative=relative, whole=lambda: now)
        used.update(writer.codecs)
        return writer.finish()

    frame = encode()
    seconds = fastest(encode, repeat), fastest(lambda: list(read_frame(frame, head)), repeat)
    return used.pop(), (len(frame) / len(new), seconds[0] / len(new), seconds[1] / len(new))


def gap(costs: dict[str, Cost], codec: str, measure: Callable[[Cost], float]) -> float:
    """Return by how much the best pair with a codec beats the best one without it; below 0: does not."""
    with_it = [measure(each) for pair, each in costs.items() if codec in pair.split("+")]
    without = [measure(each) for pair, each in costs.items() if codec not in pair.split("+")]
    return min(without) / min(with_it) - 1 if with_it and without else -1.0


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--pairs", action="store_true")
    said = parser.parse_args()
    torch.set_num_threads(1)
    measures: dict[str, Callable[[Cost], float]] = {"bytes": lambda each: each[0]}
    for link, speed in LINKS.items():
        measures[link] = lambda each, speed=speed: 1e9 * (each[1] + each[2] + each[0] / speed)  # type: ignore[misc]
    pairs = [f"{index}+{value}" for index, value in product(INDEXES, VALUES) if index != "again"]
    best: dict[str, tuple[float, str]] = {}
    for (kind, width, change), run, density in product(kinds(), (1, 64), DENSITIES):
        found, where = (
            changes(said.elements, density, width, change, run),
            f"{kind}, {density:.3%}, runs of {run}",
        )
        costs = {
            pair: each for pair in pairs for used, each in [cost(pair, found, said.repeat)] if used == pair
        }
        taken = [cost("small", found, 0)[0], *(cost("auto", found, 0, speed)[0] for speed in LINKS.values())]
        fields = [where]
        for (name, measure), choice in zip(measures.items(), taken, strict=True):
            pair = min(costs, key=lambda pair: measure(costs[pair]))
            fields.append(f"{name}: {pair} {measure(costs[pair]):.3f} [{choice}]")
        print("  ".join(fields), flush=True)
        for pair, (size, encode, decode) in costs.items() if said.pairs else ():
            print(f"    {pair:14} {size:8.3f} B  {encode * 1e9:8.2f} ns + {decode * 1e9:8.2f} ns")
        for codec, (name, measure) in product((*INDEXES, *VALUES), measures.items()):
            here = gap(costs, codec, measure), where
            best[f"{codec}, {name}"] = max(best.get(f"{codec}, {name}", here), here)
    for key, (most, where) in sorted(best.items()):
        print(f"{key}: at best {most:+.1%} against the best pair without it ({where})")


if __name__ == "__main__":
    main()
