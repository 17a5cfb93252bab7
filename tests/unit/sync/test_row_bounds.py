"""Unit tier, no ranks: control rows that cannot be are refused with their rank and column."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given

from dte_dist.errors import FrameError
from dte_dist.sync.control import REASONS, SEED_REASONS, ControlRow
from dte_dist.sync.row_bounds import check_rows
from tests.unit.sync.test_control import groups, receiver, source


def packed(rows: list[ControlRow]) -> np.ndarray:
    return np.stack([row.pack([-5, 1 << 62], 3) for row in rows])


@given(groups())
def test_rows_that_can_be_are_let_through(group: tuple[list[ControlRow], int]) -> None:
    rows, _ = group
    sources = [rank for rank, row in enumerate(rows) if row.is_source]
    receivers = [rank for rank, row in enumerate(rows) if row.is_receiver]
    check_rows(packed(rows), sources, receivers)


IMPOSSIBLE = {
    **dict.fromkeys(("failed", "is_source", "is_receiver", "aborted", "full"), (-1, 2, 1 << 40)),
    **dict.fromkeys(
        ("source_version", "receiver_version", "newest", "requested_version"), (-2, 1 << 62, -(1 << 63))
    ),
    **dict.fromkeys(
        ("source_lineage", "receiver_lineage", "proposed_lineage", "changed"), (-1, (1 << 62) + 1)
    ),
    "reason": (-1, len(REASONS), 1 << 60),
    "seed_reason": (-1, len(SEED_REASONS), 1 << 60),
    "route": (-1, 2, -(1 << 60)),
    "call": (-1, 2, 1 << 62),
}


def test_every_column_has_bounds() -> None:
    assert IMPOSSIBLE.keys() == {field.name for field in fields(ControlRow)}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_column_that_cannot_be_is_named_with_its_rank(name: str) -> None:
    rows = [source(), receiver(), receiver()]
    for value in IMPOSSIBLE[name]:
        said = rf"the {name} of a control row cannot be \[ranks 1; expected .*; got {value}\]"
        with pytest.raises(FrameError, match=said):
            check_rows(packed([rows[0], replace(rows[1], **{name: value}), rows[2]]), [0], [1, 2])


def test_a_rank_keeps_the_role_that_it_was_agreed_to_have() -> None:
    rows = [source(), receiver()]
    check_rows(packed(rows), [0], [1])
    for sources, receivers, rank, name in (
        ([0, 1], [1], 1, "is_source"),
        ([], [1], 0, "is_source"),
        ([0], [0, 1], 0, "is_receiver"),
    ):
        with pytest.raises(FrameError, match=rf"the {name} of a control row cannot be \[ranks {rank};"):
            check_rows(packed(rows), sources, receivers)
