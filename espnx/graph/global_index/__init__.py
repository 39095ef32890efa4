"""A graph for each cluster of vectors, in one directory and searched by one walk: what a query
costs does not grow with the clusters (AiSAQ's global index, section 3)."""
