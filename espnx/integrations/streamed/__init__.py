"""transformers models whose weights are larger than memory."""
