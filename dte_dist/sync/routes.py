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

from dte_dist.codec import dense_size
from dte_dist.options import AUTO, RouteOption
from dte_dist.plan.chunks import Chunk, ChunkPlan
from dte_dist.plan.flat_space import FlatSpace
from dte_dist.plan.index_map import IndexMap, build_index_maps, is_identity
from dte_dist.plan.intersections import lanes_of, pair_spaces
from dte_dist.plan.model_map import ModelMap
from dte_dist.plan.transfer_plan import ROUTES, Plan, RouteName
from dte_dist.report import Phases
from dte_dist.sync.frame_builder import Lane, Lanes
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.source import Source
from dte_dist.sync.version import SyncStep
from dte_dist.transport.broadcast import BucketedBroadcast
from dte_dist.transport.buffers import Frame
from dte_dist.transport.p2p import PairwiseExchange, Sized

__all__ = [
    "BroadcastRoute",
    "Chosen",
    "Load",
    "P2PRoute",
    "Route",
    "Routes",
    "Sizes",
    "dense_frame_bytes",
    "max_frame_bytes",
]

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

    Args:
        chunks: by source, (lane, chunk) of every frame in order; the same on all ranks.
        receiver: what this rank is.

    Attributes:
        name: as a caller says it.
        chunks: as given.
        lanes: on a source, what it sends.
        index_maps: on a receiver, by width and source, tables from the space of the frames to its own.
        seed_sizes: by source, the bytes of every frame of a seed.
        max_bytes: by source, the most bytes that each of its frames can have.
        max_frames: most frames of any source.
    """

    name: RouteName
    lanes: Lanes | None
    index_maps: Mapping[int, Mapping[int, Sequence[IndexMap]]]

    def __init__(
        self, chunks: Mapping[int, Sequence[tuple[int | None, Chunk]]], receiver: Receiver | None
    ) -> None:
        self.chunks = chunks
        self._receiver = receiver
        self.seed_sizes = {
            source: [dense_frame_bytes(chunk) for _, chunk in chunks] for source, chunks in chunks.items()
        }
        self.max_bytes = {
            source: [max_frame_bytes(chunk) for _, chunk in chunks] for source, chunks in chunks.items()
        }
        self.max_frames = max(map(len, chunks.values()), default=0)

    @abstractmethod
    def load(self, sizes: Sizes, targets: Sequence[int]) -> Load:
        """Return what frames of these sizes cost each rank on their way to `targets`."""

    def gathered(self, sizes: Sizes) -> int:
        """Return the bytes of frames of these sizes that go to the root to be relayed."""
        return 0

    def mine(self, source: int, items: Sequence[_T]) -> Sequence[_T]:
        """Return those of a source's items, one per frame, that are for this rank's receiver."""
        return items

    @cached_property
    def _taken(self) -> Mapping[int, Sequence[tuple[int | None, Chunk]]]:
        """By source, (lane, chunk) of each frame that is for this rank, in order."""
        return {source: self.mine(source, chunks) for source, chunks in self.chunks.items()}

    def take_all(self, step: SyncStep, source: int, frames: Sequence[Tensor]) -> None:
        """Take all frames of a source, in order; what is not for this rank's receiver is left out. They must
        stay as they are.
        """
        for number, frame in enumerate(self.mine(source, frames)):
            self.take(step, source, number, frame)

    def take(self, step: SyncStep, source: int, number: int, frame: Tensor) -> None:
        """Take one of the frames of a source that are for this rank, if it is a receiver."""
        if self._receiver is not None and len(frame):
            lane, chunk = self._taken[source][number]
            head = step.of_lane(lane).frame_head(source, len(self._taken[source]), chunk)
            self._receiver.take(frame, head)

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
        model: who holds what.
        schedule: the chunks of all sources.
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
        chunks = {each: [(None, chunk) for chunk in schedule.chunks(each)] for each in model.source_spaces}
        super().__init__(chunks, receiver)
        self.lanes = source.own_lanes if source is not None else None
        self.index_maps = receiver.index_maps if receiver is not None else {}
        self._relay = relay
        self._root = root
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

    def move(
        self, step: SyncStep, frames: Sequence[Frame], sizes: Sizes, targets: Sequence[int], phases: Phases
    ) -> Exception | None:
        for slot, frame in self._relay.move(sizes, frames, targets, phases, keep=not step.is_seed):
            with phases("decode"):
                self.take(step, slot.source, slot.chunk, frame)
        return self._relay.error


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
        pairs = {
            source: {lane: pair_spaces(spaces, kind) for lane, kind in sorted(kinds.items())}
            for source, spaces in model.source_spaces.items()
        }
        plans = {source: ChunkPlan(_totals(lanes), bucket_bytes) for source, lanes in pairs.items()}
        chunks = {
            source: [(lane, chunk) for lane in lanes for chunk in plans[source].chunks(lane)]
            for source, lanes in pairs.items()
        }
        super().__init__(chunks, receiver)
        self._rank = rank
        self._exchange = exchange
        self.lanes = None
        own = model.source_spaces.get(rank)
        if own is not None:
            mine = pairs[rank].items()
            self.lanes = Lanes(
                rank, [_pair_lane(own, lane, pair, plans[rank].chunks(lane)) for lane, pair in mine]
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

    def load(self, sizes: Sizes, targets: Sequence[int]) -> Load:
        load = Load()
        for source, row in sizes.items():
            load.frames += sum(size > 0 for size in row)
            for target in targets:
                load.add(source, target, sum(self._of(source, target, row)))
        return load

    def mine(self, source: int, items: Sequence[_T]) -> Sequence[_T]:
        return self._of(source, self._rank, items)

    def _of(self, source: int, target: int, items: Sequence[_T]) -> Sequence[_T]:
        """Return those of a source's items, one per frame, that are for a target."""
        lane = self._lane[target]
        chunks = self.chunks[source]
        return [item for (number, _), item in zip(chunks, items, strict=True) if number == lane]

    def move(
        self, step: SyncStep, frames: Sequence[Frame], sizes: Sizes, targets: Sequence[int], phases: Phases
    ) -> Exception | None:
        outgoing: dict[int, Sequence[Sized]] = {}
        incoming: dict[int, Sequence[int]] = {}
        if self._rank in self.chunks:
            sized = list(zip(sizes[self._rank], frames, strict=True))
            outgoing = {target: self._of(self._rank, target, sized) for target in targets}
        if self._rank in targets:
            incoming = {source: self.mine(source, row) for source, row in sizes.items()}

        moved = self._exchange.move(outgoing, incoming, targets, phases, keep=not step.is_seed)
        for source, number, frame in moved:
            with phases("decode"):
                self.take(step, source, number, frame)
        return self._exchange.error


def _totals(lanes: Mapping[int, Mapping[int, FlatSpace]]) -> dict[int, dict[int, int]]:
    """Return by lane the elements of each width."""
    return {lane: {width: space.numel for width, space in spaces.items()} for lane, spaces in lanes.items()}


def _pair_lane(
    own: Mapping[int, FlatSpace], number: int, pair: Mapping[int, FlatSpace], chunks: Sequence[Chunk]
) -> Lane:
    """Return a lane whose space is what a source and a kind of receiver have in common."""
    into = {width: build_index_maps(own[width], space) for width, space in pair.items()}
    if own.keys() == pair.keys() and all(is_identity(into[width], own[width].numel) for width in own):
        return Lane(number, chunks)
    back = {width: build_index_maps(space, own[width]) for width, space in pair.items()}
    return Lane(number, chunks, into, back)


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


def dense_frame_bytes(chunk: Chunk) -> int:
    """Return the bytes of the dense frame of a chunk."""
    return dense_size((length for _, length in chunk.segments()), chunk.width)


def max_frame_bytes(chunk: Chunk) -> int:
    """Return a bound on the bytes of any frame of a chunk: two padded streams instead of one per segment."""
    return dense_frame_bytes(chunk) + 16 * sum(1 for _ in chunk.segments())
