"""What ranks leave in the store, damaged at random: a reader returns what is sound, or refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from dte_dist import kernels
from dte_dist.liveness.board import Verdict
from dte_dist.liveness.notes import read_note
from dte_dist.liveness.places import Place
from dte_dist.liveness.presence import Process
from dte_dist.liveness.rendezvous import _said
from dte_dist.tensors.flat import BITS
from tests.unit.codec.test_frame_fuzz import cases
from tests.unit.fuzzing import damage_bytes, damage_json, refuses_or_is_harmless


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


@cache
def notes() -> dict[str, Any]:
    place = Place(1, 2, "actor", 4, {1: 3, 2: 4}, 2, True, False)
    return {
        "verdict": json.loads(Verdict("late", (2, 3), "ranks 2 and 3 did not answer é", (4, 5)).pack()),
        "process": asdict(Process.this()),
        "note": {"origin": 3, "process": asdict(Process.this())},
        "places": [asdict(place), asdict(replace(place, name=None))],
    }


def notes_in_the_store(rng: Random) -> str:
    kind = rng.choice(list(notes()))
    data = json.dumps(notes()[kind]).encode()
    data = damage_json(rng, json.loads(data)) if rng.random() < 0.8 else damage_bytes(rng, data)
    if kind == "verdict":
        verdict = Verdict.parse(data)
        assert str(verdict.error()).encode() is not None and json.loads(verdict.pack())
    elif kind == "process":
        process = read_note("a process", data, Process.read)
        assert replace(process, machine="elsewhere").is_dead() is False
    elif kind == "note":
        origin, _ = read_note("a note", data, _said)
        assert origin is None or origin >= 0
    else:
        for place in read_note("places", data, lambda said: [*map(Place.parse, said)]):
            assert str(place) and place.is_before(place) in (True, False)
    return "read"


READERS: dict[Callable[[Random], str], int] = {
    notes_in_the_store: 3000,
}
"""How many inputs of each are read in the suite."""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    refuses_or_is_harmless(reader, READERS[reader])


def test_what_is_not_damaged_is_read() -> None:
    assert Verdict.parse(json.dumps(notes()["verdict"]).encode()).ranks == (2, 3)
    assert _said(notes()["note"]) == (3, Process.this())
    assert asdict(Place.parse(json.loads(json.dumps(notes()["places"][0])))) == notes()["places"][0]
