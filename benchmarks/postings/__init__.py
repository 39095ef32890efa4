"""BM25 from SSD beside what else reads posting lists."""
