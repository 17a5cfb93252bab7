"""Which ranks sync with each other: a process group, or as much of one as a channel needs.

A channel makes groups of its own. All it needs of the caller is a store that its ranks share, this rank's
number, how many there are, and over which backends they can meet (`StoreGroup`). Trainers and the workers of
an engine live in different default worlds, so there may be no process group of both that torch's registry
knows:

1. `place_of` reads a place from whatever a caller passes: a registered group, a mesh, a group that is in no
   registry, as engines make them, or a `StoreGroup`.
2. `world_of` names the default world of this process. Ranks of a mesh count in it, so equal numbers mean
   equal ranks in one world only.
3. `is_gone` tells that the caller has destroyed a group.
"""

from __future__ import annotations

import os
import secrets
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dte_dist._torch_compat import backends_of
from dte_dist.errors import ChannelClosed, PeerLost

__all__ = [
    "Group",
    "Known",
    "Place",
    "StoreGroup",
    "address_of",
    "group_of",
    "is_gone",
    "place_of",
    "rendezvous",
    "world_of",
]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoreGroup:
    """Ranks that share a store: a group for ranks of different worlds, or of none.

    Make it once on each rank and keep it: channels belong to it as to a process group. It needs no default
    process group. Where the ranks of one call have their stores does not matter, as long as all see the same
    keys; two groups over one store need a `torch.distributed.PrefixStore` each.

    Args:
        store: that all ranks of the group reach, and that lives as long as they sync. The process that hosts
            a `TCPStore` takes it along when it ends.
        rank: of this process in the group.
        size: of the group.
        backends: by device, over which the ranks can meet: "cpu:gloo", or "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: an argument makes no sense.

    Example:
        >>> store = torch.distributed.HashStore()  # of one process
        >>> group = dte_dist.StoreGroup(store, rank=0, size=1)
        >>> group.rank, group.size, group.backends
        (0, 1, 'cpu:gloo')
    """

    store: dist.Store
    rank: int
    size: int
    backends: str = "cpu:gloo"
    _pid: int = field(default_factory=os.getpid, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.store, dist.Store):
            raise ValueError(f"store must be a torch.distributed.Store, not a {type(self.store).__name__}")
        numbers = (self.rank, self.size)
        if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers):
            raise ValueError(f"rank and size must be ints, got {self.rank!r} and {self.size!r}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be from 0 to size - 1, got rank {self.rank} of {self.size}")
        kinds = self.backends.split(",") if isinstance(self.backends, str) else []
        if "cpu:gloo" not in kinds or not {*kinds} <= {"cpu:gloo", "cuda:nccl"}:
            raise ValueError(f'backends must be "cpu:gloo" or "cpu:gloo,cuda:nccl", got {self.backends!r}')


Group = dist.ProcessGroup | DeviceMesh | StoreGroup
"""A group as a caller names it: a process group, a mesh of one dimension, or a `StoreGroup`."""

Known = dist.ProcessGroup | StoreGroup
"""A group by which channels are found."""

_registered: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that torch's registry has had: one that it has no more was destroyed."""

_DIGITS: Final = 8
"""Bytes of the name of a world."""


def rendezvous(
    address: str, rank: int, size: int, *, timeout: timedelta | float = 300.0, backends: str = "cpu:gloo"
) -> StoreGroup:
    """Meet at an address; every rank of the group must call, in any order, and needs no process group.

    Rank 0 hosts the store: it must be the process that lives longest, and must listen at that address.

    Args:
        address: such as "tcp://10.0.0.7:29400".
        rank, size, backends: see `StoreGroup`.
        timeout: how long to wait for rank 0, in seconds or as a timedelta.

    Raises:
        ValueError: an argument makes no sense, or another rank named another size.
        PeerLost: rank 0 did not come in time, or cannot listen there.

    Example:
        >>> group = dte_dist.rendezvous("tcp://127.0.0.1:29471", rank=0, size=1)  # on each rank; keep it
        >>> group.rank, group.size
        (0, 1)
    """
    parts = urlsplit(address) if isinstance(address, str) else urlsplit("")
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f'address must be "tcp://host:port", got {address!r}')
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | timedelta):
        raise ValueError(f"timeout must be seconds or a timedelta, got {timeout!r}")
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if not timedelta(milliseconds=1) <= limit <= timedelta(days=365):
        raise ValueError(f"timeout must be from 1 ms to a year, got {limit}")
    StoreGroup(dist.HashStore(), rank, size, backends)  # refuses what makes no sense before anyone waits
    try:
        store = dist.TCPStore(parts.hostname, parts.port, None, rank == 0, limit, wait_for_workers=False)
        said = store.compare_set("dte_dist/size", "", str(size)).decode("utf-8", "replace")
    except RuntimeError as error:
        what = "the store cannot be hosted here" if rank == 0 else "rank 0 did not come"
        hint = "start rank 0 at this address, on a port that is free and that the others reach"
        expected = f"a store at {address}"
        got = str(error).partition("\n")[0][:200]
        raise PeerLost(what, ranks=[0], expected=expected, got=got, hint=hint) from error
    if said != str(size):
        raise ValueError(f"size differs between ranks: {size} here, {said} on the rank that came first")
    return StoreGroup(store, rank, size, backends)


@dataclass(frozen=True, slots=True)
class Place:
    """What a channel needs to know of a group.

    Attributes:
        group: by which channels are found.
        rank, size: in the group.
        global_ranks: of its members in the default world, as far as torch knows; else their group ranks.
        store: of the group.
    """

    group: Known
    rank: int
    size: int
    global_ranks: tuple[int, ...]
    store: dist.Store

    def backends(self) -> str:
        """Return the backends by device, such as "cpu:gloo,cuda:nccl"."""
        return self.group.backends if isinstance(self.group, StoreGroup) else backends_of(self.group)


def group_of(group: Group | None) -> Known | None:
    """Return the group that a caller means. None is the world; that is None where nothing is initialised.

    Raises:
        ValueError: it is a mesh of several dimensions, or one that has no group on this rank.

    Example:
        >>> group_of(mesh["shard"]) is mesh.get_group("shard")
        True
        >>> group_of(None) is dist.group.WORLD
        True
    """
    if not isinstance(group, DeviceMesh):
        return dist.group.WORLD if group is None else group
    if group.ndim != 1:
        dims = group.mesh_dim_names or range(group.ndim)
        ways = " or ".join(f"mesh.get_group({dim!r})" for dim in dims)
        what = f"a mesh of {group.ndim} dimensions has a group for each of them"
        raise ValueError(f"{what}: pass {ways}, or a group of all its ranks")
    if group.get_coordinate() is None:
        raise ValueError("this rank is not in the mesh: call on its ranks only")
    try:
        return group.get_group()
    except RuntimeError as error:
        raise ValueError(f"the mesh has no process group: {error}; pass the group itself") from error


def place_of(group: Known | None) -> Place:
    """Return this rank's place in a group.

    Raises:
        ValueError: this rank is not a member of it, or it was destroyed.
        ChannelClosed: this process was forked from the one that is the rank.
    """
    if isinstance(group, StoreGroup):
        if os.getpid() != group._pid:
            raise _inherited_group()
        ranks = tuple(range(group.size))
        return Place(group, group.rank, group.size, ranks, group.store)
    if not isinstance(group, dist.ProcessGroup) or is_gone(group) or group.rank() < 0:
        what = "this rank is not in the group: call on its members only, after init_process_group"
        raise ValueError(what)
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise _inherited_group()
    ranks = tuple(dist.get_process_group_ranks(group)) if group in _registered else tuple(range(group.size()))
    return Place(group, group.rank(), group.size(), ranks, group.get_group_store())


def is_gone(group: Known) -> bool:
    """Return whether the caller has destroyed a group. Of one that was in no registry nothing is known."""
    if isinstance(group, StoreGroup):
        return False
    if _is_registered(group):
        _registered.add(group)
        return False
    return group in _registered


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


_inherited: Any = None
"""The world of the process that this one was forked from."""

_worlds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By default process group, its name."""

_alone = secrets.token_hex(_DIGITS)
"""The name of the world of a process that has no default process group."""


def _note_inherited() -> None:
    """Remember, in a forked child, the process groups that are its parent's."""
    global _inherited, _alone  # noqa: PLW0603
    _inherited = dist.group.WORLD if dist.is_initialized() else None
    _alone = secrets.token_hex(_DIGITS)


os.register_at_fork(after_in_child=_note_inherited)


def _inherited_group() -> ChannelClosed:
    """Return why this process takes no part in a group of its parent: it would be counted as the same
    rank.
    """
    hint = "sync in the process that made the group; start workers that are to sync by spawn, not fork"
    return ChannelClosed("the process group belongs to the process that this one was forked from", hint=hint)


def world_of() -> str:
    """Return a name of the default world of this process, which all its ranks share and no other world has;
    may block.
    """
    world = dist.group.WORLD
    if world is None:
        return _alone
    if world not in _worlds:
        store = dist.PrefixStore("dte_dist", world.get_group_store())
        _worlds[world] = store.compare_set("world", "", secrets.token_hex(_DIGITS)).decode("utf-8", "replace")
    return _worlds[world]


def address_of(store: Any) -> str | None:
    """Return where a store is, if it says so."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"tcp://{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else None
