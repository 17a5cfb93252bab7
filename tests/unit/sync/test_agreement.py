"""Coordinates of ranks come back as they were written; those outside their meshes are refused."""

from __future__ import annotations

import pytest

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import WHOLE, Cut, Entry, Manifest, MeshSpec, Placement
from dte_dist.sync.agreement import _check_numbers, _flatten, _unflatten
from dte_dist.sync.description import Description
from tests.unit.sync.test_description import LARGE, layout


def on_meshes() -> Description:
    meshes = (MeshSpec((2, 2), (0, 1, 2, 3)), MeshSpec((2,), (1, 3)))
    entries = [Entry("w", (4, 4), "float32", Placement(0, (Cut(0, 1),))), Entry("x", (4,), "float32", WHOLE)]
    return Description(
        {},
        None,
        False,
        False,
        (False, False),
        Manifest.build(entries, meshes),
        Manifest.build(entries, meshes[:1]),
    )


@pytest.mark.parametrize("number", [0, 4, 6, LARGE, -1])
def test_the_number_of_coordinates_is_that_of_the_meshes(number: int) -> None:
    described = on_meshes()
    assert described.numbers == 5
    _check_numbers([5, 5], [described] * 2)
    with pytest.raises(LayoutMismatch, match=rf"\[ranks 1; expected 5; got {number}\]"):
        _check_numbers([5, number], [described] * 2)


def test_coordinates_come_back() -> None:
    assert _unflatten(on_meshes(), [1, 0, -1, 0, 1], 0) == [((1, 0), None), ((0, 1),)]
    assert _unflatten(on_meshes(), [-1, -1, 1, -1, -1], 0) == [(None, (1,)), (None,)]
    assert _flatten(layout()) == []


@pytest.mark.parametrize(
    "numbers",
    [[2, 0, -1, 0, 1], [0, -1, -1, 0, 1], [-2, -2, -1, 0, 1], [0, 0, 2, 0, 1], [0, 0, 0, LARGE, 0]],
    ids=str,
)
def test_a_coordinate_outside_its_mesh_is_refused(numbers: list[int]) -> None:
    with pytest.raises(LayoutMismatch, match=r"a rank is at no place of a mesh \[ranks 2;"):
        _unflatten(on_meshes(), numbers, 2)
