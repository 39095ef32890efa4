"""Searches of graphs of vectors that lie on drives: AiSAQ's global index."""
