"""The streams of a GPU that syncs in the background run on, beside the caller's.

On the caller's own stream a sync would wait for everything that the caller queues there after the call, such
as the next training step; and on any other, memory that the call took on the caller's stream could be given
out again while the sync still reads it. So the whole sync, its preparation in the caller's thread too, runs
on a stream of its own, one for each device:

1. `fork_streams` returns the streams; they come after what the caller has queued so far.
2. The sync is prepared on them (`use_streams`), and all memory that it takes belongs to them.
3. `join_caller` makes the caller's streams wait for the preparation: an optimizer step comes after the bits
   have been read.
4. The thread runs the rest with `use_streams`, and `synchronize`s them before the sync counts as done: what
   it wrote can then be used on any stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

__all__ = ["Streams", "fork_streams", "join_caller", "synchronize", "use_streams"]

Streams = Sequence[torch.cuda.Stream]


def fork_streams(devices: Iterable[torch.device]) -> Streams:
    """Return a stream for each GPU, which continues from where the caller's stream is now; none for the
    CPU.
    """
    streams = [_stream(device) for device in devices if device.type == "cuda"]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    return streams


@contextmanager
def use_streams(streams: Streams) -> Iterator[None]:
    """Queue on these streams, each for its device."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def join_caller(streams: Streams) -> None:
    """Let what the caller queues from now on come after what these streams have queued."""
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def synchronize(streams: Streams) -> None:
    """Wait until all that is queued has been done."""
    for stream in streams:
        stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
