"""The parts of launch/bench.py that need no ranks: presets, generator, entropy limit, hashes, rows, targets,
the report.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import bench_report  # noqa: E402
from benchlib.check import digest  # noqa: E402
from benchlib.limit import SEGMENT, limit_of, ordered  # noqa: E402
from benchlib.links import Rate  # noqa: E402
from benchlib.report import tables  # noqa: E402
from benchlib.rows import Row, baseline, read_rows, write_rows  # noqa: E402
from benchlib.settings import CONFIGS, METHODS, Scenario, read_preset  # noqa: E402
from benchlib.targets import verdicts  # noqa: E402
from benchlib.updates import Generated, learning_rate_for, model_shapes  # noqa: E402
from benchlib.world import even_shapes, part_of  # noqa: E402
from commonlib.dense import pack  # noqa: E402
from commonlib.settings import SettingsError  # noqa: E402


class OneSource:
    """What a generator uses of a `World`, without ranks."""

    rank = 0

    def __init__(self, rows: int, columns: int, tensors: int) -> None:
        self.shapes = {f"w{number}": (rows, columns) for number in range(tensors)}
        self._live = [torch.zeros(rows, columns, dtype=torch.bfloat16) for _ in range(tensors)]

    def locals(self) -> list[torch.Tensor]:
        return self._live

    def bits(self) -> torch.Tensor:
        return torch.cat([each.reshape(-1) for each in self._live]).view(torch.int16)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small loops on a busy machine: a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(method: str, seconds: float, **changes: object) -> Row:
    """A row of the standard loopback scenario at 1 %."""
    first = Row(
        scenario="loopback",
        kind="sync",
        preset="quick",
        links="loopback",
        method=method,
        codec="",
        updates="generator",
        density=1,
        elements=1 << 27,
        changed=1_000_000,
        model_mib=256,
        tensors=64,
        sources=2,
        receivers=2,
        receivers_hold="full",
        times=(seconds,),
        median_s=seconds,
        min_s=seconds,
        cpu_s=seconds,
        wire_bytes=1_400_000,
        bytes_per_change=1.4,
        limit_bytes_per_change=1.25,
        date="2026-01-01 00:00 UTC",
        machine="a machine",
        load=0.1,
    )
    return replace(first, **changes)  # type: ignore[arg-type]


# ---- presets


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("bench_*.toml")), ids=lambda path: path.stem)
def test_every_preset_in_configs_can_be_read(path):
    scenarios = read_preset(path.stem.removeprefix("bench_"))
    assert scenarios and all(set(scenario.methods) <= set(METHODS) for scenario in scenarios)


def test_the_quick_preset_is_what_the_first_target_speaks_of():
    first, second = read_preset("quick")
    assert (first.world, first.model_mib, first.tensors, first.densities) == ("2+2", 256, 64, (0.1, 1, 10))
    assert second.densities == (100,) and {"dense_broadcast", "delta_broadcast"} <= set(second.methods)


def test_lists_of_worlds_sizes_and_tensors_are_multiplied_out(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'repeat = 2\n[[scenario]]\nname = "x"\nworld = ["1+1", "1+3"]\nmodel_mib = [1, 2]\ntensors = 3\n'
    )
    found = [
        (s.world, s.sources, s.receivers, s.model_mib, s.tensors, s.repeat) for s in read_preset(str(path))
    ]
    assert found == [
        ("1+1", 1, 1, 1, 3, 2),
        ("1+1", 1, 1, 2, 3, 2),
        ("1+3", 1, 3, 1, 3, 2),
        ("1+3", 1, 3, 2, 3, 2),
    ]


@pytest.mark.parametrize("line", [None, "speed = 3", 'world = "2"', 'methods = ["a"]', "repeat = 0"])
def test_what_is_no_preset_is_refused(tmp_path, line):
    path = tmp_path / "p.toml"
    path.write_text("" if line is None else f'[[scenario]]\nname = "x"\n{line}\n')
    with pytest.raises(SettingsError):
        read_preset(str(path))


def test_a_missing_preset_is_refused_by_name():
    with pytest.raises(SettingsError, match="quick"):
        read_preset("nonesuch")


@pytest.mark.parametrize(
    ("text", "bytes_per_second"), [("1gbit", 125e6), ("200mbit", 25e6), ("1.5Gbit", 187.5e6), ("8kbit", 1e3)]
)
def test_rates(text, bytes_per_second):
    assert Rate.parse(text).bytes_per_second == bytes_per_second


@pytest.mark.parametrize("text", ["", "1", "0mbit", "fast", "1gbyte", "-1gbit", "1gbit; rm"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="1gbit"):
        Rate.parse(text)


# ---- models


@pytest.mark.parametrize("length", [0, 1, 5, 7, 8, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_are_those_of_torch_chunk(length, parts):
    whole = torch.arange(length)
    chunks = list(whole.chunk(parts)) if length else []
    chunks += [whole[:0]] * (parts - len(chunks))
    assert [whole[part_of(length, place, parts)].tolist() for place in range(parts)] == [
        each.tolist() for each in chunks
    ]


@pytest.mark.parametrize(
    ("model_mib", "tensors"), [(256, 64), (64, 1), (1, 20), (128, 20_000), (2.5, 20_000)]
)
def test_a_model_has_the_size_and_the_tensors_asked_for(model_mib, tensors):
    shapes = even_shapes(Scenario(name="x", model_mib=model_mib, tensors=tensors))
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes.values())) * 2 / (1 << 20) == pytest.approx(model_mib, rel=0.05)


def test_the_trained_model_has_about_the_size_asked_for():
    assert sum(map(math.prod, model_shapes(64).values())) * 2 / (1 << 20) == pytest.approx(64, rel=0.06)


def test_buckets_hold_every_tensor_once_and_no_more_than_they_may():
    sizes = [3, 4, 9, 1, 1, 1, 5]
    buckets = pack(sizes, 7)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in bucket) <= 7 or len(bucket) == 1 for bucket in buckets)


# ---- updates and their limit


def test_ordered_bits_follow_the_floats_and_go_back():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    assert torch.equal(ordered(ordered(bits)), bits)
    values = bits.view(torch.bfloat16).double()
    finite = bits[~values.isnan()]
    by_order = finite[ordered(finite).argsort()].view(torch.bfloat16).double()
    assert bool((by_order.diff() >= 0).all())


def test_the_limit_is_the_entropy_of_positions_and_distances():
    before = torch.full((16,), 100, dtype=torch.int16)
    after = before.clone()
    after[[1, 5, 9, 13]] += torch.tensor([1, 1, -1, -1], dtype=torch.int16)
    positions = 16 * (0.25 * 2 + 0.75 * math.log2(4 / 3))
    limit = limit_of(before, after)
    assert limit.changed == 4
    assert limit.bits == pytest.approx(positions + 4 * 1.0)  # two distances, equally often
    assert limit.bytes_per_change == pytest.approx((positions + 4) / 8 / 4)


def test_the_limit_takes_each_segment_for_itself():
    before = torch.zeros(2 * SEGMENT, dtype=torch.int16)
    after = before.clone()
    after[:SEGMENT] = 1  # all of the one, none of the other, all by the same distance: nothing to say
    limit = limit_of(before, after)
    assert (limit.changed, limit.bits) == (SEGMENT, 0.0)


def test_nothing_changed_has_no_limit():
    limit = limit_of(torch.zeros(8, dtype=torch.int16), torch.zeros(8, dtype=torch.int16))
    assert (limit.changed, limit.bits, limit.bytes_per_change) == (0, 0.0, None)


@pytest.mark.parametrize("density", [0, 0.1, 1, 10, 30, 100])
def test_the_generator_changes_the_share_asked_for_and_says_how_much(density):
    world = OneSource(512, 256, 8)
    updates = Generated(world, density, seed=3)
    for _ in range(5):
        before = world.bits()
        limit = updates.advance()
        changed = int((world.bits() != before).sum())
        assert limit.changed == changed
        assert changed / len(before) * 100 == pytest.approx(density, rel=0.1)


def test_nine_in_ten_rows_of_the_embedding_stay():
    world = OneSource(512, 256, 8)
    updates = Generated(world, 10, seed=3)
    before = world.bits()[: 512 * 256].view(512, 256)
    updates.advance()
    moved = (world.bits()[: 512 * 256].view(512, 256) != before).any(dim=1).float().mean().item()
    assert 0.05 < moved < 0.15


def test_updates_repeat_as_many_positions_as_recorded_steps_and_return_after_four():
    world = OneSource(512, 256, 8)
    updates = Generated(world, 1, seed=3)
    states = [world.bits()]
    for _ in range(4):
        updates.advance()
        states.append(world.bits())
    assert torch.equal(states[0], states[4])
    places = [states[number] != states[number + 1] for number in range(4)]
    for first, second in itertools.pairwise(places):
        assert 0.15 < int((first & second).sum()) / int(first.sum()) < 0.3


def test_nine_in_ten_changes_are_by_one_step_as_in_recorded_runs():
    world = OneSource(512, 256, 8)
    updates = Generated(world, 1, seed=3)
    before = world.bits()
    updates.advance()
    where = world.bits() != before
    steps = (ordered(world.bits()[where]) - ordered(before[where])).abs()
    assert 0.87 < (steps == 1).float().mean().item() < 0.93


def test_a_higher_learning_rate_changes_more():
    rates = [learning_rate_for(share) for share in (0.0, 0.001, 0.01, 0.1, 0.9)]
    assert rates[0] == 0.0 and rates == sorted(set(rates))


# ---- hashes


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 17])
def test_a_hash_sees_every_bit_and_every_place(numel):
    bits = torch.arange(1, numel + 1, dtype=torch.int16)
    seen = {digest(bits.view(torch.bfloat16))}
    for index in range(numel):
        for bit in range(16):
            other = bits.clone()
            other[index] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
            seen.add(digest(other.view(torch.bfloat16)))
    assert len(seen) == 16 * numel + 1
    if numel > 1:
        assert digest(bits.flip(0)) not in seen


def test_a_hash_sees_two_signs_flipped_and_the_length():
    zeros = torch.zeros(64, dtype=torch.bfloat16)
    signs = zeros.clone()
    signs[[3, 7]] = -0.0
    assert len({digest(zeros), digest(signs), digest(zeros[:60]), digest(zeros[1:]), digest(zeros, 1)}) == 5


def test_a_hash_does_not_care_how_the_bytes_lie():
    wide = torch.randn(8, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert digest(wide[:, 1:]) == digest(wide[:, 1:].contiguous()) == digest(wide[:, 1:].clone())


# ---- rows, targets, report


def test_rows_survive_the_file(tmp_path):
    rows = [row("dense_broadcast", 1.0), row("delta_broadcast", 0.05, phases={"detect": 0.01})]
    write_rows(tmp_path / "new" / "rows.json", rows)
    again = read_rows(tmp_path / "new" / "rows.json")
    assert [(each.method, each.median_s, dict(each.phases)) for each in again] == [
        (each.method, each.median_s, dict(each.phases)) for each in rows
    ]


def test_ratios_are_taken_under_the_same_conditions_only():
    delta = row("delta_broadcast", 0.1)
    rows = [
        row("dense_broadcast", 9.0, density=10),
        row("dense_broadcast", 8.0, links="1gbit"),
        row("dense_broadcast", 1.0),
        delta,
    ]
    found = baseline(rows, delta, "dense_broadcast")
    assert found is not None and found.median_s == 1.0
    assert baseline(rows, delta, "published") is None


def _reached(rows: list[Row]) -> dict[str, bool]:
    return {f"{each.number} {each.what}": each.reached for each in verdicts(rows)}


def test_the_first_target_is_judged_by_the_faster_delta():
    rows = [
        row("dense_broadcast", 1.5),
        row("dense_p2p", 0.6),
        row("published", 0.7),
        row("delta_broadcast", 0.1),
        row("delta_p2p", 0.2),
        row("dense_broadcast", 1.5, density=10),
        row("delta_broadcast", 0.6, density=10),
    ]
    found = {what: reached for what, reached in _reached(rows).items() if what.startswith("1 ")}
    assert found == {
        "1 delta_broadcast at 1 %, times as fast as dense_broadcast": True,
        "1 delta_broadcast at 1 %, times as fast as dense_p2p": True,
        "1 delta_broadcast at 1 %, times as fast as published": False,
        "1 delta_broadcast at 10 %, times as fast as dense_broadcast": False,
    }


def test_bytes_are_judged_by_the_small_codec_and_its_worst_density():
    rows = [
        row("delta_broadcast", 1.0, codec="fast", bytes_per_change=4.0),
        row("delta_broadcast", 1.0, codec="small"),
    ]
    assert _reached(rows) == {
        "3 bytes over the entropy limit, the worst density (1 %)": True,
        "3 bytes per change at 1 %": True,
    }
    rows.append(
        row(
            "delta_broadcast", 1.0, codec="small", density=3, bytes_per_change=1.2, limit_bytes_per_change=1.0
        )
    )
    assert _reached(rows)["3 bytes over the entropy limit, the worst density (3 %)"] is False


def test_phases_are_judged_where_each_side_has_a_core_of_its_own():
    phases = {"detect": 0.02, "encode": 0.0079, "decode": 0.0081, "apply": 0.001}
    rows = [row("delta_broadcast", 1.0, sources=1, receivers=1, phases=phases, read_s=0.0099)]
    found = {what: reached for what, reached in _reached(rows).items() if what[0] in "45"}
    assert list(found.values()) == [True, True, False, True]


def test_relay_growth_and_opening_are_judged():
    relay = row("full_broadcast", 0.6, links="1gbit", wire_bytes=64 << 20, sources=1, receivers=3, density=0)
    assert _reached([relay]) == {"6 64 MiB to 3 receivers, over payload / bandwidth (4 ranks)": True}
    assert _reached([replace(relay, median_s=0.7)]) == {
        "6 64 MiB to 3 receivers, over payload / bandwidth (4 ranks)": False
    }
    one, three = (
        row("delta_p2p", s, preset="growth", sources=1, receivers=r, bytes_per_change=None)
        for s, r in ((0.1, 1), (0.12, 3))
    )
    assert _reached([one, three])["7 delta_p2p: seconds, 1+1 to 1+3"] is False
    opened = row("open", 2.9, kind="open", tensors=20_000, changed=0, bytes_per_change=None)
    assert list(_reached([opened, row("compile", 21.0, kind="compile", changed=0)]).values()) == [True, False]


def test_a_table_has_the_ratios_to_the_baselines():
    [(title, lines)] = tables([row("dense_broadcast", 1.0), row("delta_broadcast", 0.1, codec="small")])
    assert title.startswith("loopback: 2+2, 256 MiB bf16 in 64 tensors")
    line = dict(zip(lines[0], lines[2], strict=True))
    assert (line["method"], line["vs (a)"]) == ("delta_broadcast [small]", "10.00x")
    assert "vs (b)" not in line


@pytest.mark.slow
def test_the_report_is_written_from_the_rows_and_keeps_the_notes(tmp_path, monkeypatch, capsys):
    rows, out = tmp_path / "rows.json", tmp_path / "results.md"
    write_rows(
        rows,
        [row("dense_broadcast", 1.5), row("delta_broadcast", 0.1), row("delta_broadcast", 0.2, density=3)],
    )
    monkeypatch.setattr(sys, "argv", ["bench_report.py", str(rows), "--out", str(out)])
    assert bench_report.main() == 0
    text = out.read_text()
    assert (
        "| 1 | delta_broadcast at 1 %, times as fast as dense_broadcast | at least 14x | "
        "15.0x | yes | quick, loopback |" in text
    )
    assert "a machine. 2026-01-01 00:00 UTC. Load average" in text
    out.write_text(text.replace(bench_report.BEGIN, f"{bench_report.BEGIN}\nBound by memory."))
    assert bench_report.main() == 0
    assert out.read_text().count("Bound by memory.") == 1
    capsys.readouterr()


def test_what_is_no_file_of_rows_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.json"
    path.write_text('[{"method": "x"}]')
    monkeypatch.setattr(sys, "argv", ["bench_report.py", str(path), "--out", str(tmp_path / "r.md")])
    assert bench_report.main() == 1
    assert "not rows" in capsys.readouterr().err and not (tmp_path / "r.md").exists()
