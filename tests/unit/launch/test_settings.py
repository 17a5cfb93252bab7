"""Settings of the demo and of the bench: what overrides what, and what is refused, by which rank."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

from benchlib.settings import Flags, read_flags, read_preset  # noqa: E402
from commonlib import console  # noqa: E402
from commonlib.settings import SettingsError, build, read_toml  # noqa: E402
from demolib.settings import CONFIG, Settings, read_settings  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 1.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    label: str
    inner: Inner
    folder: Path | None = None


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """The settings are those of a process that torchrun did not start."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(console, "_PATIENCE", 0.0)


@pytest.fixture
def demo_toml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "demo.toml"
        path.write_text(text)
        return str(path)

    return write


# ---- override order


def test_a_flag_goes_over_the_file_and_the_file_over_the_default(demo_toml):
    path = demo_toml("[training]\nsteps = 5\nbatch = 7\n[sync]\noverlap = true\n")
    found = read_settings(["--config", path, "--steps", "6"])
    assert (found.training.steps, found.training.batch, found.training.length) == (6, 7, 32)
    assert found.sync.overlap
    assert not read_settings([f"--config={path}", "--no-overlap"]).sync.overlap


def test_the_file_of_the_demo_says_what_the_defaults_are():
    assert read_settings([]) == Settings()
    tables = tomllib.loads(CONFIG.read_text())
    assert {(name, key) for name, table in tables.items() for key in table} == {
        (table.name, key.name)
        for table in fields(Settings)
        for key in fields(getattr(Settings(), table.name))
    }


def test_every_key_of_the_demo_is_a_flag_in_both_spellings():
    found = read_settings(["--kv-heads", "2", "--new_tokens=3", "--plot", "x.png", "--lr", "1e-5"])
    assert (found.model.kv_heads, found.output.new_tokens) == (2, 3)
    assert (found.output.plot, found.training.lr) == (Path("x.png"), 1e-5)


def test_the_rows_of_the_bench_go_where_its_flags_say():
    assert Flags().rows == Path("out/bench_quick.json")
    assert Flags(preset="configs/bench_links.toml", links="1gbit").rows == Path("out/bench_links_1gbit.json")
    flags, scenarios = read_flags(["--preset", "links", "--json", "x.json", "--links", "8kbit"])
    assert flags.rows == Path("x.json") and flags.rate is not None and flags.rate.bytes_per_second == 1e3
    assert scenarios == read_preset("links")


def test_top_keys_of_a_preset_are_defaults_of_its_scenarios(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text('repeat = 2\nwarmup = 3\n[[scenario]]\nname = "x"\nwarmup = 4\n')
    [scenario] = read_preset(str(path))
    assert (scenario.repeat, scenario.warmup, scenario.seed) == (2, 4, 0)


# ---- tables


def test_a_table_becomes_a_dataclass_with_tuples_and_paths():
    table = {"label": "a", "folder": "b", "inner": {"rate": 2, "names": ["c", "d"]}}
    assert build(Outer, table, "here") == Outer(
        label="a", folder=Path("b"), inner=Inner(rate=2, names=("c", "d"))
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"label": "a", "inner": {"rat": 1}}, "here, inner has an unknown key 'rat': did you mean 'rate'?"),
        ({"label": "a", "iner": {}}, "here has an unknown key 'iner': did you mean 'inner'?"),
        ({"x": 1}, "here has an unknown key 'x'; known: folder, inner, label"),
        ({"label": "a"}, "here lacks the key 'inner'"),
        ({"label": 3, "inner": {}}, "here, label must be of type str, got 3"),
        ({"label": "a", "inner": 3}, "here, inner must be a table, got 3"),
        ({"label": "a", "inner": {"rate": True}}, "here, inner, rate must be of type float, got True"),
        ({"label": "a", "inner": {"names": "c"}}, "here, inner, names must be a list, got 'c'"),
        ({"label": "a", "inner": {"names": [1]}}, "here, inner, names must be of type str, got 1"),
    ],
)
def test_what_is_no_table_of_the_dataclass_is_refused(table, says):
    with pytest.raises(SettingsError) as caught:
        build(Outer, table, "here")
    assert str(caught.value) == says


@pytest.mark.parametrize("content", [b"[model\n", b"\xff", None])
def test_what_is_no_toml_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"x\.toml: "):
        read_toml(path)


# ---- refusals of the programs

WRONG_FLAGS = [
    (read_settings, ["--stesp", "3"], "--steps"),
    (read_settings, ["--overlp"], "--overlap"),
    (read_settings, ["--steps", "many"], "--steps"),
    (read_settings, ["--config", "nonesuch.toml"], "nonesuch.toml"),
    (read_flags, ["--prest", "quick"], "--preset"),
    (read_flags, ["--preset", "quik"], "did you mean 'quick'?"),
    (read_flags, ["--links", "fast"], "1gbit"),
]


@pytest.mark.parametrize(("read", "argv", "says"), WRONG_FLAGS)
def test_wrong_flags_end_with_code_2_and_the_nearest_name(read, argv, says, capsys):
    with pytest.raises(SystemExit) as caught:
        read(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and says in err and not out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nstep = 3\n", "training has an unknown key 'step': did you mean 'steps'?"),
        ("[model]\nsteps = 3\n", "model has an unknown key 'steps'"),
        ("[trainning]\nsteps = 3\n", "unknown key 'trainning': did you mean 'training'?"),
        ("[training]\nsteps = 3.5\n", "training, steps must be of type int, got 3.5"),
    ],
)
def test_wrong_keys_of_the_demo_end_with_code_2_and_the_nearest_name(demo_toml, text, says, capsys):
    with pytest.raises(SystemExit) as caught:
        read_settings(["--config", demo_toml(text)])
    assert caught.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['[[scenario]]\nname = "x"\nrepeats = 3\n', 'repeats = 3\n[[scenario]]\nname = "x"\n']
)
def test_wrong_keys_of_a_preset_end_with_code_2_and_the_nearest_name(tmp_path, text, capsys):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        read_flags(["--preset", str(path)])
    says = "p.toml, scenario 1 has an unknown key 'repeats': did you mean 'repeat'?"
    assert caught.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("read", [read_settings, read_flags])
def test_help_ends_every_rank_with_code_0_and_rank_0_prints_it(read, monkeypatch, capsys):
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            read(["--help"])
        out, err = capsys.readouterr()
        assert caught.value.code == 0 and not err
        assert bool(out) == speaks and ("usage: " in out) == speaks


@pytest.mark.parametrize(("read", "argv", "says"), WRONG_FLAGS)
def test_other_ranks_say_nothing_and_end_with_the_same_code(read, argv, says, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as caught:
        read(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and not out and not err
