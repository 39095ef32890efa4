"""Corpora of the benchmarks: made from seeds, or expanded from real documents, and the stores of
them."""
