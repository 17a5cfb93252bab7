"""Every code block of README.md and docs/*.md runs, or is checked as far as it can be.

* `python`: on real ranks, all of them at once, with the names of `world.on_ranks`; hidden code before it
  prepares what the text around it speaks of, hidden code after it checks what it did. A block that calls
  `init_process_group` is a program: torchrun runs it.
* `text`: not code. It is compared where a program prints it, or where hidden code checks it as `shown`.
* `bash`: the files and the options that it names exist. `.ci/run` installs the project, runs its tests and
  its demo; nothing runs the bench of 4 minutes, whose parts have tests of their own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

from tests.examples.collect import DOCUMENTS, ROOT, Block, blocks, unfenced
from tests.examples.conftest import Stage
from tests.examples.world import WORLD, make_mesh, on_ranks

BLOCKS = [block for path in DOCUMENTS for block in blocks(path)]
PROGRAMS = [block for block in BLOCKS if block.language == "python" and "init_process_group(" in block.code]
RUN = [block for block in BLOCKS if block not in PROGRAMS and (block.language == "python" or block.after)]
COMMANDS = [
    command
    for block in BLOCKS
    if block.language == "bash"
    for line in block.code.splitlines()
    for command in line.split(" && ")
]


def test_blocks_are_found():
    assert len(RUN) >= 6
    assert len(PROGRAMS) == 1
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_say_their_language(path):
    assert not unfenced(path), "lines that begin a block without a fence"
    assert not [block.line for block in blocks(path) if block.language not in ("bash", "python", "text")]


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.file}:{block.line}")
def test_block(block: Block, stage: Stage):
    stage.run(run_on_rank, block)


@cache
def _mesh() -> Any:
    return make_mesh()


def run_on_rank(rank: int, world: int, block: Block) -> None:
    names = on_ranks(_mesh()) | {"fully_shard": fully_shard, "shown": block.code}
    code = "\n" * (block.line - 1) + block.code if block.language == "python" else ""
    for part in (block.before, code, block.after):
        exec(compile(part, block.file, "exec"), names)


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"{block.file}:{block.line}")
def test_program(block: Block, tmp_path):
    printed = BLOCKS[BLOCKS.index(block) + 1]
    assert printed.language == "text", "a program is followed by what it prints"
    path = tmp_path / "train.py"
    path.write_text(block.code)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORLD),
        str(path),
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    shown, said = (_masked(text).splitlines() for text in (printed.code, ran.stdout))
    assert len(shown) == len(said)
    for expected, got in zip(shown, said, strict=True):
        assert got.startswith(expected.removesuffix("...")), ran.stdout


def _masked(text: str) -> str:
    """Return text without its figures, which other machines round otherwise; versions stay."""
    return re.sub(r"(?<![v\d.,])\d+([.,]\d+)*", "#", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str):
    words = shlex.split(command)
    if "pip" in words:
        assert words[-2:] == ["-c", "constraints.txt"] and (ROOT / words[-1]).is_file()
        extra = words[words.index("-e") + 1].removeprefix(".[").removesuffix("]")
        assert (
            extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        )
        return
    if words[:3] == ["python", "-m", "pytest"]:
        assert words[3:] in ([], ["-m", "not slow"])
        return
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    known = _help(words[at])
    assert all(flag in known for flag in words[at + 1 :] if flag.startswith("--"))
    if "--preset" in words:
        assert (ROOT / "configs" / f"bench_{words[words.index('--preset') + 1]}.toml").is_file()


@cache
def _help(script: str) -> str:
    """Return what a script says about its options."""
    ran = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
