"""Tensors of a rank on two devices, and what stands in for those that are away.

There is one device here: see `tests.unit.far`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dte_dist import (
    Layout,
    LayoutMismatch,
)
from dte_dist.detect.fingerprint import Fingerprint
from dte_dist.layout import home_of, one_device
from dte_dist.tensors import devices
from dte_dist.tensors.devices import StandIns
from tests.unit.far import CPU, FAR, GPU, OTHER, far, near_and_far
from tests.unit.sync.pair import bits
from tests.unit.sync.test_engine import random_bits

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.float64,
)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        devices, "_device_of", lambda tensor: GPU if tensor.data_ptr() in FAR else tensor.device
    )
    yield
    FAR.clear()


# Where home is ----------------------------------------------------------------------------------------------

HOMES = {
    "one": ([(CPU, 4), (CPU, 9)], CPU, []),
    "an accelerator": ([(GPU, 4), (GPU, 9)], GPU, []),
    "none": ([], CPU, []),
    "offloaded": ([(CPU, 90), (GPU, 4), (CPU, 90), (GPU, 0)], CPU, [1, 3]),
    "a counter on the CPU": ([(GPU, 90), (CPU, 1)], GPU, [1]),
    "as much on both": ([(GPU, 5), (CPU, 5)], CPU, [0]),
    "nothing on both": ([(GPU, 0), (CPU, 0)], CPU, [0]),
}


@pytest.mark.parametrize("case", HOMES)
def test_home_is_where_most_bytes_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, home, away = HOMES[case]
    tensors = [torch.zeros(numel) for _, numel in places]
    where = {id(tensor): device for tensor, (device, _) in zip(tensors, places, strict=True)}
    monkeypatch.setattr(devices, "_device_of", lambda tensor: where[id(tensor)])
    assert home_of(tensors, list(map(str, range(len(tensors))))) == (home, away)


def test_several_accelerators_are_refused_with_what_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    where = [GPU, GPU, OTHER, CPU, OTHER, GPU]
    tensors = [torch.zeros(1) for _ in where]
    monkeypatch.setattr(
        devices, "_device_of", lambda tensor: where[[each is tensor for each in tensors].index(True)]
    )
    with pytest.raises(LayoutMismatch) as caught:
        home_of(tensors, list("abcdef"))
    assert str(caught.value) == (
        "the tensors of this rank are on several accelerators [tensor 'c'; got 'c' on cuda:1, 'd' on cpu, "
        "'e' on cuda:1, the other 3 on cuda:0]. Hint: move them to cuda:0, or leave them out with select=."
    )


def test_where_one_device_is_needed_the_others_are_named() -> None:
    tensors = [torch.zeros(2), *(far(torch.zeros(2)) for _ in range(7)), *(torch.zeros(2) for _ in range(8))]
    with pytest.raises(
        LayoutMismatch,
        match=r"several devices \[tensor '1'; got '1' on cuda:0, .*'4' on cuda:0 and 3 more, the other 9 on",
    ):
        one_device(tensors, list(map(str, range(len(tensors)))))
    assert (
        one_device(tensors[:1], ["0"]) == one_device([], []) == CPU
        and one_device(tensors[1:3], ["1", "2"]) == GPU
    )


# What stands in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stand_ins_have_the_bits_and_give_back_what_is_written(dtype: torch.dtype) -> None:
    live = [
        random_bits(dtype, 6, 10),
        random_bits(dtype, 7, 5, seed=1).t(),
        random_bits(dtype),
        random_bits(dtype, 0, 3),
    ]
    new = random_bits(dtype, 5, 7, seed=2)
    before = [(tensor.data_ptr(), tensor._version, bits(tensor)) for tensor in live]
    stand_ins = StandIns.of(live, range(4), CPU)
    assert [bits(copy) for copy in stand_ins.copies] == [held for *_, held in before]
    assert all(
        copy.is_contiguous() and copy.shape == tensor.shape
        for copy, tensor in zip(stand_ins.copies, live, strict=True)
    )
    assert not {copy.data_ptr() for copy in stand_ins.copies if copy.numel()} & {
        tensor.data_ptr() for tensor in live
    }
    stand_ins.write_back()
    assert [
        (tensor.data_ptr(), tensor._version, bits(tensor)) for tensor in live
    ] == before  # nothing was written, so nothing is
    stand_ins.copies[1].view(torch.uint8 if dtype is torch.bool else dtype).copy_(new)
    for _ in range(2):
        stand_ins.write_back()
    assert (
        bits(live[1]) == bits(new)
        and live[1]._version == before[1][1] + 1
        and live[1].data_ptr() == before[1][0]
    )
    assert [bits(live[index]) for index in (0, 2, 3)] == [before[index][2] for index in (0, 2, 3)]
    assert stand_ins.writes.tolist() == [0, 1, 0, 0]


def test_names_of_one_memory_share_a_stand_in_and_its_writes() -> None:
    tied, empty = torch.zeros(4), torch.zeros(0)
    tensors = [torch.zeros(9), tied, empty, tied.view(2, 2), tied, empty, torch.zeros(3)]
    stand_ins = StandIns.of(tensors, [1, 2, 3, 4, 5], CPU)
    assert stand_ins.places.tolist() == [0, 1, 2, 0, 3]
    stand_ins.copies[0].fill_(1)
    stand_ins.write_back()
    assert tied.tolist() == [1.0] * 4
    assert stand_ins.own_writes(np.array([5, 1, 0, 0, 1, 0, 2])).tolist() == [5, 1, 0, 0, 0, 0, 2]


def test_inference_tensors_are_stood_in_for_anywhere() -> None:
    with torch.inference_mode():
        live = torch.zeros(3)
        stand_ins = StandIns.of([live], [0], CPU)
    assert not stand_ins.copies[0].is_inference()
    stand_ins.copies[0].fill_(2)
    stand_ins.write_back()
    assert live.tolist() == [2.0] * 3 and live.is_inference() and stand_ins.writes.tolist() == [1]


def test_a_layout_is_read_at_home_and_found_where_it_lies() -> None:
    tensors = near_and_far() | {"c": far(torch.zeros(3, dtype=torch.complex128))}
    layout = Layout.from_tensors(tensors)
    read, names = layout.read(), [entry.name for entry in layout.manifest.entries]
    by_name = dict(zip(names, read.tensors, strict=True))
    assert (
        read.device == CPU and {name for name, tensor in by_name.items() if tensor.data_ptr() in FAR} == set()
    )
    assert all(bits(by_name[name]) == bits(tensor) for name, tensor in tensors.items())
    assert read.addresses.tolist() == [tensor.data_ptr() for tensor in read.tensors]
    assert read.contiguous.tolist() == [tensor.is_contiguous() for tensor in read.tensors]
    assert by_name["p0"] is tensors["p0"] and by_name["b.half"] is by_name["b.half.tied"]
    assert [tensor.data_ptr() for tensor in layout.tensors()] == [tensors[name].data_ptr() for name in names]
    assert Fingerprint.of(layout.read().live).same(Fingerprint.of(read.live))
    by_name["b.mean"].fill_(3)
    by_name["c"].fill_(4)
    read.write_back()
    assert tensors["b.mean"].tolist() == [3.0] * 20 and tensors["c"].tolist() == [4 + 4j] * 3


def test_nothing_stands_in_on_one_device() -> None:
    layout = Layout.from_tensors({"a": torch.zeros(3), "b": torch.zeros(2)})
    read = layout.read()
    assert read.live is read and read.stand_ins is None
    read.write_back()
    assert read.own_writes(own := np.array([1, 2])) is own


def test_a_tensor_that_moves_away_or_home_is_noticed() -> None:
    tensors = {"a": torch.zeros(30), "b": torch.ones(3)}
    layout = Layout.from_tensors(tensors)
    assert layout.read().stand_ins is None
    tensors["b"].data = far(torch.ones(3) * 2)
    stand_ins = layout.read().stand_ins
    assert stand_ins is not None and stand_ins.indices.tolist() == [1]
    tensors["b"].data = torch.ones(3) * 3
    assert layout.read().stand_ins is None
