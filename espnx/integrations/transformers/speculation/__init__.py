"""Speculative decoding over a `KVCache`: several tokens from one pass over the rows on SSD."""
