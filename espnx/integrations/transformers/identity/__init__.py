"""Is this the model that a kept cache was made with: what of it counts, its fingerprint, and a look
in each forward pass."""
