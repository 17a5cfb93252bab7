"""Frames of a delta stay as they are after the p2p route took them; those of a seed share two buffers."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from torch import Tensor

from dte_dist.report import Phases
from dte_dist.transport.p2p import PairwiseExchange
from tests.unit.transport.wires import SIZES, Taken, Wire, as_sent, check, frame_of, memories

keeping = pytest.mark.parametrize("keep", [False, True], ids=["seed", "delta"])
made_late = pytest.mark.parametrize("late", [False, True], ids=["made", "made as they are sent"])


@keeping
@made_late
def test_frames_between_pairs(late: bool, keep: bool) -> None:
    """Rank 0 is a source, 1 a source and a receiver, 2 a receiver; to each go other frames."""
    sources, targets, posts = [0, 1], [1, 2], defaultdict[tuple[int, int], deque[Tensor]](deque)
    pairs = [(source, to) for source in sources for to in targets]
    frames = {
        (source, to): [frame_of(source, number, size, to) for number, size in enumerate(SIZES[source])]
        for source, to in pairs
    }
    for rank in range(3):
        taken: Taken = []
        exchange = PairwiseExchange(Wire(rank, range(3), posts), rank=rank, sources=sources)  # type: ignore[arg-type]
        outgoing = (
            {to: [(len(f), as_sent(f, late)) for f in frames[rank, to]] for to in targets}
            if rank in sources
            else {}
        )
        incoming = {source: SIZES[source] for source in sources} if rank in targets else {}

        for source, number, frame in exchange.move(outgoing, incoming, targets, Phases(), keep=keep):
            taken.append((source, number, frame, frame.clone()))
        mine = {
            (s, number): f
            for (s, to), row in frames.items()
            if to == rank
            for number, f in enumerate(row)
            if len(f)
        }
        check(taken, mine, keep)
        if taken and not keep:
            own = (
                sum(map(bool, SIZES[1])) if not late else 1
            )  # a rank's own frames are handed over as they are
            assert memories(taken) == (2 + own if rank == 1 else 2)
    assert not any(posts.values())
