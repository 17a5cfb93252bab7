"""Real ranks for tests: processes that are started once and then run one function after another.

    @pytest.fixture(scope="module")
    def ranks():
        with Ranks(4) as ranks:
            yield ranks

    def program(rank, world, shape):          # top level of the test file; runs on every rank
        ...
        return something_picklable

    def test_it(ranks):
        assert ranks.run(program, (7, 3)) == [...]         # one result a rank, in rank order

A program runs inside an initialised gloo world (`dist.group.WORLD`). `Ranks(4, worlds=[2, 2])` makes two of
them, as trainers and an engine have; a world of 0 stands for one rank that has none. `outcomes` gives errors
back instead of raising them; `kill` sends SIGKILL. The processes come from a fork server that has torch
imported, so that starting four of them takes about half a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "numpy", "numba"]
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank made of a program: a value, or the class name, text and traceback of an error."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""
    died: bool = False


@dataclass(frozen=True, slots=True)
class _Home:
    """The default world of a rank: its store, and the rank's place in it; size 0 for none."""

    path: str
    rank: int
    size: int


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not answer in time."""


def _serve(rank: int, world: int, home: _Home, pipe: Connection, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if home.size:
        store = dist.FileStore(home.path, home.size)
        dist.init_process_group(
            "gloo", store=store, rank=home.rank, world_size=home.size, timeout=timedelta(seconds=timeout)
        )
    pipe.send(Outcome("ready"))
    while (task := pipe.recv()) is not None:
        function, args, kwargs = task
        try:
            pipe.send(Outcome(function(rank, world, *args, **kwargs)))
        except BaseException as error:  # the parent decides what it means
            pipe.send(Outcome(None, type(error).__name__, str(error), traceback.format_exc()))
    os._exit(0)


class Ranks:
    """`world` processes in one gloo group; use as a context manager.

    Args:
        world: number of ranks.
        timeout: seconds after which a collective of the gloo world itself fails.
        worlds: sizes of the default worlds, one after the other; 0 for a rank that has none. None is one
            world of all.
    """

    def __init__(self, world: int, timeout: float = 60.0, worlds: Sequence[int] | None = None) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        homes = [
            _Home(os.path.join(self._folder.name, f"store {number}"), place, size)
            for number, size in enumerate([world] if worlds is None else worlds)
            for place in range(max(size, 1))
        ]
        for rank, home in enumerate(homes):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, world, home, theirs, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._raise(self._collect(range(world), 120.0))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(
        self, program: Callable[..., Any], *args: Any, seconds: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Run `program(rank, world, *args, **kwargs)` on every rank; return the results in rank order."""
        return [
            outcome.value for outcome in self._raise(self.outcomes(program, *args, seconds=seconds, **kwargs))
        ]

    def outcomes(
        self, program: Callable[..., Any], *args: Any, seconds: float = 120.0, **kwargs: Any
    ) -> list[Outcome]:
        """Run a program and return what became of it on each rank, errors included."""
        self.start(program, *args, **kwargs)
        return self.finish(seconds)

    def start(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start a program on every live rank without waiting for it."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send((program, args, kwargs))

    def finish(self, seconds: float = 120.0) -> list[Outcome]:
        """Wait for the program that `start` began."""
        return self._collect(range(self.world), seconds)

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank and wait until it is gone."""
        process = self._processes[rank]
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def _collect(self, ranks: Iterable[int], seconds: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = {self._pipes[rank]: rank for rank in ranks}
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                for rank in waiting.values():
                    outcomes[rank] = Outcome(None, "Hang", f"rank {rank} gave no answer in {seconds} s")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = Outcome(None, "Died", f"rank {rank} died", died=True)
        return [outcomes[rank] for rank in sorted(outcomes)]

    @staticmethod
    def _raise(outcomes: list[Outcome]) -> list[Outcome]:
        bad = [
            f"--- rank {rank}: {o.error}: {o.text}\n{o.trace}" for rank, o in enumerate(outcomes) if o.error
        ]
        if bad:
            raise RanksFailed("\n".join(bad))
        return outcomes
