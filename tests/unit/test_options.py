"""Options of a channel without ranks: when two calls say the same, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dte_dist.layout import Layout
from dte_dist.options import SyncOptions, layout_of, options_of, shared, wire_types
from dte_dist.options import differences as differing
from dte_dist.transport.named_ranks import group_ranks


def differences(name: str, one: Any, other: Any) -> list[str]:
    return differing(options_of(**{name: one}), options_of(**{name: other}))


def ending(text: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(text)


def by_default(text: str) -> Callable[[str], bool]:
    def select(name: str, end: str = text) -> bool:
        return name.endswith(end)

    return select


def by_keyword(text: str) -> Callable[[str], bool]:
    def select(name: str, *, end: str = text) -> bool:
        return name.endswith(end)

    return select


class Chooser:
    def __init__(self, text: str) -> None:
        self.text = text

    def select(self, name: str) -> bool:
        return name.endswith(self.text)


ONE, OTHER = Chooser("weight"), Chooser("bias")
ALIKE = {
    "a lambda made anew": lambda: lambda name: name.endswith("weight"),
    "one that closes over equal values": lambda: ending("weight"),
    "equal defaults": lambda: by_default("weight"),
    "equal keyword defaults": lambda: by_keyword("weight"),
    "a method of one object": lambda: ONE.select,
    "patterns": lambda: ["*.weight"],
    "a pattern": lambda: "*.weight",
    "a class": lambda: Chooser,
    "a function of C": lambda: len,
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_a_call_that_says_the_same_again_is_the_same(make: Callable[[], Any]) -> None:
    assert differences("select", make(), make()) == []


UNLIKE = {
    "other code": (lambda name: name.endswith("weight"), lambda name: name.endswith("bias")),
    "closing over other values": (ending("weight"), ending("bias")),
    "other defaults": (by_default("weight"), by_default("bias")),
    "other keyword defaults": (by_keyword("weight"), by_keyword("bias")),
    "methods of two objects": (ONE.select, OTHER.select),
    "patterns": (["*.weight"], ["*.bias"]),
    "a function and patterns": (ending("weight"), ["*.weight"]),
    "a function and nothing": (ending("weight"), None),
}


@pytest.mark.parametrize(("one", "other"), UNLIKE.values(), ids=UNLIKE)
def test_a_call_that_says_something_else_is_named(one: Any, other: Any) -> None:
    assert differences("select", one, other) == differences("select", other, one) == ["select"]


def test_every_option_that_differs_is_named() -> None:
    one = options_of(bucket_bytes=128, wire_dtype=torch.bfloat16)
    assert differing(one, options_of(bucket_bytes=128, wire_dtype=torch.bfloat16)) == []
    other = options_of(anchor_interval=3)
    assert differing(one, other) == ["bucket_bytes", "anchor_interval", "wire_dtype"]


@pytest.mark.parametrize("name", ["", "x" * 201, 3, b"a", ["a"], True], ids=lambda name: str(name)[:8])
def test_what_is_no_name_of_a_channel_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="name must be a str of 1 to 200 characters or None, got"):
        options_of(name=name)


def test_the_name_of_a_channel_is_compared_between_ranks_and_between_calls() -> None:
    assert shared(options_of())["name"] is None and shared(options_of(name="x" * 200))["name"] == "x" * 200
    assert differences("name", "actor", "reference") == differences("name", None, "actor") == ["name"]
    assert differences("name", "actor", "actor") == []


def test_a_detector_is_no_option_of_a_channel() -> None:
    assert differences("detector", None, lambda live, known: known) == []


@pytest.mark.parametrize(
    ("name", "near"), [("ratio", None), ("tiemout", "timeout"), ("ancor_interval", "anchor_interval")]
)
def test_an_option_that_is_none_is_refused_with_the_nearest(name: str, near: str | None) -> None:
    with pytest.raises(ValueError, match=f"there is no option '{name}'") as caught:
        options_of(**{name: 3})
    assert (near is None) == ("did you mean" not in str(caught.value))
    assert near is None or f"did you mean '{near}'?" in str(caught.value)


MANIFEST = Layout.from_tensors({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int32)}).manifest
WIRES = {
    "none": (None, None),
    "a dtype, for what is floating": (torch.bfloat16, {"a": "bfloat16"}),
    "a dtype by its name": ("bf16", {"a": "bfloat16"}),
    "its own": (torch.float32, {}),
    "its own by its name": ("float", {}),
    "by name": ({"a": torch.float16, "nowhere": torch.float16}, {"a": "float16"}),
    "names by name": ({"a": "half", "nowhere": "bf16"}, {"a": "float16"}),
    "a function": (
        lambda name, dtype: torch.bfloat16 if dtype.is_floating_point else dtype,
        {"a": "bfloat16"},
    ),
    "a function of names": (
        lambda name, dtype: "bfloat16" if dtype.is_floating_point else dtype,
        {"a": "bfloat16"},
    ),
    "the receiver's": ("receiver", "receiver"),
}


@pytest.mark.parametrize(("option", "types"), WIRES.values(), ids=WIRES)
def test_wire_dtypes_are_written_by_name_where_they_differ(option: Any, types: Any) -> None:
    assert (
        wire_types(option, MANIFEST)
        == wire_types(options_of(wire_dtype=option)["wire_dtype"], MANIFEST)
        == types
    )


NAMES = {
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half"),
    torch.float32: ("fp32", "float32", "float"),
}


@pytest.mark.parametrize(
    ("dtype", "name"), [(dtype, name) for dtype, names in NAMES.items() for name in names], ids=str
)
def test_a_dtype_and_its_names_are_the_same_option(dtype: torch.dtype, name: str) -> None:
    assert options_of(wire_dtype=name)["wire_dtype"] is dtype
    assert (
        differences("wire_dtype", name, dtype) == differences("wire_dtype", {"w": dtype}, {"w": name}) == []
    )
    assert (
        differences("wire_dtype", name, torch.float64)
        == differences("wire_dtype", {"w": name}, {"w": torch.float64})
        == ["wire_dtype"]
    )
    assert wire_types(name, MANIFEST) == wire_types(dtype, MANIFEST)


@pytest.mark.parametrize(
    "option",
    [
        {"a": "bfloat"},
        {"a": None},
        {"b": 2},
        {"a": "receiver"},
        lambda name, dtype: None,
        lambda name, dtype: "bloat16",
        partial(lambda n, d: 1),
    ],
    ids=[
        "no name of one",
        "none",
        "a number",
        "receiver",
        "a function of none",
        "a function of others",
        "a function of numbers",
    ],
)
def test_what_gives_no_dtype_is_refused_by_the_name_of_the_tensor(option: Any) -> None:
    with pytest.raises(
        ValueError, match=r"wire_dtype for '[ab]' must be a torch.dtype or one of 'bf16', .*'float', got"
    ) as caught:
        wire_types(option, MANIFEST)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("option", ["", "bfloat", "BF16", "torch.bfloat16", "int8", "fp8"])
def test_a_name_of_no_dtype_is_refused_with_those_that_are(option: str) -> None:
    accepted = "'bf16', 'bfloat16', 'fp16', 'float16', 'half', 'fp32', 'float32', 'float', \"receiver\""
    for takes in (lambda: options_of(wire_dtype=option), lambda: wire_types(option, MANIFEST)):
        with pytest.raises(ValueError) as caught:
            takes()
        assert str(caught.value) == f"wire_dtype must be a torch.dtype or one of {accepted}, got {option!r}"


@pytest.mark.parametrize("option", [3, ["bfloat16"], 2.0], ids=str)
def test_what_is_no_kind_of_wire_dtype_is_refused(option: Any) -> None:
    with pytest.raises(ValueError, match="wire_dtype must be a dtype or its name, a mapping, a function"):
        options_of(wire_dtype=option)


PATTERNS = ["*.weight", ["*.weight"], ("*.weight",), {"*.weight"}, ["*.weight", "*.weight"]]


def test_patterns_are_the_same_however_they_are_given() -> None:
    for one in (*PATTERNS, iter(["*.weight"])):
        assert differences("select", one, "*.weight") == []
    assert differences("select", ["a", "b"], ("b", "a")) == differences("select", [], ()) == []
    assert differences("select", ["a", "b"], "a") == differences("select", [], None) == ["select"]


@pytest.mark.parametrize("select", [3, [3], ["a", None], b"a", True], ids=str)
def test_what_is_no_patterns_is_refused(select: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"select must be a callable, a pattern such as 'layers\.\*' or a list of patterns, not",
    ):
        layout_of(nn.Linear(2, 2), options_of(select=select))


@pytest.mark.parametrize(
    "options", [{"select": ["*"]}, {"rename": str}, {"select": [], "rename": str}], ids=str
)
def test_names_are_chosen_where_a_layout_is_built_not_where_it_is_used(options: Any) -> None:
    layout = Layout.from_tensors({"w": torch.zeros(3)})
    assert layout_of(layout, options_of()).manifest is layout.manifest
    with pytest.raises(ValueError, match="where it is built"):
        layout_of(layout, options_of(**options))


def test_a_module_is_selected_and_renamed() -> None:
    options = options_of(select=["weight"], rename=lambda name: f"layer.{name}")
    assert [entry.name for entry in layout_of(nn.Linear(2, 2), options).manifest.entries] == ["layer.weight"]


ODD: list[Any] = [
    *(-1, True, 1.5, float("nan"), 1 << 70),
    *("odd", "", b"odd"),
    *(["w", 3], {"w": 3}, {3: "w"}, object(), torch.zeros(2)),
]


class Group:
    """As much of a place in a group as `group_ranks` asks for."""

    size = 4


@pytest.mark.parametrize("name", SyncOptions.__annotations__)
@pytest.mark.parametrize("value", ODD, ids=lambda value: f"{value!r:.20}")
def test_a_value_that_makes_no_sense_is_a_value_error_on_whatever_rank(name: str, value: Any) -> None:
    """Whether or not the rank has a use for the option; no other error, and none that comes later."""
    try:
        options = options_of(**{name: value})
        sources = group_ranks(None, options["group_src"], Group())  # type: ignore[arg-type]
        layout = layout_of(nn.Linear(2, 2), options)
        wire_types(options["wire_dtype"], layout.manifest)
    except ValueError:
        return
    fine = {
        "group_src": lambda: sources in ((3,), None),
        "anchor_interval": lambda: value == 1 << 70,
        "verify_interval": lambda: value == 1 << 70,
        "timeout": lambda: value == 1.5,
        "name": lambda: value == "odd",
    }
    assert name in fine and fine[name](), f"{name}={value!r} was taken"
