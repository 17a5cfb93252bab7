"""launch/bench.py with real ranks: a run of all methods, what it does about wrong bits, and its links."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launcher import Ranks

LAUNCH = Path(__file__).parents[2] / "launch"
sys.path.insert(0, str(LAUNCH))

import bench  # noqa: E402
from benchlib.check import NotExact, check  # noqa: E402
from benchlib.context import Context  # noqa: E402
from benchlib.dense import Dense  # noqa: E402
from benchlib.links import Network, NetworkError, Rate  # noqa: E402
from benchlib.run import run_all  # noqa: E402
from benchlib.settings import METHODS, Scenario  # noqa: E402
from benchlib.world import World, even_shapes  # noqa: E402

pytestmark = pytest.mark.slow

SCENARIOS = (
    Scenario(name="all", model_mib=0.25, tensors=7, densities=(0, 1, 100), methods=METHODS, repeat=2),
    Scenario(
        name="parts",
        world="1+2",
        receivers_hold="tp",
        model_mib=0.25,
        tensors=7,
        densities=(3,),
        repeat=1,
        methods=("published", "delta_p2p", "dense_broadcast"),
    ),
    Scenario(name="opening", kind="open", model_mib=0.1, tensors=50, repeat=1),
)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def _run(rank: int, world: int) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    rows = run_all(SCENARIOS, Context("tiny", "loopback", said.append, lambda rows: None))
    return [asdict(row) for row in rows], said


@pytest.mark.timeout(240)
def test_a_run_of_all_methods(ranks):
    rows, said = ranks.run(_run, seconds=230)[0]
    assert [row["method"] for row in rows[:6]] == list(METHODS) and len(rows) == 3 * 6 + 3 + 1
    assert all(row["median_s"] >= row["min_s"] > 0 and row["cpu_s"] > 0 for row in rows)
    assert [len(row["times"]) for row in rows] == [2] * 18 + [1] * 4
    assert len(said) == len(SCENARIOS) + len(rows)
    at_1 = {row["method"]: row for row in rows if row["scenario"] == "all" and row["density"] == 1}
    assert at_1["dense_broadcast"]["wire_bytes"] == 2 * at_1["dense_broadcast"]["elements"]
    assert at_1["published"]["bytes_per_change"] == pytest.approx(
        6, rel=0.2
    )  # int32 and bf16, and the tables
    for method in ("delta_broadcast", "delta_p2p"):
        row = at_1[method]
        assert row["limit_bytes_per_change"] < row["bytes_per_change"] < 7
        assert row["changed"] == pytest.approx(row["elements"] / 100, rel=0.2)
        assert {"detect", "encode", "decode", "apply"} <= row["phases"].keys()
    nothing = [row for row in rows if row["scenario"] == "all" and row["density"] == 0]
    assert all(row["changed"] == 0 and row["bytes_per_change"] is None for row in nothing)


@pytest.mark.parametrize(
    ("flags", "says"), [([], "--nproc-per-node 4"), (["--links", "1gbit"], "without torchrun")]
)
def test_ranks_that_cannot_run_a_preset_say_so(monkeypatch, capsys, flags, says):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--preset", "quick", *flags])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.main() == 1
    assert says in capsys.readouterr().err


def _spoil(rank: int, world_size: int, receivers_hold: str) -> list[str]:
    """Bring weights over, then flip one bit on the last receiver, and one on a source; returns what the
    checks say.
    """
    scenario = Scenario(name="x", world="2+2", model_mib=0.1, tensors=5, receivers_hold=receivers_hold)
    world = World(scenario, even_shapes(scenario))
    for live in world.locals() if world.is_source else ():
        live.normal_(generator=torch.Generator().manual_seed(rank))
    Dense(world, 1 << 14).run()
    check(world, "after dense")
    said = []
    for spoiled in (3, 1):
        bits = world.locals()[-1].view(torch.int16).view(-1)
        bits[-1] ^= int(rank == spoiled)
        try:
            check(world, "after a flip")
        except NotExact as error:
            said.append(str(error))
        bits[-1] ^= int(rank == spoiled)
    return said


@pytest.mark.parametrize("receivers_hold", ["full", "tp"])
def test_one_wrong_bit_is_found_on_every_rank(ranks, receivers_hold):
    said = ranks.run(_spoil, receivers_hold)
    assert said[0] == said[1] == said[2] == said[3]
    on_receiver, on_source = said[0]
    assert "rank 3 from source 1" in on_receiver and "rank 2" not in on_receiver
    assert "from source 1" in on_source and "from source 0" not in on_source


LINKED = """
[[scenario]]
name = "linked"
world = "1+1"
model_mib = 1
tensors = 3
repeat = 1
methods = ["dense_broadcast", "delta_broadcast"]
"""

# What a rank does: all sleep but rank 1, which does what it is told once all are there.
RANK = """
import os, pathlib, sys, time
folder, order = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if order == "fail" and os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(600 if order != "end" else 0)
"""

LAUNCHER = """
import sys
sys.path.insert(0, sys.argv[1])
from benchlib.launcher import launch
from benchlib.links import Rate
script, folder, order, rate = sys.argv[2:]
try:
    sys.exit(launch(script, [folder, order], 3, Rate.parse(rate) if rate else None))
except KeyboardInterrupt:
    sys.exit(130)
"""


def _launcher(folder: Path, order: str, rate: str) -> tuple[subprocess.Popen[bytes], Path]:
    script, here = folder / "rank.py", folder / "here"
    script.write_text(RANK)
    here.mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(LAUNCH), str(script), str(here), order, rate]
    return subprocess.Popen(command), here


def _wait_for_ranks(here: Path) -> None:
    deadline = time.monotonic() + 60
    while len(list(here.iterdir())) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _left(folder: Path) -> list[str]:
    """Return the command lines that still run a rank of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(folder / "rank.py") in line and "-c" not in line:
            found.append(" ".join(line))
    return found


@pytest.fixture
def links():
    """Skips where namespaces cannot be made: they need root, iproute2, and a kernel that lets us."""
    try:
        with Network(1, Rate.parse("1gbit")):
            pass
    except NetworkError as error:
        pytest.skip(f"no links here: {error}")


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(240)
def test_a_run_over_links_is_as_slow_as_they_are_and_leaves_nothing(tmp_path, links):
    preset, rows = tmp_path / "tiny.toml", tmp_path / "rows.json"
    preset.write_text(LINKED)
    command = [
        sys.executable,
        str(LAUNCH / "bench.py"),
        "--preset",
        str(preset),
        "--json",
        str(rows),
        "--links",
        "100mbit",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every receiver was bit-exact after every call" in done.stdout
    dense, delta = json.loads(rows.read_text())
    assert dense["links"] == "100mbit" and dense["nic_bytes"] > dense["wire_bytes"] > delta["nic_bytes"] > 0
    assert dense["median_s"] > 0.5 * dense["wire_bytes"] / 12.5e6  # a bucket of 256 kB may pass at once
    assert "dtebench" not in _namespaces()


@pytest.mark.parametrize(("order", "code"), [("end", 0), ("fail", 7)])
def test_the_launcher_ends_all_ranks_and_returns_the_code_of_the_first_that_failed(tmp_path, order, code):
    launcher, _ = _launcher(tmp_path, order, "")
    assert launcher.wait(60) == code
    assert not _left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_launcher(tmp_path, number):
    launcher, here = _launcher(tmp_path, "sleep", "")
    _wait_for_ranks(here)
    launcher.send_signal(number)
    assert launcher.wait(60) == (-number if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 10
    while _left(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["fail", signal.SIGINT, signal.SIGTERM])
def test_links_go_whatever_ends_the_run(tmp_path, links, how):
    launcher, here = _launcher(tmp_path, "fail" if how == "fail" else "sleep", "1gbit")
    if how != "fail":
        _wait_for_ranks(here)
        assert "dtebench2" in _namespaces()
        launcher.send_signal(how)
    assert launcher.wait(60) == (7 if how == "fail" else 130)
    assert "dtebench" not in _namespaces() and not _left(tmp_path)


def test_a_killed_launcher_leaves_namespaces_that_the_next_one_takes_down(tmp_path, links):
    launcher, here = _launcher(tmp_path, "sleep", "1gbit")
    _wait_for_ranks(here)
    launcher.kill()
    launcher.wait()
    assert "dtebench2" in _namespaces()
    with Network(1, Rate.parse("1gbit")):
        assert "dtebench2" not in _namespaces() and "dtebench0" in _namespaces()
    assert "dtebench" not in _namespaces() and not _left(tmp_path)


def test_processes_in_left_namespaces_are_ended_too(links):
    left = subprocess.run(["ip", "netns", "add", "dtebench7"], capture_output=True, check=False)
    assert left.returncode == 0
    sleeper = subprocess.Popen([*Network.prefix(7), "sleep", "600"])
    with Network(1, Rate.parse("1gbit")):
        assert "dtebench7" not in _namespaces() and "dtebench0" in _namespaces()
        assert sleeper.wait(10) != 0
    assert "dtebench" not in _namespaces()


def test_two_benches_do_not_take_each_others_links(links):
    with (
        Network(1, Rate.parse("1gbit")),
        pytest.raises(NetworkError, match="another bench"),
        Network(1, Rate.parse("1gbit")),
    ):
        pass
    assert "dtebench" not in _namespaces()
