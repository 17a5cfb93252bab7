"""Changes to bytes and back: frames, index codecs and value codecs. docs/protocol.md specifies the bytes."""

from __future__ import annotations

from dte_dist.codec.frame import FrameWriter, Segment, dense_size, prefers_dense, read_frame
from dte_dist.codec.head import FrameHead, read_head

__all__ = ["FrameHead", "FrameWriter", "Segment", "dense_size", "prefers_dense", "read_frame", "read_head"]
