"""From a query to candidates: FAISS's inverted files over one vector a document."""
