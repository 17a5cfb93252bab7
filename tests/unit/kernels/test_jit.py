"""What is cached of the loops on disk is used again, unless any file of loops has changed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from numba.core import config

from dte_dist.kernels.cpu import jit, scan_loops


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("some_loops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cache_of_a_loop_depends_on_all_loops(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache_dir / "some_loops.py"
    path.write_text(
        "from dte_dist.kernels.cpu.jit import loop\n\n\n@loop\ndef double(x):\n    return 2 * x\n"
    )
    hits = []
    for stamp in ("before", "before", "after", "after"):
        monkeypatch.setattr(jit, "_stamp", lambda stamp=stamp: stamp)
        double = load(path).double
        assert double(21) == 42
        hits.append(sum(double.stats.cache_hits.values()))
    assert hits == [0, 1, 0, 1]


def test_the_stamp_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(jit.__file__).parent.parent
    for file in root.rglob("*.py"):
        copy = tmp_path / file.relative_to(root)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "cpu" / "jit.py"))
    make = jit._stamp.__wrapped__
    first = make()
    assert first == jit._stamp() == scan_loops.advance._cache._cache_file._source_stamp
    loops = [f"cpu/{file.name}" for file in root.glob("cpu/*loops.py")]
    assert len(loops) >= 6
    for name in (*loops, "cpu/intrinsics.py", "cpu/jit.py", "sizes.py", "table.py"):
        before = make()
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert make() != before
    assert make() != first


SYNCS = """
from importlib import import_module
from pathlib import Path

from dte_dist import kernels
from dte_dist.kernels import cpu
from tests.unit.codec.pairs import PAIRS

kernels.precompile((1, 2, 4, 8))
names = [path.stem for path in Path(cpu.__file__).parent.glob("*loops.py")]
found = [vars(import_module(f"dte_dist.kernels.cpu.{name}")).values() for name in names]
loops = {id(loop): loop for values in found for loop in values if hasattr(loop, "signatures")}
before = {number: len(loop.signatures) for number, loop in loops.items()}

from tests.unit.sync import test_source_codecs as syncs

for codec in ("fast", "small", *PAIRS):
    syncs.test_chains_of_deltas_are_bit_exact(codec, None)
    syncs.test_lanes_of_pairs(codec, slice(3, 17), None)
    syncs.test_a_detector_may_name_elements_that_did_not_change(codec, None)
later = sorted(loop.__name__ for number, loop in loops.items() if len(loop.signatures) > before[number])
print("later:", *later)
"""


@pytest.fixture(scope="module")
def compiled_later() -> set[str]:
    """Return what syncs compile once the kernels are warm; in a process of its own, for here other tests have
    compiled what they need.
    """
    command = [sys.executable, "-c", SYNCS]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stderr
    first, *names = ended.stdout.splitlines()[-1].split()
    assert first == "later:"
    return {*names}


@pytest.mark.slow
def test_a_sync_compiles_nothing_once_the_kernels_are_warm(compiled_later: set[str]) -> None:
    assert compiled_later == set()


def test_processes_take_turns_at_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is at a job while its lock is held; those at another job, or with another cache, are not
    kept waiting.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with jit._turn("one") as mine:
        assert mine
        with jit._turn("one") as mine_too, jit._turn("other") as other:
            assert not mine_too and other
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(jit.config, "CACHE_DIR", "elsewhere")
            with jit._turn("one") as mine_there:
                assert mine_there
    with jit._turn("one") as mine:
        assert mine


@pytest.mark.parametrize("how", ["no folder", "a link", "somebody's folder"])
def test_without_a_lock_there_are_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none" if how == "no folder" else tmp_path))
    if how != "no folder":
        with jit._turn("one"):
            (lock,) = tmp_path.iterdir()
        lock.unlink()
        if how == "a link":
            lock.symlink_to(tmp_path / "victim")
        else:
            lock.mkdir()
    with jit._turn("one") as mine, jit._turn("one") as mine_too:
        assert mine and mine_too
    assert not (tmp_path / "victim").exists()
