"""Descriptions of ranks and the numbers of an opening, damaged at random: what is read is sound, or
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from dte_dist import kernels
from dte_dist.layout import Layout
from dte_dist.options import options_of
from dte_dist.sync.agreement import _check_numbers, _unflatten, describe
from dte_dist.sync.description import Description as RankDescription
from dte_dist.sync.description import check_counts
from dte_dist.tensors.flat import BITS
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import EXTREMES, damage_bytes, damage_json, refuses_or_is_harmless
from tests.unit.layout.manifests import check_manifest, manifests


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


@cache
def descriptions() -> list[bytes]:
    layout = Layout.from_tensors({"w": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)})
    return [
        describe(torch.nn.Linear(2, 3), None, options_of(), "cpu:gloo").data,
        describe(
            torch.nn.Linear(2, 3),
            None,
            options_of(group_src=(2, 0), wire_dtype=torch.bfloat16, anchor_interval=7),
            "cpu:gloo",
        ).data,
        describe(
            layout,
            Layout.from_tensors({"w": torch.zeros(3, 2)}),
            options_of(wire_dtype="receiver"),
            "cpu:gloo",
        ).data,
    ]


def check_description(said: RankDescription) -> None:
    assert isinstance(said.partial, bool) and isinstance(said.nccl, bool) and said.numbers >= 0
    assert said.options["src"] is None or all(0 <= rank < 4 for rank in said.options["src"])
    assert 64 <= said.options["bucket_bytes"] <= 1 << 30 and said.options["timeout"] > 0
    for manifest in said.manifests:
        if manifest is not None:
            check_manifest(manifest)


def description_as_it_came(rng: Random) -> str:
    data = damage_bytes(rng, rng.choice(descriptions()), descriptions())
    check_counts([len(data)])
    check_description(RankDescription.parse(data, rank=1, size=4))
    return "read"


def description_with_other_json(rng: Random) -> str:
    data = rng.choice(descriptions())
    sizes = np.frombuffer(data[:24], np.int64).tolist()
    head, rest = data[24 : 24 + sizes[0]], data[24 + sizes[0] :]
    head = damage_json(rng, json.loads(head))
    check_description(
        RankDescription.parse(np.array([len(head), *sizes[1:]]).tobytes() + head + rest, rank=1, size=4)
    )
    return "read"


def numbers_of_an_opening(rng: Random) -> str:
    """Sizes of descriptions, numbers of coordinates, and coordinates."""
    manifest = rng.choice(manifests())
    said = RankDescription({}, None, False, False, (False, False), manifest, rng.choice([None, *manifests()]))
    sound = [rng.choice([-1] * 2 + [0, 1])] * said.numbers
    numbers = [
        rng.choice([number, rng.choice(EXTREMES)]) if rng.random() < 0.2 else number for number in sound
    ]
    check_counts([rng.choice([24, 300, 1 << 28]), rng.choice([300, 300, rng.choice(EXTREMES)])])
    _check_numbers([rng.choice([len(numbers)] * 3 + [rng.choice(EXTREMES)])], [said])
    places = _unflatten(said, numbers, 3)
    for each, places_of in zip(said.manifests, places, strict=True):
        for mesh, place in zip(each.meshes if each is not None else (), places_of, strict=True):
            assert place is None or all(0 <= at < size for at, size in zip(place, mesh.shape, strict=True))
    return "read"


READERS: dict[Callable[[Random], str], int] = {
    description_as_it_came: 3000,
    description_with_other_json: 3000,
    numbers_of_an_opening: 3000,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])


def test_what_is_not_damaged_is_read() -> None:
    for data in descriptions():
        check_description(RankDescription.parse(data, rank=0, size=4))
