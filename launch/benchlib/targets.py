"""The targets that this project has set itself, and what the rows say about each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchlib.context import LOOPBACK
from benchlib.links import Rate
from benchlib.rows import Row, baseline

__all__ = ["Verdict", "verdicts"]

_DELTAS = ("delta_broadcast", "delta_p2p")
_ORDER = ("small", "", "auto", "fast")  # of codecs; the phases of the first there is are judged


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one target.

    Attributes:
        number: of the target.
        what: is measured.
        wanted, found: as text.
        reached: whether it was.
        row: where it was found.
    """

    number: int
    what: str
    wanted: str
    found: str
    reached: bool
    row: Row


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return a verdict for every target that the rows say something about; where several presets do, one for
    each.
    """
    sources = (_loopback, _links, _bytes, _detect, _codec, _relay, _growth, _opening)
    presets = list(dict.fromkeys((row.preset, row.links) for row in rows))
    groups = [[row for row in rows if (row.preset, row.links) == preset] for preset in presets]
    found = [verdict for source in sources for group in groups for verdict in source(group)]
    return sorted(found, key=lambda verdict: verdict.number)


def _loopback(rows: Sequence[Row]) -> Iterator[Verdict]:
    here = [row for row in rows if row.links == LOOPBACK and _is_standard(row)]
    wanted = [
        (1, "dense_broadcast", 14.0),
        (1, "dense_p2p", 5.0),
        (1, "published", 8.0),
        (0.1, "dense_broadcast", 30.0),
    ]
    for density, method, factor in [*wanted, (10, "dense_broadcast", 3.0), (100, "dense_broadcast", 1.0)]:
        yield from _faster(1, here, density, method, factor)


def _links(rows: Sequence[Row]) -> Iterator[Verdict]:
    here = [row for row in rows if row.links == "1gbit" and _is_standard(row)]
    for method, factor in (("dense_broadcast", 60.0), ("published", 4.0)):
        yield from _faster(2, here, 1, method, factor)


def _bytes(rows: Sequence[Row]) -> Iterator[Verdict]:
    deltas = [
        row
        for row in rows
        if row.kind == "sync" and row.method in _DELTAS and row.changed and row.bytes_per_change
    ]
    small = [row for row in deltas if row.codec == "small"]
    shares = [
        (row.bytes_per_change / row.limit_bytes_per_change, row)
        for row in small
        if row.bytes_per_change and row.limit_bytes_per_change
    ]
    if shares:
        share, row = max(shares, key=lambda each: each[0])
        what = f"bytes over the entropy limit, the worst density ({row.density:.3g} %)"
        yield Verdict(3, what, "at most 1.15x", f"{share:.2f}x", share <= 1.15, row)
    for row in [row for row in small if row.density == 1 and row.updates == "generator"][:1]:
        found = row.bytes_per_change or 0.0
        yield Verdict(3, "bytes per change at 1 %", "at most 1.4", f"{found:.2f}", found <= 1.4, row)


def _detect(rows: Sequence[Row]) -> Iterator[Verdict]:
    for density, wanted in ((0.1, 0.85), (1, 0.48), (10, 0.12)):
        for row in _alone(rows, density):
            share = (row.read_s or 0.0) / row.phases["detect"]
            what = f"detect at {density:g} %, of one core's read bandwidth"
            yield Verdict(4, what, f"at least {wanted:g}", f"{share:.2f}", share >= wanted, row)


def _codec(rows: Sequence[Row]) -> Iterator[Verdict]:
    for row in _alone(rows, 1):
        for phase in ("encode", "decode", "apply"):
            found = row.phases.get(phase, 0.0) / row.changed * 1e9
            yield Verdict(
                5,
                f"{phase} at 1 %, ns per changed element per core",
                "at most 8",
                f"{found:.1f}",
                found <= 8,
                row,
            )


def _relay(rows: Sequence[Row]) -> Iterator[Verdict]:
    for row in rows:
        if row.method == "full_broadcast" and row.links != LOOPBACK:
            limit = row.wire_bytes / Rate.parse(row.links).bytes_per_second
            share, ranks = row.median_s / limit, row.sources + row.receivers
            what = (
                f"{row.wire_bytes / (1 << 20):.0f} MiB to {row.receivers} receivers, over payload / bandwidth"
            )
            yield Verdict(6, f"{what} ({ranks} ranks)", "at most 1.2x", f"{share:.2f}x", share <= 1.2, row)


def _growth(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Compare rows that differ in one thing only."""
    deltas = [row for row in rows if row.preset == "growth" and row.method in _DELTAS]
    for row in deltas:
        others = [
            each
            for each in deltas
            if (each.method, each.codec, each.scenario) == (row.method, row.codec, row.scenario)
        ]
        for other in others:
            if other.model_mib == 2 * row.model_mib:
                share = other.median_s / other.elements / (row.median_s / row.elements)
                what = f"{row.label}: ns per element, {row.model_mib:g} to {other.model_mib:g} MiB"
                yield Verdict(7, what, "at most 1.00x", f"{share:.2f}x", round(share, 2) <= 1.0, other)
            if (row.sources, row.receivers, other.sources, other.receivers) == (1, 1, 1, 3):
                yield _slower(row, other, "1+1 to 1+3", 1.15)
            if (row.tensors, other.tensors) == (20, 20_000):
                yield _slower(row, other, "20 to 20,000 tensors", 1.5)


def _opening(rows: Sequence[Row]) -> Iterator[Verdict]:
    wanted = {
        "open": ("first sync on a new channel, 20,000 tensors", 3.0),
        "compile alone": ("first-ever compile, one process", 20.0),
        "compile": ("first-ever compile, on all ranks at once", 20.0),
        "load compiled": ("from cache", 1.0),
    }
    for row in rows:
        if row.method in wanted and (row.kind == "compile" or row.tensors == 20_000):
            what, most = wanted[row.method]
            yield Verdict(8, what, f"under {most:g} s", f"{row.median_s:.2f} s", row.median_s < most, row)


def _faster(
    number: int, rows: Sequence[Row], density: float, method: str, factor: float
) -> Iterator[Verdict]:
    """Yield a verdict about the fastest delta, if there is one with this baseline beside it."""
    deltas = [
        row
        for row in rows
        if row.method in _DELTAS and row.density == density and baseline(rows, row, method) is not None
    ]
    row = _fastest(deltas)
    other = baseline(rows, row, method) if row is not None else None
    if row is not None and other is not None:
        found = other.median_s / row.median_s
        what = f"{row.label} at {density:g} %, times as fast as {method}"
        yield Verdict(number, what, f"at least {factor:g}x", f"{found:.1f}x", found >= factor, row)


def _slower(row: Row, other: Row, what: str, most: float) -> Verdict:
    found = other.median_s / row.median_s
    return Verdict(
        7, f"{row.label}: seconds, {what}", f"at most {most:g}x", f"{found:.2f}x", found <= most, other
    )


def _alone(rows: Sequence[Row], density: float) -> Iterator[Row]:
    """Yield the row whose phases are those of one core: one source, one receiver, the smallest codec there
    is.
    """
    found = [
        row
        for row in rows
        if row.method == "delta_broadcast"
        and row.density == density
        and row.changed
        and row.links == LOOPBACK
    ]
    found = [row for row in found if (row.sources, row.receivers) == (1, 1) and row.phases.get("detect")]
    yield from sorted(found, key=lambda row: _ORDER.index(row.codec))[:1]


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.median_s, default=None)


def _is_standard(row: Row) -> bool:
    shape = (
        row.kind,
        row.updates,
        row.sources,
        row.receivers,
        row.receivers_hold,
        row.model_mib,
        row.tensors,
    )
    return shape == ("sync", "generator", 2, 2, "full", 256, 64)
