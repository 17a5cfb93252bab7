"""Agreement of all ranks before a channel opens: each learns what every other holds, and all come to the same
plan or the same error.

1.   Each rank describes its modules and options in bytes (`describe`).
2. o Their digests go round in one row per rank, with the sizes. If a rank could not describe itself, all
     raise its error.
3. o Each distinct description is sent once, by the lowest rank that has it; a thousand ranks of one trainer
     cost one message.
4. o The coordinates of each rank on its meshes go round: they tell a rank's block from its neighbour's.
5.   Every rank builds the same `ModelMap` from them, and derives everything else; or finds the same thing
     wrong with them.
6. o A row with the digests of these, before anyone makes groups by them and waits for the other members
     (`compare_plans`).

Steps with a ring (o) are exchanges.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dte_dist.codec.header import ENTRY, HEAD
from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout
from dte_dist.options import SyncOptions, layout_of, shared, wire_types
from dte_dist.plan.model_map import ModelMap, RankLayout
from dte_dist.sync.control import ControlRow
from dte_dist.sync.description import Description, check_counts
from dte_dist.transport.all_or_none import agreed, raise_if_any
from dte_dist.transport.communicator import Communicator

__all__ = ["Agreement", "Described", "agree", "compare_plans", "describe", "exchange"]


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """This rank's own part of an agreement.

    Attributes:
        layout: of the module.
        into: of the module to receive into, if there is another.
        data: the description, equal on ranks that are placed alike.
        coordinates: of this rank on the meshes of `layout`, then of `into`.
        devices: of the tensors of `layout`, then of `into`; none where there are no tensors.
    """

    layout: Layout
    into: Layout | None
    data: bytes
    coordinates: tuple[int, ...]
    devices: tuple[torch.device, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """The knowledge that all ranks share after opening.

    Attributes:
        model: slots and flat spaces.
        sources, receivers: group ranks; the root is the first source.
        schema: 63-bit hash of the model map; every frame carries it.
        backend: for the data: "nccl" if the group has it and the tensors of all ranks are on GPUs, else
            "gloo".
    """

    model: ModelMap
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    schema: int
    backend: str

    @property
    def root(self) -> int:
        """The group rank that relays."""
        return self.sources[0]


def describe(
    module: torch.nn.Module | Layout,
    into: torch.nn.Module | Layout | None,
    options: SyncOptions,
    backends: str,
    world: str = "",
) -> Described:
    """Describe what this rank holds and wants.

    Args:
        module, into, options: of the call.
        backends: of the user's group, by device.
        world: name of the world in which meshes count their ranks.

    Raises:
        LayoutMismatch: something is placed in a way that cannot be handled.
        ValueError: an option makes no sense.
    """
    layout = layout_of(module, options)
    other = None if into is None else layout_of(into, options)
    devices = tuple(
        each.read().device for each in (layout, other) if each is not None and each.manifest.entries
    )
    head = {
        "options": shared(options),
        "wire": wire_types(options["wire_dtype"], layout.manifest),
        "partial": (layout if other is None else other).is_partial,
        "nccl": "nccl" in backends and all(device.type == "cuda" for device in devices),
        "trained": [layout.is_trained(), other is not None and other.is_trained()],
        "world": world,
    }
    parts = [
        json.dumps(head, sort_keys=True).encode(),
        layout.manifest.to_bytes(),
        b"" if other is None else other.manifest.to_bytes(),
    ]
    data = np.array([len(part) for part in parts], np.int64).tobytes() + b"".join(parts)
    coordinates = [number for each in (layout, other) if each is not None for number in _flatten(each)]
    return Described(layout, other, data, tuple(coordinates), devices)


def agree(control: Communicator, mine: Described | None, error: Exception | None) -> Agreement:
    """Exchange descriptions and plan; all ranks of the control group must call.

    Args:
        control: the control group of the channel.
        mine: this rank's description, None if describing failed.
        error: why it failed.

    Raises:
        AgreedError: with the error of the lowest rank that could not describe itself; or with a
            `LayoutMismatch`.
        PeerLost: a rank did not answer.
        DamagedRow: what a rank said came damaged to this one.
    """
    rows, descriptions = exchange(control, mine, error)
    coordinates = mine.coordinates if mine is not None else ()
    padded = np.zeros(int(rows[:, 2].max()), np.int64)
    padded[: len(coordinates)] = coordinates
    table = control.all_gather_rows(padded) if len(padded) else np.zeros((len(rows), 0), np.int64)
    places = [row[:size].tolist() for row, size in zip(table, rows[:, 2], strict=True)]
    return agreed(lambda: _plan(descriptions, places, rows[:, 3:].tobytes()))


def exchange(
    control: Communicator, mine: Described | None, error: Exception | None
) -> tuple[np.ndarray, list[Description]]:
    """Exchange descriptions; as for `agree`.

    Returns:
        The row of each rank, int64[ranks, 5]: format, bytes, numbers of its coordinates, digest. And what
        each rank says of itself.
    """
    data, numbers = (mine.data, len(mine.coordinates)) if mine is not None else (b"", 0)
    digest = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.int64)
    rows = raise_if_any(control, error, [_format(), len(data), numbers, *digest])
    agreed(lambda: _check_formats(rows[:, 0].tolist()))
    agreed(lambda: check_counts(rows[:, 1].tolist()))
    descriptions = _share(control, rows[:, 1], rows[:, 3:], data)
    agreed(lambda: _check_numbers(rows[:, 2].tolist(), descriptions))
    return rows, descriptions


def compare_plans(control: Communicator, agreement: Agreement) -> None:
    """Compare with all ranks what they agreed on, before anyone makes groups by it and waits for others.

    Raises:
        AgreedError: with a `LayoutMismatch`: the plans differ.
        PeerLost: a rank did not answer.
        DamagedRow: what a rank said came damaged to this one.
    """
    digests = control.all_gather_rows(np.frombuffer(agreement.model.digest(), np.int64))
    agreed(lambda: _refuse_other_plan(digests))


def _refuse_other_plan(digests: np.ndarray) -> None:
    """Refuse to go on where ranks made different plans of the same descriptions; all see the same rows."""
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        what = "ranks come to different plans for the same layouts"
        hint = "run the same version of dte_dist on every rank"
        raise LayoutMismatch(what, ranks=[0, *others], hint=hint)


def _format() -> int:
    """Return a number that differs between versions of dte_dist whose rows or frames differ."""
    return zlib.crc32(repr((ControlRow.__slots__, HEAD.descr, ENTRY.descr)).encode())


def _check_formats(formats: Sequence[int]) -> None:
    others = [rank for rank, number in enumerate(formats) if number != formats[0]]
    if others:
        hint = "run the same version of dte_dist on every rank"
        raise LayoutMismatch("ranks write their rows or frames differently", ranks=[0, *others], hint=hint)


def _check_numbers(numbers: Sequence[int], described: Sequence[Description]) -> None:
    """Refuse more or fewer coordinates than a rank has meshes for, before anyone makes room for them."""
    for rank, (number, said) in enumerate(zip(numbers, described, strict=True)):
        if number != said.numbers:
            what = "a rank has other coordinates than meshes"
            hint = "run the same version of dte_dist on every rank"
            raise LayoutMismatch(what, ranks=[rank], expected=said.numbers, got=number, hint=hint)


def _share(control: Communicator, sizes: np.ndarray, digests: np.ndarray, data: bytes) -> list[Description]:
    """Send each distinct description once and return that of every rank, equal ones as one object."""
    known: dict[bytes, Description] = {}
    described = []
    for rank, (size, digest) in enumerate(zip(sizes.tolist(), digests, strict=True)):
        key = digest.tobytes()
        if key not in known:
            shared = control.broadcast_bytes(rank, data, size)
            known[key] = agreed(partial(Description.parse, shared, rank=rank, size=len(sizes)))
        described.append(known[key])
    return described


def _plan(described: Sequence[Description], places: Sequence[list[int]], digests: bytes) -> Agreement:
    _check_options(described)
    said_of = enumerate(zip(described, places, strict=True))
    coordinates = [_unflatten(said, numbers, rank) for rank, (said, numbers) in said_of]
    named = described[0].options["src"]
    sources = tuple(named) if named is not None else _connected(described, coordinates)
    receivers = tuple(
        rank for rank, said in enumerate(described) if rank not in sources or said.into is not None
    )
    if named is None:
        _refuse_to_overwrite(described, sources[0], receivers)
    if not receivers:
        hint = (
            "add rollout ranks to the group, name the trainers with src=, or pass "
            "into= on ranks that are both"
        )
        raise LayoutMismatch("every rank of the group is a source, none receives", ranks=sources, hint=hint)
    holdings = {
        rank: RankLayout(described[rank].manifest, coordinates[rank][0], described[rank].wire)
        for rank in sources
    }
    targets = {}
    for rank in receivers:
        said = described[rank]
        manifest, place = (
            (said.manifest, coordinates[rank][0]) if said.into is None else (said.into, coordinates[rank][1])
        )
        targets[rank] = RankLayout(manifest, place, partial=said.partial)
    roles = np.array([*sources, -1, *receivers, -1, *(n for place in places for n in place)], np.int64)
    hashed = hashlib.blake2b(digests + roles.tobytes(), digest_size=8).digest()
    backend = "nccl" if all(said.nccl for said in described) else "gloo"
    return Agreement(
        ModelMap(holdings, targets), sources, receivers, int.from_bytes(hashed, "little") >> 1, backend
    )


def _check_options(described: Sequence[Description]) -> None:
    _check_names([said.options["name"] for said in described])
    for rank, said in enumerate(described):
        for name, value in said.options.items():
            first = described[0].options[name]
            if value != first:
                hint = f"pass the same {name}= on every rank"
                raise LayoutMismatch(
                    f"{name} differs between ranks", ranks=[0, rank], expected=first, got=value, hint=hint
                )


def _check_names(names: Sequence[str | None]) -> None:
    """Refuse ranks that open channels of different names, before other differences that may follow."""
    ranks_of: dict[str | None, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_of.setdefault(name, []).append(rank)
    if len(ranks_of) > 1:
        got = "; ".join(f"{name!r} on rank {', '.join(map(str, ranks))}" for name, ranks in ranks_of.items())
        hint = "open the channels in the same order on every rank, each with the same name= everywhere"
        raise LayoutMismatch("ranks open channels of different names at the same time", got=got, hint=hint)


def _refuse_to_overwrite(described: Sequence[Description], root: int, receivers: Sequence[int]) -> None:
    """Refuse sources by default where weights that nobody trains would be written over trained ones."""
    trained = [rank for rank in receivers if described[rank].trained[described[rank].into is not None]]
    if trained and not described[root].trained[0]:
        what = f"src= was not passed, and rank {root}, which is not trained, would overwrite modules that are"
        hint = "name the ranks that send with src= or group_src="
        raise LayoutMismatch(what, ranks=trained, hint=hint)


def _connected(described: Sequence[Description], coordinates: Sequence[list[Any]]) -> tuple[int, ...]:
    """Return the ranks that share a mesh with rank 0, directly or through others; rank 0 alone if it has
    none. Ranks of a mesh are numbers in a world: equal ones of two worlds are different ranks.
    """
    meshes = [
        {
            (said.world, mesh.ranks)
            for mesh, place in zip(said.manifest.meshes, where[0], strict=True)
            if place is not None
        }
        for said, where in zip(described, coordinates, strict=True)
    ]
    found = {0}
    reached = set(meshes[0])
    while True:
        more = {rank for rank, held in enumerate(meshes) if held & reached} - found
        if not more:
            return tuple(sorted(found))
        found |= more
        reached.update(*(meshes[rank] for rank in more))


def _flatten(layout: Layout) -> list[int]:
    """Write coordinates as plain numbers: per mesh its axes, each -1 if this rank is not in the mesh."""
    numbers: list[int] = []
    for mesh, place in zip(layout.manifest.meshes, layout.coordinates, strict=True):
        numbers += [-1] * len(mesh.shape) if place is None else place
    return numbers


def _unflatten(
    said: Description, numbers: Sequence[int], rank: int
) -> list[tuple[tuple[int, ...] | None, ...]]:
    """Reverse `_flatten`, for the module and for `into`.

    Raises:
        LayoutMismatch: a coordinate is outside its mesh.
    """
    left = list(numbers)
    both = []
    for manifest in said.manifests:
        places: list[tuple[int, ...] | None] = []
        for mesh in manifest.meshes if manifest is not None else ():
            place = tuple(left[: len(mesh.shape)])
            left = left[len(mesh.shape) :]
            inside = all(0 <= at < size for at, size in zip(place, mesh.shape, strict=True))
            if not inside and set(place) != {-1}:
                what = "a rank is at no place of a mesh"
                hint = "run the same version of dte_dist on every rank"
                raise LayoutMismatch(
                    what, ranks=[rank], expected=f"within {mesh.shape}", got=place, hint=hint
                )
            places.append(place if inside else None)
        both.append(tuple(places))
    return both
