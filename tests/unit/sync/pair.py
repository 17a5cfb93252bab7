"""A source and a receiver without ranks: frames are handed from one to the other in memory.

`Pair` runs the protocol of one sync over real states: prepare, frames, take, vote, apply, commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dte_dist.codec import FrameHead
from dte_dist.detect.detector import Detector
from dte_dist.layout import Layout
from dte_dist.plan.chunks import Chunk, ChunkPlan
from dte_dist.plan.model_map import ModelMap, RankLayout, WireTypes
from dte_dist.report import Phases
from dte_dist.sync.receiver import Receiver
from dte_dist.sync.routes import dense_frame_bytes, max_frame_bytes
from dte_dist.sync.source import Source
from dte_dist.sync.version import NONE, SyncStep

Tamper = Callable[[list[Tensor]], list[Tensor]]
SCHEMA, STREAM = 1234, 77


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor: no comparison of floats anywhere."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(bits(ours[name]) == bits(theirs[name]) for name in theirs)


class Pair:
    """One source and one receiver, seeded."""

    def __init__(
        self,
        trained: dict[str, Tensor],
        copy: dict[str, Tensor] | None = None,
        *,
        wire: WireTypes = None,
        bucket_bytes: int = 1 << 20,
        detector: Detector | None = None,
        seed: bool = True,
    ) -> None:
        self.trained = trained
        self.copy = (
            {name: torch.zeros_like(tensor) for name, tensor in trained.items()} if copy is None else copy
        )
        self.layouts = Layout.from_tensors(self.trained), Layout.from_tensors(self.copy)
        ours, theirs = (RankLayout(layout.manifest, layout.coordinates) for layout in self.layouts)
        self.model = ModelMap({0: replace(ours, wire=wire)}, {1: theirs})
        totals = {width: space.numel for width, space in self.model.source_spaces[0].items()}
        self.schedule = ChunkPlan({0: totals}, bucket_bytes)
        self.source = Source(self.layouts[0], self.model, 0, self.schedule, SCHEMA)
        self.receiver = Receiver(self.layouts[1], self.model, 1)
        self.detector = detector
        if seed:
            self.seed()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.schedule.chunks(0)

    def head(self, chunk: Chunk, *, source: int = 0, seed: bool | None = None, **step: int) -> FrameHead:
        """What the receiver expects a frame to say: the next version after its own, unless told otherwise."""
        at = self.receiver.state
        known = {
            "schema": SCHEMA,
            "lineage": at.lineage,
            "base": at.version,
            "version": at.version + 1,
            **step,
        }
        head = SyncStep(**known).frame_head(source, len(self.chunks), chunk)
        return head if seed is None else replace(head, seed=seed)

    def seed(self, version: int = 1, lineage: int = STREAM, tamper: Tamper | None = None) -> None:
        self.source.prepare(version, True, Phases())
        self.place(version, lineage, tamper)

    def place(self, version: int, lineage: int = STREAM, tamper: Tamper | None = None) -> None:
        """Send the snapshot as it is."""
        frames = self.seed_frames(version, lineage)
        self.receiver.begin()
        for chunk, frame in zip(self.chunks, tamper(frames) if tamper else frames, strict=True):
            self.receiver.take(frame, self.head(chunk, base=NONE, version=version, lineage=lineage))
        error = self.source.error or self.receiver.error
        if error is not None:
            self.rollback()
            raise error
        self.receiver.commit(version, lineage)
        self.source.commit(version, lineage, full=True)

    def seed_frames(self, version: int, lineage: int = STREAM) -> list[Tensor]:
        """Let the source write its dense frames into buffers of the sizes that all ranks know."""
        buffers = [torch.empty(dense_frame_bytes(chunk), dtype=torch.uint8) for chunk in self.chunks]
        for write, buffer in zip(
            self.source.seed_frames(SyncStep(SCHEMA, lineage, NONE, version)), buffers, strict=True
        ):
            write(buffer)
        return buffers

    def prepare(self) -> list[Tensor]:
        """Return all frames of the next delta."""
        self.source.prepare(self.source.state.version + 1, False, Phases(), self.detector)
        frames = self.source.frames()
        assert all(
            len(frame) <= max_frame_bytes(chunk) for frame, chunk in zip(frames, self.chunks, strict=True)
        )
        return frames

    def deliver(self, frames: list[Tensor], **expected: int) -> Exception | None:
        """Let the receiver take frames and return what it says."""
        self.receiver.begin()
        for chunk, frame in zip(self.chunks, frames, strict=True):
            if len(frame):
                self.receiver.take(frame, self.head(chunk, **expected))
        return self.receiver.error

    def rollback(self) -> None:
        self.source.rollback()
        self.receiver.rollback()

    def commit(self) -> None:
        version, lineage = self.source.state.version + 1, self.source.state.lineage
        self.receiver.apply()
        self.receiver.commit(version, lineage)
        self.source.commit(version, lineage, full=False)

    def sync(self, tamper: Tamper | None = None) -> int:
        """Run a whole delta and return how many elements it sent."""
        frames = self.prepare()
        changed = self.source.changed
        error = self.deliver(tamper(frames) if tamper else frames)
        if error is not None:
            self.rollback()
            raise error
        self.commit()
        return changed


def weights(*numels: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(numels))
    return {f"w{i}": torch.randn(n, generator=generator).to(dtype) for i, n in enumerate(numels)}


def flip(frame: Tensor, byte: int, bit: int = 0) -> Tensor:
    damaged = frame.clone()
    damaged[byte] ^= 1 << bit
    return damaged
