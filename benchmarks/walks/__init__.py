"""How many vectors a walk of an HNSW compares, by its size and efSearch, and a law for more."""
