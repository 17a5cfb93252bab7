"""Find the best pair of codecs: bytes and time for each changed element, by density and kind of change.

    python launch/codec_survey.py [--elements 2097152] [--repeat 9]

A line names the pair with the fewest bytes, and the one with the least seconds over each link (codecs and
wire). The last lines say how far each codec is, at best, from the best pair without it. One thread, minimum
of the repetitions; compare ratios within one run only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec import CodecSelector, FrameHead, FrameWriter, read_frame
from dte_dist.codec.index_codecs import INDEX_CODECS
from dte_dist.codec.value_codecs import VALUE_CODECS

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95)
LINKS = {"1 Gb/s": 125e6, "10 Gb/s": 1.25e9, "100 Gb/s": 12.5e9}

Cost = tuple[float, float]
"""Bytes and seconds for each changed element."""


def training(old: Tensor, rng: torch.Generator) -> Tensor:
    """Move bits by one or two ULP, as a step of an optimizer does."""
    steps = torch.randint(1, 9, old.shape, generator=rng)
    distance = torch.where(steps < 7, 1, torch.where(steps < 8, 2, 3))
    sign = torch.randint(0, 2, old.shape, generator=rng) * 2 - 1
    return (old + (distance * sign).to(old.dtype)).to(old.dtype)


def anything(old: Tensor, rng: torch.Generator) -> Tensor:
    """Return bits that have nothing to do with those before."""
    bits = torch.iinfo(old.dtype)
    return torch.randint(bits.min, bits.max, old.shape, generator=rng, dtype=torch.int64).to(old.dtype)


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {"training": training, "anything": anything}


def changes(elements: int, density: float, width: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return positions, old bits, new bits and all new bits of a range."""
    rng = torch.Generator().manual_seed(1)
    dtype = kernels.BITS[width]
    weights = torch.randn(elements, generator=rng) * 0.04
    known = (
        (weights.bfloat16() if width == 2 else weights).view(dtype)
        if width > 1
        else anything(torch.zeros(elements, dtype=dtype), rng)
    )
    positions = (torch.rand(elements, generator=rng) < density).nonzero().view(-1).to(torch.int32)
    old = known[positions.long()]
    new = KINDS[kind](old, rng)
    now = known.clone()
    now[positions.long()] = new
    return positions, old, new, now


def fastest(call: Callable[[], object], repeat: int) -> float:
    """Return the least seconds of a call."""
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def cost(pair: str, found: tuple[Tensor, Tensor, Tensor, Tensor], repeat: int) -> Cost | None:
    """Return what a pair costs; None where it is not taken for such elements."""
    positions, old, new, now = found
    width, length = new.element_size(), len(now)
    head = FrameHead(7, 9, 1, 2, 0, 0, 1, width, 0, length)
    selector = CodecSelector(pair)
    relative = selector.relative(width)
    used: set[str] = set()

    def encode() -> Tensor:
        writer = FrameWriter(head, "cpu", selector)
        values = kernels.on("cpu").ulp_deltas(old, new) if relative else new
        writer.add(0, length, positions, values, relative=relative, whole=lambda: now)
        used.update(writer.codecs)
        return writer.finish()

    frame = encode()
    if used != {pair}:
        return None
    seconds = fastest(encode, repeat) + fastest(lambda: list(read_frame(frame, head)), repeat)
    return len(frame) / len(new), seconds / len(new)


def survey(elements: int, repeat: int) -> Iterator[tuple[str, float, dict[str, Cost]]]:
    """Yield kind and width, density, and the cost of every pair that applies."""
    pairs = [f"{index}+{value}" for index, value in product(INDEXES, VALUES) if index != "again"]
    for width, kind in product((2, 4, 1), KINDS):
        for density in DENSITIES:
            found = changes(elements, density, width, kind)
            costs = {pair: cost(pair, found, repeat) for pair in pairs}
            yield f"{kind}, {width} bytes", density, {pair: each for pair, each in costs.items() if each}


INDEXES = [codec.name for codec in INDEX_CODECS.values()]
VALUES = [codec.name for codec in VALUE_CODECS.values()]


def gap(costs: dict[str, Cost], codec: str, measure: Callable[[Cost], float]) -> float:
    """Return by how much the best pair with a codec beats the best one without it; below 0: does not."""
    with_it = [measure(each) for pair, each in costs.items() if codec in pair.split("+")]
    without = [measure(each) for pair, each in costs.items() if codec not in pair.split("+")]
    return min(without) / min(with_it) - 1 if with_it and without else -1.0


def seconds_over(speed: float, each: Cost) -> float:
    """Return the seconds of codecs and wire for each changed element."""
    return each[1] + each[0] / speed


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 21)
    parser.add_argument("--repeat", type=int, default=9)
    said = parser.parse_args()
    torch.set_num_threads(1)
    best: dict[str, float] = {}
    for what, density, costs in survey(said.elements, said.repeat):
        fewest = min(costs, key=lambda pair: costs[pair][0])
        line = [f"{what:18} {density:6.1%}  bytes: {fewest} {costs[fewest][0]:.3f}"]
        measures: dict[str, Callable[[Cost], float]] = {"bytes": lambda each: each[0]}
        measures |= {link: partial(seconds_over, speed) for link, speed in LINKS.items()}
        for link in LINKS:
            quickest = min(costs, key=lambda pair: measures[link](costs[pair]))
            line.append(f"{link}: {quickest} {measures[link](costs[quickest]) * 1e9:.1f} ns")
        print("  ".join(line), flush=True)
        for codec, (name, measure) in product((*INDEXES, *VALUES), measures.items()):
            key = f"{codec} by {'bytes' if name == 'bytes' else 'time'}"
            best[key] = max(best.get(key, -1.0), gap(costs, codec, measure))
    for key, most in sorted(best.items()):
        print(f"{key}: at best {most:+.1%} against the best pair without it")


if __name__ == "__main__":
    main()
