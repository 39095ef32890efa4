"""Every causal model of transformers with a cache on SSD."""
