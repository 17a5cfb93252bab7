"""What the demo is told: the defaults stand here, `configs/demo.toml` may change them, flags have the last
word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commonlib.model import ModelSettings
from commonlib.settings import SettingsError, build, parse, read_toml, refuse
from commonlib.training import TrainingSettings

__all__ = ["CONFIG", "Settings", "read_settings"]

CONFIG = Path(__file__).parents[2] / "configs" / "demo.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """The synchronisation.

    Attributes:
        overlap: whether the next training step runs while the last one's weights travel.
    """

    overlap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """The output.

    Attributes:
        new_tokens: that the rollout ranks generate after each step.
        show_every: steps between two prints of the generated text.
        plot: file of the picture.
    """

    new_tokens: int = 10
    show_every: int = 2
    plot: Path = Path("out/demo.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The demo: one field for each table of the TOML file.

    Attributes:
        model: the [model] table.
        training: the [training] table.
        sync: the [sync] table.
        output: the [output] table.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    output: OutputSettings = field(default_factory=OutputSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """The command line beside the settings.

    Attributes:
        config: TOML file whose values are the defaults.
    """

    config: Path = CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags(_Config):
    """The command line.

    Attributes:
        config: TOML file whose values are the defaults.
        settings: what the file and the flags say.
    """

    settings: Settings = field(default_factory=Settings)


def read_settings(argv: Sequence[str] | None = None) -> Settings:
    """Return the settings from the TOML file that `--config` names and from the flags in `argv`.

    Raises:
        SystemExit: 0 after `--help`, 2 for wrong flags or a wrong file.
    """
    about = "FSDP2 trainers keep tensor-parallel rollout ranks up to date; start it with torchrun."
    path = parse(_Config(), argv, about, rest=True).config
    try:
        settings = build(Settings, read_toml(path), str(path))
    except SettingsError as error:
        refuse(str(error))
    return parse(_Flags(config=path, settings=settings), argv, about).settings
