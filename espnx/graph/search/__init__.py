"""A search of a graph, step by step: what is asked, how long the lists of its walks are, the walks
under way, pages that are read without one."""
