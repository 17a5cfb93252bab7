"""dte_dist: the collective that keeps rollout ranks bit-identical to training ranks by moving only changed elements."""
