"""Nearest neighbours from SSD beside DiskANN and FAISS."""
