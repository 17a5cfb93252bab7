"""How fast the links of a channel are, learnt from the bytes that it moves.

`codec="auto"` weighs bytes against the time that codecs take. The first sync of a channel seeds every
receiver, so before the first delta each source has moved its part of the model, and knows how long it took.
No probe is sent. A transfer is slower than its link where a rank was late, or waited for others that move
more: the fastest one counts, of all ranks, which tell each other when they acknowledge. It is never much
faster if it is large; of a small one, the buffers of sockets take so much that it seems to be there at once,
so small ones do not count.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LinkSpeed"]

_ENOUGH: Final = 16 << 20
"""Bytes that say something about a link: more than the buffers of sockets, a few MiB at either end, could
hide.
"""


class LinkSpeed:
    """Bytes that a rank sends or receives in a second.

    Attributes:
        bytes_per_second: what this rank knows; None while that is nothing.
        agreed: what all ranks have heard, the same on all of them.

    Example:
        >>> speed = LinkSpeed()
        >>> speed.measure(10_000, 0.5), speed.bytes_per_second
        (None, None)
        >>> speed.measure(50_000_000, 0.5), speed.measure(50_000_000, 0.8), speed.bytes_per_second
        (None, None, 100000000.0)
    """

    __slots__ = ("agreed", "bytes_per_second")

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self.agreed: float | None = None

    def merge(self, bytes_per_second: int) -> None:
        """Take note of the most that a rank has learnt, this one included; 0 if they know nothing. All ranks
        hear the same.
        """
        if bytes_per_second > 0:
            self.agreed = float(bytes_per_second)
            self.bytes_per_second = max(self.bytes_per_second or 0.0, self.agreed)

    def measure(self, nbytes: int, seconds: float) -> None:
        """Look at a transfer, if it was large enough to tell."""
        if nbytes >= _ENOUGH and seconds > 0:
            self.bytes_per_second = max(self.bytes_per_second or 0.0, nbytes / seconds)
