"""Who sends what to whom, from the manifests of all ranks: pure, and equal on all of them."""

from dte_dist.plan.delta_indices import remap_delta_indices
from dte_dist.plan.transfer_plan import Plan, TransferOp

__all__ = ["Plan", "TransferOp", "remap_delta_indices"]
