"""One timed call on one rank, and what all ranks' calls say together."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from benchlib.limit import Limit
from benchlib.links import INTERFACE
from benchlib.methods import Moved

__all__ = ["Call", "Summary", "read_seconds", "summarize", "timed"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """One call on one rank.

    Attributes:
        seconds: from the barrier before it to its return on this rank.
        cpu: process time, all threads.
        rss: bytes of memory at the peak beyond those before.
        nic: bytes sent and received on this rank's link; None without links.
        moved: what the method reports.
        limit: of what changed on this rank.
        is_source: what this rank is.
    """

    seconds: float
    cpu: float
    rss: int
    nic: tuple[int, int] | None
    moved: Moved
    limit: Limit
    is_source: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """All repetitions on all ranks; the fields are those of `Row`."""

    times: tuple[float, ...]
    cpu_s: float
    wire_bytes: int
    nic_bytes: int | None
    changed: int
    limit: Limit
    phases: dict[str, float]
    source_rss_mib: float
    receiver_rss_mib: float

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Row`."""
        return {
            "times": self.times,
            "median_s": median(self.times),
            "min_s": min(self.times),
            "cpu_s": self.cpu_s,
            "wire_bytes": self.wire_bytes,
            "nic_bytes": self.nic_bytes,
            "changed": self.changed,
            "bytes_per_change": self.wire_bytes / self.changed if self.changed else None,
            "limit_bytes_per_change": self.limit.bytes_per_change,
            "phases": self.phases,
            "source_rss_mib": self.source_rss_mib,
            "receiver_rss_mib": self.receiver_rss_mib,
        }


def timed(
    call: Callable[[], Moved], group: dist.ProcessGroup, *, limit: Limit, is_source: bool, linked: bool
) -> Call:
    """Run one call between nothing but a barrier and a look at the clock."""
    _reset_peak()
    held = _memory("VmRSS")
    dist.barrier(group)
    traffic = _traffic() if linked else None
    cpu, begin = _cpu(), time.perf_counter()
    moved = call()
    seconds, cpu = time.perf_counter() - begin, _cpu() - cpu
    after = _traffic() if linked else None
    nic = (
        (after[0] - traffic[0], after[1] - traffic[1]) if traffic is not None and after is not None else None
    )
    return Call(seconds, cpu, max(0, _memory("VmHWM") - held), nic, moved, limit, is_source)


def summarize(repetitions: Sequence[Sequence[Call]]) -> Summary:
    """Put together the calls of all ranks in all repetitions."""
    limits = [sum((call.limit for call in calls), Limit()) for calls in repetitions]
    total = sum(limits, Limit())
    nics = [
        max(max(call.nic) for call in calls if call.nic is not None)
        for calls in repetitions
        if calls[0].nic is not None
    ]
    return Summary(
        times=tuple(max(call.seconds for call in calls) for calls in repetitions),
        cpu_s=median(sum(call.cpu for call in calls) for calls in repetitions),
        wire_bytes=int(median(max(call.moved.wire_bytes for call in calls) for calls in repetitions)),
        nic_bytes=int(median(nics)) if nics else None,
        changed=round(median(limit.changed for limit in limits)),
        limit=total,
        phases=_phases(repetitions),
        source_rss_mib=_most(call.rss for calls in repetitions for call in calls if call.is_source) / _MIB,
        receiver_rss_mib=_most(call.rss for calls in repetitions for call in calls if not call.is_source)
        / _MIB,
    )


def read_seconds(arrays: Iterable[Tensor]) -> float:
    """Return the seconds in which one core reads these arrays (int16, contiguous) once: the best of three
    sums.
    """
    words = [array.numpy()[: array.numel() // 4 * 4].view(np.uint64) for array in arrays]
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for each in words:
            each.sum()
        best = min(best, time.perf_counter() - begin)
    return best


def _phases(repetitions: Sequence[Sequence[Call]]) -> dict[str, float]:
    names = dict.fromkeys(name for calls in repetitions for call in calls for name in call.moved.phases)
    return {
        name: median(max(call.moved.phases.get(name, 0.0) for call in calls) for calls in repetitions)
        for name in names
    }


def _most(values: Iterable[int]) -> int:
    return max(values, default=0)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory(name: str) -> int:
    """Return VmRSS or VmHWM (the peak) of this process in bytes; 0 where /proc does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # then the peak is that of the whole run
        return


def _traffic() -> tuple[int, int]:
    """Return the bytes that this rank's link has sent and received so far."""
    numbers = Path("/sys/class/net", INTERFACE, "statistics")
    sent, received = (int((numbers / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return sent, received
