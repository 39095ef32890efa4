"""Rows of KV caches on a device: their layout in blocks, the file that holds them, the commands
that devices take."""
