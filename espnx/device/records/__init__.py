"""Embedding records on a device: their layout, the files that hold them, their scores."""
