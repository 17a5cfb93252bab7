"""Ranks as a caller names them: one, several, or those of a mesh; of the world, or of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dte_dist.liveness.groups import Place

__all__ = ["Ranks", "group_ranks", "ranks_of"]

Ranks = int | Sequence[int] | DeviceMesh
"""Ranks as a caller names them."""


def group_ranks(src: Ranks | None, group_src: Ranks | None, place: Place) -> tuple[int, ...] | None:
    """Return the sources that a caller named as ranks of the group, None for the default.

    Raises:
        ValueError: both were given, or a rank is not in the group.
    """
    if src is not None and group_src is not None:
        raise ValueError("pass src= (ranks of the world) or group_src= (ranks of the group), not both")
    if src is None and group_src is None:
        return None
    if src is None:
        return tuple(ranks_of("group_src", group_src, place.size))
    places = {rank: place for place, rank in enumerate(place.global_ranks)}
    named = ranks_of("src", src)
    missing = [rank for rank in named if rank not in places]
    if missing:
        raise ValueError(f"src names ranks {missing} of the world, which are not in the group {list(places)}")
    return tuple(places[rank] for rank in named)


def ranks_of(option: str, ranks: Any, size: int | None = None) -> list[int]:
    """Return the ranks that a caller named.

    Args:
        option: its name.
        ranks: one, several, or those of a DeviceMesh.
        size: of the group that they are counted in; None if that is looked at elsewhere.

    Raises:
        ValueError: they are no ranks, none, or one comes twice; names the option.

    Example:
        >>> ranks_of("src", (2, 3)), ranks_of("src", 1)
        ([2, 3], [1])
    """
    if isinstance(ranks, DeviceMesh):
        named: list[Any] = [int(rank) for rank in ranks.mesh.flatten().tolist()]
    else:
        named = list(ranks) if isinstance(ranks, Sequence | set | frozenset | range) else [ranks]
    if not all(type(rank) is int for rank in named):
        raise ValueError(f"{option} must be a rank, several, or a DeviceMesh, got {ranks!r}")
    most = math.inf if size is None else size
    if not named or len(set(named)) < len(named) or not all(0 <= rank < most for rank in named):
        where = "" if size is None else f" of a group of {size}"
        raise ValueError(f"{option} must be different ranks{where}, got {named}")
    return named
