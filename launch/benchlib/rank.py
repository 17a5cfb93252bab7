"""The bench on one rank, once all ranks have started."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from benchlib.check import NotExact
from benchlib.context import LOOPBACK, Context
from benchlib.plots import draw
from benchlib.report import print_tables
from benchlib.rows import Row, write_rows
from benchlib.run import run_all
from benchlib.settings import Flags, Scenario
from commonlib.console import Console

__all__ = ["main"]

_PATIENCE = timedelta(hours=2)  # ranks that a scenario does not need wait for it to end


def main(flags: Flags, scenarios: list[Scenario]) -> int:
    """Run all scenarios with the other ranks; returns the exit code."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        _run(flags, scenarios, leads=dist.get_rank() == 0)
    except NotExact as error:
        print(f"NOT BIT-EXACT: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


def _run(flags: Flags, scenarios: list[Scenario], *, leads: bool) -> None:
    console = Console(leads)

    def done(rows: list[Row]) -> None:
        if leads:
            write_rows(flags.rows, rows)

    rows = run_all(
        scenarios,
        Context(flags.preset_name, str(flags.rate or LOOPBACK), console.say, done),
    )
    if leads:
        print_tables(rows, console)
        for path in draw(rows, flags.plots) if flags.plots else ():
            console.say(f"plot: {path}")
        console.say(f"every receiver was bit-exact after every call; rows: {flags.rows}")
