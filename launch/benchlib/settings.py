"""What the bench is told: a preset is a TOML file of scenarios, flags say how to run it.

A preset holds any number of `[[scenario]]` tables. The keys are the fields of `Scenario`; keys at the top of
the file are defaults for all of them. `world`, `model_mib` and `tensors` may be lists: the scenario is then
run for every combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.links import Rate
from commonlib.settings import SettingsError, build, did_you_mean, parse, read_toml, refuse

__all__ = [
    "BASELINES",
    "CONFIGS",
    "METHODS",
    "Flags",
    "Scenario",
    "read_flags",
    "read_preset",
    "sources_and_receivers",
]

CONFIGS = Path(__file__).parents[2] / "configs"
BASELINES = ("dense_broadcast", "dense_p2p", "published")
METHODS = (*BASELINES, "delta_broadcast", "delta_p2p", "full_broadcast")
_KINDS = ("sync", "open", "compile")
_AXES = ("world", "model_mib", "tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One thing to measure.

    Attributes:
        name: rows of one name are shown in one table.
        kind: "sync" times the methods; "open" times opening a channel; "compile" times compiling the kernels.
        world: sources + receivers, such as "2+2"; they are the first ranks of those that were started.
        model_mib: bytes of the model in bf16, in MiB.
        tensors: how many tensors it has, all of one size.
        methods: in the order in which they take turns.
        codecs: passed to the delta methods as `codec=`, each a row of its own; empty: nothing is passed.
        updates: "generator" (see `updates.Generated`) or "adamw" (real training of the demo's model).
        densities: changed elements in percent, for the generator.
        learning_rates: of AdamW.
        receivers_hold: "full" (plain tensors) or "tp" (tensor-parallel parts).
        repeat, warmup: timed turns of every method, and turns before that whose times are thrown away.
        bucket_mib: bytes that travel at once, for all methods.
        seed: of the weights and their changes.
    """

    name: str
    kind: str = "sync"
    world: str = "2+2"
    model_mib: float = 256
    tensors: int = 64
    methods: tuple[str, ...] = METHODS[:-1]
    codecs: tuple[str, ...] = ()
    updates: str = "generator"
    densities: tuple[float, ...] = (1.0,)
    learning_rates: tuple[float, ...] = (3e-6,)
    receivers_hold: str = "full"
    repeat: int = 5
    warmup: int = 1
    bucket_mib: float = 16
    seed: int = 0

    def __post_init__(self) -> None:
        sources_and_receivers(self.world)
        _among("kind", [self.kind], _KINDS)
        _among("methods", self.methods, METHODS)
        _among("updates", [self.updates], ("generator", "adamw"))
        _among("receivers_hold", [self.receivers_hold], ("full", "tp"))
        if self.repeat < 1 or self.tensors < 1 or self.model_mib <= 0 or self.bucket_mib <= 0:
            raise ValueError(
                f"scenario {self.name!r}: repeat, tensors, model_mib and bucket_mib must be positive"
            )

    @property
    def sources(self) -> int:
        return sources_and_receivers(self.world)[0]

    @property
    def receivers(self) -> int:
        return sources_and_receivers(self.world)[1]

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * (1 << 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The command line.

    Attributes:
        preset: configs/bench_<preset>.toml, or a path.
        json: file for the rows; None stands for out/bench_<preset>[_<links>].json.
        plots: folder for plots; None draws none.
        links: rate such as 1gbit: every rank gets a link of this rate (needs root; not under torchrun).
    """

    preset: str = "quick"
    json: Path | None = None
    plots: Path | None = None
    links: str | None = None

    @property
    def rate(self) -> Rate | None:
        """Return the rate of the links.

        Raises:
            ValueError: `links` is not one.
        """
        return Rate.parse(self.links) if self.links is not None else None

    @property
    def preset_name(self) -> str:
        return Path(self.preset).stem.removeprefix("bench_")

    @property
    def rows(self) -> Path:
        """Return where the rows go."""
        links = f"_{self.rate}" if self.rate else ""
        return self.json or Path("out") / f"bench_{self.preset_name}{links}.json"


def read_flags(argv: Sequence[str] | None = None) -> tuple[Flags, list[Scenario]]:
    """Return the flags in `argv` and the scenarios of the preset they name.

    Raises:
        SystemExit: 0 after `--help`, 2 for wrong flags or a wrong preset.
    """
    flags = parse(Flags(), argv, "Time delta syncs beside dense ones; every call is checked bit for bit.")
    try:
        _ = flags.rate
        return flags, read_preset(flags.preset)
    except ValueError as error:
        refuse(str(error))


def read_preset(name: str) -> list[Scenario]:
    """Return the scenarios of a preset, given by name or as a path to a TOML file.

    Raises:
        SettingsError: there is no such file, or it is not a preset.
    """
    path = Path(name) if name.endswith(".toml") else CONFIGS / f"bench_{name}.toml"
    if not path.exists() and not name.endswith(".toml"):
        known = [each.stem.removeprefix("bench_") for each in CONFIGS.glob("bench_*.toml")]
        raise SettingsError(f"there is no preset {name!r}{did_you_mean(name, known)}")
    content = read_toml(path)
    tables = content.pop("scenario", [])
    if not isinstance(tables, list):
        raise SettingsError(f"{path}: scenario must be a list of tables, [[scenario]]")
    scenarios = [
        scenario
        for number, table in enumerate(tables, 1)
        for scenario in _expand(content | table, f"{path}, scenario {number}")
    ]
    if not scenarios:
        raise SettingsError(f"{path} has no [[scenario]]")
    return scenarios


def _expand(table: dict[str, Any], where: str) -> Iterator[Scenario]:
    """Yield a scenario for every combination of what the table lists."""
    axes = [
        [(name, value) for value in (table[name] if isinstance(table[name], list) else [table[name]])]
        for name in _AXES
        if name in table
    ]
    for values in itertools.product(*axes):
        yield build(Scenario, table | dict(values), where)


def sources_and_receivers(world: str) -> tuple[int, int]:
    """Return the two numbers of a world such as "2+2".

    Example:
        >>> sources_and_receivers("1+3")
        (1, 3)
    """
    try:
        sources, receivers = map(int, world.split("+"))
    except (AttributeError, ValueError):
        sources = receivers = 0
    if sources < 1 or receivers < 1:
        raise ValueError(f'world must be sources + receivers, such as "2+2", got {world!r}')
    return sources, receivers


def _among(what: str, got: Sequence[str], known: Sequence[str]) -> None:
    wrong = [each for each in got if each not in known]
    if wrong or not got:
        raise ValueError(
            f"{what} must be among {', '.join(known)}, got {', '.join(map(str, wrong)) or 'none'}"
        )
