"""The two routes that frames take, as one sync sees them: whose frames there are, how large they may be, and
how they move.

| | broadcast | p2p |
|---|---|---|
| lanes of a source | one, for all receivers | one for each kind of receiver |
| space that positions count in | the source's own | what source and receiver have in common |
| way | to the root, from there to all in buckets | from the source straight to the receiver |
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from dte_dist.options import AUTO, RouteOption
from dte_dist.plan.chunks import Chunk, ChunkPlan, FrameSlot
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.index_map import IndexMap, build_index_maps, is_identity
from dte_dist.plan.intersections import lanes_of, pair_spaces
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.transfer_plan import ROUTES, Plan, RouteName
from dte_dist.report import Phases
from dte_dist.sync.frame_builder import Lane, Lanes, P2PLanes, lane_step
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.source import Source, dense_frame_bytes, max_frame_bytes
from dte_dist.sync.version import SyncStep
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.buffers import Frame
from dte_dist.transport.p2p import PairwiseExchange, Sized

__all__ = ["AUTO", "BroadcastRoute", "Chosen", "Load", "P2PRoute", "Route", "RouteOption", "Routes", "Sizes"]

Chosen = tuple[RouteName, str]
"""A route, and why it was taken if it was not the caller who said so."""

Sizes = Mapping[int, Sequence[int]]
"""By source, the bytes of each of its frames; 0 where nothing changed."""

_T = TypeVar("_T")


class Load:
    """Bytes of frames that each rank sends and receives, from sizes that all ranks know.

    Attributes:
        sent, received: by rank.
        frames: how many are not empty.
    """

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.frames = 0

    def add(self, source: int, target: int, size: int) -> None:
        """Count `size` bytes from one rank to another; a rank sends itself nothing."""
        if source != target:
            self.sent[source] += size
            self.received[target] += size

    def received_by(self, ranks: Sequence[int]) -> list[int]:
        """Return the bytes received by each of these ranks."""
        return [self.received[rank] for rank in ranks]

    def busiest(self) -> int:
        """Return the most bytes that one rank sends or receives."""
        return max([*self.sent.values(), *self.received.values()], default=0)


class Route(ABC):
    """One way for frames.

    Attributes:
        name: as a caller says it.
        chunks: by source, (lane, chunk) of every frame in order; the same on all ranks.
        lanes: on a source, what it sends.
        index_maps: on a receiver, by width and source, tables from the space of the frames to its own.
    """

    name: RouteName
    chunks: Mapping[int, Sequence[tuple[int, Chunk]]]
    lanes: Lanes | None
    index_maps: Mapping[int, Mapping[int, Sequence[IndexMap]]]

    @property
    def max_frames(self) -> int:
        """Most frames of any source."""
        return max(map(len, self.chunks.values()), default=0)

    def seed_sizes(self) -> dict[int, list[int]]:
        """Return, by source, the bytes of every frame of a seed."""
        return {
            source: [dense_frame_bytes(chunk) for _, chunk in chunks]
            for source, chunks in self.chunks.items()
        }

    @cached_property
    def max_bytes(self) -> dict[int, list[int]]:
        """By source, the most bytes that each of its frames can have."""
        return {
            source: [max_frame_bytes(chunk) for _, chunk in chunks] for source, chunks in self.chunks.items()
        }

    @abstractmethod
    def load(self, sizes: Sizes, targets: Sequence[int]) -> Load:
        """Return what frames of these sizes cost each rank on their way to `targets`."""

    def gathered(self, sizes: Sizes) -> int:
        """Return the bytes of frames of these sizes that go to the root to be relayed."""
        return 0

    @abstractmethod
    def take(self, step: SyncStep, source: int, frames: Sequence[Tensor]) -> None:
        """Take all frames of a source, in order; what is not for this rank's receiver is left out. They must
        stay as they are.
        """

    @abstractmethod
    def move(
        self, step: SyncStep, frames: Sequence[Frame], sizes: Sizes, targets: Sequence[int], phases: Phases
    ) -> Exception | None:
        """Move all frames that make `step`; sources, the root and targets must call.

        Args:
            step: what the frames have in common.
            frames: this rank's own, in order.
            sizes: of all sources.
            targets: receivers that get them, ascending.
            phases: where the time goes.

        Returns:
            Why this rank had no memory for what it got; None if it had.
        """


class BroadcastRoute(Route):
    """Over the root.

    Args:
        model, rank: who holds what.
        schedule: the chunks of the sources' spaces.
        source, receiver: what this rank is.
        relay: the transport.
        root: group rank.
    """

    name = "broadcast"

    def __init__(
        self,
        model: ModelMap,
        schedule: ChunkPlan,
        source: Source | None,
        receiver: Receiver | None,
        *,
        relay: BucketedBroadcast,
        root: int,
    ) -> None:
        self.chunks = {each: [(0, chunk) for chunk in schedule.chunks(each)] for each in model.source_spaces}
        self.lanes = source.relay if source is not None else None
        self.index_maps = receiver.index_maps if receiver is not None else {}
        self._receiver, self._relay, self._root = receiver, relay, root
        relay.reserve(self.max_bytes, receiver=receiver is not None)

    def load(self, sizes: Sizes, targets: Sequence[int]) -> Load:
        load = Load()
        for source, row in sizes.items():
            load.frames += sum(size > 0 for size in row)
            load.add(source, self._root, sum(row))
        everything = sum(map(sum, sizes.values()))
        line = [self._root, *(target for target in targets if target != self._root)]
        for before, target in itertools.pairwise(line):
            load.add(before, target, everything)
        return load

    def gathered(self, sizes: Sizes) -> int:
        return sum(sum(row) for source, row in sizes.items() if source != self._root)

    def take(self, step: SyncStep, source: int, frames: Sequence[Tensor]) -> None:
        for number, frame in enumerate(frames):
            self._take(step, source, number, frame)

    def move(
        self, step: SyncStep, frames: Sequence[Frame], sizes: Sizes, targets: Sequence[int], phases: Phases
    ) -> Exception | None:
        def take(parcel: FrameSlot, frame: Tensor) -> None:
            self._take(step, parcel.source, parcel.chunk, frame)

        return self._relay.move(sizes, frames, targets, take, phases, keep=not step.is_seed)

    def _take(self, step: SyncStep, source: int, number: int, frame: Tensor) -> None:
        if self._receiver is not None and len(frame):
            chunks = self.chunks[source]
            self._receiver.take(frame, step.frame_head(source, len(chunks), chunks[number][1]))


class P2PRoute(Route):
    """From each source straight to each receiver.

    Args:
        model, rank: who holds what, and this rank.
        bucket_bytes: dense bytes of a chunk.
        receiver: what this rank is.
        exchange: the transport.
    """

    name = "p2p"

    def __init__(
        self,
        model: ModelMap,
        rank: int,
        bucket_bytes: int,
        receiver: Receiver | None,
        exchange: PairwiseExchange,
    ) -> None:
        self._lane = lanes_of(model.receiver_spaces)
        kinds = {lane: model.receiver_spaces[target] for target, lane in reversed(self._lane.items())}
        self._rank, self._receiver, self._exchange = rank, receiver, exchange
        self.chunks, pairs = {}, {}
        for source, spaces in model.source_spaces.items():
            pairs[source] = {lane: pair_spaces(spaces, kind) for lane, kind in sorted(kinds.items())}
            totals = {
                lane: {width: space.numel for width, space in pair.items()}
                for lane, pair in pairs[source].items()
            }
            schedule = ChunkPlan(totals, bucket_bytes)
            self.chunks[source] = [(lane, chunk) for lane in totals for chunk in schedule.chunks(lane)]
        own = model.source_spaces.get(rank)
        self.lanes = None
        if own is not None:
            self.lanes = P2PLanes(
                rank, {lane: self._pair_lane(own, lane, pair) for lane, pair in pairs[rank].items()}
            )
        self.index_maps = self._index_maps_of(model.receiver_spaces.get(rank, {}), pairs)
        exchange.reserve(self.max_bytes, receiver=receiver is not None)

    def _index_maps_of(
        self, own: Mapping[int, FlatSpace], pairs: Mapping[int, Mapping[int, Mapping[int, FlatSpace]]]
    ) -> dict[int, dict[int, Sequence[IndexMap]]]:
        if self._rank not in self._lane:
            return {}
        mine = {source: lanes[self._lane[self._rank]] for source, lanes in pairs.items()}
        return {
            width: {
                source: build_index_maps(pair[width], space) for source, pair in mine.items() if width in pair
            }
            for width, space in own.items()
        }

    def _pair_lane(self, own: Mapping[int, FlatSpace], lane: int, pair: Mapping[int, FlatSpace]) -> Lane:
        chunks = [chunk for number, chunk in self.chunks[self._rank] if number == lane]
        into = {width: build_index_maps(own[width], space) for width, space in pair.items()}
        back = {width: build_index_maps(space, own[width]) for width, space in pair.items()}
        is_own = own.keys() == pair.keys() and all(
            is_identity(into[width], space.numel) for width, space in own.items()
        )
        return Lane(chunks, into, back, is_own)

    def load(self, sizes: Sizes, targets: Sequence[int]) -> Load:
        load = Load()
        for source, row in sizes.items():
            load.frames += sum(size > 0 for size in row)
            for target in targets:
                load.add(source, target, sum(self._of(source, target, row)))
        return load

    def _of(self, source: int, target: int, items: Sequence[_T]) -> list[_T]:
        """Return those of a source's items, one per frame, that are for a target."""
        return [
            item
            for (lane, _), item in zip(self.chunks[source], items, strict=True)
            if lane == self._lane[target]
        ]

    @cached_property
    def _mine(self) -> dict[int, list[tuple[int, Chunk]]]:
        """By source, (lane, chunk) of each frame that is for this rank, in order."""
        return {source: self._of(source, self._rank, chunks) for source, chunks in self.chunks.items()}

    def take(self, step: SyncStep, source: int, frames: Sequence[Tensor]) -> None:
        for number, frame in enumerate(self._of(source, self._rank, frames)):
            self._take(step, source, number, frame)

    def move(
        self, step: SyncStep, frames: Sequence[Frame], sizes: Sizes, targets: Sequence[int], phases: Phases
    ) -> Exception | None:
        outgoing: dict[int, list[Sized]] = {}
        incoming: dict[int, list[int]] = {}
        if self._rank in self.chunks:
            sized = list(zip(sizes[self._rank], frames, strict=True))
            outgoing = {target: self._of(self._rank, target, sized) for target in targets}
        if self._rank in targets:
            incoming = {source: self._of(source, self._rank, row) for source, row in sizes.items()}

        def take(source: int, number: int, frame: Tensor) -> None:
            self._take(step, source, number, frame)

        return self._exchange.move(outgoing, incoming, targets, take, phases, keep=not step.is_seed)

    def _take(self, step: SyncStep, source: int, number: int, frame: Tensor) -> None:
        if self._receiver is not None and len(frame):
            chunks = self._mine[source]
            self._receiver.take(
                frame, lane_step(step, chunks[number][0]).frame_head(source, len(chunks), chunks[number][1])
            )


class Routes(Mapping[RouteName, Route]):
    """The routes of a channel by name, each built when it is first used: the tables of a route nobody takes
    would be wasted.

    Args:
        broadcast, p2p: build the route of this name.
        plan: build the plan, from which "auto" chooses.
    """

    def __init__(
        self, broadcast: Callable[[], Route], p2p: Callable[[], Route], plan: Callable[[], Plan]
    ) -> None:
        self._makers: dict[RouteName, Callable[[], Route]] = {"broadcast": broadcast, "p2p": p2p}
        self._plan = plan
        self._made: dict[RouteName, Route] = {}

    def __getitem__(self, name: RouteName) -> Route:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def choose(self, option: RouteOption) -> Chosen:
        """Return the route that a caller asks for; "auto" is the same on all ranks, since the plan is."""
        return self._best if option == AUTO else (option, "")

    @cached_property
    def _best(self) -> Chosen:
        return self._plan().choose_route()

    def __iter__(self) -> Iterator[RouteName]:
        return iter(ROUTES)

    def __len__(self) -> int:
        return len(ROUTES)
