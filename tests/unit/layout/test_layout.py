"""Layouts on one rank: which tensors they find, how they follow a module that changes, and what they
refuse.
"""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import DTYPES, WHOLE, Block, Entry, Layout, Manifest, ShardSpec, refuse_shared


class Model(nn.Module):
    """Tied weights, buffers of both kinds, a frozen parameter, a scalar and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(4, 0))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.register_parameter("absent", None)
        self.register_buffer("unset", None)


NAMES = ["embed.weight", "head.weight", "nothing", "scale", "steps"]


def names(layout):
    return [entry.name for entry in layout.manifest.entries]


def found(layout):
    return dict(zip(names(layout), layout.tensors(), strict=True))


def test_a_module_gives_parameters_and_persistent_buffers_under_every_name():
    module = Model()
    layout = Layout.from_module(module)
    assert names(layout) == NAMES
    assert all(entry.placement == WHOLE for entry in layout.manifest.entries)
    assert [(entry.shape, entry.dtype) for entry in layout.manifest.entries[3:]] == [
        ((), "float32"),
        ((), "int64"),
    ]
    tensors = found(layout)
    assert tensors["embed.weight"] is tensors["head.weight"] is module.embed.weight
    assert tensors["steps"] is module.steps
    assert layout.coordinates == ()


def test_which_entries_are_buffers_is_known_of_a_module_only():
    model = Model()
    layout = Layout.from_module(model)
    assert layout.buffers() == [name == "steps" for name in NAMES]
    outer = nn.Sequential(model)
    last = Layout.from_module(outer, select=["*s*"], rename=lambda name: name.replace("0.steps", "z.0.steps"))
    assert dict(zip(names(last), last.buffers(), strict=True)) == {"0.scale": False, "z.0.steps": True}
    assert not any(Layout.from_tensors(model.state_dict()).buffers())
    del model, outer
    gc.collect()
    assert layout.buffers() == [False] * len(NAMES), "a module that is gone is found out when it is read"


def test_what_has_gradients_is_trained():
    model = Model()
    layouts = [Layout.from_module(model), Layout.from_module(model, select=["steps"])]
    layouts.append(Layout.from_tensors(model.named_parameters()))
    assert [layout.is_trained() for layout in layouts] == [False] * 3
    model.nothing.grad = torch.zeros(4, 0)
    assert [layout.is_trained() for layout in layouts] == [True] * 3
    model.nothing.grad = None
    assert [layout.is_trained() for layout in layouts] == [False] * 3
    product = torch.ones(3, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where one asks for the gradient of what is no leaf
        assert not Layout.from_tensors({"product": product}).is_trained()


def test_tied_tensors_are_listed_and_overlapping_ones_are_not():
    assert Layout.from_module(Model()).manifest.ties == (("embed.weight", "head.weight"),)
    base = torch.zeros(6, 4)
    views = {
        "all": base,
        "same": base.view(6, 4),
        "rows": base[:3],
        "flat": base.view(24),
        "bits": base.view(torch.int32),
    }
    assert Layout.from_tensors({**views, "turned": base.t()}).manifest.ties == (("all", "same"),)
    assert Layout.from_tensors(Model().state_dict()).manifest.ties == (("embed.weight", "head.weight"),)


def test_empty_tensors_are_tied_only_as_one_object():
    empty = torch.zeros(0)
    assert Layout.from_tensors({"a": empty, "b": torch.zeros(0), "c": empty}).manifest.ties == (("a", "c"),)


def test_equal_models_have_equal_manifests():
    one, other = (
        Layout.from_module(Model()).manifest,
        Layout.from_tensors(list(Model().state_dict().items())[::-1]).manifest,
    )
    assert one.to_bytes() == other.to_bytes()


def test_the_module_dies_although_its_layout_lives():
    module = Model()
    layout, alive = Layout.from_module(module), weakref.ref(module)
    layout.tensors()
    assert weakref.ref(layout)() is layout
    del module
    gc.collect()
    assert alive() is None


def test_moved_and_replaced_parameters_are_found_again():
    module = Model()
    layout = Layout.from_module(module)
    module.scale.data = torch.tensor(3.0)
    assert found(layout)["scale"].item() == 3.0
    module.scale = nn.Parameter(torch.tensor(4.0))
    assert found(layout)["scale"] is module.scale
    module.steps = torch.tensor(8)
    assert found(layout)["steps"] is module.steps


@pytest.mark.parametrize("replacement", [torch.compile, lambda m: nn.Embedding(5, 3, _weight=m.weight)])
def test_a_replaced_submodule_of_the_same_kind_is_found_again(replacement):
    module = Model()
    layout = Layout.from_module(module)
    module.embed = replacement(module.embed)
    module.head.weight = nn.Parameter(torch.ones(5, 3))
    module.embed.weight = module.head.weight
    assert found(layout)["embed.weight"] is module.head.weight
    assert found(layout)["embed.weight"] is module.head.weight, "and again, from what was remembered"


def cut_rows(module):
    module.embed.weight.data = module.embed.weight.data[:4]


def untie(module):
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())


def reread(module):
    module.embed.weight.requires_grad_(False).data = module.embed.weight.data.view(torch.int32)


CHANGES = {
    "the same bits as another dtype": (
        reread,
        "another dtype.*tensor 'embed.weight'.*expected float32; got int32",
    ),
    "another shape": (
        lambda m: setattr(m, "scale", nn.Parameter(torch.zeros(2))),
        "another shape.*tensor 'scale'",
    ),
    "fewer rows of the same storage": (cut_rows, "another shape.*tensor 'embed.weight'"),
    "another dtype": (
        lambda m: m.to(torch.bfloat16),
        "another dtype.*tensor 'embed.weight'.*expected float32; got bfloat16",
    ),
    "meta": (lambda m: m.to("meta"), "meta device.*tensor 'embed.weight'"),
    "a parameter set to None": (lambda m: setattr(m, "scale", None), "came or went.*tensor 'scale'"),
    "a parameter that was None": (
        lambda m: setattr(m, "absent", nn.Parameter(torch.zeros(2))),
        "came or went.*tensor 'absent'",
    ),
    "a buffer that was None": (lambda m: setattr(m, "unset", torch.zeros(2)), "came or went.*tensor 'unset'"),
    "a parameter deleted": (lambda m: delattr(m, "scale"), "came or went.*tensor 'scale'"),
    "a parameter renamed": (
        lambda m: (delattr(m, "scale"), setattr(m, "other", nn.Parameter(torch.zeros(())))),
        "tensor 'other'",
    ),
    "a module added": (lambda m: setattr(m, "new", nn.Linear(1, 1)), "came or went.*tensor 'new.bias'"),
    "a module of another shape": (
        lambda m: setattr(m, "head", nn.Linear(3, 6, bias=False)),
        "another shape.*tensor 'head.weight'",
    ),
    "a module taken out": (lambda m: setattr(m, "head", None), "came or went.*tensor 'head.weight'"),
    "ties broken": (untie, "share storage"),
    "ties broken by a new module": (
        lambda m: setattr(m, "head", nn.Linear(3, 5, bias=False)),
        "tied tensors",
    ),
    "a new tie": (lambda m: setattr(m, "nothing", nn.Parameter(torch.zeros(4, 0))), None),
}


@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES.keys())
def test_a_module_that_no_longer_fits_is_refused_every_time(change, text):
    module = Model()
    layout = Layout.from_module(module)
    layout.tensors()
    change(module)
    if text is None:
        assert len(layout.tensors()) == len(NAMES)
        return
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match=text):
            layout.tensors()


def test_an_empty_parameter_that_is_no_longer_tied_is_noticed():
    empty = nn.Parameter(torch.zeros(0))
    module = nn.ParameterDict({"a": empty, "b": empty})
    layout = Layout.from_module(module)
    module["b"] = nn.Parameter(torch.zeros(0))
    with pytest.raises(LayoutMismatch, match="share storage"):
        layout.tensors()


def test_a_bias_that_comes_while_a_submodule_keeps_its_keys_is_noticed():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    layout = Layout.from_module(module)
    assert len(layout.tensors()) == 3
    module[0].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(LayoutMismatch, match=r"came or went.*tensor '0\.bias'"):
        layout.tensors()
    module[0].bias = None
    assert len(layout.tensors()) == 3


def test_a_tensor_that_moved_to_another_kind_of_device_is_refused():
    module = nn.Linear(2, 2)
    layout = Layout.from_module(module)
    layout._device_types[1] = "cuda"  # as if it had been built there: this machine has one kind only
    layout.tensors()
    module.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(LayoutMismatch, match=r"kind of device \[tensor 'weight'; expected cuda; got cpu\]"):
        layout.tensors()


def test_a_layout_recovers_when_the_module_does():
    module = Model()
    layout, scale = Layout.from_module(module), module.scale
    module.scale = nn.Parameter(torch.zeros(2))
    with pytest.raises(LayoutMismatch):
        layout.tensors()
    module.scale = scale
    assert found(layout)["scale"] is scale


def test_every_dtype_of_whole_bytes_is_described():
    for name, dtype in DTYPES.items():
        layout = Layout.from_tensors({"w": torch.zeros(8, dtype=torch.uint8).view(dtype)})
        assert layout.manifest.entries == (Entry("w", (8 // dtype.itemsize,), name, WHOLE),)
    assert {
        "bfloat16",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        "uint64",
        "complex64",
        "int8",
    } <= DTYPES.keys()
    assert {dtype.itemsize for dtype in DTYPES.values()} == {1, 2, 4, 8}


def test_complex128_becomes_pairs_of_float64_that_share_its_memory():
    module = nn.ParameterDict({"w": nn.Parameter(torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128))})
    layout = Layout.from_module(module)
    assert layout.manifest.entries == (Entry("w", (2, 2), "float64", WHOLE),)
    (pairs,) = layout.tensors()
    assert pairs.tolist() == [[1, 2], [3, -4]]
    with torch.no_grad():
        pairs[0, 1] = 9
    assert module["w"][0].item() == 1 + 9j
    region = Layout.from_views([("w", module["w"].detach(), (5,), (3,))])
    assert region.manifest.block(0, ()) == Block((((3, 2),), ((0, 2),)))
    assert region.tensors()[0].shape == region.manifest.block(0, ()).shape


def refused():
    yield (
        "quantised",
        torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        "torch.qint8 cannot be sent",
    )
    yield "below a byte", torch.zeros(2, dtype=torch.uint8).view(torch.uint4), "torch.uint4 cannot be sent"
    yield "sparse", torch.zeros(2, 2).to_sparse(), "not one array"
    yield "nested", torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "not one array"
    yield "meta", torch.zeros(2, device="meta"), "no data"
    yield "conjugate", torch.zeros(2, dtype=torch.complex64).conj(), "lazy conjugate"
    yield "negative", torch.zeros(2, dtype=torch.complex64).conj().imag, "lazy conjugate or negative"
    yield "expanded", torch.zeros(1, 2).expand(3, 2), "share memory"
    yield "lazy", nn.LazyLinear(2).weight, "no shape yet"
    freed = torch.zeros(2)
    freed.untyped_storage().resize_(0)
    yield "freed", freed, "has been freed"


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_bits_of_their_own_are_refused_by_name():
    cases = list(refused())
    assert len(cases) == 10
    for _, tensor, text in cases:
        with pytest.raises(LayoutMismatch, match=rf"{text}.*tensor 'layer.w'.*Hint"):
            Layout.from_tensors({"layer.w": tensor})


@pytest.mark.parametrize("item", [("w", [1.0]), ("w",), (1, torch.zeros(1)), "w", None])
def test_what_is_no_named_tensor_is_a_value_error(item):
    with pytest.raises(ValueError, match="named tensor is"):
        Layout.from_tensors([item])


def test_a_module_must_be_one():
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module, not dict"):
        Layout.from_module({})


def test_views_of_a_fused_tensor_become_regions_of_slots():
    fused = torch.arange(24.0).view(6, 4)
    views = [
        ("q", fused[:2], (8, 4), (2, 0)),
        ("k", fused[2:4, 1:3], (2, 4), (0, 1)),
        ("q", fused[4:], (8, 4), (6, 0)),
    ]
    layout = Layout.from_views(views)
    assert names(layout) == ["k", "q", "q"]
    blocks = [layout.manifest.block(index, ()) for index in range(3)]
    assert [block.runs[0] for block in blocks] == [((0, 2),), ((2, 2),), ((6, 2),)]
    assert blocks[0].global_indices((2, 4)).tolist() == [1, 2, 5, 6]
    assert [tensor.tolist() for tensor in layout.tensors()] == [
        fused[2:4, 1:3].tolist(),
        fused[:2].tolist(),
        fused[4:].tolist(),
    ]
    assert layout.tensors()[0].data_ptr() == fused[2:4, 1:3].data_ptr()
    assert Layout.from_views(reversed(views)).manifest.digest() == layout.manifest.digest()
    assert Manifest.from_bytes(layout.manifest.to_bytes()) == layout.manifest


W = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("views", "text"),
    [
        ([("w", W, (4, 2), (3, 0))], "leaves the slot"),
        ([("w", W, (4, 2), (-1, 0))], "leaves the slot"),
        ([("w", W, (4,), (0,))], "number of dimensions"),
        ([("w", W, (4, 2), (0, 0)), ("w", torch.zeros(2, 1), (4, 2), (1, 1))], "overlap"),
        ([("w", W, (4, 2), (0, 0)), ("w", torch.zeros(2, 2), (5, 2), (2, 0))], "disagree on its full shape"),
        (
            [("w", W, (4, 2), (0, 0)), ("w", torch.zeros(2, 2, dtype=torch.int32), (4, 2), (2, 0))],
            "disagree on its dtype",
        ),
    ],
)
def test_regions_that_cannot_be_are_refused_by_name(views, text):
    with pytest.raises(LayoutMismatch, match=rf"{text}.*tensor 'w'"):
        Layout.from_views(views)


def test_views_and_shards_of_the_wrong_type_are_value_errors():
    with pytest.raises(ValueError, match="a view is"):
        Layout.from_views([("w", [1], (1,), (0,))])
    with pytest.raises(ValueError, match="a shard is"):
        Layout.from_shards([("w", torch.zeros(1), (1,))])


def test_a_shard_must_have_the_shape_of_its_placement():
    with pytest.raises(LayoutMismatch, match=r"tensor 'w'; expected \(3, 2\); got \(2, 2\)"):
        Layout.from_shards([("w", torch.zeros(2, 2), ShardSpec((3, 2), None, ()))])
    with pytest.raises(LayoutMismatch, match="same name: 'w'"):
        Layout.from_shards([("w", W, ShardSpec((2, 2), None, ()))] * 2)


def test_memory_that_is_trained_and_received_at_once_is_refused() -> None:
    whole = torch.zeros(6, 4)
    refuse_shared(["a", "b"], [whole[:3], torch.zeros(0)], [whole[3:], torch.zeros(0)])
    for received in (whole, whole[2:], whole[:, 1], whole.view(-1)[11:12]):
        with pytest.raises(LayoutMismatch, match=r"into= shares memory with the module.*'w'"):
            refuse_shared(["v", "w"], [torch.zeros(3), whole[:3]], [torch.zeros(3), received])
