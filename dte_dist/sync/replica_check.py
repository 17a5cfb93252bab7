"""Check that sources which hold the same piece of the model are copies of each other.

Replicas on one mesh are copies by their placement, and none of them is read. Of what else several sources
hold (`plan.contested`):

1.   Each of them computes a digest of its own bits (`detect.digest`), which reads these tensors once. An
     error is kept.
2. o One row per rank goes round: the digests, and which of the tensors are buffers of a module. If a rank
     could not read its tensors, all raise its error.
3.   All ranks see the same rows. Where bits differ, all refuse: one name stands for several tensors, such as
     the layers of two stages of a pipeline, and only one of them would ever be sent. Buffers are an exception
     where ranks train one module, since each has statistics (of BatchNorm, say) of its own batches: the
     lowest rank sends its own, with a warning.

Steps with a ring (o) are exchanges.
"""

from __future__ import annotations

import logging

import numpy as np

from dte_dist.detect.digest import own_digests
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout
from dte_dist.plan.contested import Contested
from dte_dist.plan.model_map import ModelMap
from dte_dist.sync.agreement import Agreement
from dte_dist.transport.all_or_none import AgreedError, capture, raise_if_any
from dte_dist.transport.communicator import Communicator

__all__ = ["refuse_rivals"]

_log = logging.getLogger(__name__)

_FIX = (
    "pass rename= on the ranks that hold another part of the model; if they are copies that drifted apart, "
    "put them on one mesh, name one source with src=, or leave the tensor out on all but one with select="
)


def refuse_rivals(control: Communicator, agreement: Agreement, layout: Layout | None) -> None:
    """Refuse sources that hold different bits under one name; all ranks of the control group must call.

    Args:
        control: the control group of the channel.
        agreement: what all ranks know.
        layout: of the module of this rank; it is read only where this rank is a source of something
            contested.

    Raises:
        AgreedError: with a `LayoutMismatch`, or with the error of the lowest rank that could not read its
            tensors.
        PeerLost: a rank did not answer.
    """
    contested = agreement.model.contested
    if not len(contested):
        return
    row, error = capture(lambda: _row(contested, layout, control.rank))
    rows = raise_if_any(control, error, (_empty_row(contested) if row is None else row).tolist())
    differing, refused = _judge(contested, rows)
    if len(refused):
        raise AgreedError(_rivals(agreement.model, refused))
    if len(differing) and control.rank == agreement.root:
        named = _names(agreement.model, differing)
        more = f" and {len(named) - 1} more" if named[1:] else ""
        what = "buffers differ between sources, and the lowest rank sends its own: %s%s"
        _log.warning(what, named[0], more)


def _empty_row(contested: Contested) -> np.ndarray:
    return np.zeros(len(contested) + -(-len(contested) // 64), np.int64)


def _row(contested: Contested, layout: Layout | None, rank: int) -> np.ndarray:
    """Return the digest of each piece, 0 where another rank holds it, then in bits which are buffers."""
    row = _empty_row(contested)
    pieces, entries = contested.held_by(rank)
    if len(pieces) and layout is not None:
        tensors = layout.tensors()
        buffers = layout.buffers()
        row[pieces] = own_digests([tensors[entry] for entry in entries.tolist()])
        flags = np.zeros(64 * (len(row) - len(contested)), np.bool_)
        flags[pieces] = [buffers[entry] for entry in entries.tolist()]
        row[len(contested) :] = np.packbits(flags).view(np.int64)
    return row


def _judge(contested: Contested, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the pieces that differ, and of those among them that must not."""
    count = len(contested)
    speaker = (contested.rank, contested.piece)
    flags = np.unpackbits(np.ascontiguousarray(rows[:, count:]).view(np.uint8), axis=1)
    digests = rows[speaker]
    is_buffer = flags[speaker].astype(np.bool_)
    first = np.searchsorted(contested.piece, np.arange(count))
    differs = np.logical_or.reduceat(digests != digests[first][contested.piece], first)
    may_differ = contested.may_differ & np.logical_and.reduceat(is_buffer, first)
    return np.flatnonzero(differs), np.flatnonzero(differs & ~may_differ)


def _names(model: ModelMap, pieces: np.ndarray) -> list[str]:
    """Return the names of the tensors that some contested pieces belong to."""
    return [model.slots[slot].name for slot in np.unique(model.contested.slot[pieces]).tolist()]


def _rivals(model: ModelMap, refused: np.ndarray) -> LayoutMismatch:
    """Return the error that names the first of the tensors that differ, and who holds what differs of it."""
    contested = model.contested
    named = _names(model, refused)
    of_first = refused[contested.slot[refused] == contested.slot[refused].min()]
    ranks = np.unique(contested.rank[np.isin(contested.piece, of_first)]).tolist()
    what = "sources hold different bits under one name, and no mesh makes them replicas of each other"
    what += f" ({len(named)} tensors in all)" if named[1:] else ""
    return LayoutMismatch(what, tensor=named[0], ranks=ranks, hint=_FIX)
