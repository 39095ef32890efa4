"""Changes of a graph that its pages do not have yet: their log, and how searches see them."""
