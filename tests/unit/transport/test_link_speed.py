"""Unit tier, no ranks: what a channel learns of its links, and the pieces of a chain that follow from it."""

from __future__ import annotations

import pytest

from dte_dist.transport.broadcast import PIECE, BucketedBroadcast
from dte_dist.transport.link_speed import LinkSpeed

MIB = 1 << 20


def test_small_transfers_say_nothing() -> None:
    """The buffers of sockets take them at once, as if the link had no limit."""
    speed = LinkSpeed()
    speed.measure(16 * MIB - 1, 1e-3)
    assert speed.bytes_per_second is None
    speed.measure(16 * MIB, 0.25)
    speed.measure(2 * MIB, 1e-3)
    assert speed.bytes_per_second == 64 * MIB


def test_the_fastest_counts_and_what_all_heard_is_the_same() -> None:
    ranks = [LinkSpeed() for _ in range(3)]
    ranks[0].measure(100 * MIB, 3.0)
    ranks[1].measure(100 * MIB, 2.0)
    for _ in range(2):
        told = max(int(rank.bytes_per_second or 0) for rank in ranks)
        for rank in ranks:
            rank.merge(told)
        assert {rank.agreed for rank in ranks} == {float(50 * MIB)}
        ranks[2].measure(100 * MIB, 4.0)
    ranks[0].measure(300 * MIB, 1.0)  # known here only, until all are told
    assert {rank.agreed for rank in ranks} == {float(50 * MIB)}
    assert ranks[0].bytes_per_second == 300 * MIB


@pytest.mark.parametrize(
    ("said", "piece"),
    [(0, PIECE), (125_000_000, 512 << 10), (1_250_000_000, 4 * MIB), (12_500_000_000, 4 * MIB), (1, PIECE)],
)
def test_a_piece_is_a_power_of_two_within_bounds(said: int, piece: int) -> None:
    speed = LinkSpeed()
    speed.merge(said)
    assert BucketedBroadcast(None, None, rank=0, root=0, bucket_bytes=100, speed=speed)._piece() == piece
