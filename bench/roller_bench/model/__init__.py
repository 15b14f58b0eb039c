"""`roller bench model`: regret and rank correlation of the performance model."""
