"""Search from SSD beside search in memory, mmap and no prefetch."""
