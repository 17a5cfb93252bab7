"""Unit tier, no ranks: own writes are counted as autograd counts them, and what moved a counter further was
somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist.detect.fingerprint import Fingerprint, external_writes
from dte_dist.kernels import Identity, Kernels, cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.layout import Layout, LiveTensors
from dte_dist.plan.index_map import build_index_maps
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.geometry import homes, pairs_of_spaces
from tests.unit.kernels.test_index_map import target_of
from tests.unit.kernels.test_scan import make_tensors, random_bits

KERNELS = {"cpu": cpu, "torch": torch_kernels}
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])


@pytest.fixture(params=["cpu", "torch", "torch, all large", "torch, few at once"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Run a test with the kernels of either kind of device; torch ones write large tensors one by one, small
    ones some at once.
    """
    if "all large" in request.param:
        monkeypatch.setattr(torch_kernels.scan, "_SMALL", 0)
    if "few at once" in request.param:
        monkeypatch.setattr(torch_kernels.scan, "_BATCH", 60)
    yield KERNELS[request.param.split(",")[0]]


def versions(tensors: Any) -> np.ndarray:
    return np.array([tensor._version for tensor in tensors])


# Own writes -------------------------------------------------------------------------------------------------

Write = Callable[[Kernels, FlatTensors, Tensor], None]
"""Write to some ascending positions of a flat space with one kernel."""


def write(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    begin, end = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
    kernel.write(flat, begin, random_bits(end - begin, flat.width))


def scatter(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    kernel.scatter(flat, positions, random_bits(len(positions), flat.width))


def scatter_backwards(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    kernel.scatter(flat, positions.flip(0).to(torch.int64), random_bits(len(positions), flat.width))


def scatter_add(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    kernel.scatter_add(flat, positions.to(torch.int64), random_bits(len(positions), flat.width))


def patch(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    kernel.patch(
        Identity(len(flat)), 0, positions, random_bits(len(positions), flat.width), flat, relative=False
    )


def patch_by(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    lineage = cpu.encode_u16(positions, len(flat))
    values = random_bits(len(positions), flat.width)
    kernel.patch(Identity(len(flat)), 0, lineage, values, flat, relative=True, length=len(flat))


def place(kernel: Kernels, flat: FlatTensors, positions: Tensor) -> None:
    begin, end = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
    kernel.scatter_dense(Identity(len(flat)), begin, random_bits(end - begin, flat.width), flat)


WRITES: dict[str, Write] = {
    "write": write,
    "scatter": scatter,
    "scatter backwards": scatter_backwards,
    "scatter_add": scatter_add,
    "patch": patch,
    "patch by distances": patch_by,
    "place": place,
}
writes = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def some_positions(total: int) -> list[Tensor]:
    chance = np.random.default_rng(total).random(total)
    several = [
        np.arange(total),
        np.arange(0),
        np.array([total - 1]),
        *(np.flatnonzero(chance < share) for share in (0.01, 0.1, 0.6)),
    ]
    return [torch.from_numpy(each.astype(np.int32)) for each in several]


@widths
@writes
def test_what_a_kernel_writes_is_counted_as_the_version_counters_count_it(
    kernel: Kernels, write: Write, width: int
) -> None:
    """Misaligned, empty, of no dimension and strided tensors; nothing, one element, whole tensors, some of
    several.
    """
    tensors = make_tensors(width)
    flat = FlatTensors(tensors, width)
    for positions in some_positions(len(flat)):
        before, counted = versions(tensors), flat.writes.copy()
        write(kernel, flat, positions)
        moved = versions(tensors) - before
        assert (flat.writes - counted).tolist() == moved.tolist()
        met = {int(np.searchsorted(flat.starts, position, "right")) - 1 for position in positions.tolist()}
        between = (
            range(min(met, default=0), max(met, default=-1) + 1)
            if "write" in write.__name__ or "place" in write.__name__
            else met
        )
        assert {*np.flatnonzero(moved).tolist()} == {index for index in between if tensors[index].numel()}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_geometry(data: st.DataObject) -> None:
    """Several tables, several homes of one element, strided tensors; `place` and `patch` one after the
    other.
    """
    shapes, source, receiver = data.draw(pairs_of_spaces())
    index_maps, strided = build_index_maps(source, receiver), data.draw(st.booleans())
    met = {
        int(np.searchsorted(receiver.starts, home, "right")) - 1
        for several in homes(source, receiver, shapes)
        for home in several
    }
    small, batch = data.draw(st.sampled_from([0, 10, 1 << 16])), data.draw(st.sampled_from([5, 1 << 24]))
    for width in BITS:
        for kernel in KERNELS.values():
            flat = target_of(receiver, 5, strided, width)
            with pytest.MonkeyPatch.context() as patching:
                patching.setattr(torch_kernels.scan, "_SMALL", small)
                patching.setattr(torch_kernels.scan, "_BATCH", batch)
                for index_map in index_maps:
                    kernel.scatter_dense(index_map, 0, random_bits(source.numel, width), flat)
                    positions = torch.arange(source.numel, dtype=torch.int32)
                    for relative in (False, True):
                        kernel.patch(
                            index_map, 0, positions, random_bits(source.numel, width), flat, relative=relative
                        )
            assert flat.writes.tolist() == versions(flat.tensors).tolist()
            assert {*np.flatnonzero(flat.writes).tolist()} == met


@widths
@writes
def test_tensors_that_share_a_counter_move_it_together(kernel: Kernels, write: Write, width: int) -> None:
    """A fused projection cut into views; a tensor that comes twice; a tensor and what `detach` gives of
    it.
    """
    fused, tied, own = (random_bits(120, width, seed).view(12, 10) for seed in (1, 2, 3))
    families = [
        [fused[:5], fused[5:8], fused[8:].t()],
        [tied, tied],
        [own[:, :6], own.detach()[:, 6:]],
        [random_bits(9, width)],
    ]
    flat = FlatTensors([tensor for family in families for tensor in family], width)
    for positions in some_positions(len(flat)):
        before, counted = versions(flat.tensors), flat.writes.copy()
        write(kernel, flat, positions)
        moved, mine, first = versions(flat.tensors) - before, flat.writes - counted, 0
        for family in families:
            here = slice(first, first + len(family))
            assert moved[here].tolist() == [mine[here].sum()] * len(family)
            first += len(family)


@writes
def test_inference_tensors_are_written_beside_others(kernel: Kernels, write: Write) -> None:
    with torch.inference_mode():
        frozen = [torch.zeros(30), torch.zeros(8, 4).t(), torch.zeros(50)]
    counted = [torch.zeros(20), torch.zeros(6, 7).t(), torch.zeros(3)]
    flat = FlatTensors([tensor for pair in zip(frozen, counted, strict=True) for tensor in pair], 4)
    write(kernel, flat, torch.arange(len(flat), dtype=torch.int32))
    assert flat.writes[1::2].tolist() == versions(counted).tolist() == [1, 1, 1]
    assert all(tensor.is_inference() for tensor in frozen) and not any(
        tensor.eq(0).all() for tensor in flat.tensors
    )


def test_a_position_outside_counts_what_was_written_all_the_same() -> None:
    """The loops write before they come to it. A receiver that fails so is seeded; its counters are still its
    own.
    """
    tensors = [torch.zeros(10), torch.zeros(10)]
    for kernel in (cpu.scatter, cpu.scatter_add):
        flat, before = FlatTensors(tensors, 4), versions(tensors)
        with pytest.raises(IndexError):
            kernel(flat, torch.tensor([3, 20]), torch.ones(2, dtype=torch.int32))
        assert flat.writes.tolist() == (versions(tensors) - before).tolist()


# Fingerprints -----------------------------------------------------------------------------------------------


def taken(tensors: list[Tensor]) -> Fingerprint:
    """Take a fingerprint as a sync does when it begins."""
    return Fingerprint.of(
        Layout.from_tensors({f"{index:03}": tensor for index, tensor in enumerate(tensors)}).read()
    )


def frozen(*sizes: int) -> list[Tensor]:
    with torch.inference_mode():
        return [torch.arange(float(size)) for size in sizes]


def replace(tensors: list[Tensor]) -> None:
    tensors[1] = tensors[1].clone()


def refill(tensors: list[Tensor]) -> None:
    tensors[1].data = tensors[1].data.clone()


def reload(tensors: list[Tensor]) -> None:
    with torch.no_grad():
        tensors[1].copy_(tensors[1].clone())


DISTURBANCES = {"another tensor": replace, "other memory": refill, "the same bits": reload}


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_fingerprint_shows_what_was_written_or_replaced(disturb: Callable[[list[Tensor]], None]) -> None:
    tensors = [torch.nn.Parameter(torch.randn(8)), torch.randn(4, 3), torch.zeros(0)]
    before = taken(tensors)
    assert before.same(taken(tensors)) and before.same(before)
    disturb(tensors)
    assert not before.same(taken(tensors))


def test_inference_tensors_have_a_fingerprint_of_their_bits() -> None:
    tensors = [torch.zeros(3), *frozen(5, 0, 40), torch.zeros(2), frozen(6)[0].view(2, 3)]
    before = taken(tensors)
    assert before.versions.tolist() == [0, -1, -1, -1, 0, -1] and len(before.digests) == 4
    assert before.same(taken(tensors))
    with torch.inference_mode():
        tensors[3][17] += 1
    assert not before.same(taken(tensors))
    with torch.inference_mode():
        tensors[3][17] -= 1
    assert before.same(taken(tensors)), "the bits are those of before"
    with torch.inference_mode():
        tensors[1][0], tensors[3][0] = -0.0, 0.0
    assert not before.same(taken(tensors))


def test_memory_that_a_tensor_was_moved_to_is_seen_when_it_is_asked_for() -> None:
    """What a layout has read keeps the addresses of then."""
    local = LiveTensors.of([torch.zeros(4), torch.zeros(5)])
    before = Fingerprint.of(local)
    local.tensors[1].data = torch.zeros(5)
    assert before.same(Fingerprint.of(local)) and not before.same(Fingerprint.of(local, moved=True))


def test_no_tensors_and_other_numbers_of_tensors() -> None:
    nothing, one = Fingerprint.of(LiveTensors.of([])), Fingerprint.of(LiveTensors.of([torch.zeros(3)]))
    assert nothing.same(nothing) and not nothing.same(one) and not one.same(nothing)


# Writes by others -------------------------------------------------------------------------------------------


class Copy:
    """Tensors of a receiver between two fingerprints; `own` writes to one as a sync does."""

    def __init__(self, *tensors: Tensor) -> None:
        self.local, self.counts = LiveTensors.of(list(tensors)), np.zeros(len(tensors), np.int64)
        self.before = Fingerprint.of(self.local)

    def own(self, *indices: int) -> None:
        for index in indices:
            tensor = self.local.tensors[index]
            flat = FlatTensors([tensor], tensor.element_size())
            cpu.write(flat, 0, random_bits(len(flat), flat.width))
            self.counts[index] += flat.writes[0]

    @torch.no_grad()
    def foreign(self, *indices: int) -> None:
        for index in indices:
            self.local.tensors[index].view(-1)[0] = 9.0

    def found(self) -> list[int]:
        return external_writes(
            self.before, Fingerprint.of(self.local, moved=True), self.counts, self.local.tensors
        )


def test_own_writes_alone_are_none_of_others() -> None:
    copy = Copy(torch.zeros(3), torch.nn.Parameter(torch.zeros(4)), torch.zeros(5), torch.zeros(0))
    assert copy.found() == []
    copy.own(0, 1, 1, 1)
    assert copy.found() == []


@pytest.mark.parametrize("own", [(), (1,), (0, 1, 2), (1, 1)], ids=str)
def test_one_write_more_is_somebody_elses(own: tuple[int, ...]) -> None:
    copy = Copy(torch.zeros(3), torch.nn.Parameter(torch.zeros(4)), torch.zeros(5))
    copy.own(*own)
    copy.foreign(1)
    assert copy.found() == [1]
    copy.foreign(2)
    assert copy.found() == [1, 2]


def test_a_replaced_tensor_is_found_whatever_its_counter_says() -> None:
    copy = Copy(torch.zeros(3), torch.nn.Parameter(torch.zeros(4)))
    copy.own(0, 1)
    copy.local.tensors[1].data = torch.zeros(4)
    assert copy.found() == [1]


def test_views_of_one_tensor_share_a_counter() -> None:
    """A fused projection cut into its parts, of which a sync writes to any number, any number of times."""
    fused = torch.zeros(12, 4)
    copy = Copy(torch.zeros(3), fused[:4], fused[4:8], fused[8:], torch.zeros(2))
    copy.own(1)
    assert copy.found() == []
    copy.own(2, 3, 3, 4)
    assert copy.found() == []
    copy.foreign(2)
    assert copy.found() == [1, 2, 3], "it cannot be told which of them"
    copy = Copy(fused[:4], fused[4:8])
    with torch.no_grad():
        fused[9] = 1.0  # the padding: nothing tells it from the parts
    assert copy.found() == [0, 1]


def test_views_with_counters_of_their_own_on_one_memory_are_told_apart_by_where_these_began_and_ended() -> (
    None
):
    """As an engine that cuts `weight.data` makes them: what was written to one is not taken for what was
    written to the other.
    """
    fused = torch.zeros(12, 4)
    for own, foreign in (((0, 1), (0,)), ((0, 1, 1), (0,)), ((0, 1), (1,)), ((0, 0, 1), (1, 1))):
        copy = Copy(fused.data[:4], fused.data[4:8])
        copy.own(*own)
        assert copy.found() == []
        copy.foreign(*foreign)
        assert copy.found() == [*{*foreign}]
    views = fused.data[:4], fused.data[4:8]
    views[0].add_(1)
    copy = Copy(*views)
    copy.own(1)
    copy.foreign(0)
    assert copy.found() == [0], "it began elsewhere"


def test_a_tied_tensor_is_one_that_comes_twice() -> None:
    weight = torch.nn.Parameter(torch.zeros(6, 2))
    copy = Copy(weight, torch.zeros(3), weight, weight.detach().t())
    copy.own(0)  # a sync writes to one of the names, or to both
    assert copy.found() == []
    copy.own(2, 3)
    assert copy.found() == []
    copy.foreign(0)
    assert copy.found() == [0, 2, 3]


def test_a_complex_tensor_read_as_pairs_shares_its_counter() -> None:
    weight = torch.zeros(4, dtype=torch.complex128)
    copy = Copy(torch.view_as_real(weight.detach()))
    copy.own(0)
    assert copy.found() == []
    weight[1] = 1j
    assert copy.found() == [0]


def test_the_counters_of_inference_tensors_do_not_count() -> None:
    one, other = frozen(4, 5)
    copy = Copy(one, torch.zeros(3), other)
    copy.own(0, 1)
    assert copy.found() == []
    copy.foreign(1)
    assert copy.found() == [1]
