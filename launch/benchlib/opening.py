"""What is paid once: the first call on a channel, and compiling the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchlib.check import check
from benchlib.context import Context
from benchlib.delta import Live
from benchlib.limit import Limit
from benchlib.measure import Call, Summary, summarize, timed
from benchlib.methods import Moved
from benchlib.settings import Scenario
from benchlib.world import World, even_shapes

__all__ = ["compile_rows", "open_rows"]

_COMPILE = """
import time, numba, torch
from dte_dist import kernels
begin = time.perf_counter()
kernels.warm([2])
print(time.perf_counter() - begin)
"""


def open_rows(scenario: Scenario, context: Context) -> Iterator[dict[str, Any]]:
    """Yield a row for the first `delta_broadcast` on a channel: it opens it and sends everything."""
    world = World(scenario, even_shapes(scenario))
    if not world.is_member:
        return
    rng = torch.Generator().manual_seed(scenario.seed)
    for live in world.locals() if world.is_source else ():
        live.normal_(0, 0.02, generator=rng)

    def first_call() -> Moved:
        report = channel.sync("delta_broadcast")
        return Moved(report.wire_bytes, report.phases)

    repetitions: list[list[Call]] = []
    for number in range(-scenario.warmup, scenario.repeat):
        channel = Live(world, "", scenario.bucket_bytes)
        call = timed(first_call, world.group, limit=Limit(), is_source=world.is_source, linked=context.linked)
        check(world, f"{scenario.name}: open")
        channel.close()
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, call, group=world.group)
        repetitions += [everyone] if number >= 0 else []
    yield _row("open", summarize(repetitions), context) | {"elements": world.elements}


def compile_rows(scenario: Scenario, context: Context) -> Iterator[dict[str, Any]]:
    """Yield a row for compiling the kernels of bf16 with nothing cached, and one for loading them from the cache."""
    if dist.get_rank() != 0:
        return
    cold, warm = [], []
    for _ in range(scenario.repeat):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(_compile(cache))
            warm.append(_compile(cache))
    for name, times in (("compile", cold), ("load compiled", warm)):
        summary = Summary(tuple(times), sum(times) / len(times), 0, None, 0, Limit(), {}, 0.0, 0.0)
        yield _row(name, summary, context) | {"elements": 0}


def _row(method: str, summary: Summary, context: Context) -> dict[str, Any]:
    row = {"method": method, "codec": "", "density": 0.0} | summary.fields()
    context.say(f"  {method:16} {row['median_s']:9.3f} s")
    return row


def _compile(cache: str) -> float:
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
