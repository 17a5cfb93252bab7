"""Methods (b), (d) and (e): dte_dist itself, by either route, densely or as a delta.

Methods that use one codec share a channel, as calls of one program would. A channel notices when another
method wrote to the receivers; it is then brought up to date before the update, outside of the timed part.
"""

from __future__ import annotations

from typing import Any

import dte_dist
from benchlib.methods import Method, Moved
from benchlib.world import World

__all__ = ["Delta", "Live"]

_CALLS: dict[str, tuple[Any, str]] = {
    "dense_p2p": (dte_dist.delta_p2p, "full"),
    "full_broadcast": (dte_dist.delta_broadcast, "full"),
    "delta_broadcast": (dte_dist.delta_broadcast, "delta"),
    "delta_p2p": (dte_dist.delta_p2p, "delta"),
}


class Live:
    """The live weights as a channel of one codec sees them, and whether the channel wrote last.

    Args:
        world: the ranks and their modules.
        codec: empty to leave it to the package.
        bucket_bytes: of the channel.
    """

    def __init__(self, world: World, codec: str, bucket_bytes: int) -> None:
        self.codec, self._group = codec, world.group
        # Channels are found by module: for a second codec the same weights come as a layout.
        self._weights: Any = dte_dist.Layout.from_module(world.module) if codec else world.module
        self._options: dict[str, Any] = {"bucket_bytes": bucket_bytes} | ({"codec": codec} if codec else {})

    def sync(self, name: str) -> dte_dist.SyncReport:
        call, mode = _CALLS[name]
        report: dte_dist.SyncReport = call(self._weights, self._group, mode=mode, **self._options)
        return report

    def close(self) -> None:
        dte_dist.close(self._weights, self._group)


class Delta(Method):
    """One call of dte_dist.

    Args:
        name: of the method.
        live: shared by the methods of one codec.
    """

    def __init__(self, name: str, live: Live) -> None:
        self.name, self.codec, self._live = name, live.codec, live

    @property
    def channel(self) -> object:
        return self._live

    def catch_up(self) -> None:
        if _CALLS[self.name][1] == "delta":
            self._live.sync(self.name)

    def run(self) -> Moved:
        report = self._live.sync(self.name)
        return Moved(report.wire_bytes, report.phases)

    def close(self) -> None:
        self._live.close()
