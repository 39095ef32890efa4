"""What the systems are called."""

#: Codes beside each node, of as many bytes as the peer's, and of as many as fill the page; and in memory.
OURS = ("espnx-inline", "espnx-inline-full", "espnx-memory")
PEER, IN_RAM, MAPPED = "diskann", "faiss-hnsw", "faiss-ondisk-ivf"
SYSTEMS = (*OURS, PEER, IN_RAM, MAPPED)
