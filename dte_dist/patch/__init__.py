"""Changes on their way into live tensors: staged until the vote, then written in place."""

from dte_dist.patch.staged import StagedPatch, Target

__all__ = ["StagedPatch", "Target"]
