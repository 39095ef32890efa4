"""Near-storage devices: where rows of state lie, and what computes beside them."""
