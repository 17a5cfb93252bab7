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
kernels.precompile([2])
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
    """Yield a row for compiling the kernels of bf16 with nothing cached, alone and on all ranks at once; and
    one for loading them.
    """
    if dist.get_rank() != 0:
        return
    times: dict[str, list[float]] = {"compile alone": [], "compile": [], "load compiled": []}
    for _ in range(scenario.repeat):
        for name, processes in (("compile alone", 1), ("compile", scenario.sources + scenario.receivers)):
            with tempfile.TemporaryDirectory() as cache:
                times[name].append(_compile(cache, processes))
                if processes == 1:
                    times["load compiled"].append(_compile(cache, 1))
    for name, all_ in times.items():
        summary = Summary(tuple(all_), sum(all_) / len(all_), 0, None, 0, Limit(), {}, 0.0, 0.0)
        yield _row(name, summary, context) | {"elements": 0}


def _row(method: str, summary: Summary, context: Context) -> dict[str, Any]:
    row = {"method": method, "codec": "", "density": 0.0} | summary.fields()
    context.say(f"  {method:16} {row['median_s']:9.3f} s")
    return row


def _compile(cache: str, processes: int) -> float:
    """Return the seconds until the last of some processes that share a cache has all kernels."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    started = [
        subprocess.Popen([sys.executable, "-c", _COMPILE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    return max(_seconds(process) for process in started)


def _seconds(process: subprocess.Popen[str]) -> float:
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"compiling the kernels ended with {process.returncode}")
    return float(said)
