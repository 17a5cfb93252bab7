"""The options of a collective: each is one field of `SyncOptions`, with all that is known of it.

1. A caller says some of them. `options_of` fills in the others, checks each and gives it its one form, so
   that calls that say the same are the same.
2. Those of a channel stay the same for its life; `differences` names those in which a later call differs.
3. `shared` writes those that all ranks must say alike; ranks compare them when a channel opens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Final, Literal, TypedDict, Unpack, cast, get_type_hints

import torch

from dte_dist.codec import CodecSelector
from dte_dist.detect.detector import Detector
from dte_dist.layout import DTYPES, Layout, Manifest, Rename, Select
from dte_dist.layout.names import NameRule
from dte_dist.plan.model_map import WireTypes
from dte_dist.plan.transfer_plan import ROUTES, RouteName
from dte_dist.transport.base import TIMEOUT, check_timeout
from dte_dist.transport.named_ranks import Ranks

__all__ = [
    "AUTO",
    "RouteOption",
    "SyncOptions",
    "WireDtype",
    "differences",
    "layout_of",
    "options_of",
    "selector_of",
    "shared",
    "timeout_of",
    "wire_types",
]

RouteOption = RouteName | Literal["auto"]
AUTO: Final = "auto"

Module = torch.nn.Module | Layout

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


@dataclass(frozen=True, slots=True)
class _Option:
    """What is known of one option beside its name and type.

    Attributes:
        default: its value where a caller says nothing.
        form: returns a value in its one form, or raises a ValueError; None if all values are as they should
            be.
        each_call: whether each call may give it anew; otherwise it stays the same for the life of a channel.
        shared: whether all ranks must say it alike.
    """

    default: Any = None
    form: Callable[[Any], Any] | None = None
    each_call: bool = False
    shared: bool = False


def _one_of(name: str, *values: str) -> Callable[[Any], Any]:
    def form(value: Any) -> Any:
        if not isinstance(value, str) or value not in values:
            *others, last = map('"{}"'.format, values)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
        return value

    return form


def _every(name: str, what: str) -> Callable[[Any], Any]:
    def form(value: Any) -> Any:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive number of {what} or None, got {value!r}")
        return value

    return form


def _version(value: Any) -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_int and 1 <= value < 1 << 62):
        raise ValueError(f"version must be None or an int from 1 to 2^62 - 1, got {value!r}")
    return value


def _codec(value: Any) -> Any:
    CodecSelector(value if isinstance(value, str) else repr(value))
    return value


def _bytes_ratio(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"sparse_bytes_ratio must be a number above 0 and at most 1, got {value!r}")
    CodecSelector("fast", None, value)
    return value


def _bucket_bytes(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or not 64 <= value <= 1 << 30:
        raise ValueError(f"bucket_bytes must be between 64 and 2^30, got {value!r}")
    return value


def _timeout(value: Any) -> timedelta:
    return timedelta(seconds=check_timeout(value))


def _name(value: Any) -> Any:
    if value is not None and not (isinstance(value, str) and 1 <= len(value) <= _NAME_LENGTH):
        what = f"name must be a str of 1 to {_NAME_LENGTH} characters or None"
        raise ValueError(f"{what}, got {value!r:.250}")
    return value


def _into(value: Any) -> weakref.ref[Any] | None:
    """Return a reference: a channel must not keep alive what it belongs to."""
    if value is None or isinstance(value, weakref.ref):
        return value
    if not isinstance(value, torch.nn.Module | Layout):
        raise ValueError(f"into= must be a torch.nn.Module or a dte_dist.Layout, got {type(value).__name__}")
    return weakref.ref(value)


def _wire_dtype(option: WireDtype | None) -> WireDtype | None:
    """Return a wire dtype as a caller gave it, with dtypes for their names.

    Raises:
        ValueError: it is of no kind that is known, or a name in it is not known.
    """
    if isinstance(option, str):
        return option if option == RECEIVER else _as_dtype(option, "wire_dtype", f'"{RECEIVER}"')
    if isinstance(option, Mapping):
        if not all(isinstance(name, str) for name in option):
            raise ValueError(f"wire_dtype must map names of tensors to dtypes, got {option!r}")
        return {name: _as_dtype(given, f"wire_dtype for {name!r}") for name, given in option.items()}
    if isinstance(option, torch.dtype):
        if not option.is_floating_point:
            what = "wire_dtype is for all floating-point tensors, and must be a floating-point dtype"
            raise ValueError(f"{what}, got {option}")
        return _as_dtype(option, "wire_dtype")
    if option is None or callable(option):
        return option
    raise ValueError(
        f'wire_dtype must be a dtype or its name, a mapping, a function or "{RECEIVER}", got {option!r}'
    )


def _as_dtype(given: Any, what: str, *others: str) -> torch.dtype:
    """Return a dtype that a caller gave, or named."""
    if isinstance(given, torch.dtype):
        if given not in DTYPES.values():
            raise ValueError(f"{what}: elements of {given} cannot be sent")
        return given
    if isinstance(given, str) and given in _DTYPES:
        return _DTYPES[given]
    raise ValueError(
        f"{what} must be a torch.dtype or one of {', '.join((*map(repr, _DTYPES), *others))}, got {given!r}"
    )


def _detector(value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError(f"detector must be a function or None, got {value!r}")
    return value


def _rename(value: Rename) -> Rename:
    NameRule.of(None, value)
    return value


def _patterns(select: Select) -> Select:
    """Return patterns in one order, each once, or a function as it is."""
    if not (select is None or isinstance(select, str) or callable(select)) and isinstance(select, Iterable):
        select = tuple(select)
    found = NameRule.of(select).patterns
    return select if found is None else tuple(sorted(set(found)))


class SyncOptions(TypedDict, total=False):
    """The keyword options of a collective; `delta_broadcast` says what they mean."""

    version: Annotated[int | None, _Option(form=_version, each_call=True)]
    mode: Annotated[
        Literal["delta", "full"], _Option("delta", _one_of("mode", "delta", "full"), each_call=True)
    ]
    detector: Annotated[Detector | None, _Option(form=_detector, each_call=True)]
    route: Annotated[RouteOption, _Option("broadcast", _one_of("route", *ROUTES, AUTO), each_call=True)]
    codec: Annotated[str, _Option("auto", _codec, each_call=True)]
    sparse_bytes_ratio: Annotated[float, _Option(1.0, _bytes_ratio, each_call=True)]
    group_src: Annotated[Ranks | None, _Option(shared=True)]
    bucket_bytes: Annotated[int, _Option(16 << 20, _bucket_bytes, shared=True)]
    anchor_interval: Annotated[int | None, _Option(form=_every("anchor_interval", "deltas"), shared=True)]
    verify_interval: Annotated[int | None, _Option(form=_every("verify_interval", "versions"), shared=True)]
    timeout: Annotated[timedelta | float, _Option(TIMEOUT, _timeout, shared=True)]
    wire_dtype: Annotated[WireDtype | None, _Option(form=_wire_dtype)]
    select: Annotated[Select, _Option(form=_patterns)]
    rename: Annotated[Rename, _Option(form=_rename)]
    into: Annotated[Module | None, _Option(form=_into)]
    name: Annotated[str | None, _Option(form=_name, shared=True)]


_OPTIONS: Final[Mapping[str, _Option]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(SyncOptions, include_extras=True).items()
}
_DEFAULTS: Final = {name: option.default for name, option in _OPTIONS.items()}


def options_of(**said: Unpack[SyncOptions]) -> SyncOptions:
    """Return all options where a caller said some, each checked and in its one form.

    Raises:
        ValueError: there is no such option, or a value makes no sense; names the option.

    Example:
        >>> options_of(timeout=60)["timeout"], options_of()["mode"]
        (datetime.timedelta(seconds=60), 'delta')
    """
    given = cast(dict[str, Any], said)
    for name in given.keys() - _OPTIONS.keys():
        near = get_close_matches(name, _OPTIONS, 1)
        raise ValueError(f"there is no option {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    found = _DEFAULTS | given
    for name, value in given.items():
        form = _OPTIONS[name].form
        if form is not None:
            found[name] = _formed(name, form, value)
    return cast(SyncOptions, found)


def _formed(name: str, form: Callable[[Any], Any], value: Any) -> Any:
    try:
        return form(value)
    except ValueError:
        raise
    except Exception as error:  # of a value that cannot be asked what it is
        raise ValueError(f"{name} makes no sense: {type(error).__name__}: {error}") from error


def shared(options: SyncOptions) -> dict[str, Any]:
    """Return what all ranks must say alike, as JSON values."""
    said: dict[str, Any] = {name: value for name, value in options.items() if _OPTIONS[name].shared}
    sources = said.pop("group_src")
    return {
        **said,
        "src": None if sources is None else list(sources),
        "timeout": said["timeout"].total_seconds(),
    }


def differences(one: SyncOptions, other: SyncOptions) -> list[str]:
    """Return the names of options of a channel in which two calls differ."""
    return [
        "src" if name == "group_src" else name
        for name, option in _OPTIONS.items()
        if not option.each_call and not _same(one.get(name), other.get(name))
    ]


def timeout_of(options: SyncOptions) -> timedelta:
    """Return the timeout of options in their one form."""
    return timedelta(seconds=check_timeout(options["timeout"]))


def selector_of(options: SyncOptions, bytes_per_second: float | None) -> CodecSelector:
    """Return what chooses the codecs, for links of this speed."""
    return CodecSelector(options["codec"], bytes_per_second, options["sparse_bytes_ratio"])


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


def wire_types(option: WireDtype | None, manifest: Manifest) -> WireTypes:
    """Write the wire dtypes of a source's own entries by name, where they differ from what it holds.

    Example:
        >>> from dte_dist.layout import Layout
        >>> wire_types(torch.bfloat16, Layout.from_tensors({"w": torch.zeros(2)}).manifest)
        {'w': 'bfloat16'}
    """
    option = _wire_dtype(option)
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


def layout_of(module: Module, options: SyncOptions) -> Layout:
    """Return the layout of what a caller passed.

    Raises:
        ValueError: it is neither a module nor a layout.
    """
    if isinstance(module, Layout):
        if options["select"] is not None or options["rename"] is not None:
            raise ValueError(
                "select= and rename= are for modules: a Layout takes them, or partial=True, where it is built"
            )
        return weakref.proxy(module)  # the channel must not keep alive what it is found by
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"expected a torch.nn.Module or a dte_dist.Layout, got {type(module).__name__}")
    return Layout.from_module(module, select=options["select"], rename=options["rename"])
