"""Reports of a sync: versions, elements, bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["PHASES", "ChangedNames", "Marks", "Phases", "SyncReport", "VerifyReport", "format_bytes"]

PHASES = ("wait", "detect", "encode", "gather", "wire", "decode", "apply", "commit", "verify")
"""The phases of a sync, in the order in which they begin."""

_MOST_CODECS: Final = 3
"""Codec pairs that the line of a report names."""

Marks = Sequence[tuple[np.ndarray, np.ndarray | Tensor]]
"""Entries of a layout, and of each whether it is meant: int64[n] and bool[n], several times."""


@dataclass(frozen=True, slots=True, eq=False)
class ChangedNames:
    """Names of the tensors that a sync concerned, put together when somebody asks.

    Args:
        names: of all entries of a layout; a tensor of several regions comes several times.
        ties: groups of names that are one tensor.
        marks: which of the entries are meant; on the device where they were found.

    Example:
        >>> marks = [(np.array([0, 2]), np.array([False, True]))]
        >>> ChangedNames(["embed", "norm", "head"], [["embed", "head"]], marks).listed()
        ('embed', 'head')
    """

    names: Sequence[str] = ()
    ties: Sequence[Sequence[str]] = ()
    marks: Marks = ()

    def listed(self) -> tuple[str, ...]:
        """Return the names, sorted; of tied ones all. Waits for an accelerator that marks lie on."""
        found: set[str] = set()
        for entries, mask in self.marks:
            on_host = mask.cpu().numpy() if isinstance(mask, Tensor) else mask
            found.update(self.names[entry] for entry in entries[on_host].tolist())
        for group in self.ties:
            if not found.isdisjoint(group):
                found.update(group)
        return tuple(sorted(found))


class Phases:
    """Seconds spent in each phase on this rank; a range of the profiler for each.

    Example:
        >>> phases = Phases()
        >>> with phases("detect"):
        ...     pass
        >>> list(phases.seconds)
        ['detect']
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def coding(self) -> float:
        """Return the seconds spent on coding so far."""
        return self.seconds.get("encode", 0.0) + self.seconds.get("decode", 0.0)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block as time of phase `name`."""
        begin = time.perf_counter()
        with torch.profiler.record_function(f"dte_dist::{name}"):
            try:
                yield
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings of a verification; the same on every rank, but for the seconds.

    Attributes:
        version: the version that the sources' snapshot holds; None if they hold none, or different ones.
        tensors: how many the model has.
        different: how many of them differ on some receiver.
        first: name of the first that differs, in alphabetical order; None if none does.
        ranks: group ranks of the receivers that hold other bits; the next sync seeds them.
        compared: group ranks of the receivers that hold `version` and were compared; others are seeded
            anyway.
        moved: shards of sources whose live bits are not those of `version`: trained since, or missed by a
            detector. None where `verify_interval` verifies in the background: live bits may move then, and
            are not counted.
        seconds: of this rank.

    Example:
        >>> print(dte_dist.VerifyReport(3, 12, 1, "lm_head.weight", (2,), (2, 3), 0, 0.0021))
        v3: 1 of 12 tensors differ, first 'lm_head.weight', on rank 2 (of 2, 3); sources: 0 shards moved
            since, 2.1 ms
    """

    version: int | None
    tensors: int
    different: int
    first: str | None
    ranks: tuple[int, ...]
    compared: tuple[int, ...]
    moved: int | None
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether every receiver that was compared holds the bits of `version`.

        Example:
            >>> dte_dist.VerifyReport(3, 12, 0, None, (), (2, 3), 0, 0.0021).equal
            True
        """
        return not self.ranks

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as values of JSON.

        Example:
            >>> dte_dist.VerifyReport(3, 12, 1, "lm_head.weight", (2,), (2, 3), 0, 0.0021).as_dict()["ranks"]
            [2]
        """
        return _plain(self)

    def __str__(self) -> str:
        held = "no version" if self.version is None else f"v{self.version}"
        ranks, compared = (", ".join(map(str, some)) for some in (self.ranks, self.compared))
        found = (
            f", first {self.first!r}, on rank {ranks} (of {compared})"
            if self.ranks
            else f" (ranks {compared or 'none'})"
        )
        moved = "" if self.moved is None else f"; sources: {self.moved:,} shards moved since"
        differ = f"{self.different:,} of {self.tensors:,} tensors differ{found}"
        return f"{held}: {differ}{moved}, {1e3 * self.seconds:.1f} ms"


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The outcome of one sync; counts and versions are the same on every rank, seconds are this rank's own.

    Attributes:
        version: the version that receivers now hold.
        base_version: the version before; None if there was none.
        kind: "delta", or "full" if all receivers were seeded densely.
        reason: why it was full, or which receivers were seeded beside a delta; empty for a plain delta.
        changed: elements sent, over all sources; for a full sync, all elements.
        total: elements of the model (tied tensors once).
        wire_bytes: bytes of frames that each receiver of the delta (or of the full sync) got; on the p2p
            route, the most that one got.
        gather_bytes: bytes of frames that went from sources to the root.
        dense_bytes: bytes of the whole model in wire dtypes.
        frames: number of frames that were not empty.
        seeded: group ranks that were seeded densely.
        route: the way that frames took, "broadcast" or "p2p".
        route_reason: why, where it was chosen by route="auto"; else empty.
        busiest_bytes: bytes of frames that the busiest rank sent, or received, whichever is more.
        seconds: of the whole call on this rank, opening the channel included; with async_op, from the call to
            the end of the work.
        phases: seconds by phase, on this rank; see `PHASES`.
        codecs: segments by codec pair that this rank sent, such as {"u16+raw": 12}; empty where it sent none.
        verified: what `verify_interval=` found after this sync; None where it was not due.

    Example:
        >>> print(SyncReport(2, 1, "delta", "", 200, 20_000, 936, 0, 40_000, 1, (), 0.0519))
        v1 -> v2 delta: 200 of 20,000 changed (1.00 %), 936 B to each receiver (dense 40.0 kB, 42.7x), 1
        frame, 51.9 ms
        >>> codecs = {"u16+raw": 2, "ef+planes": 12}
        >>> report = SyncReport(2, 1, "delta", "", 200, 20_000, 936, 0, 40_000, 1, (), 0.0519, codecs=codecs)
        >>> str(report).partition("1 frame, ")[2]
        'codecs ef+planes, u16+raw, 51.9 ms'
    """

    version: int
    base_version: int | None
    kind: Literal["delta", "full"]
    reason: str
    changed: int
    total: int
    wire_bytes: int
    gather_bytes: int
    dense_bytes: int
    frames: int
    seeded: tuple[int, ...]
    seconds: float
    route: str = "broadcast"
    route_reason: str = ""
    busiest_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    codecs: Mapping[str, int] = field(default_factory=dict)
    verified: VerifyReport | None = None
    _changed_names: ChangedNames = field(default=ChangedNames(), repr=False, compare=False)

    @property
    def changed_names(self) -> tuple[str, ...]:
        """Names of the tensors that this sync changed on this rank, sorted; of tied ones all.

        On a receiver: tensors of its module or layout (of `into`, if it has that) that were written to. None
        that changed is missing. One that did not may be named too: a full sync or a seed writes all, and a
        stretch of which most changed travels whole. On a rank that is a source only: tensors of which its own
        share changed, exactly; for a full sync all that it sends. Names are those that ranks agree on, after
        `rename=`. Nothing is put together before somebody asks.

        Example:
            >>> report = dte_dist.SyncReport(2, 1, "delta", "", 0, 20_000, 0, 0, 40_000, 0, (), 0.0519)
            >>> report.changed_names  # nothing changed
            ()
        """
        return self._changed_names.listed()

    @property
    def density(self) -> float:
        """Changed elements over all elements, 0 to 1.

        Example:
            >>> dte_dist.SyncReport(2, 1, "delta", "", 200, 20_000, 936, 0, 40_000, 1, (), 0.0519).density
            0.01
        """
        return self.changed / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as values of JSON: tuples are lists, a verification is a dict of its own.

        `changed_names`, which may be long, is left out.

        Example:
            >>> report = dte_dist.SyncReport(2, 1, "delta", "", 200, 20_000, 936, 0, 40_000, 1, (3,), 0.0519)
            >>> json.dumps({"step": 7, **report.as_dict()})[:60]
            '{"step": 7, "version": 2, "base_version": 1, "kind": "delta"'
        """
        return _plain(self)

    def __str__(self) -> str:
        base = "none" if self.base_version is None else f"v{self.base_version}"
        why = f" ({self.reason})" if self.reason else ""
        times = ", ".join(
            f"{name} {seconds * 1e3:.1f}"
            for name in PHASES
            if (seconds := self.phases.get(name, 0.0)) >= 5e-5
        )
        route = f" over {self.route} ({self.route_reason})" if self.route_reason else ""
        ratio = f", {self.dense_bytes / self.wire_bytes:.1f}x" if self.wire_bytes else ""
        frames = f"{self.frames} frame{'' if self.frames == 1 else 's'}{route}{_named(self.codecs)}"
        return (
            f"{base} -> v{self.version} {self.kind}{why}: {self.changed:,} of {self.total:,} changed "
            f"({self.density * 100:.2f} %), "
            f"{format_bytes(self.wire_bytes)} to each receiver (dense "
            f"{format_bytes(self.dense_bytes)}{ratio}), "
            f"{frames}, {self.seconds * 1e3:.1f} ms" + (f" ({times})" if times else "")
        )


def _named(codecs: Mapping[str, int]) -> str:
    """Name the codec pairs of a report, those of most segments first; nothing where none are known."""
    names = sorted(codecs, key=lambda name: (-codecs[name], name))
    more = f" and {len(names) - _MOST_CODECS} more" if len(names) > _MOST_CODECS else ""
    return f", codec{'s' if len(names) > 1 else ''} {', '.join(names[:_MOST_CODECS])}{more}" if names else ""


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if is_dataclass(value):
        names = (each.name for each in fields(value) if not each.name.startswith("_"))
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(found) for key, found in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(found) for found in value]
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def format_bytes(number: float) -> str:
    """Write a number of bytes as a person reads it.

    Example:
        >>> format_bytes(936), format_bytes(2_500_000)
        ('936 B', '2.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return ""
