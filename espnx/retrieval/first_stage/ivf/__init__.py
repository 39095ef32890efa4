"""Inverted lists: vectors by the nearest of many centroids, scanned in memory by FAISS."""
