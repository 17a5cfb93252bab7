"""Runs the scenarios of a preset on this rank: every rank calls `run_all` and goes through the same steps.

For each kind of update, for each repetition, for each method in turn:

1. Who did not write to the receivers last is brought up to date.
2. The sources take their next state.
3. All ranks meet; the method runs and is timed.
4. All ranks check that the receivers hold the sources' bits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchlib.check import check
from benchlib.context import Context
from benchlib.delta import Delta, Live
from benchlib.dense import Dense
from benchlib.limit import Limit
from benchlib.measure import Call, read_seconds, summarize, timed
from benchlib.methods import Method
from benchlib.opening import compile_rows, open_rows
from benchlib.published import Published
from benchlib.rows import Row, machine, now
from benchlib.settings import Scenario
from benchlib.updates import Generated, Trained, Updates, model_shapes
from benchlib.world import World, even_shapes

__all__ = ["run_all"]


def run_all(scenarios: Sequence[Scenario], context: Context) -> list[Row]:
    """Run all scenarios; returns the rows, which are of use on rank 0.

    Raises:
        NotExact: a method left a receiver with other bits than the sources'; on every rank of its scenario.
    """
    for scenario in scenarios:
        load = os.getloadavg()[0]
        common: dict[str, Any] = {
            "preset": context.preset,
            "scenario": scenario.name,
            "kind": scenario.kind,
            "links": context.links,
            "model_mib": scenario.model_mib,
            "tensors": scenario.tensors,
            "sources": scenario.sources,
            "receivers": scenario.receivers,
            "receivers_hold": scenario.receivers_hold,
            "updates": scenario.updates,
            "machine": machine(),
            "load": load,
        }
        model = f"{scenario.model_mib:g} MiB in {scenario.tensors} tensors"
        context.say(f"{now()} {scenario.name}: {scenario.kind}, {scenario.world}, {model} (load {load:.1f})")
        for fields in _RUNS[scenario.kind](scenario, context):
            context.rows.append(Row(**common | {"date": now()} | fields))
            context.done(context.rows)
        dist.barrier()
    return context.rows


def _sync_rows(scenario: Scenario, context: Context) -> Iterator[dict[str, Any]]:
    """Yield the fields of a row for every method under every kind of update."""
    trained = scenario.updates == "adamw"
    world = World(scenario, model_shapes(scenario.model_mib) if trained else even_shapes(scenario))
    if not world.is_member:
        return
    methods = _make_methods(scenario, world)
    for number in scenario.learning_rates if trained else scenario.densities:
        updates, read = _make_updates(scenario, world, number)
        calls = _take_turns(scenario, world, methods, updates, context)
        del updates
        gc.collect()
        for method, repetitions in zip(methods, calls, strict=True):
            summary = summarize(repetitions)
            density = summary.changed / world.elements * 100 if trained else number
            row: dict[str, Any] = {
                "method": method.name,
                "codec": method.codec,
                "density": density,
                "elements": world.elements,
            }
            row |= summary.fields() | {"learning_rate": number if trained else 0.0, "read_s": read}
            context.say(
                f"  {density:.3g} % {method.name:16} {method.codec:6} {row['median_s'] * 1e3:9.1f} ms"
            )
            yield row
    for method in methods:
        method.close()


def _take_turns(
    scenario: Scenario, world: World, methods: Sequence[Method], updates: Updates | None, context: Context
) -> list[list[list[Call]]]:
    """Return the calls of all ranks, by method and repetition."""
    kept: list[list[list[Call]]] = [[] for _ in methods]
    for method in methods:
        method.begin()
    writer: object = None
    for repetition in range(-scenario.warmup, scenario.repeat):
        for method, calls in zip(methods, kept, strict=True):
            if method.channel is not writer:
                method.catch_up()
                writer = method.channel
            limit = updates.advance() if updates is not None else Limit()
            call = timed(
                method.run, world.group, limit=limit, is_source=world.is_source, linked=context.linked
            )
            check(world, f"{scenario.name}: {method.name} {method.codec}".rstrip())
            if repetition >= 0:
                everyone: list[Any] = [None] * world.size
                dist.all_gather_object(everyone, call, group=world.group)
                calls.append(everyone)
    return kept


def _make_methods(scenario: Scenario, world: World) -> list[Method]:
    dense = Dense(world, scenario.bucket_bytes)
    lives = [Live(world, codec, scenario.bucket_bytes) for codec in scenario.codecs or ("",)]
    methods: list[Method] = []
    for name in scenario.methods:
        if name == dense.name:
            methods.append(dense)
        elif name == Published.name:
            methods.append(Published(world, scenario.bucket_bytes, dense))
        else:
            methods += [Delta(name, live) for live in (lives if name.startswith("delta") else lives[:1])]
    return methods


def _make_updates(scenario: Scenario, world: World, number: float) -> tuple[Updates | None, float]:
    """Return where a source's updates come from, and the seconds in which the slowest source reads what a
    delta compares.
    """
    seconds, updates = 0.0, None
    if world.is_source:
        updates = (
            Trained(world, scenario.model_mib, number)
            if scenario.updates == "adamw"
            else Generated(world, number, scenario.seed)
        )
        lives = [each.view(torch.int16).view(-1) for each in world.locals()]
        copies = [each.clone() for each in lives]
        dist.barrier(world.mesh.get_group())
        seconds = read_seconds([*lives, *copies])
    everyone: list[Any] = [0.0] * world.size
    dist.all_gather_object(everyone, seconds, group=world.group)
    return updates, max(everyone)


_RUNS: dict[str, Callable[[Scenario, Context], Iterator[dict[str, Any]]]] = {
    "sync": _sync_rows,
    "open": open_rows,
    "compile": compile_rows,
}
