"""The index codec `again`: positions come back with a history, and nothing unsound is believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dte_dist.codec.index_codecs import AGAIN, EF, INDEX_CODECS, Again
from dte_dist.errors import FrameError
from dte_dist.kernels import torch as torch_kernels
from tests.unit import codec_reference as reference
from tests.unit.codec.histories import KERNELS, steps, use


@pytest.fixture(params=["cpu", "torch"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let all tensors be seen to by the kernels of one kind of device."""
    use(request.param, monkeypatch)
    return request.param


@settings(max_examples=80, deadline=None)
@given(steps())
def test_positions_come_back(step: tuple[np.ndarray, np.ndarray, int]) -> None:
    previous, positions, length = step
    known, now = torch.from_numpy(previous), torch.from_numpy(positions)
    if not len(known) or not len(now):
        return
    for kind in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            use(kind, patch)
            codec = Again(known, now)
            stream, low = codec.encode(now, length)
            assert stream.numpy().tobytes() == reference.again(previous, positions, length, low)
            assert codec.size(len(now), length) == len(stream)
            decoded, sound = Again(known).decode(stream, len(now), length, low)
            assert bool(sound) and torch.equal(decoded, now)
            assert (codec.number, codec.name) == (AGAIN.number, AGAIN.name) == (5, "again") and INDEX_CODECS[
                5
            ] is AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.84, 1.0])
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_the_estimate_is_near(kind: str, density: float, share: float) -> None:
    """Some runs tell within a few percent what all positions would; of few positions all are looked at."""
    rng, length = np.random.default_rng(1), 1 << 20
    previous = np.flatnonzero(rng.random(length) < density).astype(np.int32)
    others = np.flatnonzero(rng.random(length) < density * (1 - share)).astype(np.int32)
    positions = np.union1d(previous[rng.random(len(previous)) < share], others).astype(np.int32)
    codec = Again(torch.from_numpy(previous), torch.from_numpy(positions))
    size = codec.size(len(positions), length)
    assert abs(codec.estimate(len(positions), length) - size) < 0.1 * size
    few = Again(torch.from_numpy(previous[:2000]), torch.from_numpy(positions))
    assert few.estimate(len(positions), length) == few.size(len(positions), length)


@settings(max_examples=120, deadline=None)
@given(steps(), st.data())
def test_damaged_streams(step: tuple[np.ndarray, np.ndarray, int], data: st.DataObject) -> None:
    """Both kinds of kernels refuse the same ones, and what they believe is in order and in range."""
    previous, positions, length = step
    known, now = torch.from_numpy(previous), torch.from_numpy(positions)
    if not len(known) or not len(now):
        return
    stream, low = Again(known, now).encode(now, length)
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4)
    ):
        stream[place % len(stream)] = value
    stream = stream[: len(stream) - data.draw(st.sampled_from([0, 0, 0, 1, 8]))]
    count = max(1, len(now) + data.draw(st.sampled_from([0, 0, 0, 1, -1])))
    low = data.draw(st.sampled_from([low, low, low, low + 1, 0, 25]))
    known = known[: max(1, len(known) - data.draw(st.sampled_from([0, 0, 0, 1])))]  # not the same history
    found = []
    for kind in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            use(kind, patch)
            try:
                decoded, sound = Again(known).decode(stream, count, length, low)
            except FrameError:
                found.append(None)
                continue
            found.append(decoded.tolist() if bool(sound) else None)
    assert found[0] == found[1]
    if found[0] is not None:
        assert (
            len(found[0]) == count
            and found[0][0] >= 0
            and found[0][-1] < length
            and (np.diff(found[0]) > 0).all()
        )


@pytest.mark.parametrize("size", [1, 8, 24, 200])
def test_any_bytes(kind: str, size: int) -> None:
    rng, believed = np.random.default_rng(size), 0
    for _ in range(300):
        length = int(rng.integers(64, 400))
        known = torch.from_numpy(np.sort(rng.permutation(length)[: rng.integers(57, 65)]).astype(np.int32))
        data = rng.integers(0, 256, size, np.uint8) & rng.integers(0, 256, size, np.uint8)
        data[8:] = np.packbits(rng.random(8 * len(data[8:])) < 0.02)
        count = int(np.unpackbits(data[:8]).sum()) + int(rng.integers(0, 3))
        try:
            decoded, sound = Again(known).decode(
                torch.from_numpy(data), count, length, int(rng.integers(0, 3))
            )
        except FrameError:
            continue
        if bool(sound):
            believed += 1
            assert bool(torch_kernels.strictly_increasing(decoded, length))
    assert believed or size not in {8, 24}


def test_hostile_streams(kind: str) -> None:
    known, now = (torch.tensor(values, dtype=torch.int32) for values in ([1, 5, 9], [1, 4, 9, 11]))
    stream, low = Again(known, now).encode(now, 20)
    assert Again(known).decode(stream, 4, 20, low)[0].tolist() == [1, 4, 9, 11]
    wrong = {
        "short": (stream[:-8], 4, low),
        "long": (torch.cat([stream, stream]), 4, low),
        "empty": (stream[:0], 4, low),
        "no plane": (stream[:7], 4, low),
        "more": (stream, 60, low),
        "fewer than again": (stream, 1, low),
        "low": (stream, 4, 25),
    }
    for name, (stream_, count, low_) in wrong.items():
        with pytest.raises(FrameError):
            Again(known).decode(stream_, count, 20, low_)
            pytest.fail(name)
    beyond = stream.clone()
    beyond[7] = 0x80
    with pytest.raises(FrameError, match="others"):
        Again(known).decode(beyond, 4, 20, low)
    assert not bool(Again(known).decode(stream, 4, 11, low)[1])  # 11 is beyond the segment
    twice = torch.cat([stream[:8], EF.encode(torch.tensor([4, 9], dtype=torch.int32), 20)[0]])
    assert not bool(
        Again(known).decode(twice, 4, 20, EF.encode(torch.tensor([4, 9], dtype=torch.int32), 20)[1])[1]
    )
    all_again = Again(known, known).encode(known, 20)
    assert len(all_again[0]) == 8 and all_again[1] == 0
    with pytest.raises(FrameError, match="low bits"):
        Again(known).decode(all_again[0], 3, 20, 1)


def test_without_a_history_nothing_is_read() -> None:
    with pytest.raises(FrameError, match=r"delta before.*sync again"):
        AGAIN.decode(torch.zeros(8, dtype=torch.uint8), 1, 10, 0)
    with pytest.raises(ValueError, match="no positions to write"):
        Again(torch.tensor([1], dtype=torch.int32)).encode(torch.tensor([1], dtype=torch.int32), 10)
