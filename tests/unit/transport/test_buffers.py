"""Buffers of frames: those that are kept are new ones, and there is room of any size."""

from __future__ import annotations

import pytest
import torch

from dte_dist.transport.buffers import Buffers


def test_buffers_that_are_kept_are_new_ones() -> None:
    buffers, device = Buffers(), torch.device("cpu")
    turns = [buffers.get(number, size, device) for number, size in enumerate((100, 100, 50, 100))]
    assert turns[0].data_ptr() == turns[2].data_ptr() != turns[1].data_ptr() == turns[3].data_ptr()
    kept = [buffers.get(number, 100, device, keep=True) for number in range(4)]
    assert len({*(buffer.data_ptr() for buffer in kept), turns[0].data_ptr(), turns[1].data_ptr()}) == 6
    assert buffers.get(0, 100, device).data_ptr() == turns[0].data_ptr()
    assert [len(buffers.get(0, 0, device, keep=keep)) for keep in (False, True)] == [0, 0]


@pytest.mark.parametrize("size", [0, 1, 7, (4 << 20) - 1, 4 << 20, (4 << 20) + 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_room_of_any_size(size: int, dtype: torch.dtype) -> None:
    """From 4 MiB on it is numpy's: aligned to a line of the cache, all of it may be written, and it lives as
    long as the tensor.
    """
    from dte_dist import kernels

    room = kernels.empty(size // dtype.itemsize, dtype)
    assert (
        room.shape == (size // dtype.itemsize,)
        and room.dtype == dtype
        and room.is_contiguous()
        and room.device.type == "cpu"
    )
    assert room.data_ptr() % 64 == 0 or not len(room)
    part = room.fill_(1)[-3:]
    del room
    kernels.empty(size // dtype.itemsize, dtype).fill_(2)
    assert (part == 1).all()
