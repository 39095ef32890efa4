"""Decoding with K and V on SSD beside other caches."""
