"""Random cases for sweeps: a model, who holds which part of it, and how it changes. Equal on all ranks for
one seed.

The oracle is `torch.chunk` applied to the full tensor, cut after cut, in the order in which the cuts were
made. It knows nothing of the package's geometry.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    torch.bfloat16,
    torch.bfloat16,
    torch.bfloat16,
    torch.float32,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)
MESHES = {
    1: [(1,)],
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    5: [(5,)],
    6: [(6,), (2, 3), (3, 2)],
    7: [(7,)],
    8: [(8,), (4, 2), (2, 2, 2)],
}


@dataclass(frozen=True)
class Held:
    """How a side holds one tensor: cuts as (mesh dimension, tensor dimension) in order; no mesh means whole,
    as a plain tensor.
    """

    mesh: tuple[int, ...] | None
    cuts: tuple[tuple[int, int], ...] = ()

    def part(self, full: Tensor, place: int) -> Tensor:
        """Cut out what rank number `place` of the mesh holds."""
        if self.mesh is None:
            return full
        at = []
        for size in reversed(self.mesh):
            at.append(place % size)
            place //= size
        at.reverse()
        for mesh_dim, dim in self.cuts:
            pieces = full.chunk(self.mesh[mesh_dim], dim) if full.size(dim) else ()
            empty = full.narrow(dim, 0, 0)
            full = pieces[at[mesh_dim]] if at[mesh_dim] < len(pieces) else empty
        return full

    def placements(self) -> list[Placement]:
        """Write the cuts as DTensor placements; a cut made before one further left makes that one strided."""
        placements: list[Placement] = [Replicate() for _ in self.mesh or ()]
        done: dict[int, list[int]] = {}
        for mesh_dim, dim in self.cuts:
            before = [other for other in done.get(dim, []) if other > mesh_dim]
            factor = 1
            for other in before:
                factor *= self.mesh[other]
            placements[mesh_dim] = _StridedShard(dim, split_factor=factor) if before else Shard(dim)
            done.setdefault(dim, []).append(mesh_dim)
        return placements


@dataclass
class Case:
    """One case: groups, tensors, who holds them how.

    Attributes:
        sources, receivers: ranks of the world; equal lists mean that all are both.
        group: all of them, in the order of the group.
        tensors: full tensors by name, the truth.
        at_source, at_receiver: how each side holds each of them.
        wire: dtype on the wire, by name, where it is not the source's.
        ties: second name to first name of tensors that the sources tie.
        receivers_tie: whether the receivers tie them too.
        repeats: share of the elements changed by one step that the next one changes again, rather than by
            chance.
    """

    seed: str
    sources: list[int]
    receivers: list[int]
    group: list[int]
    tensors: dict[str, Tensor]
    at_source: dict[str, Held]
    at_receiver: dict[str, Held]
    wire: dict[str, torch.dtype]
    bucket_bytes: int
    density: float
    ties: dict[str, str] = field(default_factory=dict)
    receivers_tie: bool = False
    repeats: float = 0.0
    _changed: dict[str, Tensor] = field(default_factory=dict)

    def expected(self, name: str) -> Tensor:
        """Return what receivers must hold of a tensor, as a full tensor.

        Cast in one dimension: torch casts a NaN to other bits where a tensor has no dimension.
        """
        full = self.tensors[name]
        return full.reshape(-1).to(self.wire.get(name, full.dtype)).reshape(full.shape)

    def slots(self) -> list[str]:
        """Return the names of the model, tied ones once."""
        return [name for name in self.tensors if name not in self.ties]

    def on_wire(self) -> dict[str, Tensor]:
        """Return the bits that the model has on the wire, by slot."""
        return {
            name: self.expected(name).clone().view(BITS[self.expected(name).element_size()])
            for name in self.slots()
        }

    def change(self, rng: torch.Generator) -> int:
        """Change bits of the truth, in place; return of how many elements of the model the bits on the wire
        changed.
        """
        before = self.on_wire()
        for name in self.slots():
            tensor = self.tensors[name]
            bits = tensor.view(BITS[tensor.element_size()])
            noise = random_bits(tensor.shape, tensor.dtype, rng)
            where = torch.rand(tensor.shape, generator=rng) < self.density
            if self.repeats and name in self._changed:
                again = torch.rand(tensor.shape, generator=rng) < self.repeats
                where = torch.where(again, self._changed[name], where)
            self._changed[name] = where
            bits.copy_(torch.where(where, noise.view(bits.dtype), bits))
        after = self.on_wire()
        return sum(int((before[name] != after[name]).sum()) for name in before)


def random_bits(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Return a tensor of random bits, NaN payloads and all; of 0 and 1 for bool."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).to(torch.bool)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=rng, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.zeros(shape, dtype=dtype)


def make_case(seed: str, world: int, most: int = 5) -> Case:
    """Draw a case from a seed."""
    pick = random.Random(seed)
    rng = torch.Generator().manual_seed(pick.getrandbits(62))
    both = pick.random() < 0.15
    n_sources = pick.randint(1, most)
    n_receivers = n_sources if both else pick.randint(1, min(most, world - n_sources))
    ranks = pick.sample(range(world), n_sources if both else n_sources + n_receivers)
    sources, receivers = ranks[:n_sources], ranks[-n_receivers:]
    tensors, at_source, at_receiver, wire = {}, {}, {}, {}
    for index in range(pick.randint(1, 5)):
        name, dtype = f"layer.{index}.w", pick.choice(DTYPES)
        shape = tuple(
            pick.choice((0, 1, 2, 3, 5, 7, 8, pick.randint(0, 40)))
            for _ in range(pick.choice((0, 1, 2, 2, 2, 3)))
        )
        tensors[name] = random_bits(shape, dtype, rng)
        at_source[name], at_receiver[name] = (
            _held(pick, n_sources, len(shape)),
            _held(pick, n_receivers, len(shape)),
        )
        if dtype == torch.float32 and pick.random() < 0.6:
            wire[name] = torch.bfloat16
    ties, receivers_tie = {}, pick.random() < 0.5
    if pick.random() < 0.3:
        first, second = "layer.0.w", "layer.x.tied"
        ties[second], tensors[second], at_source[second] = first, tensors[first], at_source[first]
        at_receiver[second] = (
            at_receiver[first] if receivers_tie else _held(pick, n_receivers, tensors[first].dim())
        )
        if first in wire:
            wire[second] = wire[first]
    group = pick.sample(ranks, len(ranks))
    bucket_bytes = pick.choice((64, 1000, 1 << 14, 1 << 24))
    density, repeats = pick.choice((0.0, 0.01, 0.1, 0.5, 1.0)), pick.choice((0.0, 0.84, 1.0))
    return Case(
        seed,
        sources,
        receivers,
        group,
        tensors,
        at_source,
        at_receiver,
        wire,
        bucket_bytes,
        density,
        ties,
        receivers_tie,
        repeats,
    )


def _held(pick: random.Random, ranks: int, dims: int) -> Held:
    mesh = pick.choice(MESHES[ranks])
    if pick.random() < 0.2 or dims == 0:
        return Held(None if pick.random() < 0.5 else mesh)
    order = list(range(len(mesh)))
    if pick.random() < 0.4:
        order = order[1:] + order[:1]
    dim = pick.randrange(dims)
    cuts = []
    for mesh_dim in order:
        if pick.random() < 0.85:
            cuts.append((mesh_dim, dim if pick.random() < 0.6 else pick.randrange(dims)))
    return Held(mesh, tuple(cuts))


def local_tensor(full: Tensor, held: Held, ranks: list[int], rank: int) -> Tensor:
    """Return what `rank` holds as a tensor of its own: plain, or a DTensor on a mesh of `ranks` that has no
    groups.
    """
    part = held.part(full, ranks.index(rank)).contiguous().clone()
    if held.mesh is None:
        return part
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(held.mesh), _init_backend=False, _rank=rank)
    return DTensor.from_local(
        part, mesh, held.placements(), run_check=False, shape=full.shape, stride=full.stride()
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare shapes and bits."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    as_bits = BITS[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(as_bits), b.view(as_bits))
