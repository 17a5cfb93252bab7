"""Frames and payloads made and read on the device: the same bytes as on the CPU, and the same verdict about
damaged ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import dte_dist
from dte_dist.codec import CodecSelector, FrameHead, FrameWriter, PreviousDelta, Segment, read_frame
from dte_dist.codec.header import CHECKSUM_WORD, ENTRY, HEAD
from dte_dist.detect.snapshot import Snapshot
from dte_dist.errors import DeltaError
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.layout import Block
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.gpu.device import DEVICE, build, content, random_bits, recipes, same_bits, settle, tier
from tests.unit.codec.pairs import EACH

pytestmark = tier
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
codecs = pytest.mark.parametrize("codec", ["fast", "small", *EACH])
densities = pytest.mark.parametrize("density", [0.00005, 0.01, 0.3, 1.0])
LENGTH = 150_000


def head(width: int) -> FrameHead:
    return FrameHead(7, 8, 1, 2, 0, 0, 1, width, 1000, 3 * LENGTH)


def write(width: int, density: float, device: torch.device | str, codec: str = "fast") -> Tensor:
    """Make a frame of two segments with changes, one whole, all from a seed; the same on any device."""
    selector = CodecSelector(codec)
    writer, relative = FrameWriter(head(width), torch.device(device), selector), selector.relative(width)
    for number in range(2):
        rng = np.random.default_rng(number)
        positions = torch.from_numpy(np.flatnonzero(rng.random(LENGTH) < density).astype(np.int32)).to(device)
        values = random_bits(len(positions), width, number, device)
        if relative and number == 0:
            values = torch.from_numpy(rng.geometric(0.6, len(positions))).to(torch.int32).to(device)
        elif relative:
            values = torch_kernels.widen(values)
        whole = partial(random_bits, LENGTH, width, number + 5, device)
        writer.add(1000 + number * LENGTH, LENGTH, positions, values, relative=relative, whole=whole)
    writer.add_dense(1000 + 2 * LENGTH, random_bits(99, width, 9, device))
    return writer.finish()


def verdict(frame: Tensor, width: int) -> str | list[Segment]:
    try:
        return read_frame(frame, head(width))
    except DeltaError as error:
        return type(error).__name__


def same_segments(ours: list[Segment], theirs: list[Segment]) -> bool:
    def flat(segments: list[Segment]) -> list[tuple[object, ...]]:
        return [
            (
                s.first,
                s.length,
                None if s.positions is None else s.positions.tolist(),
                s.values.tolist(),
                s.relative,
            )
            for s in segments
        ]

    return flat(ours) == flat(theirs)


@widths
@densities
@codecs
def test_the_device_writes_and_reads_the_same_frames(width: int, density: float, codec: str) -> None:
    ours, theirs = write(width, density, DEVICE, codec), write(width, density, "cpu", codec)
    assert ours.device.type == DEVICE.type
    assert torch.equal(ours.cpu(), theirs)
    assert same_segments(read_frame(ours, head(width)), read_frame(theirs, head(width)))
    buffer = torch.zeros(len(ours) + 8, dtype=torch.uint8, device=DEVICE)[3 : len(ours) + 3]
    buffer.copy_(ours)
    assert same_segments(read_frame(buffer, head(width)), read_frame(theirs, head(width)))


@widths
@pytest.mark.parametrize("codec", ["small", "again+planes", "again+ulp"])
def test_deltas_that_count_on_the_one_before(width: int, codec: str) -> None:
    """The same frames on the device and the CPU, read by one that has kept its history on the other, too."""
    rng, selector, used = np.random.default_rng(width), CodecSelector(codec), set()
    flags = rng.random(2 * LENGTH) < 0.02
    writers, readers = {DEVICE: PreviousDelta(), "cpu": PreviousDelta()}, [PreviousDelta(), PreviousDelta()]
    for version in range(2, 6):
        at, frames, segments = replace(head(width), base=version - 1, version=version), {}, []
        middle = int(rng.integers(1, 2 * LENGTH))
        for device, history in writers.items():
            writer, relative = (
                FrameWriter(at, torch.device(device), selector, history),
                selector.relative(width),
            )
            for first, end in ((0, middle), (middle, 2 * LENGTH)):
                positions = torch.from_numpy(np.flatnonzero(flags[first:end]).astype(np.int32)).to(device)
                values = random_bits(len(positions), width, version, device)
                writer.add(
                    1000 + first,
                    end - first,
                    positions,
                    torch_kernels.widen(values) if relative else values,
                    relative=relative,
                )
            frames[device] = writer.finish()
            used |= writer.codecs.keys()
            history.commit(version, at.lineage)
        assert torch.equal(frames[DEVICE].cpu(), frames["cpu"])
        for history, frame in zip(readers, list(frames.values())[:: (-1) ** version], strict=True):
            history.discard()
            segments.append(read_frame(frame, at, history))
            history.commit(version, at.lineage)
        assert same_segments(*segments)
        flags = (flags & (rng.random(2 * LENGTH) < 0.84)) | (rng.random(2 * LENGTH) < 0.003)
    assert any(name.startswith("again") for name in used)
    settle()


@pytest.mark.parametrize("density", [0.00005, 0.01])
def test_any_flip_is_noticed_on_the_device(density: float) -> None:
    frame = write(2, density, DEVICE)
    places = np.random.default_rng(1).integers(0, len(frame), 60).tolist()
    for place in [*range(0, 200, 5), *places]:
        damaged = frame.clone()
        damaged[place] ^= 1 << place % 8
        assert isinstance(verdict(damaged, 2), str)
    assert isinstance(verdict(frame[:-8], 2), str)
    settle()


@widths
@pytest.mark.parametrize("density", [0.0001, 0.01, 0.3])
@codecs
def test_hostile_frames_with_a_right_checksum_get_the_same_verdict(
    width: int, density: float, codec: str
) -> None:
    """Table and streams of any content must not hurt the device: an assertion there would end every later
    call of the process.
    """
    frame, refused = write(width, density, "cpu", codec), 0
    for seed in range(40):
        rng, hostile = np.random.default_rng(seed), frame.clone()
        near = HEAD.itemsize + (
            3 * ENTRY.itemsize if seed % 2 else 1000 if seed % 4 else len(frame) - HEAD.itemsize
        )
        places = torch.from_numpy(rng.integers(HEAD.itemsize, min(near, len(frame)), 1 + seed % 4))
        hostile[places] = torch.from_numpy(rng.integers(0, 256, len(places), np.uint8))
        hostile.view(torch.int64)[CHECKSUM_WORD] = cpu.checksum(hostile, CHECKSUM_WORD)
        expected, found = verdict(hostile, width), verdict(hostile.to(DEVICE), width)
        settle()
        if isinstance(expected, str):
            refused += 1
            assert found == expected
        else:
            assert not isinstance(found, str)
            assert same_segments(found, expected)
    assert refused > 5


# Snapshots --------------------------------------------------------------------------------------------------
# -------------


@widths
@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_finds_the_same_changes(width: int, seed: int) -> None:
    drawn, found = recipes(seed), []
    for device in ("cpu", DEVICE):
        tensors = build(drawn, width, seed, device)
        flat = FlatTensors(tensors, width)
        total, live = len(flat), flat.read_as([tensor.dtype for tensor in tensors])
        known = Snapshot({width: total}, torch.device(device), 1000)
        segments = [(first, min(1000, total - first)) for first in range(0, total, 1000)]
        known.refresh({width: live}, [(width, *segment) for segment in segments])
        assert torch.equal(known.bits[width].cpu(), content(tensors, width))
        for number, tensor in enumerate(tensors):
            bits = tensor.view(BITS[width])
            bits.copy_(
                torch.where(
                    random_bits(tensor.numel(), 1, number, device).view(tensor.shape) < 9, ~bits, bits
                )
            )
        before, changes = (
            known.bits[width].clone(),
            list[tuple[int, int, list[int] | None, list[int], list[int]]](),
        )
        for batch in known.changes(live, width, [(0, total)]):
            for change in batch:
                positions = None if change.positions is None else change.positions.tolist()
                changes.append(
                    (change.first, change.length, positions, change.old.tolist(), change.new.tolist())
                )
        assert torch.equal(known.bits[width].cpu(), content(tensors, width))
        known.roll_back()
        assert torch.equal(known.bits[width], before) and not known.inconsistent
        found.append(changes)
    assert found[0] == found[1]
    assert any(positions for *_, positions, _, _ in found[0])


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_masters_are_cast_on_the_device_before_they_are_compared(wire: torch.dtype) -> None:
    masters = [
        torch.randn(1000, 33, device=DEVICE),
        torch.randn(70, device=DEVICE),
        torch.randn((), device=DEVICE),
    ]
    expected = torch.cat([master.reshape(-1) for master in masters]).to(wire)
    width = wire.itemsize
    live = FlatTensors(masters, width).read_as([wire] * 3)
    known = Snapshot({width: 33071}, DEVICE, 5000)
    known.refresh(
        {width: live}, [(width, first, min(5000, 33071 - first)) for first in range(0, 33071, 5000)]
    )
    assert torch.equal(known.bits[width], expected.view(BITS[width]))
    masters[0][7, 3] *= 1 + 2**-20
    masters[1][5] += 64
    masters[2].neg_()
    changes = [change for batch in known.changes(live, width, [(0, 33000), (33000, 71)]) for change in batch]
    assert [
        (change.first, change.positions.tolist()) for change in changes if change.positions is not None
    ] == [(33000, [5, 70])]


# Payloads ---------------------------------------------------------------------------------------------------
# -------------


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(DEVICE, DEVICE), (DEVICE, "cpu"), ("cpu", DEVICE)],
    ids=["device", "to the CPU", "from the CPU"],
)
def test_the_engine_over_loopback(sender: torch.device | str, receiver: torch.device | str) -> None:
    drawn, engine = recipes(3, most=12), dte_dist.DeltaEngine(transport=dte_dist.LoopbackTransport())
    for width in BITS:
        trained = {
            f"{width}.{number}": tensor for number, tensor in enumerate(build(drawn, width, 1, sender))
        }
        copy = {
            f"{width}.{number}": tensor for number, tensor in enumerate(build(drawn, width, 50, receiver))
        }
        engine = dte_dist.DeltaEngine(transport=dte_dist.LoopbackTransport())
        for version in range(1, 5):
            engine.push(trained, version=version)
            engine.pull(copy, version=version)
            assert all(same_bits(trained[name], copy[name]) for name in trained)
            for number, tensor in enumerate(trained.values()):
                bits = tensor.view(BITS[width])
                bits.copy_(
                    torch.where(
                        random_bits(tensor.numel(), 1, number + version, sender).view(tensor.shape)
                        < 20 * version,
                        ~bits,
                        bits,
                    )
                )


@pytest.mark.parametrize("counter", [torch.int32, torch.int64])
def test_remap_delta_indices(counter: torch.dtype) -> None:
    blocks = [
        Block.rectangle((2, 0), (50, 40)),
        Block.rectangle((30, 1), (40, 33)),
        Block.rectangle((40, 0), (5, 40)),
    ]
    indices = torch.arange(0, 2000, 7, dtype=counter)
    for other in blocks:
        expected = dte_dist.remap_delta_indices(indices, blocks[0], other)
        found = dte_dist.remap_delta_indices(indices.to(DEVICE), blocks[0], other)
        assert [part.device.type for part in found] == [DEVICE.type] * 2
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
