"""KV caches on SSD, tensors only: what lies where, delayed writeback, attention over both, X rows,
the choice between them."""
