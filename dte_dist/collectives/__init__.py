"""What a user calls, and the protocol behind it."""

from dte_dist.collectives.api import delta_broadcast, delta_p2p, verify
from dte_dist.collectives.registry import close, invalidate
from dte_dist.collectives.warm import warm
from dte_dist.collectives.work import DeltaWork

__all__ = ["DeltaWork", "close", "delta_broadcast", "delta_p2p", "invalidate", "verify", "warm"]
