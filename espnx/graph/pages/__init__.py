"""Pages of a graph: read and checked, and the folders that they lie in."""
