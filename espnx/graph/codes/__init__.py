"""Codes of vectors: codebooks, rotations, and how vectors are encoded by both."""
