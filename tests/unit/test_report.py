"""Unit tier, no ranks: the report reads as one line and its phases add up."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from dte_dist.report import PHASES, ChangedNames, Phases, SyncReport, VerifyReport

REPORT = SyncReport(8, 7, "delta", "", 10, 1000, 96, 48, 2000, 2, (), 0.01)


def changed(**fields: object) -> str:
    values = {name: getattr(REPORT, name) for name in SyncReport.__slots__}
    return str(SyncReport(**{**values, **fields}))  # type: ignore[arg-type]


def test_a_report_is_one_line() -> None:
    assert (
        str(REPORT) == "v7 -> v8 delta: 10 of 1,000 changed (1.00 %), 96 B to each receiver (dense 2.0 "
        "kB, 20.8x), 2 frames, 10.0 ms"
    )
    assert "\n" not in changed(reason="rank 1 seeded: it had no version", phases={"wire": 1.0})


def test_a_first_sync_has_no_base_and_says_why_it_is_full() -> None:
    assert changed(base_version=None, kind="full", reason="first sync").startswith(
        "none -> v8 full (first sync): "
    )


def test_nothing_changed_divides_by_nothing() -> None:
    text = changed(changed=0, wire_bytes=0, frames=0)
    assert "0 of 1,000 changed (0.00 %), 0 B to each receiver (dense 2.0 kB), 0 frames" in text
    empty = SyncReport(1, None, "full", "first sync", 0, 0, 0, 0, 0, 0, (), 0.0)
    assert empty.density == 0.0 and "0 of 0 changed (0.00 %)" in str(empty)


def test_density_is_changed_over_total() -> None:
    assert REPORT.density == 0.01


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_900, "999.9 kB"),
        (1_500_000, "1.5 MB"),
        (2_500_000_000, "2.5 GB"),
        (10**15, "1000000.0 GB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_fits(number: int, text: str) -> None:
    assert f" {text} to each receiver" in changed(wire_bytes=number)


def test_phases_show_in_their_order_and_only_if_they_took_time() -> None:
    text = changed(phases={"wire": 0.004, "detect": 0.002, "apply": 1e-6})
    assert text.endswith("10.0 ms (detect 2.0, wire 4.0)")


CODECS = {
    "": {},
    "codec ef+planes, ": {"ef+planes": 7},
    "codecs ef+planes, u16+raw, ": {"u16+raw": 2, "ef+planes": 7},
    "codecs a, b, c and 2 more, ": {"c": 1, "e": 1, "b": 4, "d": 1, "a": 4},
}


@pytest.mark.parametrize(("text", "codecs"), CODECS.items(), ids=map(str, map(len, CODECS.values())))
def test_codecs_show_where_they_are_known_the_most_used_first(text: str, codecs: dict[str, int]) -> None:
    assert changed(codecs=codecs, route_reason="fewer bytes").endswith(
        f", 2 frames over broadcast (fewer bytes), {text}10.0 ms"
    )
    assert changed(codecs=codecs, phases={"wire": 0.004}).endswith(f", 2 frames, {text}10.0 ms (wire 4.0)")


def test_a_report_as_values_of_json() -> None:
    verified = VerifyReport(8, 3, 1, "w", (2,), (1, 2), 0, 0.5)
    report = replace(
        REPORT,
        seeded=(1, np.int64(2)),
        phases={"wire": 0.25},
        codecs={"u16+raw": np.int64(3)},
        verified=verified,
    )
    found = report.as_dict()
    named = {each.name for each in fields(SyncReport) if not each.name.startswith("_")}
    assert set(found) == named and json.loads(json.dumps(found)) == found
    assert (found["version"], found["reason"], found["seeded"], found["phases"]) == (
        8,
        "",
        [1, 2],
        {"wire": 0.25},
    )
    assert found["codecs"] == {"u16+raw": 3} and found["seconds"] == 0.01
    assert (
        found["verified"] == verified.as_dict()
        and found["verified"]["ranks"] == [2]
        and found["verified"]["first"] == "w"
    )
    assert json.loads(json.dumps(REPORT.as_dict()))["verified"] is None
    found["phases"].clear()
    assert report.phases == {"wire": 0.25}


def test_moved_shards_show_only_where_they_were_counted() -> None:
    verified = VerifyReport(8, 3, 0, None, (), (1, 2), 0, 0.5)
    assert str(verified) == "v8: 0 of 3 tensors differ (ranks 1, 2); sources: 0 shards moved since, 500.0 ms"
    uncounted = replace(verified, moved=None)
    assert str(uncounted) == "v8: 0 of 3 tensors differ (ranks 1, 2), 500.0 ms"
    assert uncounted.as_dict()["moved"] is None


def test_phases_add_up_and_count_a_block_that_raised() -> None:
    phases = Phases()
    with phases("wire"):
        pass
    first = phases.seconds["wire"]
    with pytest.raises(KeyError), phases("wire"):
        raise KeyError
    assert phases.seconds["wire"] > first >= 0.0 and list(phases.seconds) == ["wire"]
    assert set(phases.seconds) <= set(PHASES)


def test_changed_names_are_sorted_and_each_comes_once_with_its_aliases() -> None:
    names, ties = ["b", "b", "c", "tied", "a", "z"], [("a", "tied"), ("untouched", "z")]
    regions = np.array([0, 1, 4]), np.array([True, True, True])
    on_device = np.array([2, 5]), torch.tensor([True, False])
    report = replace(REPORT, _changed_names=ChangedNames(names, ties, [regions, on_device]))
    assert report.changed_names == ("a", "b", "c", "tied")
    assert REPORT.changed_names == () and report == REPORT and "changed_names" not in repr(report)
    assert pickle.loads(pickle.dumps(report)).changed_names == report.changed_names


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        REPORT.version = 9  # type: ignore[misc]
