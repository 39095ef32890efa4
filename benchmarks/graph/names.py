"""What the systems are called."""

#: Codes beside each node, of as many bytes as the peer's, also of the vectors as they are, as the
#: peer's are; of as many as fill the page, also built in less time; in memory; and in pages of
#: their own.
OURS = (
    "espnx-inline",
    "espnx-inline-pq",
    "espnx-inline-full",
    "espnx-inline-fast",
    "espnx-memory",
    "espnx-paged",
)
UNROTATED = ("espnx-inline-pq",)
LONG_CODES = ("espnx-inline-full", "espnx-inline-fast")
CODES = {"espnx-memory": "memory", "espnx-paged": "paged"}  # of builds, else inline
LIST_SIZES = {"espnx-inline-fast": 50}  # of builds, in place of 100
PEER, IN_RAM, MAPPED, LANCE = "diskann", "faiss-hnsw", "faiss-ondisk-ivf", "lancedb"
SYSTEMS = (*OURS, PEER, IN_RAM, MAPPED, LANCE)
PEER_PAGE_BYTES = 4096
