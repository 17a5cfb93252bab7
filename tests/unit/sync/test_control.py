"""Unit tier, no ranks: one decision from the rows of all ranks, and why a receiver is seeded instead of
followed.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dte_dist.errors import VersionError, VersionReplay
from dte_dist.sync.control import NONE, REASONS, ControlRow, Decision, decide

STREAM, OTHER, PROPOSAL = 77, 88, 99
FIELDS = len(fields(ControlRow))


def source(version: int = 7, lineage: int = STREAM, **more: int) -> ControlRow:
    return ControlRow(
        is_source=1, source_version=version, source_lineage=lineage, proposed_lineage=PROPOSAL, **more
    )


def receiver(version: int = 7, lineage: int = STREAM, **more: int) -> ControlRow:
    return ControlRow(
        is_receiver=1, receiver_version=version, receiver_lineage=lineage, proposed_lineage=1, **more
    )


FRESH_SOURCE = source(NONE, 0, full=1, reason=REASONS.index("first sync"))
FRESH_RECEIVER = receiver(NONE, 0)
states = st.tuples(st.sampled_from([NONE, 1, 2, 3, 9]), st.sampled_from([STREAM, OTHER]))


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[ControlRow], int]:
    """Rows of one to six ranks in any roles and states, and which of the sources is the root."""
    roles = draw(st.lists(st.sampled_from(["source", "receiver", "both"]), max_size=5))
    rows = []
    shared = draw(states)
    for role in ["source", *roles, *(["receiver"] if not {"receiver", "both"} & set(roles) else [])]:
        at, held = draw(st.one_of(st.just(shared), states)), draw(st.one_of(st.just(shared), states))
        row = ControlRow(proposed_lineage=draw(st.integers(1, 2**62)))
        if role != "receiver":
            row = replace(
                row,
                is_source=1,
                source_version=at[0],
                source_lineage=at[1],
                full=int(at[0] == NONE or draw(st.booleans())),
            )
        if role != "source":
            row = replace(row, is_receiver=1, receiver_version=held[0], receiver_lineage=held[1])
        rows.append(row)
    order = draw(st.permutations(range(len(rows))))
    rows = [rows[place] for place in order]
    return rows, draw(st.sampled_from([rank for rank, row in enumerate(rows) if row.is_source]))


@given(groups())
def test_every_receiver_gets_exactly_one_of_delta_and_seed(group: tuple[list[ControlRow], int]) -> None:
    rows, root = group
    decision = decide(rows, root)
    receivers = [rank for rank, row in enumerate(rows) if row.is_receiver]
    assert sorted(decision.followers + decision.seeded) == receivers
    assert list(decision.followers) == sorted(decision.followers) and list(decision.seeded) == sorted(
        decision.seeded
    )
    assert decision.is_full == (not decision.followers)


@given(groups())
def test_followers_hold_exactly_what_all_sources_start_from(group: tuple[list[ControlRow], int]) -> None:
    rows, root = group
    decision = decide(rows, root)
    for rank in decision.followers:
        assert (rows[rank].receiver_version, rows[rank].receiver_lineage) == (decision.base, decision.lineage)
        assert decision.base != NONE
    if decision.followers:
        sources = [row for row in rows if row.is_source]
        assert {(row.source_version, row.source_lineage) for row in sources} == {
            (decision.base, decision.lineage)
        }
        assert not any(row.full for row in sources)


@given(groups())
def test_the_version_is_newer_than_what_sources_and_followers_hold_and_on_a_full_sync_than_all(
    group: tuple[list[ControlRow], int],
) -> None:
    rows, root = group
    decision = decide(rows, root)
    held = [row.source_version for row in rows if row.is_source] + [
        rows[rank].receiver_version for rank in decision.followers
    ]
    held += [] if decision.followers else [row.receiver_version for row in rows if row.is_receiver]
    assert decision.version > max(held) and decision.version >= 1
    if decision.followers:
        assert decision.version == decision.base + 1  # what sources have encoded before anyone decided


@given(groups())
def test_whoever_is_seeded_has_a_reason_and_a_plain_delta_has_none(
    group: tuple[list[ControlRow], int],
) -> None:
    rows, root = group
    decision = decide(rows, root)
    sources_agree = len({(row.source_version, row.source_lineage) for row in rows if row.is_source}) == 1
    if decision.followers and not decision.seeded:
        assert decision.reason == ""
    if decision.followers and decision.seeded:
        assert all(f"rank {rank} seeded: " in decision.reason for rank in decision.seeded)
    if not sources_agree:
        assert decision.is_full and decision.reason == "sources hold different versions"


@given(groups(), st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_does_not_matter(group: tuple[list[ControlRow], int], random: object) -> None:
    rows, root = group
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    decision, moved = decide(rows, root), decide([rows[rank] for rank in order], order.index(root))
    assert (moved.version, moved.base, moved.lineage, moved.next_lineage) == (
        decision.version,
        decision.base,
        decision.lineage,
        decision.next_lineage,
    )
    assert sorted(order[place] for place in moved.followers) == list(decision.followers)
    assert sorted(order[place] for place in moved.seeded) == list(decision.seeded)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=FIELDS, max_size=FIELDS),
    st.lists(st.integers(0, 2**40), max_size=5),
    st.integers(0, 3),
)
def test_a_row_comes_back_from_its_int64_form(numbers: list[int], sizes: list[int], spare: int) -> None:
    row = ControlRow(*numbers)
    packed = row.pack(sizes, len(sizes) + spare)
    assert packed.dtype == np.int64
    assert ControlRow.columns() == FIELDS
    rows, behind = ControlRow.unpack(np.stack([packed, packed]))
    assert rows == [row, row] and behind.shape == (2, len(packed) - ControlRow.columns())
    assert packed[FIELDS:].tolist() == sizes + [0] * spare


def test_receivers_at_the_version_of_the_sources_get_a_delta() -> None:
    assert decide([source(), source(), receiver(), receiver()], 0) == Decision(
        8, 7, STREAM, STREAM, (2, 3), (), ""
    )


def test_the_first_sync_is_full_and_starts_the_lineage_that_the_root_proposes() -> None:
    rows = [FRESH_RECEIVER, replace(FRESH_SOURCE, proposed_lineage=5), FRESH_SOURCE]
    assert decide(rows, 2) == Decision(1, NONE, 0, PROPOSAL, (), (0,), "first sync")


def test_a_new_receiver_is_seeded_beside_the_delta_and_the_others_are_not() -> None:
    assert decide([source(), receiver(), FRESH_RECEIVER], 0) == Decision(
        8, 7, STREAM, STREAM, (1,), (2,), "rank 2 seeded: it had no version"
    )


def test_gap_replay_and_restart_are_told_apart_by_name() -> None:
    decision = decide([source(), receiver(), receiver(6), receiver(9), receiver(7, OTHER)], 0)
    assert decision.followers == (1,) and decision.seeded == (2, 3, 4)
    assert decision.reason.split("; ") == [
        "rank 2 seeded: gap, it held v6, sources v7",
        "rank 3 seeded: replay, it held v9, sources v7",
        "rank 4 seeded: it followed another run",
    ]


def test_a_restarted_trainer_seeds_under_a_new_lineage_and_a_version_above_the_receivers() -> None:
    decision = decide([FRESH_SOURCE, receiver(7), receiver(5)], 0)
    assert decision == Decision(8, NONE, 0, PROPOSAL, (), (1, 2), "sources restarted, receivers held v7")


def test_one_source_of_two_restarted_is_a_full_sync_of_a_new_lineage() -> None:
    decision = decide([source(), replace(FRESH_SOURCE, proposed_lineage=5), receiver()], 0)
    assert decision == Decision(8, NONE, 0, PROPOSAL, (), (2,), "sources hold different versions")


@pytest.mark.parametrize("asking", [[0], [1], [0, 1]])
def test_one_source_that_was_asked_for_everything_is_enough(asking: list[int]) -> None:
    asked = source(NONE, STREAM, full=1, reason=REASONS.index("mode"))
    rows = [asked if rank in asking else source() for rank in range(2)]
    next_lineage = PROPOSAL if len(asking) == 2 else STREAM
    base, lineage = (NONE, 0) if len(asking) == 2 else (7, STREAM)
    assert decide([*rows, receiver()], 0) == Decision(8, base, lineage, next_lineage, (), (2,), "mode")


def test_after_a_sync_that_broke_off_receivers_follow_but_the_new_version_has_a_name_of_its_own() -> None:
    rows = [source(aborted=1), source(), receiver(), receiver(8)]
    assert decide(rows, 0) == Decision(
        8, 7, STREAM, PROPOSAL, (2,), (3,), "rank 3 seeded: replay, it held v8, sources v7"
    )


def test_a_full_sync_is_above_every_version_that_was_ever_held() -> None:
    assert decide([FRESH_SOURCE, replace(FRESH_RECEIVER, newest=11)], 0).version == 12


@pytest.mark.parametrize("reason", ["mode", "anchor"])
def test_a_full_sync_on_purpose_says_why(reason: str) -> None:
    full = source(NONE, STREAM, full=1, reason=REASONS.index(reason))
    decision = decide([full, receiver(), receiver()], 0)
    assert decision.is_full and decision.reason == reason and decision.version == 8


@pytest.mark.parametrize("requested_version", [1, 6, 7])
def test_a_version_that_is_not_newer_is_a_replay_and_says_what_is_held(requested_version: int) -> None:
    with pytest.raises(VersionReplay, match=rf"expected > 7; got {requested_version}"):
        decide([source(requested_version=requested_version), receiver()], 0)


@pytest.mark.parametrize("requested_version", [1, 7])
def test_a_full_sync_is_held_against_what_receivers_hold(requested_version: int) -> None:
    with pytest.raises(VersionReplay):
        decide([replace(FRESH_SOURCE, requested_version=requested_version), receiver(7)], 0)
    assert decide([replace(FRESH_SOURCE, requested_version=8), receiver(7)], 0).version == 8


def test_a_version_may_leave_numbers_out() -> None:
    assert decide([source(requested_version=100), receiver()], 0) == Decision(
        100, 7, STREAM, STREAM, (1,), (), ""
    )


def test_receivers_may_leave_the_version_out_or_say_the_same() -> None:
    assert (
        decide(
            [
                source(requested_version=9),
                source(requested_version=9),
                receiver(requested_version=9),
                receiver(),
            ],
            0,
        ).version
        == 9
    )


@pytest.mark.parametrize(
    "rows",
    [
        [source(requested_version=8), source(requested_version=9), receiver()],
        [source(requested_version=8), source(), receiver()],
        [source(requested_version=8), receiver(requested_version=9)],
        [source(), receiver(requested_version=8)],
    ],
    ids=["two sources", "one source of two", "source and receiver", "receiver alone"],
)
def test_different_versions_are_named_with_who_wants_what(rows: list[ControlRow]) -> None:
    with pytest.raises(VersionError, match=r"version= differs between ranks \[ranks .* on rank") as caught:
        decide(rows, 0)
    assert type(caught.value) is VersionError


def test_a_version_that_would_not_fit_is_refused() -> None:
    with pytest.raises(VersionError, match="does not fit") as caught:
        decide([source(requested_version=1 << 62), receiver()], 0)
    assert type(caught.value) is VersionError
    assert decide([source(requested_version=(1 << 62) - 1), receiver()], 0).version == (1 << 62) - 1


def test_a_colocated_rank_follows_itself() -> None:
    both = replace(source(), is_receiver=1, receiver_version=7, receiver_lineage=STREAM)
    assert decide([both], 0).followers == (0,)
    assert decide([replace(both, receiver_version=NONE)], 0).seeded == (0,)
