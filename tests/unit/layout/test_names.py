"""Names: wrappers leave no trace, and what is chosen and renamed is what the user said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout, ShardSpec, canonical_name


def names(layout):
    return [entry.name for entry in layout.manifest.entries]


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


PLAIN = [
    "0.bias",
    "0.weight",
    "1.0.bias",
    "1.0.weight",
    "1.1.bias",
    "1.1.num_batches_tracked",
    "1.1.running_mean",
    "1.1.running_var",
    "1.1.weight",
]


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("_orig_mod.a.weight", "a.weight"),
        ("a._checkpoint_wrapped_module._orig_mod.b", "a.b"),
        ("_fsdp_wrapped_module.a", "a"),
        ("module.a", "module.a"),
        ("a_orig_mod.b", "a_orig_mod.b"),
        ("weight", "weight"),
    ],
)
def test_wrapper_segments_are_stripped_anywhere(name, canonical):
    assert canonical_name(name) == canonical


def test_compiled_and_checkpointed_modules_have_plain_names():
    wrapped = model()
    wrapped[1][0] = checkpoint_wrapper(torch.compile(wrapped[1][0]))
    wrapped[1] = torch.compile(wrapped[1])
    assert dict(wrapped.named_modules()).keys() >= {"1._orig_mod.0._checkpoint_wrapped_module._orig_mod"}
    assert names(Layout.from_module(torch.compile(wrapped))) == PLAIN
    assert names(Layout.from_tensors(torch.compile(wrapped).state_dict())) == PLAIN
    assert names(Layout.from_module(model())) == PLAIN


def test_a_submodule_that_is_called_module_keeps_its_name():
    assert names(Layout.from_module(nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)}))) == [
        "module.weight"
    ]


def test_select_takes_patterns_and_predicates_on_canonical_names():
    wrapped = torch.compile(model())
    assert names(Layout.from_module(wrapped, select=["1.*weight", "0.b*"])) == [
        "0.bias",
        "1.0.weight",
        "1.1.weight",
    ]
    assert names(Layout.from_module(wrapped, select=lambda name: name.startswith("0."))) == [
        "0.bias",
        "0.weight",
    ]
    assert names(Layout.from_tensors(model().state_dict(), select=["0.*"])) == ["0.bias", "0.weight"]


@pytest.mark.parametrize(
    "make", [str, lambda pattern: [pattern], lambda pattern: iter([pattern]), lambda pattern: {pattern}]
)
def test_one_pattern_alone_is_a_pattern(make):
    assert names(Layout.from_module(model(), select=make("*.w*"))) == [
        name for name in PLAIN if name.endswith("weight")
    ]
    assert names(Layout.from_tensors(model().state_dict(), select=make("0.*"))) == ["0.bias", "0.weight"]
    assert Layout.from_module(model(), select=make("*")).is_partial


SAYS = {
    "a pattern": ("lyers.*", "'lyers.*'"),
    "patterns": (["a", "b.*"], "'a', 'b.*'"),
    "none": ([], "no patterns"),
    "an empty one": ("", "''"),
    "a function": (lambda name: False, "a function"),
}


@pytest.mark.parametrize(("select", "said"), SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("is_module", [True, False])
def test_to_select_no_tensor_is_refused_with_patterns_and_names(select, said, is_module):
    with pytest.raises(ValueError, match="select= chooses no tensor") as caught:
        Layout.from_module(model(), select=select) if is_module else Layout.from_tensors(
            model().state_dict(), select=select
        )
    assert f"it is {said}, and the names are " in str(caught.value)
    assert "'0.bias'" in str(caught.value) and "and 5 more" in str(caught.value)


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("select", [["0.*", "lyers.*"], ["lyers.*", "*"]])
def test_one_pattern_of_several_that_matches_nothing_is_warned_of_by_name(select, is_module):
    with pytest.warns(UserWarning, match=r"the pattern 'lyers\.\*' of select= matches no tensor") as caught:
        Layout.from_module(model(), select=select) if is_module else Layout.from_tensors(
            model().state_dict(), select=select
        )
    (told,) = map(str, (each.message for each in caught))
    assert "'0.bias'" in told and "Hint: " in told


def test_where_there_are_no_tensors_there_is_nothing_to_select_from():
    for layout in (Layout.from_module(nn.Module(), select="w"), Layout.from_tensors({}, select="w")):
        assert names(layout) == [] and layout.is_partial


LONE = "w\udcff"


def test_a_name_that_cannot_be_encoded_is_named_and_so_is_who_gave_it():
    with pytest.raises(ValueError, match=r"rename returned 'w\\udcff' for 'bias': it has a lone surrogate"):
        Layout.from_module(nn.Linear(1, 1), rename=lambda name: LONE if name == "bias" else name)
    spec = ShardSpec((1,), None, ())
    for make in (
        lambda: Layout.from_tensors({LONE: torch.zeros(1)}),
        lambda: Layout.from_module(nn.ParameterDict({LONE: nn.Parameter(torch.zeros(1))})),
        lambda: Layout.from_shards([(LONE, torch.zeros(1), spec)]),
        lambda: Layout.from_views([(LONE, torch.zeros(1), (1,), (0,))]),
    ):
        with pytest.raises(ValueError, match=r"name 'w\\udcff' of a tensor cannot be sent"):
            make()


def test_rename_sees_canonical_names_after_select():
    layout = Layout.from_module(
        torch.compile(model()), select=["0.*"], rename=lambda name: name.replace("0.", "first.")
    )
    assert names(layout) == ["first.bias", "first.weight"]


def test_what_is_not_selected_is_not_looked_at():
    module = nn.ModuleDict({"fine": nn.Linear(1, 1), "meta": nn.Linear(1, 1, device="meta")})
    assert names(Layout.from_module(module, select=["fine.*"])) == ["fine.bias", "fine.weight"]
    with pytest.raises(LayoutMismatch, match=r"meta device.*tensor 'meta.bias'.*materialise"):
        Layout.from_module(module)


def test_duplicate_names_are_named():
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(1)), ("_orig_mod.a", torch.zeros(1))]
    with pytest.raises(LayoutMismatch, match="same name: 'a'"):
        Layout.from_tensors(tensors)
    with pytest.raises(LayoutMismatch, match="same name: 'w'"):
        Layout.from_module(nn.Linear(1, 1), rename=lambda name: "w")


@pytest.mark.parametrize(
    "options", [{"select": 0}, {"select": [1]}, {"rename": "x"}, {"rename": lambda name: None}]
)
def test_options_of_the_wrong_type_are_value_errors(options):
    with pytest.raises(ValueError, match="must"):
        Layout.from_module(nn.Linear(1, 1), **options)
