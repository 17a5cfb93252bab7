"""Times `delta_broadcast` and `delta_p2p` beside what a user would pick instead, and checks every call bit
for bit.

    torchrun --standalone --nproc-per-node 4 launch/bench.py --preset quick
    python launch/bench.py --preset links --links 1gbit

1. A preset (configs/bench_<name>.toml) lists scenarios: how many ranks, which model, how much of it changes,
   which methods.
2. In each repetition all methods take turns on the same ranks, weights and buffers. Each gets an update of
   its own, of one density.
3. Before every timed call all ranks meet; its time is that of the slowest rank. Afterwards, not timed, all
   ranks compare bits.
4. Rank 0 prints a table and writes the rows as JSON; `launch/bench_report.py` makes docs/results.md from such
   files.

The methods: (a) `dense_broadcast`, everything gathered with `full_tensor()`, packed and broadcast; (b)
`dense_p2p`, a dense reshard by `delta_p2p`; (c) `published`, the design of public trainers (see
benchlib/published.py); and the deltas of this package.

Without torchrun the bench starts the ranks itself, as many as the preset needs. With `--links` it gives each
a network namespace of its own behind a link of that rate (see benchlib/links.py), which needs root.
"""

from __future__ import annotations

import os
import sys

from benchlib.launcher import STARTED, launch
from benchlib.links import NetworkError
from benchlib.settings import Flags, read_flags
from commonlib.console import complain


def main() -> int:
    flags, scenarios = read_flags()
    ranks = max(scenario.sources + scenario.receivers for scenario in scenarios)
    if "RANK" not in os.environ:
        return start(ranks, flags)
    if flags.links and STARTED not in os.environ:
        return complain("--links starts the ranks itself: run it without torchrun", code=1)
    if int(os.environ["WORLD_SIZE"]) < ranks:
        return complain(
            f"preset {flags.preset} needs {ranks} ranks: torchrun --standalone --nproc-per-node "
            f"{ranks} launch/bench.py ...",
            code=1,
        )
    from benchlib import (
        rank,
    )  # here, since it takes seconds, and the process that starts the ranks needs none of it

    return rank.main(flags, scenarios)


def start(ranks: int, flags: Flags) -> int:
    """Start the ranks and wait for them."""
    try:
        return launch(__file__, sys.argv[1:], ranks, flags.rate)
    except NetworkError as error:
        return complain(str(error), code=1)
    except KeyboardInterrupt:
        return complain("interrupted", code=1)


if __name__ == "__main__":
    sys.exit(main())
