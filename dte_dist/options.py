"""The options of a channel: what a call may say, in the form in which ranks compare it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dte_dist.codec import CodecSelector
from dte_dist.detect.snapshot import Detector
from dte_dist.layout import Layout, Manifest, Rename, Select
from dte_dist.plan.model_map import WireTypes
from dte_dist.plan.transfer_plan import ROUTES, RouteName
from dte_dist.transport.base import TIMEOUT, check_timeout

__all__ = [
    "CallOptions",
    "ChannelOptions",
    "OptionKeywords",
    "Ranks",
    "WireDtype",
    "group_ranks",
    "layout_of",
    "wire_types",
]

RouteOption = RouteName | Literal["auto"]
AUTO: Final = "auto"

Ranks = int | Sequence[int] | DeviceMesh
"""Ranks as a caller names them: one, several, or those of a mesh."""

WireDtype = (
    torch.dtype | str | Mapping[str, torch.dtype | str] | Callable[[str, torch.dtype], torch.dtype | str]
)
"""Dtypes on the wire as a caller names them; see `delta_broadcast`."""

RECEIVER: Final = "receiver"
"""The wire dtype that stands for whatever the receivers hold."""

_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}
"""Names that a caller may write instead of a dtype."""
_NAME_LENGTH: Final = 200
"""Characters of the longest name of a channel."""


class OptionKeywords(TypedDict, total=False):
    """The keyword options of a collective; `delta_broadcast` says what they mean."""

    group_src: Ranks | None
    version: int | None
    mode: Literal["delta", "full"]
    into: torch.nn.Module | Layout | None
    wire_dtype: WireDtype | None
    select: Select
    rename: Rename
    detector: Detector | None
    anchor_interval: int | None
    verify_interval: int | None
    bucket_bytes: int
    timeout: timedelta | float
    name: str | None
    route: RouteOption
    codec: str
    sparse_bytes_ratio: float


@dataclass(frozen=True, slots=True, eq=False)
class CallOptions:
    """The options that each call may give anew; `delta_broadcast` says what they mean.

    Raises:
        ValueError: something makes no sense.
    """

    version: int | None = None
    mode: Literal["delta", "full"] = "delta"
    detector: Detector | None = None
    route: RouteOption = "broadcast"
    codec: str = "auto"
    sparse_bytes_ratio: float = 1.0

    @classmethod
    def of(cls, said: OptionKeywords) -> CallOptions:
        """Pick these from the options of a call."""
        return cls(**{name: said[name] for name in cls.__slots__ if name in said})  # type: ignore[literal-required]

    def __post_init__(self) -> None:
        version = self.version
        if version is not None and (
            isinstance(version, bool) or not isinstance(version, int) or not 1 <= version < 1 << 62
        ):
            raise ValueError(f"version must be None or an int from 1 to 2^62 - 1, got {version!r}")
        if self.mode not in ("delta", "full"):
            raise ValueError(f'mode must be "delta" or "full", got {self.mode!r}')
        if self.route not in (*ROUTES, AUTO):
            raise ValueError(f'route must be "broadcast", "p2p" or "auto", got {self.route!r}')
        if isinstance(self.sparse_bytes_ratio, bool) or not isinstance(self.sparse_bytes_ratio, int | float):
            raise ValueError(
                f"sparse_bytes_ratio must be a number above 0 and at most 1, got {self.sparse_bytes_ratio!r}"
            )
        self.selector(None)

    def selector(self, bytes_per_second: float | None) -> CodecSelector:
        """Return what chooses the codecs, for links of this speed."""
        return CodecSelector(self.codec, bytes_per_second, self.sparse_bytes_ratio)


@dataclass(frozen=True, slots=True, eq=False)
class ChannelOptions:
    """The options that stay the same for the life of a channel.

    Attributes:
        sources: group ranks as said by the caller, first the root; None for the default.
        bucket_bytes, anchor_interval, verify_interval, timeout, name: compared between ranks when the
            channel opens. A timeout may be given in seconds.
        wire_dtype, select, rename: each rank's own; their effect is compared. A dtype may be given by its
            name, and one pattern alone.
        into: what this rank receives into, if not the module.

    Each attribute has one form, however its value was given, so that calls that say the same are the same.

    Raises:
        ValueError: something makes no sense.
    """

    sources: tuple[int, ...] | None = None
    bucket_bytes: int = 16 << 20
    anchor_interval: int | None = None
    verify_interval: int | None = None
    timeout: timedelta = TIMEOUT
    wire_dtype: WireDtype | None = None
    select: Select = None
    rename: Rename = None
    into: weakref.ref[Any] | None = None
    name: str | None = None

    def shared(self) -> dict[str, Any]:
        """Return what all ranks must say alike, as JSON values."""
        return {
            "src": None if self.sources is None else list(self.sources),
            "bucket_bytes": self.bucket_bytes,
            "anchor_interval": self.anchor_interval,
            "verify_interval": self.verify_interval,
            "timeout": self.timeout.total_seconds(),
            "name": self.name,
        }

    def __post_init__(self) -> None:
        if not isinstance(self.bucket_bytes, int) or not 64 <= self.bucket_bytes <= 1 << 30:
            raise ValueError(f"bucket_bytes must be between 64 and 2^30, got {self.bucket_bytes!r}")
        for name, what in (("anchor_interval", "deltas"), ("verify_interval", "versions")):
            every = getattr(self, name)
            if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
                raise ValueError(f"{name} must be a positive number of {what} or None, got {every!r}")
        set_once = partial(object.__setattr__, self)
        set_once("timeout", timedelta(seconds=check_timeout(self.timeout)))
        set_once("wire_dtype", _as_dtypes(self.wire_dtype))
        set_once("select", _as_patterns(self.select))
        if self.name is not None and not (isinstance(self.name, str) and 1 <= len(self.name) <= _NAME_LENGTH):
            what = f"name must be a str of 1 to {_NAME_LENGTH} characters or None"
            raise ValueError(f"{what}, got {self.name!r:.250}")

    def differences(self, other: ChannelOptions) -> list[str]:
        """Return the names of options in which another call differs from this one."""
        return [name for name in self.__slots__ if not _same(getattr(self, name), getattr(other, name))]


def _same(a: Any, b: Any) -> bool:
    """Compare two values of an option; functions by code and by what they close over, since a lambda is made
    anew at each call.
    """
    if a is b:
        return True
    if isinstance(a, partial) and isinstance(b, partial):
        return _same(a.func, b.func) and (a.args, a.keywords) == (b.args, b.keywords)
    if hasattr(a, "__code__") and hasattr(b, "__code__"):
        return all(
            _parts(a, name) == _parts(b, name)
            for name in ("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__self__")
        )
    return bool(a == b)


def _parts(function: Any, name: str) -> Any:
    part = getattr(function, name, None)
    return [cell.cell_contents for cell in part] if name == "__closure__" and part else part


def _as_dtypes(option: WireDtype | None) -> WireDtype | None:
    """Return a wire dtype as a caller gave it, with dtypes for their names.

    Raises:
        ValueError: it is of no kind that is known, or a name in it is not known.
    """
    if isinstance(option, str):
        return option if option == RECEIVER else _as_dtype(option, "wire_dtype", f'"{RECEIVER}"')
    if isinstance(option, Mapping):
        return {name: _as_dtype(given, f"wire_dtype for {name!r}") for name, given in option.items()}
    if option is None or isinstance(option, torch.dtype) or callable(option):
        return option
    raise ValueError(
        f'wire_dtype must be a dtype or its name, a mapping, a function or "{RECEIVER}", got {option!r}'
    )


def _as_dtype(given: Any, what: str, *others: str) -> torch.dtype:
    """Return a dtype that a caller gave, or named."""
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, str) and given in _DTYPES:
        return _DTYPES[given]
    raise ValueError(
        f"{what} must be a torch.dtype or one of {', '.join((*map(repr, _DTYPES), *others))}, got {given!r}"
    )


def _as_patterns(select: Select) -> Select:
    """Return patterns in one order, each once; anything else as it is, to be refused where it is used."""
    if callable(select) or not isinstance(select, Iterable):
        return select
    patterns = (select,) if isinstance(select, str) else tuple(select)
    return tuple(sorted(set(patterns))) if all(isinstance(pattern, str) for pattern in patterns) else patterns


def group_ranks(
    src: Ranks | None, group_src: Ranks | None, group: dist.ProcessGroup
) -> tuple[int, ...] | None:
    """Return the sources that a caller named as ranks of the group, None for the default.

    Raises:
        ValueError: both were given, or a rank is not in the group.
    """
    if src is not None and group_src is not None:
        raise ValueError("pass src= (ranks of the world) or group_src= (ranks of the group), not both")
    if src is None and group_src is None:
        return None
    named = _numbers(src if src is not None else group_src)
    if src is not None:
        place = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(group))}
        missing = [rank for rank in named if rank not in place]
        if missing:
            raise ValueError(
                f"src names ranks {missing} of the world, which are not in the group {list(place)}"
            )
        named = [place[rank] for rank in named]
    if not named or len(set(named)) < len(named) or not all(0 <= rank < group.size() for rank in named):
        raise ValueError(f"sources must be different ranks of a group of {group.size()}, got {named}")
    return tuple(named)


def _numbers(ranks: Any) -> list[int]:
    if isinstance(ranks, DeviceMesh):
        return [int(rank) for rank in ranks.mesh.flatten().tolist()]
    named = [ranks] if isinstance(ranks, int) else list(ranks)
    if not all(isinstance(rank, int) for rank in named):
        raise ValueError(f"sources are one rank, several, or a DeviceMesh, got {ranks!r}")
    return named


def wire_types(option: WireDtype | None, manifest: Manifest) -> WireTypes:
    """Write the wire dtypes of a source's own entries by name, where they differ from what it holds.

    Example:
        >>> from dte_dist.layout import Layout
        >>> wire_types(torch.bfloat16, Layout.from_tensors({"w": torch.zeros(2)}).manifest)
        {'w': 'bfloat16'}
    """
    option = _as_dtypes(option)
    if option is None or isinstance(option, str):
        return None if option is None else "receiver"
    chosen: dict[str, str] = {}
    for entry in manifest.entries:
        own: torch.dtype = getattr(torch, entry.dtype)
        if isinstance(option, torch.dtype):
            dtype = option if own.is_floating_point else own
        elif isinstance(option, Mapping):
            dtype = _as_dtype(option.get(entry.name, own), f"wire_dtype for {entry.name!r}")
        else:
            dtype = _as_dtype(option(entry.name, own), f"wire_dtype for {entry.name!r}")
        if dtype != own:
            chosen[entry.name] = str(dtype).removeprefix("torch.")
    return chosen


def layout_of(module: torch.nn.Module | Layout, options: ChannelOptions) -> Layout:
    """Return the layout of what a caller passed.

    Raises:
        ValueError: it is neither a module nor a layout.
    """
    if isinstance(module, Layout):
        if options.select is not None or options.rename is not None:
            raise ValueError(
                "select= and rename= are for modules: a Layout takes them, or partial=True, where it is built"
            )
        return weakref.proxy(module)  # the channel must not keep alive what it is found by
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"expected a torch.nn.Module or a dte_dist.Layout, got {type(module).__name__}")
    return Layout.from_module(module, select=options.select, rename=options.rename)
