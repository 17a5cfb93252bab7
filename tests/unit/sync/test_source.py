"""Unit tier, no ranks: what a source puts into frames, dense or not, and what it refuses to make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist.codec import FrameWriter
from dte_dist.codec.index_codecs import INDEX_CODECS
from dte_dist.codec.value_codecs import VALUE_CODECS
from dte_dist.errors import (
    FrameError,
)
from dte_dist.plan.chunks import SEGMENT
from dte_dist.report import Phases
from dte_dist.sync.version import NONE
from tests.unit.sync.pair import STREAM, Pair, bits, same_bits, weights


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "in the middle", "last"])
@pytest.mark.parametrize("bucket_bytes", [SEGMENT, 4 * SEGMENT], ids=["frames of their own", "one frame"])
def test_a_dense_segment_next_to_sparse_ones_arrives_right(at: int, bucket_bytes: int) -> None:
    length = 2 * SEGMENT + 999
    pair = Pair({"w": torch.zeros(length, dtype=torch.uint8)}, bucket_bytes=bucket_bytes)
    whole = slice(at * SEGMENT, (at + 1) * SEGMENT)
    pair.trained["w"][::29_000] = pair.trained["w"][-40:] = 9
    pair.trained["w"][whole] = torch.arange(len(range(length)[whole])) % 251 + 1
    pair.trained["w"][whole][17] = 0  # did not change, but is sent with the rest of its segment
    frames = pair.prepare()
    assert sum(map(bool, map(len, frames))) == (1 if bucket_bytes > SEGMENT else 3)
    joined = at != 1 and bucket_bytes > SEGMENT  # neighbours that are alike are written as one
    assert pair.source.codecs == {"dense+raw": 1, "u16+raw": 1 if joined else 2}
    assert pair.deliver(frames) is None
    assert not pair.copy["w"].any()
    pair.commit()
    assert torch.equal(pair.trained["w"], pair.copy["w"]) and torch.equal(
        pair.source.snapshot.bits[1], pair.trained["w"]
    )
    assert pair.sync() == 0


def test_codecs_count_the_segments_of_the_delta_until_it_is_forgotten() -> None:
    pair = Pair(weights(SEGMENT + 100))
    assert pair.source.codecs == {}
    pair.trained["w0"][[1, SEGMENT // 2]] += 1
    pair.trained["w0"][SEGMENT:].neg_()
    pair.deliver(pair.prepare())
    expected = {"i32+raw": 2, "dense+raw": 1}  # a chunk has at most 2^18 elements here
    assert pair.source.codecs == expected
    pair.commit()
    assert pair.source.codecs == expected  # for the report, which comes last
    pair.rollback()
    assert pair.source.codecs == {}
    assert pair.sync() == 0 and pair.source.codecs == {}


def frame_of(
    pair: Pair, number: int, parts: list[tuple[int, Tensor | None, Tensor]], version: int = 2
) -> Tensor:
    """A seed frame that a source would not make, of segments (first, positions, bits)."""
    writer = FrameWriter(pair.head(pair.chunks[number], base=NONE, version=version), "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dte_dist.codec.selector.CodecSelector.select",
            lambda *of, **how: (INDEX_CODECS[1], VALUE_CODECS[0], False),
        )
        for first, positions, values in parts:
            if positions is None:
                writer.add_dense(first, values)
            else:
                writer.add(first, len(values), positions.int(), values[positions])
    return writer.finish()


SEEDS: dict[str, list[tuple[int, Tensor | None, Tensor]]] = {
    "sparse": [(64, torch.tensor([0, 5]), torch.arange(64).int())],
    "sparse, but all of it": [(64, torch.arange(64), torch.arange(64).int())],
    "its front half": [(64, None, torch.arange(32).int())],
    "its back half": [(96, None, torch.arange(32).int())],
    "a hole in it": [(64, None, torch.arange(31).int()), (96, None, torch.arange(32).int())],
    "half dense, half sparse": [
        (64, None, torch.arange(32).int()),
        (96, torch.arange(32), torch.arange(32).int()),
    ],
}


@pytest.mark.parametrize("parts", SEEDS.values(), ids=SEEDS)
def test_a_seed_that_is_not_the_whole_chunk_is_refused_and_not_written(
    parts: list[tuple[int, Tensor | None, Tensor]],
) -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    before = bits(pair.copy["w0"][64:])
    pair.trained["w0"].neg_()
    with pytest.raises(FrameError, match="not the whole chunk"):
        pair.seed(2, tamper=lambda frames: [frames[0], frame_of(pair, 1, parts), frames[2]])
    assert bits(pair.copy["w0"][64:]) == before
    assert pair.receiver.state.version == NONE
    pair.seed(3)
    assert same_bits(pair.trained, pair.copy)


def test_a_seed_that_is_not_whole_in_its_first_frame_leaves_the_version_as_it_was() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    part = frame_of(pair, 0, [(0, None, torch.arange(63).int())])
    with pytest.raises(FrameError, match="not the whole chunk"):
        pair.seed(2, tamper=lambda frames: [part, *frames[1:]])
    assert pair.receiver.state.version == 1


def test_a_whole_seed_in_several_dense_segments_is_taken() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    parts = frame_of(pair, 1, [(64, None, torch.arange(32).int()), (96, None, torch.arange(32, 64).int())])
    pair.seed(2, tamper=lambda frames: [frames[0], parts, frames[2]])
    assert (
        pair.copy["w0"][64:128].view(torch.int32).tolist() == [*range(64)]
        and pair.receiver.state.version == 2
    )


def test_a_seed_frame_that_could_not_be_made_is_refused_and_the_source_says_why() -> None:
    pair = Pair(weights(192), bucket_bytes=256)
    before = bits(pair.copy["w0"])
    pair.trained["w0"].neg_()
    pair.source.prepare(2, True, Phases())
    write, made = pair.source.own_lanes.write_seed, []

    def failing(*args: Any) -> None:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no room")
        write(*args)

    pair.source.own_lanes.write_seed = failing  # type: ignore[method-assign]
    frames = pair.seed_frames(2)
    assert [bool(frame.any()) for frame in frames] == [True, False, True]
    assert type(pair.source.error) is MemoryError
    pair.receiver.begin()
    pair.receiver.take(frames[1], pair.head(pair.chunks[1], base=NONE, version=2, lineage=STREAM))
    assert type(pair.receiver.error) is FrameError and bits(pair.copy["w0"]) == before
    pair.rollback()
    pair.seed(3)
    assert pair.source.error is None and same_bits(pair.trained, pair.copy)
