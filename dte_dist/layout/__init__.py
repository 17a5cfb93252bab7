"""Where everything lies: which part of which tensor each rank holds, and the tensors that hold it.

`Layout` is what one rank holds. Its `Manifest` is what other ranks must know of it; with a rank's coordinates
it gives the `Block` of every slot on that rank. Nothing here communicates.
"""

from dte_dist.layout.blocks import Block, Cut, Run, Runs, chunk_bounds, cut_block
from dte_dist.layout.layout import Layout
from dte_dist.layout.manifest import Manifest
from dte_dist.layout.names import Rename, Select, canonical_name
from dte_dist.layout.placements import WHOLE, Coordinates, Entry, MeshSpec, Placement
from dte_dist.layout.sharding import ShardSpec
from dte_dist.tensors.devices import StandIns, brought_home, home_of, one_device
from dte_dist.tensors.dtypes import DTYPES
from dte_dist.tensors.live import LiveTensors
from dte_dist.tensors.overlaps import refuse_overlaps, refuse_shared

__all__ = [
    "DTYPES",
    "WHOLE",
    "Block",
    "Coordinates",
    "Cut",
    "Entry",
    "Layout",
    "LiveTensors",
    "Manifest",
    "MeshSpec",
    "Placement",
    "Rename",
    "Run",
    "Runs",
    "Select",
    "ShardSpec",
    "StandIns",
    "brought_home",
    "canonical_name",
    "chunk_bounds",
    "cut_block",
    "home_of",
    "one_device",
    "refuse_overlaps",
    "refuse_shared",
]
