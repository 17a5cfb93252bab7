"""A payload as frames of bytes, for transports that carry bytes: files, object stores, fabrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from dte_dist.codec.named_tensors import Payload
from dte_dist.codec.payload_bytes import MOST_DATA, MOST_TEXT, Arrival, Packed, frame_sizes
from dte_dist.errors import FrameError

__all__ = ["payload_from_frames", "payload_to_frames"]

_LENGTHS: Final = 16
"""Bytes of the head before all frames: two int64, the bytes of the description and of the data."""


def payload_to_frames(payload: Payload) -> list[Tensor]:
    """Return a payload as frames of bytes, each with a checksum: all that a transport of bytes has to carry.

    Args:
        payload: of tensors on any devices; whole or a delta.

    Returns:
        uint8 CPU tensors in one dimension, in order: a head of 16 bytes, then frames of at most 16 MiB and 8
        bytes. docs/protocol.md says what they hold.

    Raises:
        LayoutMismatch: a tensor cannot be sent, or the payload is too large; names it.

    Example:
        >>> payload = dte_dist.payload_of({"w": torch.ones(3)}, version=1)
        >>> frames = dte_dist.payload_to_frames(payload)
        >>> data = b"".join(frame.numpy().tobytes() for frame in frames)  # to a file, say
        >>> dte_dist.payload_from_frames(frames).tensors["w"]
        tensor([1., 1., 1.])
    """
    packed = Packed(payload)
    frames = [torch.tensor([len(packed.text), packed.nbytes], device="cpu").view(torch.uint8)]
    for size, write in packed.frames():
        frame = torch.empty(size, dtype=torch.uint8, device="cpu")
        write(frame)
        frames.append(frame)
    return frames


def payload_from_frames(frames: Sequence[Tensor]) -> Payload:
    """Return the payload that `payload_to_frames` wrote; nothing is believed that was not checked.

    Args:
        frames: uint8 CPU tensors, in order.

    Raises:
        FrameError: a frame is missing, of another size, or damaged.

    Example:
        >>> frames = dte_dist.payload_to_frames(dte_dist.payload_of({"w": torch.ones(3)}, version=1))
        >>> frames[-1][0] += 1
        >>> dte_dist.payload_from_frames(frames)
        Traceback (most recent call last):
            ...
        dte_dist.errors.FrameError: a piece of a payload is damaged: its checksum is wrong. Hint: ...
    """
    text_bytes, nbytes = _lengths(frames)
    sizes = frame_sizes(text_bytes, nbytes)
    got = [len(frame) for frame in frames[1:]]
    if got != sizes:
        what = "the frames of a payload are not those that its head announces"
        expected = f"{len(sizes)} frames of {sum(sizes)} bytes"
        raise FrameError(what, expected=expected, got=f"{len(got)} of {sum(got)}", hint="read them again")
    arrival = Arrival(text_bytes, nbytes, torch.device("cpu"))
    for number, frame in enumerate(frames[1:]):
        arrival.take(number, frame)
    return arrival.payload()


def _lengths(frames: Sequence[Tensor]) -> tuple[int, int]:
    """Return what the head says, having checked that it can be."""
    for frame in frames:
        if not isinstance(frame, Tensor) or frame.dtype is not torch.uint8 or frame.dim() != 1:
            raise FrameError("a frame of a payload is a uint8 tensor in one dimension", hint="read it again")
    if not frames or len(frames[0]) != _LENGTHS:
        got = f"{len(frames[0])} bytes" if frames else "no frame"
        raise FrameError(
            "the head of a payload is damaged", expected="16 bytes", got=got, hint="read it again"
        )
    text_bytes, nbytes = frames[0].clone().view(torch.int64).tolist()
    if not (8 <= text_bytes <= MOST_TEXT and 0 <= nbytes <= MOST_DATA and text_bytes % 8 == nbytes % 8 == 0):
        got = f"{text_bytes} and {nbytes} bytes"
        raise FrameError("a payload cannot have this size", got=got, hint="read it again")
    return text_bytes, nbytes
