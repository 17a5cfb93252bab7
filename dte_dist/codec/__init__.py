"""Changes to bytes and back: frames, index codecs and value codecs. docs/protocol.md specifies the bytes."""

from __future__ import annotations

from dte_dist.codec.frame import FrameWriter, dense_size
from dte_dist.codec.frame_reader import Segment, read_frame
from dte_dist.codec.header import FrameHead, read_head
from dte_dist.codec.previous_delta import PreviousDelta
from dte_dist.codec.selector import FAST, CodecSelector

__all__ = [
    "FAST",
    "CodecSelector",
    "FrameHead",
    "FrameWriter",
    "PreviousDelta",
    "Segment",
    "dense_size",
    "read_frame",
    "read_head",
]
