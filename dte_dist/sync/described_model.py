"""What the sources of a group hold, told to ranks that have no layout yet.

An engine that traces how its loader places a checkpoint needs names, shapes and dtypes first, and should not
need the trainer's configuration for them.

1.   Each rank describes its module, if it has one, as when a channel opens.
2. o The digests go round; if a rank could not describe itself, all raise its error.
3. o Each distinct description is sent once.
4.   Every rank puts the same names together, or finds the same thing wrong with them.

Steps with a ring (o) are exchanges. They are those of `sync.agreement`, on a group that is closed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import numpy as np
import torch

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import DTYPES, Entry, Layout, Manifest
from dte_dist.liveness.groups import Group, group_of, place_of
from dte_dist.options import options_of, timeout_of
from dte_dist.sync.agreement import describe as described_by
from dte_dist.sync.agreement import exchange
from dte_dist.transport.all_or_none import agreed, capture
from dte_dist.transport.base import TIMEOUT
from dte_dist.transport.opening import Opening, open_together

__all__ = ["TensorInfo", "describe"]

_NOTHING: Final = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the sources' model, whole, however it is sharded.

    Attributes:
        shape: of the tensor.
        dtype: that the sources hold.
        aliases: all names of the tensor if it has several, sorted, this one among them.

    Example:
        >>> info = dte_dist.TensorInfo((8, 4), torch.float32)
        >>> torch.empty(info.shape, dtype=info.dtype).numel()
        32
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()


def describe(
    group: Group | None = None,
    module: torch.nn.Module | Layout | None = None,
    *,
    timeout: timedelta | float = TIMEOUT,
) -> Mapping[str, TensorInfo]:
    """Return what the sources of a group hold, on every rank of it; all must call.

    An engine asks it before it has a layout, and traces with it where its loader puts a checkpoint.

    Args:
        group: as for `delta_broadcast`.
        module: on a source, what it sends; None on a rank that only receives.
        timeout: the longest wait for another rank, the same on all.

    Returns:
        By name, sorted, shape and dtype of each tensor.

    Raises:
        LayoutMismatch: sources give one name another shape or dtype, or no rank has a module; on every rank.
        ValueError: an argument makes no sense; on every rank if it is that of a member.
        PeerLost: a rank did not come, or died; on every survivor.

    Example:
        >>> held = dte_dist.describe(group, model if rank == 0 else None)
        >>> held["0.weight"].shape, held["0.weight"].dtype
        ((32, 16), torch.float32)
    """
    place_of(group_of(group))
    options, error = capture(lambda: options_of(timeout=timeout))
    options = options or options_of()
    given = torch.nn.Module() if module is None else module

    def steps(opening: Opening) -> Mapping[str, TensorInfo]:
        backends = opening.membership.backends
        world = opening.membership.world
        mine, wrong = capture(lambda: described_by(given, None, options, backends, world))
        control = opening.connect()
        _, said = exchange(control, mine if error is None else None, error or wrong)
        opening.has_met = opening.watch.is_ending = True
        found = agreed(lambda: _put_together([each.manifest for each in said]))
        control.all_gather_rows(_NOTHING)  # nobody closes the group before all have everything
        opening.end()
        return found

    return open_together(group, timeout_of(options), steps, keep=False)


def _put_together(manifests: Sequence[Manifest]) -> Mapping[str, TensorInfo]:
    """Return the tensors of all sources by name."""
    first: dict[str, tuple[int, Entry]] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for rank, manifest in enumerate(manifests):
        for entry in manifest.entries:
            other, known = first.setdefault(entry.name, (rank, entry))
            _refuse_difference([other, rank], known, entry)
        for names in manifest.ties:
            for name in names:
                aliases[name] = tuple(sorted({*aliases.get(name, ()), *names}))
    if not first:
        hint = "pass the module on the ranks that send it"
        raise LayoutMismatch("no rank of the group has a module to describe", hint=hint)
    return {
        name: TensorInfo(entry.shape, DTYPES[entry.dtype], aliases.get(name, ()))
        for name, (_, entry) in sorted(first.items())
    }


def _refuse_difference(ranks: Sequence[int], known: Entry, entry: Entry) -> None:
    for what in ("shape", "dtype"):
        expected = getattr(known, what)
        got = getattr(entry, what)
        if expected != got:
            raise LayoutMismatch(
                f"sources hold one name with another {what}",
                tensor=entry.name,
                ranks=ranks,
                expected=expected,
                got=got,
            )
