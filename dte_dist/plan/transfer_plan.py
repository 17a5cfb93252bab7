"""The public plan: which rank copies which part of which tensor to whom.

Every rank computes the whole plan alone, from the manifests and coordinates of all ranks. The channel itself
does not copy by ops: it translates positions of flat spaces (see `plan.index_map`), which follow from the
same `ModelMap`. The plan says the same in a form that can be looked at, checked, costed and carried out by
other means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, NoReturn

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Block, Layout, Manifest
from dte_dist.plan.block_overlap import BlockOverlap, Held
from dte_dist.plan.coverage import disjoint
from dte_dist.plan.hints import OF_PLANS
from dte_dist.plan.model_map import ModelMap, RankLayout, Slot
from dte_dist.plan.transfer_ops import Box, TransferOp, TransferOps
from dte_dist.report import format_bytes

__all__ = ["ROUTES", "Plan", "RouteName", "TransferOp"]

RouteName = Literal["broadcast", "p2p"]
ROUTES: Final[tuple[RouteName, ...]] = ("broadcast", "p2p")
"""The ways that changes take; a control row names one by its index."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Say how every element comes from the source that contributes it to every receiver that holds it.

    Of replicas (equal blocks on several sources) one sends, for all receivers and for good; replicas on a
    mesh take turns, slot by slot (`plan.ownership`). Replicas of a trained weight drift apart in the last
    bit, so a different one per receiver would give receivers bits that differ, and another one later would
    send the drift as if it were training.

    Attributes:
        ops: a sequence of `TransferOp`, in order of slot, sender and receiver; they are made when they are
            looked at.
        slots: of the model, sorted by name.
        sent, held: what the sources contribute, and what the receivers hold.
        contributed: by source, bytes on the wire that it contributes; first the root of the broadcast.

    Example:
        >>> whole = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
        >>> lower = dte_dist.Layout.from_views([("w", torch.zeros(2, 3), (4, 3), (2, 0))])
        >>> plan = dte_dist.Plan.between({0: whole}, {1: lower})
        >>> [(op.send_rank, op.recv_rank, op.train_slices[0], op.inf_slices[0]) for op in plan.ops]
        [(0, 1, slice(2, 4, None), slice(0, 2, None))]
    """

    ops: Sequence[TransferOp]
    slots: tuple[Slot, ...]
    sent: Held
    held: Held
    contributed: Mapping[int, int]

    @classmethod
    def between(
        cls,
        sources: Mapping[int, Layout | RankLayout],
        receivers: Mapping[int, Layout | RankLayout],
    ) -> Plan:
        """Return the plan from what each rank holds; every rank gets the same.

        Args:
            sources: by group rank, first the root of the broadcast.
            receivers: by group rank; a colocated rank is in both. A `RankLayout` is a manifest and a rank's
                coordinates, and says besides in which dtypes a source sends (`wire`), or that a receiver asks
                for some slots only (`partial`).

        Raises:
            LayoutMismatch: the layouts do not fit together: names, shapes, dtypes, coverage.
            ValueError: there are no sources.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> len(dte_dist.Plan.between({0: layout}, {1: layout, 2: layout}).ops)
            2
        """
        if not sources:
            raise ValueError("a plan needs at least one source")
        known: list[Manifest] = []
        model = ModelMap(
            *({rank: _holding(each, known) for rank, each in side.items()} for side in (sources, receivers)),
            hints=OF_PLANS,
        )
        return cls.of(model, next(iter(sources)))

    @classmethod
    def of(cls, model: ModelMap, root: int) -> Plan:
        """Return the plan of a model map whose broadcast goes over source `root`.

        Example:
            >>> from dte_dist.plan.model_map import ModelMap
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> holding = dte_dist.RankLayout(layout.manifest, layout.coordinates)
            >>> plan = dte_dist.Plan.of(ModelMap({0: holding}, {1: holding}), root=0)
            >>> plan.digest() == dte_dist.Plan.between({0: layout}, {1: layout}).digest()
            True
        """
        sent, held = (
            Held.of(spaces, len(model.slots)) for spaces in (model.source_spaces, model.receiver_spaces)
        )
        sizes = {
            rank: sum(width * space.numel for width, space in spaces.items())
            for rank, spaces in model.source_spaces.items()
        }
        return cls(
            BlockOverlap(sent, held).ops(model.slots),
            model.slots,
            sent,
            held,
            {root: sizes.pop(root), **sizes},
        )

    @cached_property
    def _columns(self) -> TransferOps:
        return self.ops if isinstance(self.ops, TransferOps) else TransferOps.of(self.ops, self.slots)

    @cached_property
    def _traffic(self) -> dict[tuple[int, int], int]:
        return self._columns.traffic()

    def ops_for(self, send_rank: int | None = None, recv_rank: int | None = None) -> Sequence[TransferOp]:
        """Return the ops of one sender, of one receiver, or between both; None for any rank.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> [op.recv_rank for op in dte_dist.Plan.between({0: layout}, {1: layout,
            ...     2: layout}).ops_for(recv_rank=2)]
            [2]
        """
        return self._columns.where(send_rank, recv_rank)

    def validate(self) -> None:
        """Check that the ops cover every element of every receiver exactly once.

        Raises:
            LayoutMismatch: an element is left out or written twice, or what an op writes is outside of its
                tensor or not of the shape that it reads.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> dte_dist.Plan.between({0: layout}, {1: layout}).validate()
        """
        columns = self._columns
        left = set(self.held.slot.tolist())
        tiled: dict[tuple[int, bytes], bool] = {}
        for group in columns.groups:
            recv = group.recv.used()
            rows = [group.box[recv.row == row] for row in range(len(recv.ranks))]
            keys = [row.tobytes() for row in rows]
            for at, slot in enumerate(group.slots.tolist()):
                left.discard(slot)
                name = columns.slots[slot].name
                filled = zip(
                    recv.ranks.tolist(),
                    recv.entries[at].tolist(),
                    strict=True,
                )
                _same_tensors(name, self._tensors(slot), set(filled))
                for row, block in enumerate(self.held.block[self.held.at(slot)].tolist()):
                    key = block, keys[row]
                    if key not in tiled:
                        tiled[key] = _tiles(
                            self.held.table.blocks[block],
                            [columns.boxes.boxes[box] for box in rows[row].tolist()],
                        )
                    if not tiled[key]:
                        _refuse(
                            name,
                            [int(recv.ranks[row])],
                            "do not cover every element exactly once",
                        )
        for slot in sorted(left):
            _same_tensors(columns.slots[slot].name, self._tensors(slot), set())

    def refuse_other_ops(self) -> None:
        """Check that the ops are those between what sources contribute and receivers hold.

        Raises:
            LayoutMismatch: they are others, so that blocks and ops would not copy the same elements.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> dte_dist.Plan.between({0: layout}, {1: layout}).refuse_other_ops()
        """
        if BlockOverlap(self.sent, self.held).ops(self.slots).digest() != self.digest():
            what, hint = (
                "the ops of a plan are not those of its blocks",
                "take all ops of Plan.between, as they are",
            )
            raise LayoutMismatch(what, hint=hint)

    def _tensors(self, slot: int) -> set[tuple[int, int]]:
        """Return (rank, entry) of the receivers' tensors of a slot."""
        pieces = self.held.at(slot)
        return set(
            zip(
                self.held.rank[pieces].tolist(),
                self.held.entry[pieces].tolist(),
                strict=True,
            )
        )

    def digest(self) -> bytes:
        """Return 16 bytes that differ when plans differ: compare them across ranks before relying on the
        plan.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> dte_dist.Plan.between({0: layout},
            ...     {1: layout}).digest() == dte_dist.Plan.between({0: layout}, {2: layout}).digest()
            False
        """
        return self._columns.digest()

    def bytes_between(self, send: int, recv: int) -> int:
        """Return the dense bytes that one rank sends to another, in wire dtypes; 0 if they have nothing in
        common.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> dte_dist.Plan.between({0: layout}, {1: layout}).bytes_between(0, 1)
            48
        """
        return self._traffic.get((send, recv), 0)

    def busiest_bytes(self, route: RouteName) -> int:
        """Return the most dense bytes that one rank sends or receives in one sync on a route: a bound,
        reached if everything changes.

        On "p2p" every sender sends each receiver what that one holds. On "broadcast" the sources send what
        they contribute to the root, the first of them, and everything goes from there from receiver to
        receiver. A copy within a rank costs nothing.

        Raises:
            ValueError: there is no such route.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> plan = dte_dist.Plan.between({0: layout}, {1: layout, 2: layout})
            >>> plan.busiest_bytes("p2p"), plan.busiest_bytes("broadcast")
            (96, 48)
        """
        return max(max(load.values(), default=0) for load in self._loads(route))

    def total_bytes(self, route: RouteName) -> int:
        """Return the most dense bytes that all ranks together send in one sync on a route; otherwise as
        `busiest_bytes`.

        Raises:
            ValueError: there is no such route.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> dte_dist.Plan.between({0: layout}, {1: layout, 2: layout}).total_bytes("broadcast")
            96
        """
        return self._loads(route)[0].total()

    def choose_route(self) -> tuple[RouteName, str]:
        """Return the route on which the busiest rank has least to move, or else all ranks together; and why.

        Example:
            >>> layout = dte_dist.Layout.from_tensors({"w": torch.zeros(4, 3)})
            >>> dte_dist.Plan.between({0: layout}, {1: layout, 2: layout}).choose_route()
            ('broadcast', 'busiest rank 48 B, 96 B over p2p')
        """
        costs = {route: (self.busiest_bytes(route), self.total_bytes(route)) for route in ROUTES}
        best, other = sorted(
            ROUTES, key=costs.__getitem__
        )  # the first of equals is broadcast: fewer messages
        which = 0 if costs[best][0] != costs[other][0] else 1
        what = ("busiest rank", "all ranks together")[which]
        return (
            best,
            f"{what} {format_bytes(costs[best][which])}, {format_bytes(costs[other][which])} over {other}",
        )

    def _loads(self, route: RouteName) -> tuple[Counter[int], Counter[int]]:
        """Return the dense bytes that each rank sends, and those that each receives."""
        if route not in ROUTES:
            raise ValueError(f'a route is "broadcast" or "p2p", not {route!r}')
        sent = Counter[int]()
        received = Counter[int]()
        for (sender, receiver), nbytes in (self._traffic if route == "p2p" else self._relayed()).items():
            if sender != receiver:
                sent[sender] += nbytes
                received[receiver] += nbytes
        return sent, received

    def _relayed(self) -> dict[tuple[int, int], int]:
        """Return the bytes from rank to rank when the root gathers and a chain of receivers passes on."""
        root = next(iter(self.contributed))
        everything = sum(self.contributed.values())
        line = [root, *sorted(set(self.held.rank.tolist()) - {root})]
        return {(source, root): nbytes for source, nbytes in self.contributed.items()} | dict.fromkeys(
            pairwise(line), everything
        )


def _holding(given: Layout | RankLayout, known: list[Manifest]) -> RankLayout:
    """Return what a rank holds; of equal manifests the first one stands for all, which saves work."""
    holding = (
        RankLayout(given.manifest, given.coordinates, partial=given.is_partial)
        if isinstance(given, Layout)
        else given
    )
    same = next(
        (each for each in known if each is holding.manifest or each == holding.manifest),
        None,
    )
    if same is None:
        known.append(holding.manifest)
        return holding
    return RankLayout(same, holding.coordinates, holding.wire, holding.partial)


def _tiles(block: Block, boxes: Sequence[Box]) -> bool:
    """Tell whether the receiving slices of ops tile a block, and each has the shape of what is sent."""
    shapes = [[tuple(each.stop - each.start for each in part) for part in box] for box in boxes]
    if any(len(inf) != len(block.shape) for _, inf in shapes):
        return False
    inside = all(
        0 <= each.start < each.stop <= size
        for _, part in boxes
        for each, size in zip(part, block.shape, strict=True)
    )
    if not inside or any(train != inf for train, inf in shapes):
        return False
    filled = [
        Block.rectangle([each.start for each in part], shape)
        for (_, part), (_, shape) in zip(boxes, shapes, strict=True)
    ]
    return sum(each.numel for each in filled) == block.numel and disjoint(filled)


def _same_tensors(slot: str, held: set[tuple[int, int]], filled: set[tuple[int, int]]) -> None:
    """Refuse ops that leave out a tensor of a receiver, or are for one that it has not."""
    for tensors, what in (
        (held - filled, "leave out a tensor"),
        (filled - held, "are for a tensor that is not there"),
    ):
        if tensors:
            _refuse(slot, sorted({rank for rank, _ in tensors}), what)


def _refuse(slot: str, ranks: Sequence[int], what: str) -> NoReturn:
    raise LayoutMismatch(
        f"the ops of a plan {what}",
        tensor=slot,
        ranks=ranks,
        hint="take all ops of Plan.between, each once",
    )
