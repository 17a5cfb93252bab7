"""What ranks run, an application that trains, syncs and goes on after errors: programs that the parent names.

`step` is the core: it calls a collective until a call ends well, as an application does that catches
`DeltaError`, and says so at each try. A rank can be interrupted in its first try. Its answer holds the bits:
those of a source from just before the call that ended well, those of a receiver from just after it.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

import dte_dist
from dte_dist import DeltaError, SyncReport
from tests.chaos.faults import options_of, suffer
from tests.chaos.interrupts import Interrupt, points_of
from tests.chaos.model import Bits, Model

__all__ = [
    "Here",
    "begin",
    "build",
    "close",
    "deliver",
    "forsake",
    "leaks",
    "points",
    "points_of_delivery",
    "refill",
    "step",
    "syncs",
    "two_modules",
]

TIMEOUT: Final = 10.0
SHORT: Final = 4.0
"""Seconds for ranks that meet in lock step, so that each interrupt may cost a timeout."""


class Here:
    """What a process keeps between programs.

    Attributes:
        say: sends a message to the parent.
        rank, size: in the group that is open.
        model: that is kept in step.
        copy: on a rank that is source and receiver, what it receives into.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self.say = say
        self.rank, self.size = 0, 0
        self.model: Model = None  # type: ignore[assignment]  # `build` comes before everything else
        self.copy: Model | None = None
        self.engine: dte_dist.DeltaEngine | None = None
        self.transport: dte_dist.ProcessGroupTransport | None = None
        self.store: dist.Store | None = None
        self.stores: dict[int, dist.Store] = {}


def begin(
    here: Here, *, rank: int, size: int, timeout: float, port: int, prefix: str, file: str, store: str
) -> None:
    """Form a group, over a store of the parent, in a file, or of rank 0."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if port not in here.stores:
        here.stores[port] = dist.TCPStore("127.0.0.1", port, is_master=False)
    found: dist.Store = dist.PrefixStore(prefix, here.stores[port])
    if store == "file":
        found = dist.FileStore(file, size)
    elif store == "rank":
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        if own is not None:
            found.set("port", str(own.port))
        found = own or dist.TCPStore("127.0.0.1", int(found.get("port")), is_master=False)
    here.rank, here.size, here.store = rank, size, found
    dist.init_process_group(
        "gloo", store=found, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


def build(
    here: Here,
    *,
    sources: int,
    cut: str = "whole",
    kind: str = "views",
    fill: int | None = None,
    scale: int = 1,
    keep: bool = False,
    colocated: bool = False,
) -> None:
    """Make this rank's part of the model; with `keep` only where it has another part, or none.

    If ranks are colocated, each is a source of its rows, and has a copy of the whole besides.
    """
    old = here.model
    if keep and old is not None and (old.rank < old.sources) == (here.rank < sources):
        same_rows = (old.rank, old.sources) == (here.rank, sources)
        if same_rows if here.rank < sources else cut == old.cut == "whole":
            old.rank, old.sources, old.size = here.rank, sources, here.size
            return
    here.model = here.copy = None  # type: ignore[assignment]
    del old
    gc.collect()
    here.model = Model(here.rank, sources, here.size, cut=cut, kind=kind, fill=fill, scale=scale)
    if colocated:
        here.copy = Model(here.rank, 0, here.size, cut=cut, kind=kind, fill=None, scale=scale)


def refill(here: Here, *, full: Bits) -> None:
    """Take over this rank's part of full tensors, as from a checkpoint; sources only."""
    if here.rank < here.model.sources:
        here.model.fill(full)


def close(here: Here) -> None:
    """End the channel of the model, as all ranks do."""
    dte_dist.close(here.model.handle)


def leaks(here: Here) -> dict[str, int]:
    """Count what a process must not collect as time goes by."""
    gc.collect()
    return {"threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}


def call(here: Here, how: Mapping[str, Any], after: Callable[[], None] | None = None) -> SyncReport:
    """Call a collective once, as `how` says; `after` is done while a sync in the background runs."""
    collective = dte_dist.delta_p2p if how.get("p2p") else dte_dist.delta_broadcast
    options = {"timeout": TIMEOUT, "bucket_bytes": 1024, **how.get("options", {})}
    sources = list(range(here.model.sources))
    if here.copy is not None:
        options["into"] = here.copy.handle
    if how.get("background"):
        work = collective(here.model.handle, group_src=sources, async_op=True, **options)
        if after is not None:
            after()
        return work.wait()
    report = collective(here.model.handle, group_src=sources, **options)
    if how.get("verify") and not (found := dte_dist.verify(here.model.handle)).equal:
        raise RuntimeError(f"a sync ended well, and verify says: {found}")
    return report


def points(here: Here, *, how: Mapping[str, Any], change: float, seed: str, unit: str = "line") -> list[str]:
    """Sync once; return where the call could have been interrupted."""
    train(here, random.Random(seed), change)
    return points_of(lambda: call(here, how), unit)  # type: ignore[arg-type]


def train(here: Here, choose: random.Random, share: float) -> None:
    """Change weights, if this rank is a source."""
    if share and here.rank < here.model.sources:
        here.model.change(choose, share)


def step(
    here: Here,
    *,
    how: Mapping[str, Any],
    seed: str,
    change: float = 0.05,
    again: bool = True,
    tries: int = 8,
    fault: Mapping[str, Any] | None = None,
    delay: float = 0.0,
) -> dict[str, Any]:
    """Sync until a call ends well.

    Args:
        how: the collective: `p2p`, `background`, `options`; with `verify`, another one after it.
        seed: of the changes.
        change: share of the elements that a source changes before a call.
        again: change before each further try, too.
        tries: calls that may fail before this program raises.
        fault: what happens in the first try, see `faults`.
        delay: seconds before the first call.
    """
    choose = random.Random(f"{seed} {here.rank}")
    for number in range(tries):
        if number == 0 or again:
            train(here, choose, change)
        time.sleep(delay if number == 0 else 0.0)
        before, begin = here.model.bits(), time.monotonic()
        here.say(said="calling", number=number)
        try:
            report = _try(here, how, choose, fault if number == 0 else None)
        except (DeltaError, ValueError) as error:
            here.say(
                said="failed", error=type(error).__name__, text=str(error), seconds=time.monotonic() - begin
            )
        except (Interrupt, MemoryError) as error:
            here.say(
                said="interrupted",
                where=str(error),
                error=type(error).__name__,
                seconds=time.monotonic() - begin,
            )
        else:
            return _answer(here, report, number + 1, time.monotonic() - begin, before)
        finally:
            _check_modes()
    raise RuntimeError(f"no call ended well in {tries} tries")


def _check_modes() -> None:
    """A call that broke off must not leave the thread of the trainer without gradients."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        torch.set_grad_enabled(True)
        raise RuntimeError("a call left torch without gradients, or in inference mode")


def _try(
    here: Here, how: Mapping[str, Any], choose: random.Random, fault: Mapping[str, Any] | None
) -> SyncReport:
    reports: list[SyncReport] = []
    how = {**how, "options": {**how.get("options", {}), **options_of(fault)}}

    def one() -> None:
        reports.append(call(here, how, lambda: train(here, choose, 0.02)))

    if fault is None or fault["kind"] == "describe":
        one()
    else:
        suffer(here.model, one, **fault)
    return max(reports, key=lambda report: report.version)


def _answer(here: Here, report: SyncReport, tries: int, seconds: float, before: Bits) -> dict[str, Any]:
    is_source = here.rank < here.model.sources
    return {
        "version": report.version,
        "base": report.base_version,
        "kind": report.kind,
        "reason": report.reason,
        "seeded": list(report.seeded),
        "tries": tries,
        "seconds": seconds,
        "bits": before if is_source else here.model.bits(),
        "copy": here.copy.bits() if here.copy is not None else None,
    }


def syncs(
    here: Here, *, how: Mapping[str, Any], seed: str, most: int, pause: float = 0.0, change: float = 0.05
) -> dict[str, Any]:
    """Sync until a call fails, pausing up to so many seconds; says "calling" and "called" around each."""
    choose = random.Random(f"{seed} {here.rank}")
    for number in range(most):
        train(here, choose, change)
        time.sleep(choose.random() * pause)
        here.say(said="calling", number=number)
        begin = time.monotonic()
        try:
            call(here, how)
        except (DeltaError, ValueError) as error:
            seconds = time.monotonic() - begin
            return {
                "error": type(error).__name__,
                "text": str(error),
                "seconds": seconds,
                "number": number,
                "bits": here.model.bits(),
            }
        here.say(said="called", number=number, seconds=time.monotonic() - begin)
    return {"error": "", "text": "", "seconds": 0.0, "number": most, "bits": here.model.bits()}


def two_modules(here: Here, *, sources: int, seed: str, count: int, p2p: bool) -> list[list[Bits]]:
    """Keep two models in step over one group, each in its own thread; return their bits after each sync."""
    models = [Model(here.rank, sources, here.size, cut="whole", kind="views", fill=fill) for fill in range(2)]
    found: list[list[Bits]] = [[], []]
    raised: list[BaseException] = []

    def sync(number: int) -> None:
        choose = random.Random(f"{seed} {number} {here.rank}")
        if here.rank < sources:
            models[number].change(choose, 0.05)
        time.sleep(choose.random() * 0.01)
        collective = dte_dist.delta_p2p if p2p else dte_dist.delta_broadcast
        collective(models[number].handle, group_src=list(range(sources)), timeout=TIMEOUT, bucket_bytes=1024)
        found[number].append(models[number].bits())

    def run(number: int) -> None:
        try:
            for _ in range(count):
                sync(number)
        except BaseException as error:
            raised.append(error)

    for number in range(2):  # channels are opened in one order on all ranks
        sync(number)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return found


def deliver(
    here: Here, *, version: int, full: bool, seed: str, fault: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Push (rank 0) or pull a version over a `ProcessGroupTransport`, a new one if there is none.

    An application that is interrupted tries again at once. One that is told that a peer is lost, or that the
    transport is closed, makes a new one next time.
    """
    train(here, random.Random(f"{seed} {here.rank}"), 0.05)
    bits, said = here.model.bits(), list[str]()
    for number in range(2):
        try:
            if number == 0 and fault is not None:
                suffer(here.model, lambda: _deliver(here, version, full), **fault)
            else:
                _deliver(here, version, full)
            return {"ok": True, "said": said, "bits": bits if here.rank == 0 else here.model.bits()}
        except (Interrupt, MemoryError) as error:
            said.append(f"{type(error).__name__}: {error}")
        except (DeltaError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
            if isinstance(error, dte_dist.PeerLost | dte_dist.ChannelClosed):
                here.transport = here.engine = None
            break
    return {"ok": False, "said": said, "bits": bits}


def _deliver(here: Here, version: int, full: bool) -> None:
    if here.transport is None or here.engine is None:
        here.transport = dte_dist.ProcessGroupTransport(timeout=SHORT)
        here.engine = dte_dist.DeltaEngine(here.transport, timeout=SHORT)
    if here.rank == 0:
        here.engine.push(here.model.tensors, version, full=full)
    else:
        here.engine.pull(here.model.tensors, version)


def forsake(here: Here) -> None:
    """Close the transport, as all ranks do, and let the next `deliver` make a new one."""
    if here.transport is not None:
        here.transport.close()
    here.transport = here.engine = None


def points_of_delivery(here: Here, *, version: int, opening: bool, unit: str) -> list[str]:
    """Deliver a version; return where the call could have been interrupted."""
    if opening:
        forsake(here)
    return points_of(lambda: _deliver(here, version, True), unit)  # type: ignore[arg-type]
