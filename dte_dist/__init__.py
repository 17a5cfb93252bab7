"""dte_dist: the collective that keeps rollout ranks bit-identical to training ranks by moving only changed
elements.
"""

from pathlib import Path

from dte_dist.api import delta_broadcast, delta_p2p, verify
from dte_dist.codec.named_tensors import Payload, payload_of
from dte_dist.codec.payload_frames import payload_from_frames, payload_to_frames
from dte_dist.detect.detector import Detector
from dte_dist.errors import (
    ApplyFailed,
    ChannelClosed,
    DeltaError,
    FrameError,
    LayoutMismatch,
    OrderMismatch,
    PeerLost,
    SyncFailed,
    VersionError,
    VersionGap,
    VersionReplay,
    VersionRestart,
)
from dte_dist.layout import Layout, ShardSpec
from dte_dist.liveness.groups import StoreGroup, rendezvous
from dte_dist.plan import Plan, TransferOp, remap_delta_indices
from dte_dist.plan.model_map import RankLayout
from dte_dist.report import SyncReport, VerifyReport
from dte_dist.sync.background import DeltaWork
from dte_dist.sync.described_model import TensorInfo, describe
from dte_dist.sync.engine import DeltaEngine
from dte_dist.sync.payload_apply import reconstruct_against_base
from dte_dist.sync.registry import close, invalidate
from dte_dist.sync.tracker import DeltaTracker
from dte_dist.sync.warm import warm
from dte_dist.transport.base import Transport
from dte_dist.transport.loopback import LoopbackTransport
from dte_dist.transport.process_group import ProcessGroupTransport
from dte_dist.version import find_version

__version__ = find_version(Path(__file__).parent)

__all__ = [
    "ApplyFailed",
    "ChannelClosed",
    "DeltaEngine",
    "DeltaError",
    "DeltaTracker",
    "DeltaWork",
    "Detector",
    "FrameError",
    "Layout",
    "LayoutMismatch",
    "LoopbackTransport",
    "OrderMismatch",
    "Payload",
    "PeerLost",
    "Plan",
    "ProcessGroupTransport",
    "RankLayout",
    "ShardSpec",
    "StoreGroup",
    "SyncFailed",
    "SyncReport",
    "TensorInfo",
    "TransferOp",
    "Transport",
    "VerifyReport",
    "VersionError",
    "VersionGap",
    "VersionReplay",
    "VersionRestart",
    "__version__",
    "close",
    "delta_broadcast",
    "delta_p2p",
    "describe",
    "invalidate",
    "payload_from_frames",
    "payload_of",
    "payload_to_frames",
    "reconstruct_against_base",
    "remap_delta_indices",
    "rendezvous",
    "verify",
    "warm",
]
