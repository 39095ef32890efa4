"""What the systems are called."""

#: Codes beside each node, of as many bytes as the peer's, and of as many as fill the page; in memory; and in pages of their own.
OURS = ("espnx-inline", "espnx-inline-full", "espnx-memory", "espnx-paged")
PEER, IN_RAM, MAPPED, LANCE = "diskann", "faiss-hnsw", "faiss-ondisk-ivf", "lancedb"
SYSTEMS = (*OURS, PEER, IN_RAM, MAPPED, LANCE)
