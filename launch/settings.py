"""What the demo is told: the defaults stand here, `configs/demo.toml` may change them, flags have the last
word.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["CONFIG", "Settings", "read_settings"]

CONFIG = Path(__file__).parent.parent / "configs" / "demo.toml"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field for every key of the TOML file and every flag of the command line."""

    # model
    vocab: int = 4096
    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1536

    # training
    seed: int = 0
    batch: int = 2
    length: int = 32
    warmup_steps: int = 16
    warmup_lr: float = 1e-3
    steps: int = 8
    lr: float = 3e-6

    # synchronisation
    overlap: bool = False

    # output
    new_tokens: int = 10
    show_every: int = 2
    plot: str = "out/demo.png"


def read_settings(argv: Sequence[str] | None = None) -> Settings:
    """Settings from the TOML file that `--config` names and from the flags in `argv`."""
    parser = argparse.ArgumentParser(
        description="FSDP2 trainers keep tensor-parallel rollout ranks up to date; start it with torchrun."
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="TOML file (default: configs/demo.toml)")
    for field in fields(Settings):
        kind: Any = (
            {"action": argparse.BooleanOptionalAction}
            if isinstance(field.default, bool)
            else {"type": type(field.default)}
        )
        parser.add_argument("--" + field.name.replace("_", "-"), default=None, **kind)
    flags = vars(parser.parse_args(argv))
    try:
        return Settings(
            **_read_toml(flags.pop("config"))
            | {name: value for name, value in flags.items() if value is not None}
        )
    except (OSError, TypeError, tomllib.TOMLDecodeError) as error:
        parser.error(str(error))


def _read_toml(path: Path) -> dict[str, Any]:
    """All keys of the file; its sections only group them for the reader."""
    merged: dict[str, Any] = {}
    for section in tomllib.loads(path.read_text()).values():
        merged |= section
    return merged
