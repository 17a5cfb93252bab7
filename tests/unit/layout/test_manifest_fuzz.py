"""Manifests, damaged at random: a reader returns one that is safe to work with, or refuses."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from random import Random

import pytest

from dte_dist import kernels
from dte_dist.layout import Manifest
from dte_dist.tensors.flat import BITS
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import damage_bytes, damage_json, refuses_or_is_harmless
from tests.unit.layout.manifests import check_manifest, manifests


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


def manifest_as_it_came(rng: Random) -> str:
    manifest = rng.choice(manifests())
    data = damage_bytes(rng, manifest.to_bytes(), [other.to_bytes() for other in manifests()])
    read = Manifest.from_bytes(data)
    assert read in manifests()
    return "read"


def manifest_with_other_json(rng: Random) -> str:
    text = damage_json(rng, json.loads(zlib.decompress(rng.choice(manifests()).to_bytes())))
    check_manifest(Manifest.from_bytes(zlib.compress(text, 1)))
    return "read"


READERS: dict[Callable[[Random], str], int] = {
    manifest_as_it_came: 3000,
    manifest_with_other_json: 3000,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])


def test_what_is_not_damaged_is_read() -> None:
    for manifest in manifests():
        check_manifest(manifest)
