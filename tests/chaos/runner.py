"""Processes to be broken on purpose: started plainly, driven over pipes, and hit by signals.

    with World(3) as world:                          # three processes, no group yet
        world.begin()                                # a gloo group of all of them
        world.run("build", sources=1)                # a program on each of them, to its end
        world.tell(1, "step", how={}, seed="1")      # a program on one; it answers in lines of JSON
        number, message = world.read(seconds=20.0)   # "calling", "failed", ..., in the end "done"
        world.hit(1, signal.SIGKILL)

`torchrun` ends the survivors of a rank that died, and `multiprocessing` watches its children with threads of
its own, so neither is used. A process that ends by itself is an error here, named by the signal that ended it
and the end of what it wrote to stderr; so is one that does not answer, with the stacks of all its threads.
Every choice comes from `SEED`: the environment variable DTE_CHAOS_SEED, a number, or "random".
DTE_CHAOS_ROUNDS makes tests longer: the number of rounds of each, or "all" where a test knows how many there
are.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

__all__ = ["SEED", "Message", "WentWrong", "World", "pick", "rounds"]

_SAID: Final = os.environ.get("DTE_CHAOS_SEED", "1")
SEED: Final = random.SystemRandom().getrandbits(32) if _SAID == "random" else int(_SAID)
PATIENCE: Final = 120.0
"""Seconds that a process may take to start: longer than kernels take to compile."""

_ENVIRONMENT: Final = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
_TAIL: Final = 6000
_FOREVER: Final = 1 << 30

Message = dict[str, Any]


class WentWrong(AssertionError):
    """A process died or hung by itself, or what it did is wrong; says with which seed."""

    def __init__(self, text: str) -> None:
        said = f"[DTE_CHAOS_SEED={SEED}]"
        super().__init__(f"{text.replace(said, '').rstrip()}\n{said}")


def pick(*what: object) -> random.Random:
    """Return the random numbers for a purpose: the same for the same seed."""
    return random.Random(f"{SEED} {what}")


def rounds(short: int, every: int | None = None) -> int:
    """Return how many rounds a test makes: `short`, or as the environment says; "all" means `every`."""
    said = os.environ.get("DTE_CHAOS_ROUNDS", "")
    if said == "all":
        return short if every is None else every
    return min(int(said), every or _FOREVER) if said else short


class _Process:
    """One process; `dead` once it was killed on purpose."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.dead, self.busy = number, False, True
        self.errors = folder / f"stderr_{number}.txt"
        self._rest, self.inbox = b"", deque[Message]()
        with self.errors.open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_ENVIRONMENT,
            )
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.input, self.output = self.popen.stdin, self.popen.stdout
        os.set_blocking(self.output.fileno(), False)

    def tell(self, message: Message) -> None:
        self.busy = True
        try:
            self.input.write(json.dumps(message).encode() + b"\n")
            self.input.flush()
        except BrokenPipeError:
            raise self.end() from None

    def listen(self) -> None:
        """Take in what it has written; raises if it has ended by itself."""
        data = self.output.read(1 << 22)
        if data == b"":
            if not self.dead:
                raise self.end()
            return
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        self.inbox.extend(map(json.loads, lines))

    def end(self) -> WentWrong:
        """Say how it ended, though nobody told it to."""
        try:
            code = self.popen.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return WentWrong(f"process {self.number} ended by {how}, and nobody had killed it\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of what it wrote to stderr."""
        lines = self.errors.read_text(errors="replace").splitlines()
        text = "\n".join(line for line in lines if not line.startswith("Extension modules:"))
        return f"--- stderr of process {self.number}:\n{text[-_TAIL:]}"


class World:
    """Some processes, of which a number are in a group.

    Args:
        size: how many start at once.

    Attributes:
        members: processes of the group that is open, by rank.
        store: where that group has its store.
        sound: whether all is well with all processes that are left; if not, take new ones.
    """

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dte_chaos_")
        self.folder = Path(self._folder.name)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[_Process] = []
        self._groups, self.store = 0, ""
        self.members: list[int] = []
        self.sound = True
        for _ in range(size):
            self.add()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all that are left."""
        self.sound = False
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()
            process.input.close()
            process.output.close()
        self._folder.cleanup()

    @property
    def living(self) -> list[int]:
        """Numbers of the processes that nobody killed."""
        return [process.number for process in self._processes if not process.dead]

    def add(self) -> int:
        """Start one more process; return its number. It says "ready" once it can be told something."""
        self._processes.append(_Process(len(self._processes), self.folder))
        return len(self._processes) - 1

    def begin(
        self, members: Iterable[int] | None = None, *, store: str = "parent", timeout: float = 60.0
    ) -> None:
        """Let some processes form a gloo group, in this order; the group before it is dropped.

        Args:
            members: numbers of processes; None for all that live.
            store: "parent" keeps the store in this process, "file" in a file, "rank" on rank 0, with which it
                dies.
            timeout: seconds that collectives of the group itself may take.
        """
        self.members, self.store = list(self.living if members is None else members), store
        self._groups += 1
        where = {
            "port": self._store.port,
            "prefix": f"world/{self._groups}",
            "file": str(self.folder / f"store_{self._groups}"),
            "store": store,
        }
        for rank, number in enumerate(self.members):
            self.tell(number, "begin", rank=rank, size=len(self.members), timeout=timeout, **where)
        self.results(self.members, PATIENCE)

    def tell(self, number: int, program: str, **parameters: Any) -> None:
        """Let a process run a function of `programs.py`."""
        self._processes[number].tell({"program": program, "parameters": parameters})

    def run(self, program: str, seconds: float = PATIENCE, **parameters: Any) -> list[Any]:
        """Run a program on all members; return what it returns, by rank."""
        for number in self.members:
            self.tell(number, program, **parameters)
        return self.results(self.members, seconds)

    def results(self, numbers: Iterable[int], seconds: float) -> list[Any]:
        """Wait until these processes are done; return their results, in this order."""
        numbers, done, deadline = list(numbers), dict[int, Any](), time.monotonic() + seconds
        while left := [number for number in numbers if number not in done]:
            found = self.read(deadline - time.monotonic(), left)
            if found is None:
                raise self.hang(left, seconds)
            number, message = found
            if "done" in message:
                done[number] = message["done"]
            elif "raised" in message:
                self.sound = False
                raise WentWrong(
                    f"process {number} raised {message['raised']}: {message['text']}\n{message['trace']}"
                )
        return [done[number] for number in numbers]

    def read(self, seconds: float, numbers: Iterable[int] | None = None) -> tuple[int, Message] | None:
        """Return the next message of a process (of those given), or None if there is none in this time.

        Raises:
            WentWrong: a process ended by itself.
        """
        these = [self._processes[number] for number in (self.living if numbers is None else numbers)]
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            for process in self._processes:
                if not process.dead:
                    ready.register(process.output, selectors.EVENT_READ, process)
            while True:
                for process in these:
                    if process.inbox:
                        message = process.inbox.popleft()
                        process.busy = process.busy and not message.keys() & {"done", "raised"}
                        return process.number, message
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                for key, _ in ready.select(left):
                    self._listen(key.data)

    def _listen(self, process: _Process) -> None:
        try:
            process.listen()
        except WentWrong:
            self.sound = False
            raise

    def busy(self) -> list[int]:
        """Return the members that have not answered yet."""
        return [number for number in self.members if self._processes[number].busy]

    def hit(self, number: int, what: int) -> None:
        """Send a signal; a process that is killed is gone afterwards."""
        process = self._processes[number]
        if what == signal.SIGKILL:
            process.dead = True
        process.popen.send_signal(what)
        if what == signal.SIGKILL:
            process.popen.wait()

    def hang(self, numbers: Iterable[int], seconds: float) -> WentWrong:
        """Return the error for processes that did not answer, with the stacks of their threads."""
        self.sound = False
        numbers = list(numbers)
        for number in numbers:
            self._processes[number].popen.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        tails = "\n".join(self._processes[number].tail() for number in numbers)
        return WentWrong(f"processes {numbers} gave no answer in {seconds:.0f} s\n{tails}")
